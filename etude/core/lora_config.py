"""The configuration of LoRA: which stages train an adapter, and which one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from etude.core.schema import Config, Count, Name, Positive
from etude.core.stages import StageConfig


class LoraConfig(Config):
    """LoRA: from some stage on a small adapter is trained, and the model under it stays as it is
    (docs/lora.md)."""

    rank: Count = 16
    """Rank of the two thin matrices beside each adapted one."""
    alpha: Positive = 32.0
    """What they give is multiplied by alpha / rank."""
    targets: Annotated[tuple[Name, ...], Field(min_length=1, strict=False)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The adapted matrices by their last names in Hugging Face files. In sparse models those of
    attention alone: experts take no adapters."""
    from_stage: Name | None = None
    """The first stage that trains the adapter; those after it go on with it. None: the first stage
    of the run, which then starts from model.path."""

    def stages(self, names: Sequence[str]) -> Sequence[str]:
        """Those that train the adapter, of all stages of the run."""
        return names if self.from_stage is None else names[names.index(self.from_stage) :]

    def check(self, stages: Sequence[StageConfig], *, fresh: bool, optimizer: str) -> None:
        """Raises ValueError for what does not go together. `fresh`: the run starts from fresh
        weights."""
        names = [stage.name for stage in stages]
        if self.from_stage is not None and self.from_stage not in names:
            raise ValueError(
                f"trainer.lora.from_stage = {self.from_stage!r} is none of the stages "
                f"{', '.join(names)}"
            )
        training = self.stages(names)
        if fresh and len(training) == len(names):
            raise ValueError(
                "trainer.lora would adapt fresh weights, which know nothing: give a model.path, or "
                "name a later stage in trainer.lora.from_stage"
            )
        if optimizer != "adamw":
            raise ValueError(
                f"trainer.lora is trained by adamw: leave out trainer.optimizer = {optimizer!r}"
            )
        balanced = [stage.name for stage in stages if getattr(stage, "router_balance", False)]
        if both := [name for name in balanced if name in training]:
            raise ValueError(
                f"stage.{both[0]}.router_balance moves the routers, which stay as they are under "
                f"trainer.lora: leave out one of them"
            )
