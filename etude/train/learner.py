"""The model that learns.

Two copies of the weights: fp32 masters, which the optimizer moves, and the model, whose parameters are the masters
rounded to bf16. The forward pass so computes with exactly the values that are published and served, while steps too
small for bf16 still add up in the masters; a gradient at the rounded weights is taken as the masters' gradient.

One thread or many, and on which cores, is the business of the process that holds the learner.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.core.types import Batch
from etude.model import files
from etude.model.transformer import Transformer
from etude.train.correction import Drift, drift
from etude.train.loss import entropies, token_logprobs
from etude.train.objective import AGGREGATE, Objective
from etude.train.routers import Routers, to_replay
from etude.train.rows import Microbatch, Padded, pack
from etude.train.supervised import Figures, FitLoss, cross_entropy

BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one RL step did."""

    loss: float
    drift: Drift
    capped: float
    """Share of the sampled tokens whose importance weight the correction cut or took away."""
    silenced: float
    """Share of them that taught nothing although their advantage was not 0."""
    entropy: float
    """Mean over the sampled tokens, in nats."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_rows: int
    num_tokens: int
    """Sampled tokens."""
    num_computed: int
    """All tokens that went through the model, prompts and padding included."""
    router_disagreement: float | None = None
    """Share of the tokens with replayed experts for which a router, left alone, would have chosen another."""
    experts_replaced: float | None = None
    """Share of the replayed experts that were implausible, and so not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStats:
    """What one supervised step did."""

    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    figures: Figures
    """What else the loss tells, as means over what it counts."""


