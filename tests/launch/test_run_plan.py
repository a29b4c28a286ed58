"""The plan of a run that is printed before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.launch.check import Findings
from etude.launch.place import RunPlace
from etude.launch.plan import Standing, plan
from etude.run.evaluate import report_name
from etude.store.runs import Run

TOML = """
name = "a"
[[stage]]
kind = "midtrain"
steps = 1
[[stage]]
kind = "rl"
steps = 1
max_lag = 3
[engine]
regions = ["here", "there"]
"""
NO_WARMUP = ["stage.midtrain.warmup_steps=0", "stage.rl.warmup_steps=0"]


def test_a_plan_says_what_would_run(tmp_path: Path) -> None:
    place = RunPlace.of(tmp_path / "r")
    lines = plan(parse(TOML, ["tasks.novel=0", *NO_WARMUP]), place).splitlines()
    first, model, environment, agent, midtrain, rl, workers, sandboxes = lines
    assert first == f"run a, seed 0, in {tmp_path}/r"
    assert model == "  model: untrained weights, sessions of at most 512 tokens"
    assert environment.endswith(
        "CodeRepair; tasks: at most 4096 for training, at most 400 held out"
    )
    assert "CodingAgent, 8 turns of at most 64 tokens, within 60 s" in agent
    assert midtrain.startswith("  midtrain: version 0 -> 1 (") and "steps 1" in midtrain
    assert rl.startswith("  rl: version 1 -> 2 (") and "max_lag 3" in rl and "kind" not in rl
    assert "router_" not in rl, "its defaults are for sparse models"
    sparse = plan(parse(TOML, ["stage.rl.router_replay=false"]), place)
    assert "router_replay False" in sparse and "router_balance" not in sparse
    assert workers.startswith("  workers: here, there, ")
    assert sandboxes.startswith("  sandboxes: ")
    assert not place.directory.exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["harness.code={}"], "etude.harness.code.agent:CodeAgent, 8 turns of at most 64 tokens"),
        (["harness.agent=mine.py:A"], "  agent: mine.py:A, answers of at most 64 tokens, within"),
        (
            ["harness.agent=mine.py:A", "harness.max_turns=8"],
            "mine.py:A, 8 turns of at most 64 tokens",
        ),
        (
            ["harness.command=['mine']", "harness.max_turns=5"],
            "  agent: mine, answers of at most 64",
        ),
    ],
)
def test_turns_are_told_where_somebody_counts_them(
    overrides: list[str], told: str, tmp_path: Path
) -> None:
    assert told in plan(parse(TOML, overrides), RunPlace.of(tmp_path / "r"))


FOUND = Findings(
    tasks={},
    parameters=1,
    model_context=8,
    seconds={},
    disk_bytes=1,
    memory_bytes=7 * 10**9,
    activation_bytes=2 * 10**9,
    memory_free=20 * 10**9,
)


def test_a_plan_says_that_answers_cannot_be_so_long(tmp_path: Path) -> None:
    def looks(tokens: int, found: Findings | None = None) -> list[str]:
        config = parse(TOML, [f"harness.max_tokens={tokens}", *NO_WARMUP])
        told = plan(config, RunPlace.of(tmp_path / "r"), found)
        return [line for line in told.splitlines() if line.startswith("  warning: ")]

    assert looks(512) == []
    (line,) = looks(513)
    assert "harness.max_tokens = 513" in line and "512 tokens" in line
    small = replace(FOUND, model_context=256)
    (line,) = looks(512, small)
    assert "256 tokens" in line


def test_a_plan_says_that_nothing_is_held_out(tmp_path: Path) -> None:
    def told(*changes: str) -> str:
        return plan(parse(TOML, changes), RunPlace.of(tmp_path / "r"))

    assert "warning: no tasks are held out" in told("tasks.heldout=0", "tasks.novel=0")
    assert "no tasks are held out" not in told("tasks.heldout=0", "tasks.novel=1")


def test_a_plan_says_that_a_stage_is_never_evaluated_within(tmp_path: Path) -> None:
    def told(*changes: str) -> str:
        return plan(parse(TOML, ["stage.rl.steps=10", *changes]), RunPlace.of(tmp_path / "r"))

    never = "warning: eval.every_steps = {} evaluates nothing: "
    assert "eval.every_steps" not in told("eval.every_steps=9") + told()
    assert never.format(10) + "no stage with rollouts continues after that many" in told(
        "eval.every_steps=10"
    )
    assert never.format(5) + "no tasks are held out" in told(
        "eval.every_steps=5", "tasks.heldout=0"
    )


def test_a_plan_says_that_a_rate_is_never_reached(tmp_path: Path) -> None:
    def told(steps: int) -> str:
        changes = [f"stage.rl.steps={steps}", "stage.rl.warmup_steps=10", "stage.rl.lr=1e-5"]
        return plan(parse(TOML, NO_WARMUP + changes), RunPlace.of(tmp_path / "r"))

    assert "warning:" not in told(11)
    assert (
        "the stage has only 10 steps: the learning rate reaches 9.1e-06, never lr = 1e-05"
        in told(10)
    )


def test_a_plan_says_what_was_found(tmp_path: Path) -> None:
    findings = replace(
        FOUND,
        tasks={"train": 12, "heldout": 400, "novel": 200},
        parameters=134_500_000,
        model_context=8192,
        seconds={"midtrain": 30.0, "rl": 9000.0, "evaluations": 100.0},
        disk_bytes=10**18,
    )
    told = plan(parse(TOML), RunPlace.of(tmp_path / "r"), findings)
    assert "; 134.5 M parameters, context 8192" in told
    assert "tasks: 12 for training (4096 asked for), 400 held out, 200 novel" in told
    later = plan(parse(TOML), RunPlace.of(tmp_path / "r"), recorded={"train": 12})
    assert "tasks: 12 for training (4096 asked for), at most 400 held out" in later
    assert "about 2.5 h of computing (midtrain 30 s, rl 2.5 h, evaluations 1.7 min)" in told
    assert "GB are free, which is too little" in told
    memory = "about 7 GB for the trainer (2 GB of it activations), plus the engines; 20 GB are"
    assert f"expected memory: {memory} free" in told and "microbatch_tokens," not in told
    short = plan(parse(TOML), RunPlace.of(tmp_path / "r"), replace(findings, memory_free=1))
    assert "too little: lower stage.rl.microbatch_tokens, or set trainer.gradient_check" in short


def test_a_plan_of_an_interrupted_run_is_that_of_the_rest(tmp_path: Path) -> None:
    config = parse(TOML, ["stage.rl.steps=4", "tasks.novel=0"])
    findings = replace(FOUND, seconds={"midtrain": 30.0, "rl": 9000.0, "evaluations": 100.0})
    place = RunPlace.of(tmp_path / "r")
    assert Standing.of(place, config) is None
    run = Run.open(place.store)
    assert Standing.of(place, config) is None
    run.put_checkpoint("000003.000000", b"")
    run.put_eval(report_name(1, "heldout"), {})
    standing = Standing.of(place, config)
    assert standing == Standing(version=3, evaluations_left=0.5, finished=False)
    told = plan(config, place, findings, standing)
    assert "\n  resumes at version 3\n  rl: version 3 -> 5 (" in told and "midtrain" not in told
    assert "about 1.3 h of computing (rl 1.2 h, evaluations 50 s)" in told
    over = plan(config, place, findings, Standing(5, 0.0, True))
    assert "finished at version 5: nothing left to do" in over
    assert "expected" not in over and "->" not in over
