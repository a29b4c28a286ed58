"""Expert parallelism: the experts of every layer divided among the ranks of a group.

If experts were sharded like all other weights (`distributed`), each rank would gather all experts
of a layer for every pass, while a token needs only a few of them. Here a rank gathers only the
experts of its part of the group, and tokens are exchanged: each is sent to the ranks that hold its
experts, and their outputs are sent back. The gradient of an expert covers all tokens that it
received, from any rank.

With W ranks in groups of S consecutive ones, a rank's part is an S-th of the experts, and the W / S
ranks with the same part shard it as ranks shard all other weights. A rank owns the same rows as
without expert parallelism, a W-th of the experts in the order of ranks, so that masters,
optimizers, checkpoints and published weights are the same, and a run can continue with another
size.

Shapes: X experts, M pairs of a token of this rank and one of its experts, R pairs whose experts are
on this rank, S ranks of the group, Y experts of a part; E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from etude.core.errors import EtudeError
from etude.model.config import ModelConfig
from etude.model.experts import StackedExperts
from etude.model.transformer import Transformer
from etude.train.distributed import World, shard_module


def check_expert_parallel(
    config: ModelConfig, *, ranks: int, size: int, invariant: bool = False
) -> None:
    """Raise EtudeError for experts that cannot be divided in this way."""
    asked = f"trainer.expert_parallel = {size}"
    if config.experts is None:
        raise EtudeError(f"{asked}: the model has no experts to divide; leave it at 1")
    if invariant:
        raise EtudeError(f"{asked} does not support batch-invariant arithmetic: leave it at 1")
    if ranks % size:
        raise EtudeError(
            f"{asked} does not divide the {ranks} ranks into equal groups: choose a number that "
            f"divides trainer.ranks"
        )
    if config.experts.num_experts % ranks:
        raise EtudeError(
            f"{asked}: {config.experts.num_experts} experts cannot be shared equally among "
            f"{ranks} ranks; leave it at 1, or choose trainer.ranks that divides the number of "
            f"experts"
        )


def expert_places(num_experts: int, ranks: int, size: int) -> Tensor:
    """Index of each expert, [X], in the order in which a group holds them: those of its first rank,
    then of the second. A part consists of the experts owned by the ranks that share it, in the
    order of ranks."""
    owners = torch.arange(num_experts).view(ranks // size, size, num_experts // ranks)
    held_X = owners.transpose(0, 1).flatten()
    return torch.empty_like(held_X).index_copy(0, held_X, torch.arange(num_experts))


def distribute_experts(model: Transformer, world: World, size: int) -> None:
    """Keep only this rank's part of all experts, sharded among the ranks that have the same part;
    must be called before `World.shard`."""
    from torch.distributed.device_mesh import init_device_mesh

    check_expert_parallel(
        model.config, ranks=world.world_size, size=size, invariant=model.invariant
    )
    assert model.config.experts is not None
    num_experts = model.config.experts.num_experts
    device = next(model.parameters()).device
    mesh = init_device_mesh(
        device.type, (world.world_size // size, size), mesh_dim_names=("shard", "expert")
    )
    places_X = expert_places(num_experts, world.world_size, size).to(device)
    exchange = AllToAllExchange(mesh.get_group("expert"), size, places_X)
    part = world.rank % size
    own_Y = places_X.argsort().view(size, -1)[part]
    for module in model.modules():
        if isinstance(module, StackedExperts):
            _keep(module, own_Y)
            module.exchange = exchange
            shard_module(module, mesh["shard"])


@torch.no_grad()
def _keep(experts: StackedExperts, own_Y: Tensor) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        own = nn.Parameter(parameter.index_select(0, own_Y), parameter.requires_grad)
        setattr(experts, name, own)


class AllToAllExchange:
    """Token exchange among the ranks of a group, each of which holds the experts of its part."""

    def __init__(self, group: Any, size: int, places_X: Tensor) -> None:
        self._group = group
        self._size = size
        self.places_X = places_X
        # Ranks communicate in this method. Not a decorator: that would load the compiler with this
        # module.
        self._exchange_uncompiled = torch.compiler.disable(self._exchange)  # type: ignore[no-untyped-call]

    def __call__(
        self, x_ME: Tensor, ends_X: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        y_ME: Tensor = self._exchange_uncompiled(x_ME, ends_X, compute)
        return y_ME

    def _exchange(
        self, x_ME: Tensor, ends_X: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        sent_SY = ends_X.diff(prepend=ends_X.new_zeros(1)).view(self._size, -1)
        got_SY = torch.empty_like(sent_SY)
        dist.all_to_all_single(got_SY, sent_SY, group=self._group)
        sent, got = torch.stack((sent_SY.sum(1), got_SY.sum(1))).tolist()
        x_RE = self._all_to_all(x_ME, sent, got)
        # Received tokens are sorted by rank, then by expert; experts read their tokens in one
        # product.
        expert_SY = torch.arange(got_SY.shape[1], device=got_SY.device).expand_as(got_SY)
        expert_R = expert_SY.flatten().repeat_interleave(got_SY.flatten(), output_size=sum(got))
        order_R = expert_R.argsort(stable=True)
        y_RE = compute(x_RE[order_R], got_SY.sum(0).cumsum(0))
        return self._all_to_all(torch.empty_like(y_RE).index_copy(0, order_R, y_RE), got, sent)

    def _all_to_all(self, x_ME: Tensor, sent: Sequence[int], got: Sequence[int]) -> Tensor:
        received: Tensor = _AllToAll.apply(x_ME, sent, got, self._group)  # type: ignore[no-untyped-call]
        return received


class _AllToAll(torch.autograd.Function):
    """Send `sent` rows to each rank in turn, receive `got` rows from each; backward sends them
    back."""

    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, sent: Sequence[int], got: Sequence[int], group: Any
    ) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _sent(x_ME, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _sent(gradients[0], ctx.got, ctx.sent, ctx.group), None, None, None


def _sent(x_ME: Tensor, sent: Sequence[int], got: Sequence[int], group: Any) -> Tensor:
    received = x_ME.new_empty(sum(got), *x_ME.shape[1:])
    dist.all_to_all_single(received, x_ME.contiguous(), list(got), list(sent), group=group)
    return received
