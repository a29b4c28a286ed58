"""`etude sessions` and `etude show`, on stores written by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from etude.commands.sessions import Choice, find_sessions, sessions
from etude.commands.show import show
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, AttemptDone, Launched, ProcessDied, ProcessSilent
from etude.core.ledger import Batched, Dropped, Issued, Reason, Trained
from etude.core.sampling import VersionSpan
from etude.core.types import Cost, Credit, Group, Part, Score, Segment, Trajectory
from etude.dash.session import LONG, Block, read_session, said, shorten
from etude.launch.launcher import locked
from etude.model.directory import MODEL_FILES
from etude.run.loop import attempt_done
from etude.store.objects import Objects
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run
from tests.small_model import small_files

CALL = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": '{"line": 2}'}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "fix area.py"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
]


def trajectory(id: str, reward: float, task: str = "t1") -> Trajectory:
    score = Score(reward, parts=(Part("checks", 3.0, evidence="3 of 4\nline 7"),), flags=("odd",))
    return Trajectory(
        id=id,
        task=task,
        group=id.partition(".")[0],
        segments=(),
        score=score,
        status="done",
        messages=MESSAGES,
        cost=Cost(seconds=1.5),
    )


def failed(id: str, tokens: tuple[int, ...] = ()) -> Trajectory:
    count = len(tokens)
    segment = Segment(
        prompt=(1,),
        tokens=tokens,
        mask=(True,) * count,
        logprobs=(-1.0,) * count,
        versions=(VersionSpan(0, count),),
    )
    return replace(
        trajectory(id, 0.0),
        score=None,
        status="failed",
        error="agent: KeyError in agent.py, line 4: 'x'",
        traceback="Traceback:\n  agent.py, line 4",
        messages=[],
        segments=(segment,) if tokens else (),
    )


def group(number: int, *trajectories: Trajectory, task: str = "t1") -> Group:
    name = f"g{number:06d}"
    return Group(id=name, task=task, slot=number, admitted=0, trajectories=trajectories)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with a settled group, one that waits, an evaluation, and an attempt of a group under
    way."""
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    for name, data in small_files().items():
        run.put_model_file(name, data)
    settled = group(1, trajectory("g000001.0", 1.0), trajectory("g000001.1", 0.25))
    waiting = group(2, trajectory("g000002.0", 0.5, "t2"), failed("g000002.1", (7, 8, 9)))
    evaluated = [trajectory("eval-0-heldout.h1", 0.75, "h1")]
    events = run.events("controller", EVENTS)
    for each in (settled, waiting):
        run.put_group(each)
        events.append(*(attempt_done(t, "train") for t in each.trajectories))
    key = run.put_eval_sessions("000000.heldout", evaluated)
    log = RolloutLog(run.objects)
    log.append([replace(row, step=1) for row in group_rows(settled)])
    log.put_evaluation("000000.heldout", evaluated, stage="start", split="heldout", object=key)
    events.append(attempt_done(replace(failed("g000003.0"), error="sandbox: no room"), "train"))
    events.flush()
    run.ledger.append(Dropped(samples=("g000002.1",), reason="failed"))
    return run


def printed(run: Run, width: int | None = None, **chosen: object) -> str:
    """The output in a pipe, or on a terminal of the given width."""
    is_terminal = width is not None
    console = Console(record=True, width=width or 160, quiet=False, force_terminal=is_terminal)
    path = Path(run.objects.url.removeprefix("file:"))
    sessions(str(path), console, Choice(**chosen), as_json=False)  # type: ignore[arg-type]
    return console.export_text()


def test_all_sessions_are_found_whatever_became_of_them(run: Run) -> None:
    found, damage = find_sessions(run)
    assert damage == []
    assert {each.id: (each.became, each.object) for each in found} == {
        "g000001.0": ("step 1", "groups/g000001"),
        "g000001.1": ("step 1", "groups/g000001"),
        "g000002.0": ("waits", "groups/g000002"),
        "g000002.1": ("failed", "groups/g000002"),
        "eval-0-heldout.h1": ("evaluation", "evals/000000.heldout.sessions"),
        "g000003.0": ("under way", None),
    }


def test_a_session_has_its_step_once_that_is_done(run: Run) -> None:
    ids = ("g000001.0", "g000001.1")

    def became() -> set[str]:
        return {each.became for each in find_sessions(run)[0] if each.id in ids}

    run.ledger.append(
        Issued(group="g000001", task="t1", samples=ids, version=0), Batched(step=1, samples=ids)
    )
    assert became() == {"in step 1, not done yet"}, "though its row is there"
    run.ledger.append(Trained(step=1))
    assert became() == {"step 1"}


