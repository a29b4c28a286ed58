"""One session out of an object of several, and verdicts on it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.core.types import PromptPart
from etude.store.codec import pack, seal
from etude.store.objects import Missing, Objects
from etude.store.rollouts import RolloutLog, RolloutReader, group_rows
from etude.store.runs import Run
from etude.store.sessions import SessionReader
from etude.store.verdicts import Verdict, add_verdict, read_verdicts
from tests.store.test_rollouts import DONE, GROUP


@pytest.fixture
def run() -> Run:
    run = Run(Objects.open("memory:"))
    run.put_group(GROUP)
    run.put_eval_sessions("000001.heldout", [DONE, replace(DONE, id="other")])
    return run


@pytest.mark.parametrize("key", ["groups/g000004", "evals/000001.heldout.sessions"])
def test_a_session_is_read_as_it_was_written(run: Run, key: str) -> None:
    reader = SessionReader(run)
    for whole in run.sessions(key):
        assert reader.session(key, whole.id) == whole
    without = [replace(whole, segments=()) for whole in run.sessions(key)]
    assert reader.conversations(key) == without
    assert reader.conversations(key, {without[1].id, "x"}) == without[1:2]
    with pytest.raises(Missing, match="has no session 'x'"):
        reader.session(key, "x")


def test_rows_are_read_as_they_come() -> None:
    objects = Objects.open("memory:")
    log, reader, rows = RolloutLog(objects), RolloutReader(objects), group_rows(GROUP)
    assert reader.new() == []
    log.append(rows[:1])
    assert reader.new() == rows[:1]
    objects.put("rollouts/0000000001.parquet", b"cut off")
    log.put_evaluation("000001.heldout", [DONE], stage="rl", split="heldout")
    RolloutLog(objects).append(rows[1:])
    assert [row.id for row in reader.new()] == [rows[1].id, DONE.id]
    assert "0000000001.parquet is damaged" in str(reader.damaged[0])
    assert reader.new() == []


def test_verdicts_of_many_at_once_are_all_kept(run: Run) -> None:
    def judge(who: str) -> None:
        for verdict in ("cheat", "honest"):
            add_verdict(run, Verdict(session="s", verdict=verdict, who=who))  # type: ignore[arg-type]

    threads = [threading.Thread(target=judge, args=(f"p{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [(each.record.who, each.record.verdict) for each in read_verdicts(run)]
    assert sorted(told) == [(f"p{n}", said) for n in range(2) for said in ("cheat", "honest")]


class Busy(Objects):
    """A store in which another writer is faster, this many times."""

    times = 0

    def create(self, key: str, data: bytes) -> bool:
        if key.startswith("verdicts/") and self.times:
            self.times -= 1
            super().create(key, seal(b""))
        return super().create(key, data)


@pytest.mark.parametrize(("times", "is_kept"), [(0, True), (4, True), (5, False)])
def test_who_comes_second_tries_again(times: int, is_kept: bool) -> None:
    run = Run(Busy.open("memory:"))
    run.objects.times = times  # type: ignore[attr-defined]
    mine = Verdict(session="s", verdict="cheat", who="w")
    with (
        nullcontext() if is_kept else pytest.raises(EtudeError, match="another process has written")
    ):
        add_verdict(run, mine)
    assert [each.record for each in read_verdicts(run)] == ([mine] if is_kept else [])


@pytest.mark.parametrize(
    "fields",
    [
        *({"who": " "}, {"who": "x" * 4001}, {"note": "x" * 4001}),
        *({"reward": float("nan")}, {"reward": float("-inf")}),
    ],
)
def test_a_verdict_that_says_nothing(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="verdict"):
        Verdict(**({"session": "s", "verdict": "cheat", "who": "w"} | fields))  # type: ignore[arg-type]
    Verdict(session="s", verdict="cheat", who="w" * 4000, note="x" * 4000, reward=-1.0)


def test_what_an_older_run_did_not_write_is_nothing(run: Run) -> None:
    told = {"id": "old", "task": "t", "group": "g", "score": None, "status": "failed"}
    run.objects.put_sealed("evals/000002.heldout.sessions", pack([told | {"segments": []}]))
    reader, key = SessionReader(run), "evals/000002.heldout.sessions"
    assert reader.conversations(key) == [reader.session(key, "old")]


def test_a_conversation_is_all_of_a_session_but_its_tokens(run: Run) -> None:
    told: dict[str, Any] = {
        "error": "e",
        "traceback": "t",
        "messages": [{"role": "user"}],
        "diff": "+x",
        "score": None,
    }
    parts = (PromptPart(name="files", text="a.py", role="user", priority=1),)
    whole = replace(DONE, status="failed", prompt_parts=parts, **told)
    left_out = {each.name for each in fields(whole) if not getattr(whole, each.name)}
    assert left_out == {"score"}, "what is not given here would be missed by nobody"
    run.put_eval_sessions("000003.heldout", [whole, DONE])
    found = SessionReader(run).conversations("evals/000003.heldout.sessions")
    assert found == [replace(whole, segments=()), replace(DONE, segments=())]
