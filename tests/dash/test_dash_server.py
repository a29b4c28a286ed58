"""The dashboard's server: every view over a store, and attempts at unauthorized access."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from starlette.types import ASGIApp

from etude.cli import main
from etude.core.ledger import Batched, Dropped, Issued, Trained
from etude.dash.answers import solve_rates
from etude.dash.exports import export
from etude.dash.guard import Access
from etude.dash.recorded import RecordedRun, evidence_of
from etude.dash.server import create_app
from etude.dash.table import RolloutTable
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run
from etude.weights.manifest import find_newest
from etude.weights.publish import publish
from tests.dash.recorded_store import (
    ALL_HOSTILE,
    HOSTILE,
    Answer,
    ask,
    group,
    trajectory,
    write_run,
)

STATIC = Path(__file__).parent.parent.parent / "etude" / "dash" / "static"
TOKEN = "a-token-of-forty-two-letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}
VIEWS = (
    "overview", "rollouts", "failures", "groups/g000001", "sessions/g000001.1",
    "sessions/g000001.1/tokens", "ledger", "fleet", "doctor", "review",
    "compare", "realtime",
)  # fmt: skip
PATHS = ("/api/runs", *(f"/api/runs/x/{view}" for view in VIEWS))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run)
    return run


@pytest.fixture
def app(run: Run) -> ASGIApp:
    return create_app([RecordedRun("x", run)], Access(host="127.0.0.1"))


@pytest.fixture
def with_token(run: Run) -> ASGIApp:
    return create_app([RecordedRun("x", run)], Access(host="0.0.0.0", token=TOKEN))


def test_the_overview_has_alarms_curves_and_lag(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/overview").json
    assert [alarm["name"] for alarm in found["alarms"]] == ["k3"]
    assert "lower lr or max_lag" in found["alarms"][0]["advice"]
    assert found["steps"]["reward"] == [0.5]
    assert found["steps"]["trainer_busy"] == [0.25]
    assert found["steps"]["busy east"] == [0.5]
    assert found["lag_bound"] == 2
    assert found["lag_split"] == {"in_flight": {"1": 2}, "queued": {"0": 2}}
    assert found["stages"][0]["state"] == "under way"
    assert found["solve"]["heldout"]["rate"] == [1.0]
    assert found["missing"] == []


def test_an_attempt_counts_for_the_newest_version_that_sampled_it() -> None:
    (one,) = group_rows(group(1, trajectory("g000001.0", 1.0)))
    table = RolloutTable()
    for number, versions in enumerate([(4,), (2, 3, 4), (2, 3)]):
        table.add([replace(one, id=f"g000001.{number}", versions=versions)])
    found = solve_rates(table)["train env"]
    assert (found["version"], found["count"]) == ([3.0, 4.0], [1.0, 2.0])


OF_THE_RUN = {
    "steps", "solve", "parts", "regions", "workers", "dropped", "in_flight", "queued", "status",
    "became", "kind", "source", "stage", "flag", "cause", "arguments",
}  # fmt: skip
"""Fields whose keys may be names from the run."""
UNREAD = {"prompt_tokens"}


def fields(value: object) -> set[str]:
    if isinstance(value, list):
        return set[str]().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    inner = (each.values() if isinstance(each, dict) and name in OF_THE_RUN else [each]
             for name, each in value.items())  # fmt: skip
    return set(value).union(*(fields(list(each)) for each in inner))


def test_the_page_reads_what_is_answered(app: ASGIApp) -> None:
    """Every field of every view is read by a script under the same name, or is listed as unread."""
    read = set(re.findall(r"\w+", "".join(path.read_text() for path in STATIC.glob("*.js"))))
    told = {path: fields(ask(app, path).json) for path in PATHS}
    assert {path: names - read for path, names in told.items() if names - read - UNREAD} == {}


def test_a_rollout_is_trained_on_when_its_step_is_done(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    write_run(run)
    waiting = group(4, trajectory("g000004.0", 1.0))
    RolloutLog(run.objects).append([replace(row, step=3) for row in group_rows(waiting)])
    run.ledger.append(Issued(group="g000004", task="t", samples=("g000004.0",), version=0))
    run.ledger.append(Batched(step=3, samples=("g000004.0",)))

    def told() -> list[Any]:
        app = create_app([RecordedRun("x", run)], Access(host="127.0.0.1"))
        ledger = ask(app, "/api/runs/x/ledger").json
        assert sum(each["trained"] for each in ledger["by_status"]) == ledger["trained"]
        found = ask(app, "/api/runs/x/rollouts?step=3").json
        exported = json.loads(ask(app, "/api/runs/x/export?format=jsonl&step=3").body)
        return [found["rows"][0]["became"], *found["facets"]["became"], exported["became"]]

    assert told() == ["batched"] * 3
    run.ledger.append(Trained(step=3))
    assert told() == ["trained"] * 3


def test_rollouts_that_are_settled_and_those_that_have_just_ended(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/rollouts?sort=-reward").json
    became = {row["id"]: row["became"] for row in found["rows"]}
    assert became == {
        "g000001.0": "trained",
        "eval-1-heldout.h1": "evaluation",
        "g000003.0": "waits",
        "g000001.1": "trained",
        "g000002.0": "waits",
        "g000002.1": "failed",
    }
    assert [row["reward"] for row in found["rows"]][-1] is None
    assert found["facets"]["status"] == {"done": 5, "failed": 1}
    one = ask(app, "/api/runs/x/rollouts?reward_max=0.3&status=done&kind=train&step=2").json
    assert [row["id"] for row in one["rows"]] == ["g000001.1"]
    assert ask(app, "/api/runs/x/rollouts?text=NO+ROOM").json["matched"] == 1


def test_a_filter_that_is_none(app: ASGIApp) -> None:
    for query, words in (
        ("colour=red", "there is no filter 'colour'"),
        ("reward_min=much", "'much' is not a valid value for the filter reward_min"),
        ("sort=id", "cannot sort by 'id'"),
        ("limit=-1", "limit must be a number"),
    ):
        answer = ask(app, f"/api/runs/x/rollouts?{query}")
        assert answer.status == 400 and words in answer.json["error"]


def test_a_session_with_its_score_and_tokens(app: ASGIApp) -> None:
    session = ask(app, "/api/runs/x/sessions/g000001.1").json["session"]
    assert (session["task"], session["group"], session["error"]) == ("t1", "g000001", None)
    assert [turn["role"] for turn in session["turns"]] == ["user", "assistant", "tool"]
    assert session["turns"][1]["calls"][0]["arguments"] == {"x": ALL_HOSTILE}
    assert session["parts"] == [
        {"name": "checks", "value": 0.25, "evidence": f"error: {ALL_HOSTILE}"}
    ]
    assert ask(app, "/api/runs/x/sessions/g000001.1/tokens").json["trainer"] is None
    tokens = ask(app, "/api/runs/x/sessions/g000001.1/tokens?trainer=true").json
    assert tokens["mask"] == [[0, 2], [1, 1], [0, 1], [1, 2]]
    assert tokens["logprobs"] == [-0.5, -1.5, -2.5]
    assert tokens["trainer"] == [-0.4, -1.5, -2.0]
    assert tokens["versions"] == [[0, 1], [1, 2]]
    assert len(tokens["pieces"]) == 6
    later = ask(app, "/api/runs/x/sessions/g000001.1/tokens?offset=4&limit=2").json
    assert (later["logprobs"], later["versions"]) == ([-1.5, -2.5], [[1, 2]])


def test_a_session_whose_group_is_under_way(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/sessions/g000003.0").json
    assert found["row"]["reward"] == 0.5
    assert "is not stored: groups are stored when" in found["not_stored"]
    tokens = ask(app, "/api/runs/x/sessions/g000003.0/tokens").json
    assert tokens == {"segments": [], "not_stored": found["not_stored"]}
    # its group is stored, although it has no row yet
    assert ask(app, "/api/runs/x/sessions/g000002.0").json["session"]["reward"] == 0.0
    assert ask(app, "/api/runs/x/sessions/g000009.0").status == 404


def test_of_a_traceback_the_table_shows_the_end_and_the_session_all(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run)
    error = (
        'agent: Traceback (most recent call last):\n  File "a.py", line 4, in main\n    argv[1]\n'
        "IndexError: list index"
    )
    failed = group(4, replace(trajectory("g000004.0", None), error=error))
    RolloutLog(run.objects).append(group_rows(failed))
    app = create_app([RecordedRun("x", run)], Access(host="127.0.0.1"))
    (row,) = ask(app, "/api/runs/x/rollouts?text=g000004.0").json["rows"]
    assert row["error"] == "agent: IndexError: list index"
    assert ask(app, "/api/runs/x/sessions/g000004.0").json["row"]["error"] == error


def test_a_session_that_failed_says_why(app: ASGIApp) -> None:
    session = ask(app, "/api/runs/x/sessions/g000002.1").json["session"]
    assert (session["status"], session["reward"]) == ("failed", None)
    assert session["error"].startswith("sandbox: no room for 17")


def test_a_group_side_by_side(app: ASGIApp) -> None:
    attempts = ask(app, "/api/runs/x/groups/g000001").json["attempts"]
    assert [(each["id"], each["reward"]) for each in attempts] == [
        ("g000001.0", 1.0),
        ("g000001.1", 0.25),
    ]
    assert ask(app, "/api/runs/x/groups/g000009").status == 404


def test_failures_by_cause(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/failures").json
    assert found["broken"][0]["cause"].startswith("sandbox: no room for … of")
    assert found["clusters"][0]["count"] == 1 and found["looked_into"] == 1
    assert found["clusters"][0]["examples"] == ["g000001.1"]
    assert found["unsolved"] == 4  # g000001.1, both of group 2, and g000003.0


def test_the_cause_of_an_attempt_without_a_score() -> None:
    late = replace(trajectory("g000001.0", None), status="timeout", error=None)
    assert evidence_of(late) == "out of time"
    assert evidence_of(replace(late, status="truncated")) == "out of turns or context"
    assert evidence_of(replace(late, status="done")) == "no evidence"


def test_the_ledger_adds_up(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/ledger").json
    assert (found["issued"], found["trained"], found["in_flight"]) == (6, 2, 3)
    assert found["dropped"] == {"failed": 1}
    assert found["by_status"] == [{"name": "done", "dispatched": 2, "trained": 2}]


def test_the_ledger_shows_what_became_of_attempts_without_a_reward(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run)
    failed = group(2, trajectory("g000002.0", 0.0), trajectory("g000002.1", None))
    run.ledger.append(Dropped(samples=("g000002.0",), reason="no_signal"))
    RolloutLog(run.objects).append([replace(row, dropped="failed") for row in group_rows(failed)])
    app = create_app([RecordedRun("x", run)], Access(host="127.0.0.1"))
    found = ask(app, "/api/runs/x/ledger").json
    assert found["by_reward"] == [
        {"name": "solved (1)", "dispatched": 1, "trained": 1},
        {"name": "between", "dispatched": 1, "trained": 1},
        {"name": "0", "dispatched": 1, "trained": 0},
        {"name": "failed (no reward)", "dispatched": 1, "trained": 0},
    ]


def test_the_fleet(app: ASGIApp) -> None:
    found = ask(app, "/api/runs/x/fleet").json
    assert found["regions"]["east"] == {"version": 2, "busy": 0.5, "running": 3, "waiting": 1}
    assert {each["version"]: "live" in each for each in found["versions"]} == {
        2: True,
        1: True,
        0: True,
    }


def test_the_fleet_shows_how_much_of_a_version_had_to_be_sent(run: Run, app: ASGIApp) -> None:
    weights = torch.arange(100_000, dtype=torch.float32)
    publish(run.objects, 0, {"w": weights}, stage="start", step=0)
    weights[7] = -1.0
    publish(run.objects, 1, {"w": weights}, stage="rl", step=1)
    shown = {each["version"]: each for each in ask(app, "/api/runs/x/fleet").json["versions"]}
    assert (shown[0]["snapshot"], shown[1]["snapshot"]) == (True, False)
    assert shown[0]["whole_bytes"] == shown[1]["whole_bytes"] == 400_000
    assert shown[1]["bytes"] < 4_000 and shown[1]["stage"] == "rl"
    newest = find_newest(run.objects)
    assert newest is not None
    assert (shown[1]["digest"], shown[1]["published"]) == (newest.root, newest.time)
    assert shown[1]["changed"] == newest.changed


def test_what_has_not_changed_is_not_sent_again(app: ASGIApp) -> None:
    first = ask(app, "/api/runs/x/ledger")
    again = ask(app, "/api/runs/x/ledger", headers={"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


# Text of a model is never markup or code.


@pytest.mark.parametrize("path", PATHS)
def test_hostile_text_stays_json(app: ASGIApp, path: str) -> None:
    answer = ask(app, path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert_guarded(answer)
    json.loads(answer.body)


def test_hostile_text_reaches_the_page_whole(app: ASGIApp) -> None:
    text = json.dumps(ask(app, "/api/runs/x/groups/g000001").json, ensure_ascii=False)
    assert all(json.dumps(each, ensure_ascii=False)[1:-1] in text for each in HOSTILE)


@pytest.mark.parametrize("path", ["/", "/runs/x", f"/runs/{HOSTILE[0]}", "/runs/x/sessions/g1.0"])
def test_the_page_holds_nothing_of_the_run(app: ASGIApp, path: str) -> None:
    answer = ask(app, path)
    assert answer.body == (STATIC / "index.html").read_bytes()
    assert_guarded(answer)


def test_no_script_makes_markup_or_code_of_text() -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|eval\(|Function\("
    )
    for path in STATIC.glob("*.js"):
        assert not re.search(ways, path.read_text()), path
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script>|\son\w+=|style=|https?:", page)


def assert_guarded(answer: Answer) -> None:
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    promised = {"x-content-type-options": "nosniff", "x-frame-options": "DENY"}
    promised |= {f"cross-origin-{name}-policy": "same-origin" for name in ("opener", "resource")}
    assert (promised | {"referrer-policy": "no-referrer"}).items() <= dict(answer.headers).items()
    assert not {"access-control-allow-origin", "set-cookie"} & answer.headers.keys()


# Other sites and other host names.

REBOUND = (
    "evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example",
    "0.0.0.0:8765", "localhost@evil.example", "evil.example#localhost", "192.168.1.4", "[::]",
    "", "127.0.0.1 evil.example", "2130706433.evil.example", "[::1", "1.1.1.1",
)  # fmt: skip


@pytest.mark.parametrize("host", REBOUND)
def test_a_name_that_was_pointed_here(app: ASGIApp, host: str) -> None:
    for path in ("/", "/api/runs", "/api/runs/x/overview"):
        assert ask(app, path, headers={"host": host}).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:9000", "[::1]:8765", "LOCALHOST"])
def test_loopback_by_any_name_and_through_any_forwarded_port(app: ASGIApp, host: str) -> None:
    assert ask(app, "/api/runs", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1:8765.evil.example"},
        {"origin": "http://["},
        {"origin": "127.0.0.1:8765"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_requests_from_other_sites(
    app: ASGIApp, with_token: ASGIApp, headers: dict[str, str]
) -> None:
    for path in PATHS:
        assert ask(app, path, headers=headers).status == 403
    assert verdict(with_token, headers=BEARER | headers).status == 403
    own = {"origin": "http://127.0.0.1:8765", "sec-fetch-site": "same-origin"}
    assert ask(app, "/api/runs", headers=own).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "LINK"])
def test_nothing_can_be_changed_without_a_token(app: ASGIApp, method: str) -> None:
    for path in ("/", "/runs/x", *PATHS):
        assert ask(app, path, method=method).status in (403, 405)


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/vendor/../server.py", "/..%2f..%2fconfig.json", "/static/app.js",
        "/etude/dash/server.py", "//etc/passwd", "/vendor/", "/api", "/api/runs/y/overview",
        "/api/runs/x/groups/..%2f..%2fconfig.json", "/api/runs/x/sessions/..%2fconfig.json",
        "/api/runs/x/groups/../../config.json",
    ],
)  # fmt: skip
def test_nothing_beside_the_page_and_the_runs(app: ASGIApp, path: str) -> None:
    assert ask(app, path).status == 404


def test_every_request_carries_the_token(with_token: ASGIApp) -> None:
    wrong = (
        {}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN},
        {"cookie": f"token={TOKEN}"}, {"authorization": "Basic " + TOKEN},
    )  # fmt: skip
    for path in PATHS:
        for headers in wrong:
            assert ask(with_token, path, headers=dict(headers)).status == 401
        assert ask(with_token, f"{path}?token={TOKEN}").status == 401
    assert ask(with_token, "/api/runs", headers=BEARER).json["writes"]
    assert ask(with_token, "/").status == 200  # asks for it


def test_bound_widely_it_answers_to_addresses_and_not_to_names(with_token: ASGIApp) -> None:
    assert ask(with_token, "/api/runs", headers=BEARER | {"host": "10.1.2.3:80"}).status == 200
    assert ask(with_token, "/api/runs", headers=BEARER | {"host": "evil.example"}).status == 421


def test_a_wide_bind_needs_a_token(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETUDE_TOKEN", raising=False)
    path = run.objects.url.removeprefix("file:")
    with pytest.raises(SystemExit, match="2"):
        main(["dash", path, "--host", "0.0.0.0", "--port", "0"])
    assert "set ETUDE_TOKEN" in capsys.readouterr().err


# Verdicts.


def verdict(app: ASGIApp, headers: dict[str, str] = BEARER, **changes: object) -> Answer:
    told = {"session": "g000001.1", "verdict": "cheat", "who": "Ada", "note": "<b>reads</b>"}
    body = json.dumps(told | changes).encode()
    kind = {"content-type": "application/json"}
    return ask(app, "/api/runs/x/review", method="POST", headers=kind | headers, body=body)


def test_verdicts_are_kept_and_judge_the_detectors(with_token: ASGIApp) -> None:
    before = ask(with_token, "/api/runs/x/review", headers=BEARER).json
    assert [row["id"] for row in before["queue"]] == ["g000001.1"]
    assert before["detectors"][0]["precision"] is None
    assert verdict(with_token).status == 201
    assert verdict(with_token, session="g000001.0", who="Bo").status == 201  # had no flag
    found = ask(with_token, "/api/runs/x/review", headers=BEARER).json
    detector = found["detectors"][0]
    assert (detector["precision"], detector["recall"]) == (1.0, 0.5)
    assert verdict(with_token, verdict="honest").status == 201
    found = ask(with_token, "/api/runs/x/review", headers=BEARER).json
    assert found["detectors"][0]["precision"] == 0.0
    told = [each for row in found["queue"] for each in row["verdicts"]]
    assert {(each["who"], each["verdict"]) for each in told} == {("Ada", "honest"), ("Bo", "cheat")}


def test_a_verdict_that_is_none(with_token: ASGIApp) -> None:
    assert verdict(with_token, who=" ").status == 400
    assert verdict(with_token, verdict="maybe").status == 400
    assert verdict(with_token, session="g000009.0").status == 404
    assert verdict(with_token, note="n" * 30_000).status == 413
    json_kind = BEARER | {"content-type": "application/json"}
    deep = b'{"more": ' + b"[" * 15_000
    path = "/api/runs/x/review"
    assert ask(with_token, path, method="POST", headers=json_kind, body=deep).status == 400
    assert verdict(with_token, headers=BEARER | {"content-type": "text/plain"}).status == 415
    assert verdict(with_token, headers={}).status == 401


# Exports.


def test_exports(app: ASGIApp, run: Run) -> None:
    def exported(format: str) -> bytes:
        answer = ask(app, f"/api/runs/x/export?format={format}&kind=train&status=done")
        assert answer.status == 200 and "attachment" in answer.headers["content-disposition"]
        return answer.body

    foreign = create_app([RecordedRun("prémier 第一", run)], Access(host="127.0.0.1"))
    answer = ask(foreign, "/api/runs/prémier 第一/export?format=csv")
    assert answer.status == 200
    assert answer.headers["content-disposition"].endswith('"pr_mier___.rollouts.csv"')
    lines = [json.loads(line) for line in exported("jsonl").splitlines()]
    ids = [line["id"] for line in lines]
    assert sorted(ids) == ["g000001.0", "g000001.1", "g000002.0", "g000003.0"]
    assert parquet.read_table(io.BytesIO(exported("parquet"))).column("id").to_pylist() == ids
    assert len(exported("csv").decode().splitlines()) >= 1 + len(ids)
    sessions = [json.loads(line) for line in exported("sessions.jsonl").splitlines()]
    assert sessions[0]["messages"][0]["role"] == "user"
    assert len(exported("atif.jsonl").splitlines()) == len(sessions)
    assert ask(app, "/api/runs/x/export?format=exe").status == 400


def test_an_export_of_conversations_that_are_gone_says_so(app: ASGIApp, run: Run) -> None:
    for name in run.groups():
        run.objects.delete(f"groups/{name}")
    answer = ask(app, "/api/runs/x/export?format=sessions.jsonl&kind=train")
    assert answer.status == 404 and "it does not exist" in answer.json["error"]
    assert ask(app, "/api/runs/x/export?format=jsonl&kind=train").status == 200


def test_no_cell_of_a_csv_is_a_formula(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/x")
    write_run(run, said="")
    recorded = RecordedRun("x", run)
    recorded.refresh()
    rows = [replace(recorded.row("g000001.0"), task=HOSTILE[-1], error="@SUM(A1)")]
    text = b"".join(export(recorded, rows, "csv")).decode()
    assert "'=cmd" in text and "'@SUM" in text


# Runs that are damaged, or grow.


def test_a_run_that_was_cut_off_says_what_is_missing(tmp_path: Path) -> None:
    write_run(Run.open(f"file:{tmp_path}/x"))
    root = tmp_path / "x"
    for name in ("rollouts/0000000000.parquet", "events/controller/0000000000.jsonl"):
        file = root / name
        file.write_bytes(file.read_bytes()[:-40])
    for name in ("config.json", "groups/g000001", "batches/000002", "model/tokenizer.json"):
        (root / name).unlink()
    (root / "ledger/0000000001.jsonl").write_bytes(b"")
    app = create_app([RecordedRun("x", Run.open(f"file:{root}"))], Access(host="127.0.0.1"))
    found = ask(app, "/api/runs/x/overview").json
    text = "\n".join(found["missing"])
    for name in (
        "0000000000.parquet",
        "controller/0000000000.jsonl",
        "ledger/0000000001",
        "has no run",
        "1 trained groups",
        "step 2",
    ):
        assert name in text, name
    for view in ("rollouts", "failures", "ledger", "fleet", "doctor", "review"):
        assert ask(app, f"/api/runs/x/{view}").status == 200
    left = ask(app, "/api/runs/x/rollouts").json["rows"]
    assert [row["id"] for row in left] == ["eval-1-heldout.h1"]


def test_the_page_is_small() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != ".txt"]
    assert sum(path.stat().st_size for path in files) <= 300_000