def test_sessions_of_one_object_are_read_with_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(f"file:{tmp_path}")
    report = "000003.heldout_x8"
    attempts = [trajectory(f"eval-3-heldout_x8.{number}", 1.0) for number in range(9)]
    log = RolloutLog(run.objects)
    rows = group_rows(group(0, *attempts))
    key = run.put_eval_sessions(report, attempts)
    log.append([replace(row, kind="heldout", object=key) for row in rows])
    read: list[str] = []
    get_sealed = Objects.get_sealed

    def counted(self: Objects, key: str) -> bytes:
        read.append(key)
        return get_sealed(self, key)

    monkeypatch.setattr(Objects, "get_sealed", counted)
    sessions(str(tmp_path), Console(), Choice(count=100), as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["id"] for line in lines} == {each.id for each in attempts}
    assert all(line["session"]["messages"] for line in lines)
    assert read.count(key) == 1


def test_the_best_is_shown_whole(run: Run) -> None:
    text = printed(run, best=True)
    assert text.index("g000001.0") < text.index("eval-0-heldout.h1") < text.index("g000002.0")
    for words in (
        "system    be brief",
        "user      fix area.py",
        "call      edit(line=2)",
        "tool      ok",
        "score     reward 1",
        "checks 3: 3 of 4",
        "flag: odd",
    ):
        assert words in text, words
    assert "g000003.0" not in text, "it has no reward"


def test_failures_have_their_error_and_what_the_model_said(run: Run) -> None:
    text = printed(run, failed=True, count=2)
    assert "2 of 2 sessions that match (of 6)" in text
    assert text.index("g000003.0 ") < text.index("g000002.1 "), "the newest first"
    assert "g000003.0, train task" not in text, "there is nothing more to read of it"
    older = text.index("g000002.1, train task")
    assert "error     agent: KeyError in agent.py, line 4: 'x'\n          Traceback:" in text
    assert "raw       " in text[older:], "the agent left no messages, the recorder did"


def test_the_table_tells_what_a_traceback_ends_with(run: Run) -> None:
    frames = '  File "/work/agent.py", line 4, in main\n    argv[1]\n' * 9
    error = f"agent: Traceback (most recent call last):\n{frames}IndexError: list index"
    events = run.events("controller", EVENTS)
    events.append(attempt_done(replace(failed("g000004.0"), error=error), "train"))
    events.flush()
    (line,) = re.findall(r"^g000004\.0 .*", printed(run, failed=True), re.M)
    assert line.rstrip().endswith("agent: IndexError: list index")
    assert printed(run, id="g000004.0").count("argv[1]") == 9, "all of it, below"


def test_a_narrow_terminal_is_told_all(run: Run) -> None:
    text = printed(run, 60, failed=True)
    assert all(len(line) <= 60 for line in text.splitlines())
    (row,) = re.findall(r"^g000003\.0 .*\n(?: .*\n)*", text, re.M)
    assert "under way" in row and row.split()[-3:] == ["sandbox:", "no", "room"]
    assert "error     agent: KeyError in agent.py, line 4: 'x'" in text


def test_by_task_and_by_name(run: Run) -> None:
    assert "1 of 1 sessions that match" in printed(run, task="t2")
    assert "g000001.1, train task t1" in printed(run, id="g000001.1")
    lost = printed(run, id="g000003.0")
    assert "error     sandbox: no room" in lost and "all sessions of its group have ended" in lost
    with pytest.raises(EtudeError, match="no task t9: the closest of 3 are t2, t1, h1"):
        printed(run, task="t9")
    with pytest.raises(EtudeError, match=r"no session g1.1: the closest of 6 are g000001\.1,"):
        printed(run, id="g1.1")


def test_an_evaluation_that_failed_is_no_session_under_way(run: Run) -> None:
    long = "the program ended with exit code 1\n" + "  File somewhere\n" * 99
    event = attempt_done(replace(failed("eval-3-heldout.0"), error=long), "heldout")
    events = run.events("controller", EVENTS)
    events.append(event)
    events.flush()
    table, _, below = printed(run, failed=True).partition("eval-3-heldout.0, heldout task")
    (line,) = (line for line in table.splitlines() if line.startswith("eval-3"))
    assert " evaluation " in line and line.rstrip().endswith("...") and len(line) < 200
    printed_whole = printed(run, id="eval-3-heldout.0")
    assert printed_whole.count("File somewhere") > 99, "all of it, below"
    assert "evaluations retry failed sessions" in printed_whole
    events.append(replace(event, id="eval-3-heldout.1", status="timeout", reward=0.0, error=None))
    events.flush()
    timed_out = printed(run, id="eval-3-heldout.1")
    assert "score     timed out, reward 0.0" in timed_out
    assert "when all sessions of its evaluation have ended" in timed_out


