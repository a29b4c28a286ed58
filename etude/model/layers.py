"""The small pieces of a layer. Shapes: E hidden size, F size within an MLP.

Matrices that read the same input are one parameter, so that trainer and engine run one product
where Hugging Face files have several tensors. Such a module says how its parameter is cut
(`parts`), and `files` names the cuts.
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
    """A module whose tensors have other names in Hugging Face files than here."""

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name in the files below the name of the parent module, view) of all that is in
        `tensors`, the module's own parameters or others of their shapes, by their names in this
        module."""


ADAPTER_KINDS = ("lora_A", "lora_B")
"""The parameters of a layer that belong to an adapter (`lora`)."""


class Linear(nn.Linear):
    arithmetic = PLAIN
    adapter: Callable[[Linear, Tensor, Tensor], Tensor] | None = None
    """Adds to the product y of x what adapters say: (this layer, x, y) -> y."""
    quantisable = True
    """False: it keeps its type where others are quantised. For what decides between scores that lie
    close together, and for weights that are not only multiplied with a row."""
    quantised: fp8.Quantised | None = None
    """The weight in FP8, where an engine keeps that beside the plain one."""
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    adapted_parts: Mapping[str, int] = {}
    """The parts whose pairs stand in `lora_A` and `lora_B`, and how many outputs each has."""

    def reset_parameters(self) -> None:
        """Values come from files or from `fresh`; drawing others first would take longer than
        loading them."""

    @property
    def in_fp8(self) -> bool:
        """Whether it multiplies in FP8, with the weight that is kept so or one that is rounded in
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
        """As above."""


class Fused(Linear):
    """Several linear maps of one input: `sizes` are their names and output sizes."""

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
    """`centred`: what it multiplies by is 1 plus its weight."""

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
