"""Pairs of two versions: shown blind, judged, kept, and read by the stage dpo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from etude.core.sampling import VersionSpan
from etude.core.types import Trajectory
from etude.dash.compare import pairs
from etude.dash.guard import Access
from etude.dash.recorded import RecordedRun
from etude.dash.server import create_app
from etude.model.tokenizer import ChatTokenizer
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run
from etude.store.verdicts import Verdict, add_verdict, read_preferences, read_verdicts
from etude.trainer.data import read_preferences as read_pairs
from tests.dash.recorded_store import SEGMENT, Answer, ask, group, trajectory, write_run
from tests.small_model import small_files

TOKEN = "a-token-of-forty-two-letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}
TASKS = 8
WORDS = {1: "def old(): ...", 2: "def new(): ..."}
"""Version -> its answer."""


def said(number: int, attempt: int, version: int, task: str) -> Trajectory:
    spans = (VersionSpan(version, 3),)
    messages = [
        {"role": "user", "content": f"fix {task}"},
        {"role": "assistant", "content": f"{WORDS[version]} {attempt}"},
    ]
    return replace(
        trajectory(f"g{number:06d}.{attempt}", float(version == 2), task=task),
        segments=(replace(SEGMENT, versions=spans),),
        messages=messages,
    )


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    """Eight tasks that both versions tried twice each, and one that only the second version
    tried."""
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run, said="")
    log = RolloutLog(run.objects)
    tried = [(v, f"both-{n}") for v in (1, 2) for n in range(TASKS)] + [(2, "alone")]
    for number, (version, task) in enumerate(tried, 10):
        made = group(number, *(said(number, attempt, version, task) for attempt in (0, 1)))
        run.put_group(made)
        log.append(group_rows(made))
    return RecordedRun("x", run)


@pytest.fixture
def app(recorded: RecordedRun) -> ASGIApp:
    return create_app([recorded], Access(host="127.0.0.1", token=TOKEN))


def shown(app: ASGIApp, who: str = "Ada") -> dict[str, Any]:
    path = f"/api/runs/x/compare?before=1&after=2&who={who}"
    answer = ask(app, path, headers=BEARER)
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def choose(app: ASGIApp, pair: str, headers: dict[str, str] = BEARER, **changes: object) -> Answer:
    told = {"before": 1, "after": 2, "pair": pair, "verdict": "left", "who": "Ada"} | changes
    kind = {"content-type": "application/json"}
    body = json.dumps(told).encode()
    return ask(app, "/api/runs/x/compare", method="POST", headers=kind | headers, body=body)


def judged(app: ASGIApp, who: str = "Ada") -> Iterator[dict[str, Any]]:
    """Every pair, each judged by `who` in favour of the second version."""
    while (pair := shown(app, who)["next"]) is not None:
        better = "left" if WORDS[2] in pair["left"][1]["text"] else "right"
        assert choose(app, pair["pair"], who=who, verdict=better).status == 201
        yield pair


def test_nothing_tells_which_is_which(app: ASGIApp, recorded: RecordedRun) -> None:
    found = shown(app)
    assert (found["pairs"], found["left"]) == (2 * TASKS, 2 * TASKS)
    assert found["next"].keys() == {"pair", "task", "left", "right"}
    text = json.dumps(found["next"])
    ids = [row.id for row in recorded.table.rows]
    assert not any(id in text for id in ids) and "version" not in text and "reward" not in text
    newer_is_left = [
        recorded.table.get(pair.left).versions == (2,)  # type: ignore[union-attr]
        for pair in pairs(recorded.table, 1, 2)
    ]
    assert 0 < sum(newer_is_left) < len(newer_is_left)


def test_both_sides_are_of_one_task_and_of_the_two_versions(
    app: ASGIApp, recorded: RecordedRun
) -> None:
    shown(app)
    for pair in pairs(recorded.table, 1, 2):
        left, right = (recorded.row(id) for id in (pair.left, pair.right))
        assert left.task == right.task == pair.task
        assert {left.versions, right.versions} == {(1,), (2,)}
    assert pairs(recorded.table, 1, 2) == pairs(recorded.table, 2, 1)
    assert pairs(recorded.table, 2, 2) == [] == pairs(recorded.table, 1, 9)


def test_a_pair_is_judged_once_by_each(app: ASGIApp, recorded: RecordedRun) -> None:
    add_verdict(recorded.run, Verdict(session="g000001.0", verdict="cheat", who="Ada"))
    seen = [pair["pair"] for pair in judged(app)]
    assert len(set(seen)) == len(seen) == 2 * TASKS
    assert shown(app)["result"] == {"before": 0, "after": 2 * TASKS, "tie": 0}
    assert shown(app, "Bo")["left"] == 2 * TASKS
    assert choose(app, seen[0], verdict="tie").status == 201
    assert shown(app)["result"] == {"before": 0, "after": 2 * TASKS - 1, "tie": 1}
    assert len(read_preferences(recorded.run)) == 2 * TASKS + 1
    assert [each.record.session for each in read_verdicts(recorded.run)] == ["g000001.0"]


def test_the_stage_dpo_reads_what_was_preferred(app: ASGIApp, tmp_path: Path) -> None:
    seen = [pair["pair"] for pair in judged(app)]
    choose(app, seen[0], verdict="tie")
    answer = ask(app, "/api/runs/x/export?format=preferences.jsonl", headers=BEARER)
    file = tmp_path / "preferences.jsonl"
    file.write_bytes(answer.body)
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert len(lines) == 2 * TASKS - 1
    assert all(WORDS[2] in line["chosen"][0]["content"] for line in lines)
    assert all(WORDS[1] in line["rejected"][0]["content"] for line in lines)
    assert {line["who"] for line in lines} == {"Ada"} and all(line["time"] > 0 for line in lines)
    found, skipped = read_pairs(str(file), ChatTokenizer(small_files()), 4096, "error")
    assert (len(found), skipped) == (len(lines), [])
    some = ask(app, "/api/runs/x/export?format=preferences.jsonl&task=both-1", headers=BEARER)
    prompts = [json.loads(line)["prompt"] for line in some.body.splitlines()]
    assert prompts and all(prompt[0]["content"] == "fix both-1" for prompt in prompts)


def test_sessions_that_went_alike_are_passed_over(
    recorded: RecordedRun, app: ASGIApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORDS, 2, WORDS[1])
    log = RolloutLog(recorded.run.objects)
    for number, version in ((90, 1), (91, 2)):
        made = group(number, replace(said(number, 0, version, "alike"), task="alike"))
        recorded.run.put_group(made)
        log.append(group_rows(made))
    monkeypatch.undo()
    seen = [pair["task"] for pair in judged(app)]
    assert len(seen) == 2 * TASKS and "alike" not in seen
    found = shown(app)
    assert (found["pairs"], found["left"], found["next"]) == (2 * TASKS + 1, 1, None)


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_a_pair_that_cannot_be_read_is_passed_over(
    recorded: RecordedRun, app: ASGIApp, how: str
) -> None:
    """Each object holds two sessions, and each pair is of two objects."""
    objects = recorded.run.objects
    shown(app)
    key = recorded.row(pairs(recorded.table, 1, 2)[0].left).object
    assert key is not None
    if how == "deleted":
        objects.delete(key)
    else:
        objects.put(key, b"x" + objects.get(key)[1:])
    assert len(list(judged(app))) == 2 * TASKS - 2
    assert shown(app)["left"] == 2


def test_the_ids_of_calls_tell_nothing_and_pair_their_answers(
    recorded: RecordedRun, app: ASGIApp
) -> None:
    log = RolloutLog(recorded.run.objects)
    for number, version in ((90, 1), (91, 2)):
        calls = [{"id": f"v{version}-{n}", "function": {"name": f"f{n}"}} for n in range(2)]
        messages = [
            {"role": "assistant", "content": WORDS[version], "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"v{version}-1", "content": "one"},
            {"role": "tool", "tool_call_id": f"v{version}-0", "content": "zero"},
            {"role": "tool", "tool_call_id": f"v{version}-9", "content": "of nobody"},
        ]
        made = group(number, replace(said(number, 0, version, "calls"), messages=messages))
        recorded.run.put_group(made)
        log.append(group_rows(made))
    recorded.refresh()
    (pair,) = (pair for pair in pairs(recorded.table, 1, 2) if pair.task == "calls")
    for other in pairs(recorded.table, 1, 2):
        if other != pair:
            assert choose(app, other.key, verdict="tie").status == 201
    found = shown(app)["next"]
    assert found["pair"] == pair.key
    for side in (found["left"], found["right"]):
        assert [call["id"] for call in side[0]["calls"]] == ["1", "2"]
        assert [turn["call_id"] for turn in side] == ["", "2", "1", "3"]


def test_a_choice_that_is_none(app: ASGIApp) -> None:
    pair = shown(app)["next"]["pair"]
    assert choose(app, pair, verdict="both").status == 400
    assert choose(app, pair, who=" ").status == 400
    assert choose(app, pair, note="n" * 30_000).status == 413
    assert choose(app, "another").status == 404
    assert choose(app, pair, after=9).status == 404
    assert choose(app, pair, headers={}).status == 401
    assert choose(app, pair, headers=BEARER | {"content-type": "text/plain"}).status == 415
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert choose(app, pair, headers=BEARER | headers).status == 403
    assert choose(app, pair, headers=BEARER | {"host": "evil.example"}).status == 421
    assert shown(app)["left"] == 2 * TASKS
