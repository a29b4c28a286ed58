"""Which weight version each stage starts from and ends with.

One counter runs through the whole lineage. A stage that only learns from text ends in one version; each step of rl
makes one, so the batch of step n makes version n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.core.config import MidtrainConfig, RlConfig, SftConfig


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