def test_as_json(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(run.objects.url.removeprefix("file:"))
    sessions(str(path), Console(stderr=True), Choice(best=True, count=2), as_json=True)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["id"], first["reward"]) == ("g000001.0", 1.0)
    assert first["session"]["messages"] == MESSAGES
    assert second["session"]["score"]["parts"][0]["evidence"] == "3 of 4\nline 7"


def test_a_damaged_group_is_named_and_the_others_are_read(run: Run) -> None:
    run.objects.put("groups/g000002", b"something else")
    found, damage = find_sessions(run)
    assert len(damage) == 1 and "groups/g000002" in damage[0]
    (lost,) = (each for each in found if each.id == "g000002.0")
    assert lost.object is None and lost.reward == 0.5, "what its event tells"
    run.objects.put("rollouts/0000000000.parquet", b"something else")
    found, damage = find_sessions(run)
    assert len(damage) == 2
    assert {each.id for each in found} >= {"g000001.0", "g000001.1"}, "from their group"


def test_a_run_without_sessions(tmp_path: Path) -> None:
    Run.open(f"file:{tmp_path}").put_config(
        parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n')
    )
    with pytest.raises(EtudeError, match="has no sessions yet"):
        sessions(str(tmp_path), Console(quiet=True), Choice(), as_json=False)


def test_arguments_are_written_as_python_would_and_long_ones_as_they_are() -> None:
    def call(arguments: object) -> list[Block]:
        function = {"name": "write", "arguments": arguments}
        return [*said([{"role": "assistant", "tool_calls": [{"function": function}]}])]

    assert call('{"path": "a.py"}') == [Block("call", "write(path='a.py')")]
    assert call('{"path": ') == [Block("call", 'write({"path": )')]
    (long,) = call(json.dumps({"path": "a.py", "text": "one\ntwo"}))
    assert long.text == "write(\n  path = a.py\n  text = one\ntwo\n)"
    assert [*said([{"role": "assistant", "content": ""}])] == [Block("model", "(says nothing)")]


def test_long_outputs_lose_their_middle() -> None:
    short = shorten("\n".join(map(str, range(LONG + 5))))
    assert "... (5 lines left out) ..." in short and short.endswith(f"\n{LONG + 4}")
    assert shorten("x" * 1000).endswith("... (1000 characters)")
    assert shorten("a\nb") == "a\nb"


def test_a_score_says_what_was_credited_for_what() -> None:
    t = trajectory("g000001.0", 0.5)
    assert t.score is not None
    credited = replace(t.score, credit=(Credit(0.25, segment=0), Credit(-1.0, segment=1, turn=3)))
    assert read_session(replace(t, score=credited), None)[-1].text.splitlines() == [
        "reward 0.5",
        "checks 3: 3 of 4",
        "    line 7",
        "flag: odd",
        "credit 0.25 for segment 0",
        "credit -1 for segment 1, turn 3",
    ]


def test_a_session_that_ran_out_of_time_says_so() -> None:
    late = replace(trajectory("g.0", 0.0), status="timeout")
    assert [block.who for block in read_session(late, None)] == [
        "system", "user", "call", "tool", "timed out", "score",
    ]  # fmt: skip


def shown(path: Path) -> tuple[bool, str]:
    console = Console(record=True, width=160)
    return show(str(path), console), console.export_text()


def test_a_damaged_run_is_shown_with_what_is_missing(run: Run, tmp_path: Path) -> None:
    run.ledger.append(
        Issued(group="g000001", task="t1", samples=("g000001.0",), version=0, epoch=0),
        Batched(step=1, samples=("g000001.0",)),
    )
    run.objects.delete("groups/g000001")
    run.objects.delete(f"model/{MODEL_FILES[1]}")
    run.objects.put("evals/000001.heldout.json", b"nothing")
    whole, text = shown(tmp_path)
    assert not whole
    for words in (
        "model/tokenizer.json is missing",
        "batches/000001",
        "groups/g000001",
        "evals/000001.heldout.json",
        "1 groups",
    ):
        assert words in text, words
    run.objects.delete("config.json")
    text = shown(tmp_path)[1]
    assert "config.json is missing" in text and "model/tokenizer.json is missing" in text


def test_an_empty_directory_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match=f"^{tmp_path} has no run: check the path, or"):
        shown(tmp_path)
    there = tmp_path / "runs" / "mine"
    Run.open(f"file:{there}").put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    with pytest.raises(EtudeError, match=rf"check the path \(there is {there}\), or"):
        shown(tmp_path)


