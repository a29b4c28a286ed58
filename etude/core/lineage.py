"""The lineage of a run: which weight versions each stage starts from and ends with, and the
advantage estimator of a loop.

One counter runs through the whole lineage. A stage that learns from files ends in one version; each
step of a loop (rl, distill) makes one, so the batch of step n makes version n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.core.advantage import ADVANTAGE, AdvantageEstimator, constant_advantage
from etude.core.config import AnyStage, RunConfig
from etude.core.effort import Effort
from etude.core.stages import RlConfig, RolloutStageConfig


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A stage and the weight versions that it spans."""

    stage: AnyStage
    start: int
    """The version that the stage starts from. Version 0, the weights before any training, is
    published if the run was given a model (`model.path`), or for a loop."""
    end: int

    @property
    def name(self) -> str:
        return self.stage.name


def stage_spans(stages: Sequence[AnyStage]) -> list[StageSpan]:
    result: list[StageSpan] = []
    for stage in stages:
        start = result[-1].end if result else 0
        result.append(
            StageSpan(
                stage, start, start + (stage.steps if isinstance(stage, RolloutStageConfig) else 1)
            )
        )
    return result


def adapted_spans(config: RunConfig) -> list[StageSpan]:
    """The stages that train an adapter (LoRA). The adapter applies to the version that the first of
    these stages starts from."""
    spans = stage_spans(config.stage)
    lora = config.trainer.lora
    names = [] if lora is None else lora.stages([span.name for span in spans])
    return [span for span in spans if span.name in names]


def periodic_versions(stages: Sequence[AnyStage], every: int) -> list[int]:
    """The versions within loops that are evaluated while the loops run, except the last version of
    a stage, which is always evaluated."""
    loops = [span for span in stage_spans(stages) if isinstance(span.stage, RolloutStageConfig)]
    return [
        version for span in loops for version in range(span.start + every, span.end, every or 1)
    ]


def estimator_of(
    stage: AnyStage, max_tokens: int, *, quarantine: bool = False
) -> AdvantageEstimator:
    """The advantage estimator of a stage; `max_tokens` is the limit of a row."""
    max_lag = stage.max_lag if isinstance(stage, RolloutStageConfig) else None
    if not isinstance(stage, RlConfig):
        return AdvantageEstimator(
            per_group=constant_advantage,
            keep_zero_std=True,
            use_credit=False,
            max_tokens=max_tokens,
            max_lag=max_lag,
            quarantine=quarantine,
        )
    effort = Effort(**stage.effort_penalty.model_dump()) if stage.effort_penalty else None
    return replace(
        ADVANTAGE[stage.advantage],
        effort=effort,
        train_summaries=stage.train_summaries,
        max_tokens=max_tokens,
        max_lag=max_lag,
        quarantine=quarantine,
    )


def stage_of(version: int, stages: Sequence[AnyStage]) -> str:
    """The name of the stage that makes a version."""
    return next(
        (span.name for span in stage_spans(stages) if span.start < version <= span.end), "start"
    )
