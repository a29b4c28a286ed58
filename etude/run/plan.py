"""What follows from a config: which weight version each stage starts from and ends with, and how a loop gives credit.

One counter runs through the whole lineage. A stage that learns from files ends in one version; each step of a loop (rl,
distill) makes one, so the batch of step n makes version n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.core.config import AnyStage, RlConfig
from etude.core.credit import CREDIT, Credit, equally
from etude.core.effort import Effort
from etude.core.stages import LoopConfig


@dataclass(frozen=True, slots=True)
class Leg:
    stage: AnyStage
    start: int
    """The version that it starts from. Version 0, the weights before any training, is published only for a loop."""
    end: int

    @property
    def name(self) -> str:
        return self.stage.name


def legs(stages: Sequence[AnyStage]) -> list[Leg]:
    result: list[Leg] = []
    for stage in stages:
        start = result[-1].end if result else 0
        result.append(Leg(stage, start, start + (stage.steps if isinstance(stage, LoopConfig) else 1)))
    return result


def credit_of(stage: AnyStage, max_tokens: int) -> Credit:
    """How a loop gives credit; `max_tokens` of a row."""
    max_lag = stage.max_lag if isinstance(stage, LoopConfig) else None
    if not isinstance(stage, RlConfig):
        return Credit(within=equally, always=True, max_tokens=max_tokens, max_lag=max_lag)
    effort = Effort(**stage.effort.model_dump()) if stage.effort else None
    return replace(CREDIT[stage.credit], effort=effort, max_tokens=max_tokens, max_lag=max_lag)


def stage_of(version: int, stages: Sequence[AnyStage]) -> str:
    """The name of the stage that makes a version."""
    return next((leg.name for leg in legs(stages) if leg.start < version <= leg.end), "start")
