"""What a run is said to take, against what its trainer counts."""

from __future__ import annotations

import pytest

from etude.core.config import RunConfig, parse
from etude.core.types import Row
from etude.train.flops import step_flops
from etude.trainer import estimate as estimating
from etude.trainer.estimate import TRAINING, estimate
from etude.trainer.prepare import model_shape

RATE = 1e9


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "_rate", lambda config: RATE)


def run(*overrides: str) -> RunConfig:
    stages = '[[stage]]\nkind = "midtrain"\nsteps = 6\n[[stage]]\nkind = "rl"\nsteps = 2\n'
    return parse(f'name = "a"\n{stages}', overrides)


def test_a_step_takes_what_its_arithmetic_takes() -> None:
    config = run("stage.midtrain.seq_len=64", "stage.midtrain.batch_tokens=640")
    row = Row(
        sample="s",
        tokens=(1,) * 65,
        mask=(False,) + (True,) * 64,
        logprobs=(0.0,) * 65,
        advantages=(0.0,) * 65,
        versions=(),
    )
    counted = 6 * 10 * step_flops(model_shape(config), [row])
    assert estimate(config, {}).seconds["midtrain"] == pytest.approx(counted / (RATE * TRAINING))


def test_more_work_takes_longer_and_what_is_not_evaluated_takes_none() -> None:
    one, two = (estimate(run(f"stage.rl.steps={n}"), {}).seconds for n in (1, 2))
    assert two["rl"] == pytest.approx(2 * one["rl"]) and two["midtrain"] == one["midtrain"]
    assert one["evaluations"] == 0.0
    assert estimate(run(), {"heldout": 10}).seconds["evaluations"] > 0.0
