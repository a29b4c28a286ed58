"""The small parts of a layer. Shapes: E hidden size, F size within an MLP.

Matrices with the same input are one parameter, so that trainer and engine run one product where
Hugging Face files have several tensors. Such a module states how its parameter is split (`parts`),
and `files` names the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.model import fp8
from etude.model.numerics import PLAIN


@runtime_checkable
class FusedModule(Protocol):
    """A module whose tensors have different names in Hugging Face files."""

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Pairs (name in the files below the name of the parent module, view) for all of `tensors`:
        the module's own parameters or others of their shapes, by their names in this module."""


ADAPTER_KINDS = ("lora_A", "lora_B")
"""The parameters of a layer that belong to an adapter (`lora`)."""


class Linear(nn.Linear):
    arithmetic = PLAIN
    adapter: Callable[[Linear, Tensor, Tensor], Tensor] | None = None
    """Adds the output of adapters to the product y of x: (this layer, x, y) -> y."""
    quantisable = True
    """False: the layer keeps its dtype when others are quantised. For weights that decide between
    scores that are close together, and weights that are not only multiplied with a row."""
    quantised: fp8.Quantised | None = None
    """The weight in FP8, if an engine keeps it in addition to the unquantised one."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    adapted_parts: Mapping[str, int] = {}
    """The parts whose pairs are stacked in `lora_A` and `lora_B`, and the number of outputs of
    each."""

    def reset_parameters(self) -> None:
        """Do nothing: values come from files or from `fresh`, and drawing others first would take
        longer than loading them."""

    @property
    def in_fp8(self) -> bool:
        """True if the layer multiplies in FP8, with a stored FP8 weight or one that is rounded in
        each pass."""
        return self.arithmetic.fp8 and self.quantisable

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_fp8:
            y = self.arithmetic.linear(x, self.weight, self.bias)
        elif self.quantised is not None:
            y = fp8.linear(x, self.quantised, self.bias, self.arithmetic)
        else:
            y = fp8.trainable_linear(x, self.weight, self.bias, self.arithmetic)
        return y if self.adapter is None else self.adapter(self, x, y)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As in `Linear`."""


class Fused(Linear):
    """Several linear maps of one input; `sizes` has their names and output sizes."""

    def __init__(self, inputs: int, sizes: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(sizes.values()), bias=bias)
        self.sizes = dict(sizes)

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for kind, tensor in tensors.items():
            sizes = self.sizes if kind not in ADAPTER_KINDS else dict(self.adapted_parts)
            if kind == "lora_A":
                sizes = dict.fromkeys(sizes, len(tensor) // len(sizes))
            for name, view in zip(
                sizes, tensor.split_with_sizes(list(sizes.values())), strict=True
            ):
                yield f"{name}.{kind}", view


class RMSNorm(nn.Module):
    """RMS norm; if `centred`, the factor is 1 plus the weight."""

    def __init__(self, size: int, eps: float, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.eps = eps
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            gain = 1 + self.weight.float()
            return F.rms_norm(x.float(), gain.shape, gain, self.eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    arithmetic = PLAIN

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        act: str = "silu",
        bias: bool = False,
        fused_files: bool = False,
    ) -> None:
        super().__init__()
        self.act = act
        sizes = dict.fromkeys(("gate_proj", "up_proj"), intermediate_size)
        if fused_files:
            sizes = {"gate_up_proj": 2 * intermediate_size}
        self.gate_up_proj = Fused(hidden_size, sizes, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.arithmetic.activation(self.act)(gate) * up)  # type: ignore[no-any-return]
