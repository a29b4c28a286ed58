"""Optimizers of the master weights. Each rank updates its own rows of them.

An optimizer is created with the masters by name and keeps a few tensors of state for each. Masters
may be split: `joined` gives one in fp32. To add an optimizer, add a class to `OPTIMIZER`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from etude.model import files
from etude.model.transformer import Transformer
from etude.train.distributed import World, full_tensor
from etude.train.masters import Master, SplitMaster, joined, zeros_like

BETAS = (0.9, 0.95)
EPS = 1e-8
MOMENTUM = 0.95

# Numbers that a CPU joins at a time: what is made of them stays in its caches.
PIECE = 1 << 18


class Optimizer(Protocol):
    """An optimizer over the master weights of one rank."""

    def step(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        """Update the masters that have a gradient, in bf16 or fp32. Gradients are divided by
        `divisor`, which clips them; if that is not finite, nothing changes, without a wait of the
        host. Weight decay applies to matrices only: the gains of norms are scales, whose neutral
        value is not 0."""

    def reset(self) -> None:
        """Zero the state."""

    def state(self) -> dict[str, Tensor]:
        """The optimizer's state, by the names of the masters; it shares memory. Rows of a tensor
        belong to the same rows of its master."""


class AdamW:
    """AdamW over the master weights, in one pass over memory where the device has one: torch's
    fused function, or a kernel of our own for split masters on CUDA."""

    def __init__(self, masters: Mapping[str, Master], model: Transformer, world: World) -> None:
        self._masters = dict(masters)
        self._matrices = {n for n, m in masters.items() if m.ndim >= 2 and not n.endswith("bias")}
        self._update = _adamw_over(masters)
        self.reset()

    def step(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        trained = sorted(self._masters.keys() & gradients.keys())  # always in the same order
        self._update(
            [self._masters[name] for name in trained],
            [gradients[name] for name in trained],
            [self._first_moments[name] for name in trained],
            [self._second_moments[name] for name in trained],
            [self._steps[name] for name in trained],
            lr=lr,
            weight_decays=[weight_decay * (name in self._matrices) for name in trained],
            betas=BETAS,
            eps=EPS,
            divisor=divisor,
        )

    def reset(self) -> None:
        masters = self._masters.items()
        self._steps = {name: torch.zeros((), device=m.device) for name, m in masters}
        self._first_moments = {name: zeros_like(master) for name, master in masters}
        self._second_moments = {name: zeros_like(master) for name, master in masters}

    def state(self) -> dict[str, Tensor]:
        parts = {
            "step": self._steps,
            "exp_avg": self._first_moments,
            "exp_avg_sq": self._second_moments,
        }
        return {
            f"{part}.{name}": tensors[name]
            for name in self._masters
            for part, tensors in parts.items()
        }


def _adamw_over(masters: Mapping[str, Master]) -> Callable[..., None]:
    """The function that takes an AdamW step over these masters, which are all of one kind."""
    split = next((m for m in masters.values() if isinstance(m, SplitMaster)), None)
    if split is None:
        return _fused_adamw
    if split.device.type == "cpu":
        return _adamw_in_pieces
    from etude.train import adamw_kernel  # imports Triton

    adamw_kernel.check(split.device, BETAS, EPS)
    return adamw_kernel.SplitAdamW().step


def _fused_adamw(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    weight_decays: Sequence[float],
    betas: tuple[float, float],
    eps: float,
    divisor: Tensor,
) -> None:
    """Torch's function. It does not come from `torch.optim.AdamW`, because that class loads torch's
    compiler, which takes as long as loading torch itself."""
    every = list(zip(masters, gradients, first_moments, second_moments, steps, strict=True))
    for weight_decay in dict.fromkeys(weight_decays):
        chosen = [t for t, decay in zip(every, weight_decays, strict=True) if decay == weight_decay]
        weights, grads, first, second, counts = (
            list(tensors) for tensors in zip(*chosen, strict=True)
        )
        adamw(
            weights,
            [gradient.float() for gradient in grads],
            first,
            second,
            [],
            counts,
            fused=True,
            grad_scale=divisor,
            found_inf=(~divisor.isfinite()).float(),
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )


def _adamw_in_pieces(
    masters: Sequence[SplitMaster],
    gradients: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    weight_decays: Sequence[float],
    **settings: Any,
) -> None:
    """`_fused_adamw`, with one piece of a joined master at a time."""
    every = zip(masters, gradients, first_moments, second_moments, steps, strict=True)
    for (master, *tensors, step), decay in zip(every, weight_decays, strict=True):
        parts = (torch.split(tensor.flatten(), PIECE) for tensor in tensors)
        for piece, gradient, first, second in zip(master.pieces(PIECE), *parts, strict=True):
            counted = step.clone()  # once for all pieces
            with joined(piece) as tensor:
                _fused_adamw(
                    [tensor], [gradient], [first], [second], [counted],
                    weight_decays=[decay], **settings,
                )  # fmt: skip
        step.copy_(counted)


class Muon:
    """Muon: matrices within layers are updated with their orthogonalised momentum, so that all
    directions of a matrix learn at the same speed; embeddings, head, routers, filters, norms and
    biases are updated with AdamW.

    Matrices that are fused into one parameter here are orthogonalised separately, as Hugging Face
    names them. A step has the typical size of an AdamW step, so learning rate and weight decay mean
    the same for both. The update needs whole matrices: each is gathered when its turn comes, and
    every rank keeps its rows of the result. A row of stacked experts is a whole matrix, and is not
    gathered.
    """

    def __init__(self, masters: Mapping[str, Master], model: Transformer, world: World) -> None:
        self._model = model
        self._world = world
        self._parameters = dict(model.named_parameters())
        self._masters = {
            name: master for name, master in masters.items() if is_hidden(name, master)
        }
        self._momentum = {name: zeros_like(master) for name, master in self._masters.items()}
        self._rest = AdamW(
            {n: m for n, m in masters.items() if n not in self._masters}, model, world
        )

    @torch.no_grad()
    def step(
        self, gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        self._rest.step(gradients, lr=lr, weight_decay=weight_decay, divisor=divisor)
        if not divisor.isfinite():
            return
        for name, master in self._masters.items():
            gradient = gradients[name].float() / divisor
            momentum = self._momentum[name]
            momentum.lerp_(gradient, 1 - MOMENTUM)
            ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov momentum
            is_stacked = master.ndim > 2
            update = ahead if is_stacked else full_tensor(ahead, self._parameters[name])
            for tensor in files.hf_tensors(self._model, {name: update}).values():
                # Some families have all experts of a layer in one tensor.
                for matrix in tensor.view(-1, *tensor.shape[-2:]):
                    matrix.copy_(orthogonal(matrix) * 0.2 * math.sqrt(max(matrix.shape)))
            if not is_stacked:
                update = update[self._world.local_rows(len(update))]
            with joined(master) as tensor:
                tensor.mul_(1 - lr * weight_decay).sub_(update, alpha=lr)

    def reset(self) -> None:
        self._rest.reset()
        for momentum in self._momentum.values():
            momentum.zero_()

    def state(self) -> dict[str, Tensor]:
        return self._rest.state() | {
            f"momentum.{name}": tensor for name, tensor in self._momentum.items()
        }


OPTIMIZER: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "muon": Muon}


def is_hidden(name: str, master: Master) -> bool:
    """True for a matrix that maps one hidden state to another."""
    is_matrix = master.ndim >= 2 and not name.endswith(("bias", "conv1d.weight"))
    return ".layers." in name and is_matrix and not name.endswith("mlp.gate.weight")


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Approximately the nearest matrix whose singular values are all 1: a few Newton-Schulz steps,
    whose polynomial maps any singular value in (0, 1] to between 0.7 and 1.2, small ones
    quickly."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, steps).T
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix / (torch.linalg.matrix_norm(matrix) + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
