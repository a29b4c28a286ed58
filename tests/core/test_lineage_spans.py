"""The versions that the stages of a run span, and the advantage estimator of each."""

from __future__ import annotations

from etude.core.advantage import ADVANTAGE, constant_advantage
from etude.core.config import parse
from etude.core.lineage import estimator_of, stage_spans

RUN = parse(
    """
name = "a"
[[stage]]
kind = "midtrain"
steps = 5
[[stage]]
kind = "rl"
steps = 3
max_lag = 2
advantage = "rloo"
train_summaries = false
[stage.effort_penalty]
tokens = 0.5
scale = 2.0
[[stage]]
kind = "sft"
demonstrations = 2
[[stage]]
kind = "distill"
steps = 4
max_lag = 1
teacher = "t"
"""
)


def test_a_loop_makes_a_version_a_step_and_other_stages_one() -> None:
    spans = stage_spans(RUN.stage)
    assert [(span.name, span.start, span.end) for span in spans] == [
        ("midtrain", 0, 1),
        ("rl", 1, 4),
        ("sft", 4, 5),
        ("distill", 5, 9),
    ]


def test_each_loop_weighs_its_attempts_in_its_own_way() -> None:
    _, rl, sft, distill = (estimator_of(stage, 77) for stage in RUN.stage)
    assert rl.per_group is ADVANTAGE["rloo"].per_group and rl.use_credit and not rl.keep_zero_std
    assert rl.effort is not None and rl.effort.tokens == 0.5
    assert (rl.train_summaries, distill.train_summaries) == (False, True)
    assert (rl.max_lag, sft.max_lag, distill.max_lag) == (2, None, 1)
    assert {each.max_tokens for each in (rl, sft, distill)} == {77}
    # a teacher scores every token: no attempt is dropped for its reward
    assert distill.per_group is constant_advantage
    assert distill.keep_zero_std and not distill.use_credit and distill.effort is None


def test_what_is_suspected_is_set_aside_in_every_loop_that_is_told_to() -> None:
    for stage in RUN.stage:
        assert estimator_of(stage, 77, quarantine=True).quarantine
        assert not estimator_of(stage, 77).quarantine
