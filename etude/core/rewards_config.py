"""The table `[rewards]` of a run's config."""

from __future__ import annotations

from typing import Literal

from etude.core.schema import Config


class RewardsConfig(Config):
    """What is done about attempts that look like cheating."""

    detector: Literal["quarantine", "flag", "off"] = "quarantine"
    """What becomes of an attempt in which the detector finds a known trick (docs/rewards.md):
    it is set aside and not trained on; or only flagged; or nobody looks."""

    @property
    def quarantines(self) -> bool:
        return self.detector == "quarantine"