def test_a_process_that_was_silent_is_no_alarm_of_a_finished_run(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[tasks]\nnovel = 0\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    events = run.events("launcher", EVENTS)
    events.append(ProcessSilent(process="trainer", seconds=10.0))
    events.flush()
    texts = []
    for finished in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("etude.commands.show.is_finished", lambda run, config: finished)  # noqa: B023
            texts.append(shown(tmp_path)[1])
    assert "alarm: the trainer has been silent" in texts[0]
    assert "finished" in texts[1] and "alarm" not in texts[1]


def test_a_run_that_nobody_runs_is_told_with_how_to_go_on(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[tasks]\nnovel = 0\n[[stage]]\nkind = "rl"\nsteps = 3\n'))
    unknown = f"x in {tmp_path}: not finished; newest version none of 3\n"
    assert unknown in shown(tmp_path)[1], "its store may be that of another machine"
    with locked(tmp_path):
        running = f"x in {tmp_path}: running; newest version none of 3\n"
        assert running in shown(tmp_path)[1]
    stopped = "stopped; newest version none of 3; resume with: etude run"
    assert f"{stopped} FILE\n" in shown(tmp_path)[1].replace("\n ", " ")
    events = run.events("launcher", EVENTS)
    for command in ("etude run my.toml", "etude eval runs/x"):
        events.append(Launched(resumed=False, command=command))
    events.flush()
    assert f"{stopped} my.toml\n" in shown(tmp_path)[1].replace("\n ", " ")


def test_what_is_in_flight_in_a_stopped_run_is_told(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[tasks]\nnovel = 0\n[[stage]]\nkind = "rl"\nsteps = 3\n'))
    for name, data in small_files().items():
        run.put_model_file(name, data)
    for name in ("g000001", "g000002"):
        samples = (f"{name}.0", f"{name}.1")
        run.ledger.append(Issued(group=name, task="t1", samples=samples, version=0))
    run.put_group(group(1, trajectory("g000001.0", 1.0), trajectory("g000001.1", 0.0)))
    told = "0 dropped + 4 in flight (2 in unfinished groups + 2 waiting for a batch)"
    will_be = (
        "when the run resumes, the 2 in unfinished groups are dropped as interrupted, and their"
    )
    with locked(tmp_path):
        text = shown(tmp_path)[1]
        assert told in text and will_be not in text, "it goes on"
    text = shown(tmp_path)[1]
    assert told in text and will_be in text


def test_alarms_of_a_run_are_told_as_they_ended(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    run.put_config(parse('name = "x"\n[tasks]\nnovel = 0\n[[stage]]\nkind = "rl"\nsteps = 3\n'))
    events = run.events("controller", EVENTS)
    events.append(*(attempt_done(failed(f"g.{n}"), "train") for n in range(40)))
    events.append(ProcessDied(process="trainer", how="was killed by SIGKILL", advice="free some"))
    events.flush()
    text = re.sub(r"\s+", " ", shown(tmp_path)[1])
    assert "alarm: 40 of the last 40 sessions failed" in text and "4 of the last 4 " not in text
    assert f"`etude sessions {tmp_path} --failed`" in text
    assert "alarm: the trainer was killed by SIGKILL: free some" in text


def test_nothing_of_a_stopped_run_is_under_way(run: Run, tmp_path: Path) -> None:
    assert "under way" in printed(run, failed=True)
    with locked(tmp_path):
        assert "under way" in printed(run, failed=True)
    assert re.search(r"g000003\.0 .* stopped ", printed(run, failed=True))
    assert "the run stopped before its group" in printed(run, id="g000003.0")


@pytest.mark.parametrize("reason", ["interrupted", "cancelled"])
def test_what_was_never_stored_is_not_said_to_come(run: Run, reason: Reason) -> None:
    run.ledger.append(Dropped(samples=("g000003.0", "g000003.1"), reason=reason))
    told = printed(run, id="g000003.0")
    assert f"is not stored: its group was {reason}" in told
    assert "when all sessions" not in told


def test_an_event_of_an_attempt_holds_its_outcome() -> None:
    assert attempt_done(trajectory("g.0", float("nan")), "train").reward is None
    assert attempt_done(trajectory("g.0", 0.5), "novel") == AttemptDone(
        id="g.0", task="t1", split="novel", status="done", reward=0.5, error=None, seconds=1.5
    )


@pytest.mark.parametrize("call", ["x", None, {"function": "x"}, {"function": {"name": None}}])
def test_a_call_in_no_known_form_is_shown_all_the_same(call: object) -> None:
    (block,) = said([{"role": "assistant", "tool_calls": [call]}])  # type: ignore[list-item]
    assert block.who == "call"
