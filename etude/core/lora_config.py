"""The configuration of LoRA: the stages that train an adapter, and its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from etude.core.schema import Config, Count, Name, Positive
from etude.core.stages import StageConfig


class LoraConfig(Config):
    """LoRA: from some stage on, train a small adapter and leave the model under it unchanged
    (docs/lora.md)."""

    rank: Count = 16
    """Rank of the two thin matrices added to each adapted one."""
    alpha: Positive = 32.0
    """The product of the two thin matrices is multiplied by alpha / rank."""
    targets: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The adapted matrices, by their last names in Hugging Face files. In sparse models only those
    of attention: experts take no adapters."""
    from_stage: Name | None = None
    """The first stage that trains the adapter; later stages continue training it. None: the first
    stage of the run, which must then start from model.path."""

    def stages(self, names: Sequence[str]) -> Sequence[str]:
        """The stages that train the adapter, out of all stages of the run."""
        return names if self.from_stage is None else names[names.index(self.from_stage) :]

    def check(self, stages: Sequence[StageConfig], *, fresh: bool, optimizer: str) -> None:
        """Raise ValueError for a combination that is not possible. `fresh`: the run starts from
        fresh weights."""
        names = [stage.name for stage in stages]
        if self.from_stage is not None and self.from_stage not in names:
            raise ValueError(
                f"trainer.lora.from_stage = {self.from_stage!r} is not one of the stages: "
                f"{', '.join(names)}"
            )
        training = self.stages(names)
        if fresh and len(training) == len(names):
            raise ValueError(
                "trainer.lora would adapt untrained weights: set model.path, or name a later "
                "stage in trainer.lora.from_stage"
            )
        if optimizer != "adamw":
            raise ValueError(
                f"trainer.lora only works with adamw: leave out trainer.optimizer = {optimizer!r}"
            )
        balanced = [stage.name for stage in stages if getattr(stage, "router_balance", False)]
        if both := [name for name in balanced if name in training]:
            raise ValueError(
                f"stage.{both[0]}.router_balance changes the routers, which trainer.lora "
                "keeps frozen: leave out one of the two"
            )
