"""The table `[trainer]` of a run's config."""

from __future__ import annotations

from typing import Literal

from etude.core.lora_config import LoraConfig
from etude.core.schema import Config, Count, NonNegative, Positive


class TrainerConfig(Config):
    """The trainer: device, ranks, optimizer and dtypes."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """The device of the trainer; auto: CUDA devices if there are any. Each rank on a machine takes
    a device of its own."""
    ranks: Count = 1
    """Processes that train together; each holds its share of weights and optimizer state. A run can
    resume from the same checkpoints with another number, but not bit for bit."""
    context_parallel: Count = 1
    """Ranks that compute each row together, for rows whose activations do not fit on one device.
    Must divide `ranks`. Not for models with recurrent layers."""
    expert_parallel: Count = 1
    """Ranks that hold the experts of a layer together: tokens are sent to the experts, and no rank
    gathers all of them. Must divide `ranks` and the number of experts. For sparse models."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer. `muon` updates the matrices within layers by orthogonalised momentum, and the
    rest as `adamw` does."""
    published_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype that weights are rounded to for computing and publishing. The master weights are
    always float32."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype that every stage computes in; auto: bfloat16 on a CUDA device, float32 on the CPU
    and with `published_dtype = "float32"`. Gradients are always accumulated in float32. bfloat16
    also rounds activations, and is faster where the processor supports it."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations: about a third
    more arithmetic, in exchange for several times as many `microbatch_tokens` in the same
    memory."""
    checkpoint_every_s: NonNegative = 60.0
    """Minimum time between two checkpoints within a stage. Publishing does not wait for them: after
    a crash the trainer repeats the steps since the newest one, from the same batches. Real-time RL
    writes one for every version."""
    timeout_s: Positive = 45.0
    """Time for each collective operation of the ranks."""
    lora: LoraConfig | None = None
    """LoRA: train a small adapter to weights that stay unchanged; without it all weights are
    trained."""
