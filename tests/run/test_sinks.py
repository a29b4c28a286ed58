"""The curves in a sink equal those of the events; TensorBoard's are read back with its own
reader."""

from __future__ import annotations

import asyncio
import builtins
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, EvalDone, Event, FitStep, GroupDone, StepDone
from etude.core.metrics import metrics
from etude.launch.local import in_background
from etude.run import sinks
from etude.run.sinks import SINKS, Sinks, WandbLike, forward_events
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.store.telemetry import EventReader, Stamped

STEP = StepDone(
    step=3, loss=-0.5, lag=1, k1=0.0, k3_mean=0.25, k3_p99=0.0, entropy=1.0, grad_norm=2.0,
    tokens=9, seconds=1.0, wait_s=0.0, reward=0.75, lags=(3, 1),
)  # fmt: skip
FIT = FitStep(stage="sft", step=7, steps=9, loss=1.5, tokens_per_s=100.0)
EVAL = EvalDone(stage="rl", split="heldout", version=4, solved=1, total=4, low=0.0, high=1.0)


def test_what_becomes_a_curve() -> None:
    step, numbers = metrics(STEP)
    assert step == 3 and numbers["rl/loss"] == -0.5 and numbers["rl/reward"] == 0.75
    assert (numbers["rl/lag_0"], numbers["rl/lag_1"]) == (0.75, 0.25)
    assert "rl/router_mismatch_frac" not in numbers, "what is not known is no point"
    assert "rl/step" not in numbers, "that is the axis"
    assert metrics(FIT) == (7, {"sft/loss": 1.5, "sft/tokens_per_s": 100.0})
    assert metrics(EVAL) == (4, {"eval/heldout": 0.25})
    group = GroupDone(group="g", task="t", admitted=0, rewards=(), failed=0, kept=True, seconds=1.0)
    assert metrics(group) == (0, {"rl/group_has_signal": 1.0})


async def test_tensorboard_gets_what_happens_while_it_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    class Reader(EventReader):
        def new(self) -> list[Stamped[Event]]:
            found = super().new()
            looked.set()
            return found

    monkeypatch.setattr(sinks, "EventReader", Reader)
    run = Run(Objects.open("memory:"))
    log = run.events("trainer", EVENTS)
    log.append(StepDone(**{name: getattr(STEP, name) for name in STEP.__slots__} | {"step": 2}))
    log.flush()
    async with in_background(
        forward_events(run, Sinks(["tensorboard"], run="mine", directory=tmp_path))
    ):
        await asyncio.to_thread(looked.wait)
        for event in (STEP, FIT, EVAL):
            log.append(event)
        log.flush()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(p.step, p.value) for p in found.Scalars("rl/loss")] == [(3, -0.5)], (
        "step 2 was told in an earlier life"
    )
    assert [(p.step, p.value) for p in found.Scalars("sft/loss")] == [(7, 1.5)]
    assert [(p.step, p.value) for p in found.Scalars("eval/heldout")] == [(4, 0.25)]


def test_packages_like_wandb_get_numbers_and_their_step() -> None:
    class Recording:
        rows: list[dict[str, float]] = []
        finished = False

        def log(self, row: dict[str, float]) -> None:
            self.rows.append(row)

        def finish(self) -> None:
            self.finished = True

    there = Recording()
    sink = WandbLike(there)
    sink.write(0.0, *metrics(FIT))
    sink.close()
    assert (
        there.rows == [{"sft/loss": 1.5, "sft/tokens_per_s": 100.0, "sft/step": 7.0}]
        and there.finished
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wandb", {"name": "mine", "id": "mine", "dir": "here", "resume": "allow"}),
        ("trackio", {"project": "etude", "name": "mine", "resume": "allow"}),
    ],
)
def test_another_life_of_a_run_goes_on_with_its_curves(
    name: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    there = SimpleNamespace(log=lambda row: None, finish=lambda: None)
    package = SimpleNamespace(init=lambda **how: told.append(how) or there)
    monkeypatch.setitem(sys.modules, name, package)  # type: ignore[arg-type]
    sinks = Sinks([name], run="mine", directory=tmp_path)
    sinks.close()
    (how,) = told
    if "dir" in expected:
        assert tmp_path in (how["dir"], *how["dir"].parents)
        how["dir"] = "here"
    assert how == expected


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_not_there_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(module: str, *rest: Any) -> Any:
        if module.partition(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(module, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        EtudeError,
        match=rf"needs the package {name}, which is not installed: pip install 'etude\[{name}",
    ):
        Sinks([name], run="mine", directory=tmp_path)


def test_sinks_may_change_between_two_lives_of_a_run() -> None:
    text = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n'
    run = Run(Objects.open("memory:"))
    run.put_config(parse(text))
    run.put_checkpoint("000001.000000", b"")
    run.put_config(parse('trackers = ["wandb"]\n' + text))
    assert run.config().trackers == ("wandb",)
    with pytest.raises(EtudeError, match="input should be 'tensorboard', 'wandb' or 'trackio'"):
        parse('trackers = ["mlflow"]\n' + text)


async def test_what_breaks_meanwhile_is_told_afterwards() -> None:
    done = False

    async def breaks() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        async with in_background(breaks()):
            await asyncio.sleep(0)
            done = True
    assert done


def test_each_of_several_sinks_gets_the_numbers_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[Any, ...]] = []

    class Noting:
        def __init__(self, run: str, directory: Path) -> None:
            happened.append(("open", run, directory))

        def write(self, t: float, step: int, numbers: dict[str, float]) -> None:
            happened.append(("write", t, step, numbers))

        def close(self) -> None:
            happened.append(("close",))

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(SINKS, name, Noting)
    sinks = Sinks(["wandb", "trackio"], run="r", directory=tmp_path)
    sinks.write(5.0, STEP)
    sinks.close()
    step, numbers = metrics(STEP)
    assert happened == [
        *[("open", "r", tmp_path)] * 2, *[("write", 5.0, step, numbers)] * 2, *[("close",)] * 2,
    ]  # fmt: skip
