"""The table of the trainer."""

from __future__ import annotations

from typing import Literal

from etude.core.lora_config import LoraConfig
from etude.core.schema import Config, Count, NonNegative, Positive


class TrainerConfig(Config):
    """The trainer: device, ranks, optimizer and dtypes."""

    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """The device of the trainer; auto: on CUDA devices if there are any. Each rank of a machine
    takes a device of its own."""
    ranks: Count = 1
    """Processes that train together; each holds its share of weights and optimizer. Another number
    goes on from the same checkpoints, but not to the last bit."""
    context_parallel: Count = 1
    """Ranks that compute each row together, for rows whose activations do not fit one device; it
    divides `ranks`. Not for models with recurrent layers."""
    expert_parallel: Count = 1
    """Ranks that hold the experts of a layer together: tokens are sent to them, and no rank gathers
    all experts. It divides `ranks`, and these the number of experts. For sparse models."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer. `muon` updates the matrices within layers by orthogonalised momentum, and the
    rest as `adamw` does."""
    published_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype that weights are rounded to for computing and publishing. The masters are float32
    in any case."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype that every stage computes in; auto: bfloat16 on a CUDA device,
    float32 on the CPU, and float32 with such weights. Gradients are added up in float32 in any
    case. bfloat16 also rounds activations, and is faster where the processor has units for it."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass instead of keeping their activations: about a third
    more arithmetic, and memory for several times as many `microbatch_tokens`."""
    checkpoint_every_s: NonNegative = 60.0
    """Least time between two checkpoints within a stage. Publishing does not wait for them: after a
    crash the trainer repeats the steps since the newest one, from the same batches. Real-time RL
    writes one for every version."""
    timeout_s: Positive = 45.0
    """Time for each collective operation of the ranks."""
    lora: LoraConfig | None = None
    """LoRA: train a small adapter to weights that stay as they are; without it all weights are
    trained."""