class Learner:
    """Takes the model over: from now on its parameters are the rounded masters."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._parameters = dict(model.named_parameters())
        # What no gradient moves: the biases of routers.
        self._fixed = {name: t for name, t in model.state_dict().items() if name not in self._parameters}
        self._masters = {name: p.detach().float().clone() for name, p in self._parameters.items()}
        self._kept: dict[str, Tensor] = {}
        # Decay pulls matrices towards 0; the gains of the norms are scales, whose neutral value is not 0.
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others}], lr=0.0, betas=BETAS, weight_decay=0.0, fused=True
        )
        self.restart()
        self._round(self._masters)

    def step(
        self,
        batch: Batch,
        *,
        lr: float,
        objective: Objective = Objective(),  # noqa: B008 (frozen)
        temperature: float = 1.0,
        microbatch_tokens: int = 8192,
        weight_decay: float = 0.0,
        fetch: Callable[[str], bytes] | None = None,
        plausible: float = 0.0,
        balance: bool = False,
    ) -> StepStats:
        """One step of RL. `microbatch_tokens = 0`: row after row in their order, deterministic. An objective with a
        `kl_coef` takes the kept weights for its reference. `fetch` reads the experts that a row names; without it none
        are replayed. `plausible`, `balance`: see `routers`."""
        config, routers = self.model.config, Routers(self.model, least=plausible, balance=balance)
        weights, divisor = AGGREGATE[objective.aggregate](batch.rows, config.max_position_embeddings)
        microbatches = pack(
            batch.rows,
            microbatch_tokens=microbatch_tokens,
            max_tokens=config.max_position_embeddings,
            weights=weights,
            experts=lambda row: to_replay(row, config.experts, fetch) if fetch else None,
        )
        num_tokens = sum(micro.num_tokens for micro in microbatches)
        if num_tokens == 0:
            raise ValueError(f"the batch of step {batch.step} has no sampled token: there is nothing to learn from")
        total, new, old, entropy, capped, silenced = 0.0, [], [], 0.0, 0, 0
        references = self._reference(microbatches, temperature) if objective.kl_coef else itertools.repeat(None)
        for micro, ref_logp_N in zip(microbatches, references, strict=False):
            routing = routers.open(micro)
            logp_N, logp_NV = token_logprobs(self.model, micro.tokens_BT, micro.mask_BT, temperature, routing)
            old_logp_N, adv_N = micro.old_logprobs_BT[micro.mask_BT], micro.advantages_BT[micro.mask_BT]
            row_N = micro.mask_BT.nonzero()[:, 0]
            scored = objective.score(logp_N, old_logp_N, adv_N, row_N, ref_logp_N)
            balancing = routers.close(routing, micro) * (micro.num_tokens / num_tokens)
            loss = (scored.loss_N * micro.weights_B[row_N]).sum() / divisor + balancing
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            capped, silenced = capped + int(scored.capped_N.sum()), silenced + int(scored.silenced_N.sum())
            entropy += entropies(logp_NV.detach()).sum().item() / num_tokens
            new.append(logp_N.detach())
            old.append(old_logp_N)
        routers.settle()
        return StepStats(
            loss=total,
            drift=drift(torch.cat(new), torch.cat(old)),
            capped=capped / num_tokens,
            silenced=silenced / num_tokens,
            entropy=entropy,
            grad_norm=self._update(lr, weight_decay),
            lr=lr,
            num_rows=len(batch.rows),
            num_tokens=num_tokens,
            num_computed=sum(micro.tokens_BT.numel() for micro in microbatches),
            router_disagreement=routers.disagreement,
            experts_replaced=routers.replaced,
        )

    def fit(
        self,
        microbatches: Sequence[Padded],
        *,
        lr: float,
        weight_decay: float = 0.0,
        balance: bool = False,
        loss: FitLoss = cross_entropy,
    ) -> FitStats:
        """One step of a supervised loss, averaged over what counts in all microbatches together."""
        routers = Routers(self.model, balance=balance)
        count = sum(micro.count for micro in microbatches)
        total, figures = 0.0, Figures()
        for micro in microbatches:
            routing = routers.open(micro)
            sum_of_losses, seen = loss(self.model, micro, routing)
            mean = (sum_of_losses + micro.count * routers.close(routing, micro)) / count
            mean.backward()  # type: ignore[no-untyped-call]
            total += mean.item()
            figures |= {name: figures.get(name, 0.0) + value / count for name, value in seen.items()}
        routers.settle()
        return FitStats(
            loss=total,
            grad_norm=self._update(lr, weight_decay),
            lr=lr,
            num_tokens=sum(micro.num_tokens for micro in microbatches),
            figures=figures,
        )

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Padded]) -> float:
        """Mean cross entropy of the tokens that count; changes nothing."""
        logps = [token_logprobs(self.model, m.tokens_BT, m.mask_BT, starts_BT=m.starts_BT)[0] for m in microbatches]
        return -sum(logp_N.double().sum().item() for logp_N in logps) / sum(m.num_tokens for m in microbatches)

    @torch.no_grad()
    def _reference(self, microbatches: Sequence[Microbatch], temperature: float) -> list[Tensor]:
        """The log-probs under the kept weights."""
        assert self._kept, "a kl_coef needs a reference: keep() the weights that the stage starts from"
        with self.recalled():
            return [token_logprobs(self.model, m.tokens_BT, m.mask_BT, temperature)[0] for m in microbatches]

    def weights(self) -> dict[str, Tensor]:
        """The bf16 tensors to publish: a copy, and the very values that the next forward pass computes with."""
        return files.weights(self.model)

    def rows(self) -> dict[str, files.Rows]:
        """What `weights` copies, as it is: whoever publishes it takes a copy of his own."""
        return files.rows(self.model, {name: (0, tensor) for name, tensor in self.model.state_dict().items()})

    def restart(self) -> None:
        """Forget the optimizer's past and any kept weights, as a new stage does; the weights stay."""
        for master in self._masters.values():
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._optimizer.state[master] = {"step": torch.tensor(0.0), **moments}
        self._kept = {}

    def keep(self) -> None:
        """Remember the weights as they are now, in place of any kept before."""
        self._kept = {name: master.clone() for name, master in self._masters.items()}

    def recall(self) -> None:
        """Go back to the kept weights."""
        _fill(self._masters, self._kept)
        self._round(self._masters)

    @contextlib.contextmanager
    def recalled(self) -> Iterator[None]:
        """The model computes with the kept weights for as long as the block lasts."""
        self._round(self._kept)
        try:
            yield
        finally:
            self._round(self._masters)

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on. It shares memory with the learner: pack it before stepping."""
        return self._whole() | {f"kept.{name}": tensor for name, tensor in self._kept.items()}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from `state()` of this learner or of another one, to the bit."""
        self._kept = {name.removeprefix("kept."): t.clone() for name, t in tensors.items() if name.startswith("kept.")}
        _fill(self._whole(), {name: tensor for name, tensor in tensors.items() if not name.startswith("kept.")})
        self._round(self._masters)

    def _whole(self) -> dict[str, Tensor]:
        """The masters, what the optimizer remembers of each, and what is fixed."""
        tensors = {f"fixed.{name}": tensor for name, tensor in self._fixed.items()}
        tensors |= {f"master.{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            tensors |= {f"{part}.{name}": tensor for part, tensor in self._optimizer.state[master].items()}
        return tensors

    def _update(self, lr: float, weight_decay: float) -> float:
        """Moves the masters by the gradient that has gathered on the model, and rounds them into it."""
        # A gradient that is not finite would poison the masters and every version after: crash instead.
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRAD_NORM, error_if_nonfinite=True)
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad
        matrices, others = self._optimizer.param_groups
        matrices["lr"], matrices["weight_decay"], others["lr"] = lr, weight_decay, lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        self._round(self._masters)
        return float(norm)

    @torch.no_grad()
    def _round(self, weights: Mapping[str, Tensor]) -> None:
        """Into the model."""
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name].to(torch.bfloat16))


@torch.no_grad()
def _fill(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if own.keys() != given.keys():
        raise ValueError(f"the state does not fit the model: missing {sorted(own.keys() - given.keys())}, "
                         f"unknown {sorted(given.keys() - own.keys())}")  # fmt: skip
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise ValueError(
                f"the state does not fit the model: {name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
            )
        tensor.copy_(given[name])
