"""`[placement]`: the devices of a machine that each process of a run gets."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from etude.core.schema import Config, CountOrZero, Name

Devices = Annotated[tuple[CountOrZero, ...], Field(strict=False)]


class PlacementConfig(Config):
    """Devices of the machine for trainer, engines and sandboxes. Without this table the first GPUs
    go to the ranks of the trainer and the others to the regions in turn, if there is one for each;
    otherwise all processes share all GPUs."""

    trainer: Devices = ()
    """Numbers of the GPUs of the trainer, as `nvidia-smi` counts them."""
    engines: dict[Name, Devices] = {}
    """Region -> the GPUs of its worker."""
    sandbox_cpus: Devices = ()
    """CPU cores of the sandboxes and of the graders in them; none: all cores."""

    @property
    def evaluator(self) -> Devices:
        """The evaluator's GPU: it shares one with an engine, never with the trainer, namely the
        last one of the region that has most."""
        return max(self.engines.values(), key=len, default=())[-1:]

    @model_validator(mode="after")
    def _once(self) -> PlacementConfig:
        for region, devices in self.engines.items():
            if shared := sorted(set(devices) & set(self.trainer)):
                raise ValueError(
                    f"GPU {shared[0]} is given to both the trainer and the region {region}: "
                    "give it to one of them, or leave out both settings to let them share "
                    "all GPUs"
                )
        return self


def deal(gpus: int, ranks: int, regions: tuple[str, ...]) -> PlacementConfig:
    """Deal this many GPUs to the ranks of the trainer and then to the regions in turn; the result
    is empty if there are too few for each to have one."""
    if gpus < ranks + len(regions):
        return PlacementConfig()
    rest = range(ranks, gpus)
    return PlacementConfig(
        trainer=tuple(range(ranks)),
        engines={
            region: tuple(rest[number :: len(regions)]) for number, region in enumerate(regions)
        },
    )
