"""`etude compare` over evaluations in a store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import to_builtins

from etude.cli import main
from etude.core.config import parse
from etude.core.types import Cost, Score, Trajectory
from etude.run.evaluate import Report, reports
from etude.store.runs import Run

SOLVED = {0: {"a": 0, "b": 0, "c": 1, "d": 0}, 6: {"a": 1, "b": 1, "c": 1, "d": 0, "e": 1}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "ada@example.com" / "runs"
    run = Run.open(f"file:{place}")
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 6\n'))
    for version, solved in SOLVED.items():
        report = Report(
            stage="rl", split="heldout", version=version, solved=sum(solved.values()),
            total=len(solved), low=0.0, high=1.0, rewards={}, example=[], solved_by_task=solved,
            cost=Cost(sampled_tokens=100, seconds=8.0, calls=12),
        )  # fmt: skip
        run.put_eval(report.name, report)
    return place


def test_two_versions_of_a_run(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{directory}@0", str(directory), "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["num_tasks"], found["before"], found["after"]) == (4, 0.25, 0.75)
    assert (found["gained"], found["lost"], found["p_value"]) == (2, 0, 0.5)
    assert "1 tasks left out that were not attempted on every side" in told.err
    assert "+50.0 points" in told.err and "exact sign-flip test over 4 tasks" in told.err
    assert "too few tasks for an interval (at least 6 needed)" in told.err
    assert "the same evaluation" not in told.err


def test_seeds_are_compared_by_their_mean_at_each_task(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    run = Run.open(f"file:{other}")
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 6\n'))
    report = next(each for each in reports(Run.open(f"file:{directory}")) if each.version == 6)
    run.put_eval(report.name, replace(report, solved_by_task={"a": 1, "b": 0, "c": 0, "d": 0}))
    assert main(["compare", f"{directory}@0", str(directory), str(other), "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert (found["num_tasks"], found["before"], found["after"]) == (4, 0.25, 0.5)
    # a: +2, b: +1, c: -1 of two; of the eight ways to swap them six come as far as +2
    assert (found["gained"], found["lost"], found["p_value"]) == (2, 1, 0.75)
    assert "mean of 2 seeds for each task" in told.err
    assert main(["compare", f"{directory}@0", str(other), str(other)]) == 2
    assert f"{other} is given twice" in capsys.readouterr().err


def test_only_what_was_solved_within_so_many_turns_counts(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """a takes two turns, b three; before, only c was solved, in one turn."""
    run = Run.open(f"file:{directory}")
    for version, solved in SOLVED.items():
        turns = {"a": 2, "b": 3}
        attempts = [
            Trajectory(
                id=task, task=task, group="", segments=(), score=Score(reward),
                status="done", cost=Cost(calls=turns.get(task, 1)), messages=[{"role": "user"}],
            )
            for task, reward in solved.items()
        ]  # fmt: skip
        run.put_eval_sessions(f"{version:06d}.heldout", attempts)
    for turns, after in ((3, 0.75), (2, 0.5), (1, 0.25)):
        told = ["compare", f"{directory}@0", str(directory), "--turns", str(turns), "--json"]
        assert main(told) == 0
        output = capsys.readouterr()
        found = json.loads(output.out)
        assert (found["before"], found["after"]) == (0.25, after)
        assert (
            f"with more than {turns} answers of the model count as unsolved" in output.err
            and found["turns"] == turns
        )


def test_a_version_beside_itself(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", f"{directory}@6", str(directory)]) == 0
    assert "both sides are the same evaluation, of version 6" in capsys.readouterr().out


def test_what_was_not_evaluated_is_said_with_the_command_that_does(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", f"{directory}@3", str(directory)]) == 2
    assert f"etude eval {directory} --version 3 --split heldout" in capsys.readouterr().err
    assert main(["compare", f"{directory}@new", str(directory)]) == 2
    assert "write RUN@NUMBER" in capsys.readouterr().err


def test_more_attempts_on_one_side_are_compared_by_the_share_that_is_solved(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(f"file:{directory}")
    for version, samples, solved in (
        (0, 4, {"a": 0, "b": 1, "c": 4}),
        (6, 6, {"a": 3, "b": 1, "c": 6}),
    ):
        report = run.eval(f"{version:06d}.heldout", Report)
        report = replace(report, samples=samples, solved_by_task=solved)
        run.put_eval(report.name, report)
    assert main(["compare", f"{directory}@0", f"{directory}@6", "--json"]) == 0
    told = capsys.readouterr()
    assert "p = 1 (sign-flip test over 3 tasks)" in told.err
    found = json.loads(told.out)
    assert (found["before"], found["after"]) == (pytest.approx(5 / 12), pytest.approx(10 / 18))
    assert (found["gained"], found["lost"], found["p_value"]) == (1, 1, 1.0)


def test_one_attempt_is_not_compared_with_several(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(f"file:{directory}")
    report = replace(run.eval("000006.heldout", Report), samples=4)
    run.put_eval(report.name, report)
    assert main(["compare", f"{directory}@0", f"{directory}@6"]) == 2
    assert "with 1 attempts per task" in capsys.readouterr().err


def test_a_report_of_an_older_run_says_by_its_rewards_what_was_solved(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older reports, from before evaluations with several attempts, have no other figure per
    task."""
    run = Run.open(f"file:{directory}")
    report = run.eval("000000.heldout", Report)
    old = to_builtins(replace(report, rewards={"a": 0.5, "b": 0.0, "c": 1.0, "d": 0.0}))
    for name in ("samples", "solved_by_task", "cost"):
        del old[name]
    run.put_eval(report.name, old)
    assert run.eval(report.name, Report).pass_at(1) == 0.25
    assert main(["compare", f"{directory}@0", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == 0.25
