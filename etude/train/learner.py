"""The learner: the model, its fp32 master weights and its optimizer.

There are two copies of the weights: fp32 masters, which the optimizer updates, and the model, whose
parameters are the masters rounded to bf16. So the forward pass computes with exactly the values
that are published and served, while steps too small for bf16 still accumulate in the masters; the
gradient at the rounded weights is used as the masters' gradient. Of a master whose parameter is in
bf16 only the other half is stored (`masters`). Gradients are summed in fp32 too, whatever dtype the
model computes in.

A model with an adapter (`model.lora`) has masters, gradients and optimizer state only for the
adapter, which is also all that is saved and published; the other weights are rounded once and never
change.

A learner is one rank of its `world`, by default the only one. Every rank is given the same batch,
computes its share of it and holds its rows of model, masters and optimizer; all of them take the
same step.

The process that holds the learner decides about threads and cores.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Batch, Row
from etude.model import files
from etude.model.transformer import Transformer
from etude.train.checkpoint import fill_tensors
from etude.train.context_parallel import ContextGroup, check_context_parallel
from etude.train.distributed import SINGLE_PROCESS, World, local_tensor, shard_rows
from etude.train.expert_parallel import distribute_experts
from etude.train.flops import sequence_cost
from etude.train.host_copy import AsyncHostCopy
from etude.train.loss import token_logprobs
from etude.train.masters import Master, SplitMaster, round_into, whole
from etude.train.mismatch import mismatch_stats
from etude.train.objective import AGGREGATE, RlObjective
from etude.train.optimizer import OPTIMIZER, Optimizer
from etude.train.packing import (
    PackedMicrobatch,
    PackedRollouts,
    PackItem,
    RolloutSequence,
    TokenSequence,
    check,
    pack_batch,
    pack_rollouts,
    plan_microbatches,
)
from etude.train.routers import ExpertRouters, experts_to_replay
from etude.train.stats import RlStats, SupervisedStats, recomputed_rows
from etude.train.supervised import Metrics, SupervisedLoss, cross_entropy

MAX_GRAD_NORM = 1.0

# Small enough for the caches of a CPU core, and enough to keep a device busy; a step depends on it
# only by rounding.
MICROBATCH_TOKENS = {"cpu": 1024, "cuda": 16_384}

P = TypeVar("P", bound=PackedMicrobatch)


class Learner:
    """A model with its fp32 master weights and its optimizer, on one rank. It takes over the model:
    from now on the model's parameters are the rounded masters, and only this rank's rows of them.

    `published_dtype` is the dtype that masters are rounded to. float32 leaves them unrounded: for
    models that are too small or steps that are too exact for bf16, and to compare ranks without the
    noise of rounding. `compute_dtype` is the dtype of the parameters, and so of activations;
    bfloat16 is for processors with bf16 units.
    """

    def __init__(
        self,
        model: Transformer,
        world: World = SINGLE_PROCESS,
        *,
        optimizer: str = "adamw",
        published_dtype: torch.dtype = torch.bfloat16,
        compute_dtype: torch.dtype = torch.float32,
        context_parallel: int = 1,
        expert_parallel: int = 1,
    ) -> None:
        self.model = model
        self.world = world
        self.num_shares = world.world_size // context_parallel
        """The number of shares of a batch, one for each rank or context group."""
        self._context_group: ContextGroup | None = None
        if context_parallel > 1:
            check_context_parallel(model.config, invariant=model.invariant)
            self._context_group = ContextGroup(world, context_parallel)
        self.published_dtype = published_dtype
        self.compute_dtype = compute_dtype
        self.device = next(model.parameters()).device
        self._sequence_cost = sequence_cost(model)
        self._num_rows = {name: len(p) for name, p in model.named_parameters()}
        self._masters: dict[str, Master] = {
            name: p.detach()[world.local_rows(len(p))].to(torch.float32, copy=True)
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        self._is_adapted = len(self._masters) < len(list(model.parameters()))
        if self._is_adapted:
            model.cast(published_dtype)  # the base is what was published
        model.cast(compute_dtype)
        if expert_parallel > 1:
            distribute_experts(model, world, expert_parallel)
        world.shard(model)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if compute_dtype == published_dtype == torch.bfloat16:
            for name, p in self._parameters.items():
                self._masters[name] = SplitMaster.of(whole(self._masters[name]), p)
        # the hook must not hold the learner, or neither would ever be freed
        self._gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            hook = partial(_add_gradient, self._gradients, name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        # Tensors without a gradient: the biases of routers. An adapter's base keeps its own.
        self._fixed = (
            {}
            if self._is_adapted
            else {n: t for n, t in model.state_dict().items() if n not in self._parameters}
        )
        self._snapshot: dict[str, Master] = {}
        # called with the number of rows of each microbatch of an RL step that is done
        self.on_rows: Callable[[int], None] = lambda rows: None
        self._optimizer: Optimizer = OPTIMIZER[optimizer](self._masters, model, world)
        self._round(self._masters)

    def rl_step(
        self,
        batch: Batch,
        *,
        lr: float,
        objective: RlObjective = RlObjective(),  # noqa: B008 (frozen)
        temperature: float = 1.0,
        microbatch_tokens: int | None = None,
        weight_decay: float = 0.0,
        fetch_experts: Callable[[str], bytes] | None = None,
        router_replay_min_score: float = 0.0,
        router_balance: bool = False,
    ) -> RlStats:
        """Take one RL step. `temperature` applies to rows that do not state their sampling
        parameters. `microbatch_tokens = 0`: row after row in their order; None: a number that suits
        the device. An objective with a `kl_coef` uses the snapshot as reference. `fetch_experts`
        reads the experts that a row names; without it none are replayed. For the other arguments
        see `routers`."""
        routers = ExpertRouters(
            self.model, min_score=router_replay_min_score, router_balance=router_balance
        )
        rows, divisor = self._weighed(batch, objective.aggregate, temperature)
        num_loss_tokens = sum(row.num_loss_tokens for row in rows)
        mine = self._share(
            rows, partial(pack_rollouts, experts=self._experts(fetch_experts)), microbatch_tokens
        )
        references: Iterable[Tensor | None] = itertools.repeat(None)
        if objective.kl_coef:
            mine = list(mine)
            references = self._reference(mine)
        # on the device: do not wait before the last microbatch is launched
        sums, seen = [], []
        for micro, ref_logp_N in zip(mine, references, strict=False):
            summed, columns_N5 = self._backward(
                micro, routers, objective, ref_logp_N, total=num_loss_tokens, divisor=divisor
            )
            sums.append(summed)
            seen.append(columns_N5)
        routers.end_step(self.world)
        copies = AsyncHostCopy(torch.stack(sums)), AsyncHostCopy(torch.cat(seen))
        norm = self._update(lr, weight_decay)  # runs while the metrics are computed
        sums_M4, seen_N5 = (copy.wait() for copy in copies)
        loss_sum, *others_sum = self.world.all_reduce_sum(*map(sum, sums_M4.T.tolist()))
        corrected_frac, zero_grad_frac, entropy = (each / num_loss_tokens for each in others_sum)
        seen_N5 = self.world.all_gather(seen_N5.flatten()).view(-1, 5)
        return RlStats(
            recomputed=recomputed_rows(seen_N5, len(rows)),
            loss=loss_sum,
            mismatch=mismatch_stats(seen_N5[:, 1].numpy(), seen_N5[:, 2].numpy()),
            corrected_frac=corrected_frac,
            zero_grad_frac=zero_grad_frac,
            entropy=entropy,
            lr=lr,
            num_rows=len(rows),
            num_loss_tokens=num_loss_tokens,
            num_forward_tokens=sum(row.length for row in rows),
            router_mismatch_frac=routers.mismatch_frac,
            experts_replaced_frac=routers.replaced_frac,
            grad_norm=_finite(norm),  # last: this waits for the update
        )

    def _experts(
        self, fetch_experts: Callable[[str], bytes] | None
    ) -> Callable[[Row], Tensor | None]:
        """Return the function that gives `pack_rollouts` the routed experts of a row."""
        config = self.model.config.experts
        return lambda row: experts_to_replay(row, config, fetch_experts) if fetch_experts else None

    def _backward(
        self,
        micro: PackedRollouts,
        routers: ExpertRouters,
        objective: RlObjective,
        ref_logp_N: Tensor | None,
        *,
        total: int,
        divisor: float,
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of one microbatch; return its sums and the columns to report for its
        tokens. `total`: the loss tokens of the whole batch."""
        routing = routers.begin_microbatch(micro)
        logp_N, others = token_logprobs(self.model, micro, routing, with_stats=True)
        losses = objective.token_losses(
            logp_N, micro.old_logprobs_N, micro.advantages_N, micro.row_ids_N, ref_logp_N
        )
        router_mismatch_N = routers.token_mismatches(routing, micro)
        balancing = routers.end_microbatch(routing, micro) * (micro.num_loss_tokens / total)
        loss = (losses.loss_N * micro.weights_N).sum() / divisor + balancing
        loss.backward()  # type: ignore[no-untyped-call]
        parts = (
            loss.detach(),
            losses.corrected_N.sum(),
            losses.zero_grad_N.sum(),
            others.entropy_N.sum(),
        )
        summed = torch.stack([part.double() for part in parts])
        columns = (
            micro.row_ids_N,
            micro.old_logprobs_N,
            logp_N.detach(),
            others.argmax_N,
            router_mismatch_N,
        )
        columns_N5 = torch.stack([column.double() for column in columns], 1)
        self.on_rows(len(micro.lengths))
        return (summed, columns_N5) if self._reports else (summed * 0, columns_N5[:0])

    def _weighed(
        self, batch: Batch, aggregate: str, temperature: float
    ) -> tuple[list[RolloutSequence], float]:
        """The rows of a batch, and the divisor of the weighted sum of their token losses."""
        context = self.model.config.max_position_embeddings
        weights, divisor = AGGREGATE[aggregate](batch.rows, context)
        if not any(any(row.mask) for row in batch.rows):
            raise ValueError(
                f"the batch of step {batch.step} has no sampled token: there is nothing to learn "
                f"from"
            )
        check(batch.rows, max_tokens=context)
        return [
            RolloutSequence.from_row(row, n, w, temperature)
            for n, (row, w) in enumerate(zip(batch.rows, weights, strict=True))
        ], divisor

    def supervised_step(
        self,
        items: Sequence[PackItem],
        *,
        lr: float,
        weight_decay: float = 0.0,
        router_balance: bool = False,
        pack: Callable[[Sequence[Any]], PackedMicrobatch] = pack_batch,
        loss: SupervisedLoss = cross_entropy,
    ) -> SupervisedStats:
        """Take one step of a supervised loss, averaged over the loss terms of all items
        together."""
        routers = ExpertRouters(self.model, router_balance=router_balance)
        count = sum(item.num_loss_terms for item in items)
        num_loss_tokens = sum(item.num_loss_tokens for item in items)
        totals, metrics = [], Metrics()
        for micro in self._share(items, pack):
            routing = routers.begin_microbatch(micro)
            sum_of_losses, seen = loss(self.model, micro, routing)
            balancing = routers.end_microbatch(routing, micro) * (
                micro.num_loss_tokens / num_loss_tokens
            )
            mean = sum_of_losses / count + balancing
            mean.backward()  # type: ignore[no-untyped-call]
            totals.append(mean.detach().double() * self._reports)
            metrics |= {
                name: metrics.get(name, 0.0) + self._reports * value / count
                for name, value in seen.items()
            }
        routers.end_step(self.world)
        total, *sums = self.world.all_reduce_sum(
            sum(torch.stack(totals).tolist()), *metrics.values()
        )
        return SupervisedStats(
            loss=total,
            grad_norm=_finite(self._update(lr, weight_decay)),
            lr=lr,
            num_loss_tokens=num_loss_tokens,
            metrics=dict(zip(metrics, sums, strict=True)),
        )

    @torch.no_grad()
    def evaluate(self, sequences: Sequence[TokenSequence]) -> float:
        """The mean cross entropy of the tokens that the loss counts; changes nothing."""
        logps = [
            token_logprobs(self.model, packed)[0].double().sum() * self._reports
            for packed in self._share(sequences, pack_batch)
        ]
        self.world.reshard(self.model)
        (total,) = self.world.all_reduce_sum(sum(torch.stack(logps).tolist()))
        return -total / sum(sequence.num_loss_tokens for sequence in sequences)

    @torch.no_grad()
    def _reference(self, microbatches: Sequence[PackedRollouts]) -> list[Tensor]:
        """The log-probs under the snapshot."""
        assert self._snapshot, (
            "a kl_coef needs a reference: snapshot() the weights that the stage starts from"
        )
        with self.using_snapshot():
            return [token_logprobs(self.model, micro)[0] for micro in microbatches]

    def weights(self) -> dict[str, Tensor]:
        """A copy of the tensors to publish, exactly the values that the next forward pass uses.
        Only with a single rank."""
        return files.hf_state_dict(self.model, self.published_dtype)

    def hf_rows(self) -> dict[str, files.Rows]:
        """A copy of this rank's rows of the tensors to publish; for an adapted model, of the
        adapter."""
        fixed = {name: (0, tensor.clone()) for name, tensor in self._fixed.items()}
        return self._rows(self._parameters, fixed)

    def base_rows(self) -> dict[str, files.Rows]:
        """A copy of this rank's rows of the tensors under the adapter."""
        parameters = dict(self.model.named_parameters())
        state = self.model.state_dict()
        fixed = {n: (0, state[n].clone()) for n in state.keys() - parameters.keys()}
        return self._rows({n: p for n, p in parameters.items() if n not in self._parameters}, fixed)

    def _rows(
        self, parameters: Mapping[str, Tensor], others: Mapping[str, tuple[int, Tensor]]
    ) -> dict[str, files.Rows]:
        held = {
            name: (
                self.world.local_rows(self._num_rows[name]).start,
                local_tensor(p).detach().to(self.published_dtype, copy=True),
            )
            for name, p in parameters.items()
        }
        held |= others
        return files.hf_rows(self.model, held, self.published_dtype, counts=self._num_rows)

    def begin_stage(self) -> None:
        """Begin a stage: reset the optimizer and drop the snapshot. The weights stay."""
        self._optimizer.reset()
        self._snapshot = {}

    def snapshot(self) -> None:
        """Keep a copy of the current weights, replacing any earlier snapshot."""
        self._snapshot = {name: master.clone() for name, master in self._masters.items()}

    def restore_snapshot(self) -> None:
        """Restore the weights of the snapshot."""
        fill_tensors(self._masters, self._snapshot)
        self._round(self._masters)

    @contextlib.contextmanager
    def using_snapshot(self) -> Iterator[None]:
        """Compute with the weights of the snapshot inside the `with` block."""
        # split masters need their half; it takes memory that gradients take later
        kept = {n: local_tensor(p).detach().clone() for n, p in self._parameters.items()}
        self._round(self._snapshot)
        try:
            yield
        finally:
            self.world.reshard(self.model)
            for name, parameter in self._parameters.items():
                local_tensor(parameter).detach().copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """This rank's part of the state that the next step depends on. It shares memory with the
        learner: serialize it before the next step. Split masters are joined one by one, into
        copies on the host."""
        return {
            name: part if isinstance(part, Tensor) else part.join().cpu()
            for name, part in self._whole().items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the `state()` of this rank, exact to the bit."""
        self._snapshot = {}
        if any(name.startswith("snapshot.") for name in tensors):
            self.snapshot()
        fill_tensors(self._whole(), tensors)
        self._round(self._masters)

    def load_shards(
        self, world_size: int, read_shard: Callable[[int], Mapping[str, Tensor]]
    ) -> None:
        """Load the states of `world_size` ranks; `read_shard` reads that of one. The number of
        ranks may have changed: each takes its rows from theirs, and sums are then taken in another
        order."""
        if world_size == self.world.world_size:
            self.load_state(read_shard(self.world.rank))
            return
        mine: dict[str, list[Tensor]] = {}
        for rank in range(world_size):
            for name, tensor in read_shard(rank).items():
                mine.setdefault(name, []).append(self._mine(name, tensor, rank, world_size))
        self.load_state(
            {name: torch.cat(parts) if parts[0].ndim else parts[0] for name, parts in mine.items()}
        )

    def _mine(self, name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
        """The part of a tensor of one of `size` ranks that this rank holds."""
        if name.startswith("fixed.") or tensor.ndim == 0:  # every rank has all of it
            return tensor if rank == 0 or tensor.ndim == 0 else tensor[:0]
        count = self._num_rows[name.partition(".")[2]]
        theirs, ours = shard_rows(count, rank, size), self.world.local_rows(count)
        start, stop = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
        return tensor[start - theirs.start : max(start, stop) - theirs.start].clone()

    def _whole(self) -> dict[str, Master]:
        """All parts of the state: they share memory."""
        parts: dict[str, Master] = {f"fixed.{name}": part for name, part in self._fixed.items()}
        parts |= {f"master.{name}": master for name, master in self._masters.items()}
        parts |= self._optimizer.state()
        return parts | {f"snapshot.{name}": master for name, master in self._snapshot.items()}

    def _share(
        self,
        items: Sequence[PackItem],
        pack: Callable[[Sequence[Any]], P],
        microbatch_tokens: int | None = None,
    ) -> Iterable[P]:
        """The microbatches of this rank, each packed when its turn comes, while the device is busy
        with the previous one. Ranks communicate in every layer of every pass, so all have equally
        many."""
        limit = (
            MICROBATCH_TOKENS[self.device.type] if microbatch_tokens is None else microbatch_tokens
        )
        plans = plan_microbatches(
            [item.length for item in items], limit, self.num_shares, self._sequence_cost
        )
        # the ranks of a context group are consecutive
        share = self.world.rank * self.num_shares // self.world.world_size
        packed = (pack([items[index] for index in some]).to(self.device) for some in plans[share])
        return (replace(micro, context_group=self._context_group) for micro in packed)

    @property
    def _reports(self) -> bool:
        """True if this rank counts for its context group, whose ranks all compute the same."""
        return self._context_group is None or self._context_group.rank == 0

    def _update(self, lr: float, weight_decay: float) -> Tensor:
        """Update the masters with the accumulated gradient, and round them into the model. Return
        the norm of the gradient; if it is not finite, nothing has changed."""
        gradients = {
            name: self._gradients[name] for name in self._masters if name in self._gradients
        }
        self._gradients.clear()
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
        norm = self.world.global_norm(torch.linalg.vector_norm(torch.stack(norms)))
        divisor = ((norm + 1e-6) / MAX_GRAD_NORM).clamp(min=1.0)
        self._optimizer.step(gradients, lr=lr, weight_decay=weight_decay, divisor=divisor)
        self._round(self._masters)
        return norm

    @torch.no_grad()
    def _round(self, weights: Mapping[str, Master]) -> None:
        """Round weights into the model."""
        for name, weight in weights.items():
            if self.published_dtype == torch.bfloat16:
                round_into(self._parameters[name], weight)
            else:
                local_tensor(self._parameters[name]).copy_(whole(weight))


def _finite(norm: Tensor) -> float:
    if not math.isfinite(found := float(norm)):
        raise EtudeError(
            "the gradient of this step is not finite, and the weights were left as they are: look "
            "for rewards or log-probs that are not finite in its batch, or for a loss of your own "
            "that is not finite on it"
        )
    return found


@torch.no_grad()
def _add_gradient(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Add the gradient that a microbatch left in a parameter to the sum, which is in fp32; the
    first stays as it is until there is a second."""
    assert parameter.grad is not None
    gradient, parameter.grad = local_tensor(parameter.grad), None
    if name in gradients:
        gradient = gradients[name].float().add_(gradient)
    gradients[name] = gradient
