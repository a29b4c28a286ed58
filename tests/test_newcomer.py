"""The pages for newcomers, followed to the letter: their code runs, their configs start, and a run
learns with both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.cli import main
from etude.core.config import parse
from etude.core.events import EVENTS, StepDone
from etude.core.stages import RlConfig
from etude.store.runs import Run
from etude.trainer.step import objective_of

ROOT = Path(__file__).parent.parent
LOSS, ENVIRONMENT = (ROOT / "docs" / f"your-own-{name}.md" for name in ("loss", "environment"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_loss_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, tried = blocks(LOSS, "python")
    assert written == (ROOT / "examples/custom_loss.py").read_text()
    (tmp_path / "custom_loss.py").write_text(written)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(written + tried, {"__name__": "page"})
    (toml,) = blocks(LOSS, "toml")
    (stage,) = parse(toml).stage
    assert isinstance(stage, RlConfig)
    objective = objective_of(stage)
    assert objective.loss.function.__name__ == "gentle" and objective.correction == "truncated"


def test_the_environment_of_the_page_is_that_of_the_example() -> None:
    text = (ROOT / "examples/custom_env.py").read_text()
    assert all(block.strip() in text for block in blocks(ENVIRONMENT, "python"))
    assert (ROOT / "examples/custom_env.toml").read_text() in blocks(ENVIRONMENT, "toml")


@pytest.mark.parametrize("agent", ["custom_env.py:Singer", "program_agent.py:Program"])
def test_the_examples_can_be_tried(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "song.txt").write_text("rhythm a")
    keys = ["--set", "sandbox.isolation=process", "--set", f"harness.agent={agent}"]
    argv = ["try", "examples/custom_env.toml", "--script", str(tmp_path / "song.txt"), "--json"]
    assert main([*argv, *keys]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["look"] == []
    assert [trial["score"]["reward"] for trial in found["trials"]] == [0.0, 1.0, 0.25]


@pytest.mark.e2e
def test_a_run_with_environment_agent_loss_and_sink_of_ones_own(tmp_path: Path) -> None:
    keys = [
        "sandbox.isolation=process",
        "stage.rl.steps=2",
        "stage.rl.loss=custom_loss.py:GENTLE",
    ]
    keys += [
        "tasks.heldout=1",
        'trackers=["tensorboard"]',
        "stage.rl.kl_coef=0.01",
        "engine.regions=['here']",
    ]
    keys += ["stage.rl.effort_penalty={scale=0.01, tokens=0.1}"]
    argv = [
        sys.executable,
        "-m",
        "etude",
        "run",
        "examples/custom_env.toml",
        "--dir",
        str(tmp_path / "run"),
    ]
    argv += [part for key in keys for part in ("--set", key)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.open(f"file:{tmp_path / 'run'}", create=False)
    steps = [
        event for event in run.events("trainer", EVENTS).records() if isinstance(event, StepDone)
    ]
    assert [step.step for step in steps] == [1, 2] and all(
        0 < (step.reward or 0) < 1 for step in steps
    )
    curve = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("rl/reward")
    assert [point.step for point in curve] == [1, 2]
