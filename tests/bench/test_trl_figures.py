"""The figures of the benchmark against TRL, worked by hand, and the inputs of both sides."""

from __future__ import annotations

import pytest

from etude.bench._trl_task import GROUP_SIZE, GROUPS_PER_STEP, LR, MIN_WORDS, STEPS, reward
from etude.bench.trl import CONFIG, Side, compare, etude_side
from etude.core.config import parse
from etude.core.events import GroupDone, StepDone
from etude.core.stages import RlConfig
from etude.store.codec import Stamped


def test_reward_at_equal_wall_clock() -> None:
    own = Side(10.0, [(2.0, 8, 0.1), (8.0, 8, 0.5), (10.0, 8, 0.7)])
    other = Side(40.0, [(8.0, 16, 0.2), (30.0, 16, 0.9)])
    assert compare(own, other) == pytest.approx(
        {
            "etude.rollouts_per_s": 2.4,
            "trl.rollouts_per_s": 0.8,
            "speedup": 3.0,
            "equal_s": 10.0,
            "etude.reward": 0.6,
            "trl.reward": 0.2,
            "etude.seconds": 10.0,
            "trl.seconds": 40.0,
        }
    )


def test_a_run_counts_from_its_first_question_to_its_last_step() -> None:
    def group(t: float, seconds: float) -> Stamped[GroupDone]:
        return Stamped(
            t,
            GroupDone(
                group="g",
                task="t",
                admitted=0,
                rewards=(0.0, 1.0),
                failed=0,
                kept=True,
                seconds=seconds,
            ),
        )

    zero = dict.fromkeys(
        ("loss", "k1", "k3_mean", "k3_p99", "entropy", "grad_norm", "wait_s", "seconds"), 0.0
    )
    end = Stamped(110.0, StepDone(step=1, lag=0, tokens=1, **zero))
    side = etude_side([group(104.0, 4.0), end, group(111.0, 5.0)])
    assert (side.seconds, side.seen) == (10.0, [(4.0, 2, 0.5)])


def test_both_sides_are_given_the_same() -> None:
    (stage,) = parse(CONFIG).stage
    assert isinstance(stage, RlConfig)
    found = (stage.steps, stage.groups_per_step, stage.group_size, stage.lr, stage.temperature)
    assert found == (STEPS, GROUPS_PER_STEP, GROUP_SIZE, LR, 1.0)


def test_being_brief_earns_nothing() -> None:
    assert reward("") == 0.0 and reward("S") == 1 / MIN_WORDS
    assert reward("so " * MIN_WORDS) == reward("so " * 3 * MIN_WORDS) == 1.0
    assert reward("so it " * MIN_WORDS) == 0.5
