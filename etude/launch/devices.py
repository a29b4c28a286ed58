"""The devices of this machine, and their assignment to processes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from etude.core.config import RunConfig
from etude.core.placement_config import PlacementConfig, deal


def count_gpus() -> int:
    """The NVIDIA GPUs that this process may use, counted without loading CUDA."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([each for each in visible.split(",") if each.strip()])
    folder = Path("/dev")
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in folder.glob("nvidia*"))


def placed(config: RunConfig) -> PlacementConfig:
    """The placement in the run's file, or one that distributes the GPUs of this machine. If
    CUDA_VISIBLE_DEVICES selects some of them, only those are used."""
    uses_gpus = "cpu" not in (config.trainer.device, config.engine.device)
    chosen = "CUDA_VISIBLE_DEVICES" in os.environ
    if config.placement != PlacementConfig() or not uses_gpus or chosen:
        return config.placement
    own = tuple(region for region in config.engine.regions if region not in config.engine.vllm_urls)
    return deal(count_gpus(), config.trainer.ranks, own)


def described_placement(placement: PlacementConfig) -> list[str]:
    """The placement as lines of the plan; none if all processes share all devices."""

    def listed(devices: tuple[int, ...]) -> str:
        return ", ".join(map(str, devices)) or "all"

    if not (placement.trainer or placement.engines):
        return []
    engines = "; ".join(f"{region} {listed(gpus)}" for region, gpus in placement.engines.items())
    return [f"  GPUs: trainer {listed(placement.trainer)}; {engines}"]
