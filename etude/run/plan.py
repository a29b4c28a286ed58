"""What follows from a config: which weight version each stage starts from and ends with, and how rl gives credit.

One counter runs through the whole lineage. A stage that only learns from text ends in one version; each step of rl
makes one, so the batch of step n makes version n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.core.config import MidtrainConfig, RlConfig, RunConfig, SftConfig
from etude.core.credit import CREDIT, Credit
from etude.core.effort import Effort


@dataclass(frozen=True, slots=True)
class Leg:
    stage: MidtrainConfig | SftConfig | RlConfig
    start: int
    """The version that it starts from. Version 0, the weights before any training, is published only for an rl leg."""
    end: int

    @property
    def kind(self) -> str:
        return self.stage.kind


def legs(stages: Sequence[MidtrainConfig | SftConfig | RlConfig]) -> list[Leg]:
    result: list[Leg] = []
    for stage in stages:
        start = result[-1].end if result else 0
        result.append(Leg(stage, start, start + (stage.steps if isinstance(stage, RlConfig) else 1)))
    return result


def stage_of(version: int, stages: Sequence[MidtrainConfig | SftConfig | RlConfig]) -> str:
    """The kind of the stage that makes a version."""
    return next((leg.kind for leg in legs(stages) if leg.start < version <= leg.end), "start")


def credit_of(config: RunConfig) -> Credit:
    """How the rl stage of a run gives credit; the default one for a run without."""
    rl = next((stage for stage in config.stage if isinstance(stage, RlConfig)), None)
    if rl is None:
        return Credit()
    effort = Effort(**rl.effort.model_dump()) if rl.effort else None
    return replace(CREDIT[rl.credit], effort=effort, max_tokens=config.model.max_context, max_lag=rl.max_lag)
