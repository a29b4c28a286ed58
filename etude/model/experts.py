"""Mixture-of-experts layers: every token uses only a few experts.

A router picks the experts of a token by comparing scores that are close together, and rounding may
change its choice. If the trainer chooses differently than the engine did, it trains a model other
than the one that sampled. So the engine records the choice (`Routing.chosen`), and the trainer may
replay it (`Routing.replay`); the scores and their gradient are still its own. A replayed expert
should be one that rounding or a few training steps could have made its own choice; an expert that
the trainer's router finds implausible is replaced by the best remaining one (`Routing.min_score`).

Shapes: N tokens, X experts, k experts of a token, M = N * k pairs of a token and one of its
experts, E hidden size, F size within an expert, L layers that have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.model.config import ExpertsConfig
from etude.model.layers import MLP, Linear
from etude.model.numerics import PLAIN


class Routing:
    """The expert choices of one forward pass, layer after layer, and what was observed of the
    routers."""

    def __init__(
        self, replay: Tensor | None = None, *, min_score: float = 0.0, keep_scores: bool = False
    ) -> None:
        """`replay`: [.., L, k] of any integer type, with the leading dimensions of the tokens; the
        router decides where it is negative. `min_score`: a replayed expert is used if its score is
        at least this share of the lowest score among the router's own choices; 0 accepts all.
        `keep_scores`: keep `scores` after the pass, with their gradient."""
        self.replay = replay
        self.min_score = min_score
        self.keep_scores = keep_scores
        self.scores: list[Tensor] = []
        """One [N, X] for each layer, if they are kept."""
        self._used: list[Tensor] = []
        self._differs: list[Tensor] = []
        self._replaced: list[Tensor] = []

    def choose(self, place: int, scores_NX: Tensor, ranks_NX: Tensor, num: int) -> Tensor:
        """Choose the experts of all tokens in one layer, number `place` of those with experts.
        Without replay these are the `num` experts that `ranks_NX` ranks first. A layer that is
        recomputed (gradient checkpointing) gets its first choice again."""
        if place < len(self._used):
            return self._used[place]
        if self.keep_scores:
            self.scores.append(scores_NX)
        with torch.no_grad():
            own_Nk = ranks_NX.topk(num, -1).indices
            self._used.append(
                own_Nk if self.replay is None else self._told(place, own_Nk, scores_NX, ranks_NX)
            )
        return self._used[-1]

    def _told(self, place: int, own_Nk: Tensor, scores_NX: Tensor, ranks_NX: Tensor) -> Tensor:
        assert self.replay is not None
        told_Nk = self.replay[..., place, :].reshape(own_Nk.shape).long()
        is_told_Nk, told_Nk = told_Nk >= 0, told_Nk.clamp(min=0)
        is_own_Nk = _marked(own_Nk, ranks_NX.shape[-1]).gather(-1, told_Nk)
        self._differs.append((is_told_Nk & ~is_own_Nk).any(-1))
        least_N1 = self.min_score * scores_NX.gather(-1, own_Nk).amin(-1, keepdim=True)
        holds_Nk = is_told_Nk & (scores_NX.gather(-1, told_Nk) >= least_N1)
        self._replaced.append((is_told_Nk & ~holds_Nk).sum(-1))
        # Experts that are kept keep their place, since sums are taken in this order; the router's
        # best experts fill the others.
        taken_NX = _marked(
            torch.where(holds_Nk, told_Nk, ranks_NX.shape[-1]), ranks_NX.shape[-1] + 1
        )[:, :-1]
        best_Nk = ranks_NX.masked_fill(taken_NX, -torch.inf).topk(own_Nk.shape[-1], -1).indices
        next_Nk = (~holds_Nk).cumsum(-1) - 1
        return torch.where(holds_Nk, told_Nk, best_Nk.gather(-1, next_Nk.clamp(min=0)))

    def chosen(self) -> Tensor:
        """[N, L, k], after the pass."""
        return torch.stack(self._used, 1)

    def mismatches(self) -> Tensor:
        """Mask [N], after a pass with replay: True if the router would have chosen another expert
        in any layer."""
        return torch.stack(self._differs, 1).any(1)

    def replaced(self) -> Tensor:
        """Counts [N], after a pass with replay: the experts of all layers that were to be replayed
        and were replaced."""
        return torch.stack(self._replaced, 1).sum(1)


def _marked(ids_Nk: Tensor, size: int) -> Tensor:
    """[N, size], True at the ids."""
    return torch.zeros(len(ids_Nk), size, dtype=torch.bool, device=ids_Nk.device).scatter_(
        -1, ids_Nk, True
    )


def read_ids(data: bytes, c: ExpertsConfig) -> Tensor:
    """Parse the expert ids that an engine records, into [tokens, L, k]: one byte for each id, or
    two with more than 256 experts."""
    kind: torch.dtype = getattr(torch, c.id_dtype)
    token_bytes = len(c.layers) * c.num_experts_per_tok * kind.itemsize
    if not data or len(data) % token_bytes:
        raise ValueError(
            f"{len(data)} bytes of expert ids do not fit the model: they must be a multiple of "
            f"{token_bytes} bytes, those of one token"
        )
    ids = torch.frombuffer(bytearray(data), dtype=kind).view(
        -1, len(c.layers), c.num_experts_per_tok
    )
    if not 0 <= int(ids.min()) <= int(ids.max()) < c.num_experts:
        raise ValueError(
            f"the recorded experts include expert {int(ids.max())}, but the model has "
            f"{c.num_experts} experts"
        )
    return ids


class Router(nn.Module):
    """Scores every expert for a token. Always in fp32, because rounding could change the choice."""

    arithmetic = PLAIN
    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, c: ExpertsConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(c.num_experts)) if c.router_bias else None
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(c.num_experts) if c.sigmoid else None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the dtype of the bias when the model is cast to bf16; move the bias when the model
        is moved."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None:
            self.e_score_correction_bias = bias.to(self.weight.device)
        return self

    def forward(self, x_NE: Tensor, place: int, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """(ids_Nk, weights_Nk) of the experts of each token."""
        c = self.c
        scores_NX = self.scores(x_NE)
        ranks_NX = self._ranks(scores_NX.detach())
        ids_Nk = (routing or Routing()).choose(place, scores_NX, ranks_NX, c.num_experts_per_tok)
        weights_Nk = scores_NX.gather(-1, ids_Nk)
        if c.norm_topk_prob:
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
        return ids_Nk, weights_Nk * c.routed_scaling_factor

    def scores(self, x_NE: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        logits_NX = self.arithmetic.linear(x_NE.float(), self.weight.float(), bias)
        return self.arithmetic.sigmoid(logits_NX) if self.c.sigmoid else logits_NX.softmax(-1)

    def _ranks(self, scores_NX: Tensor) -> Tensor:
        """The scores by which experts are chosen: with the load-balancing bias, and restricted to
        the groups with the best experts."""
        if self.e_score_correction_bias is not None:
            scores_NX = scores_NX + self.e_score_correction_bias
        if self.c.n_group == self.c.topk_group:
            return scores_NX
        scores_NGX = scores_NX.view(len(scores_NX), self.c.n_group, -1)
        group_NG = scores_NGX.topk(self.c.best_in_group, -1).values.sum(-1)
        best_Ng = group_NG.topk(self.c.topk_group, -1).indices
        out_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, best_Ng, False)
        return scores_NGX.masked_fill(out_NG.unsqueeze(-1), -torch.inf).flatten(-2)


class ExpertExchange(Protocol):
    """Moves tokens to their experts and back when a layer's experts are divided among processes."""

    places_X: Tensor
    """Index of each expert in the order in which the processes hold them."""

    def __call__(
        self, x_ME: Tensor, ends_X: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Outputs of the experts for tokens sorted by the place of their expert; `compute`
        evaluates the experts of this process."""


class StackedExperts(nn.Module):
    """The stacked weights of all experts of a layer; with an `exchange`, those that this process
    holds."""

    arithmetic = PLAIN
    exchange: ExpertExchange | None = None

    def __init__(self, hidden_size: int, c: ExpertsConfig, act: str = "silu") -> None:
        super().__init__()
        self.act = act
        self.num_experts = c.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(c.num_experts, 2 * c.moe_intermediate_size, hidden_size)
        )
        self.down_proj = nn.Parameter(
            torch.empty(c.num_experts, hidden_size, c.moe_intermediate_size)
        )

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for kind, stacked in tensors.items():
            for number, tensor in enumerate(stacked):
                if kind == "down_proj":
                    yield f"experts.{number}.down_proj.weight", tensor
                else:
                    for name, view in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                        yield f"experts.{number}.{name}.weight", view

    def forward(self, x_NE: Tensor, ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """Weighted sum of the outputs of each token's experts. Tokens are sorted by expert, so that
        each expert takes one product; sums follow the order of `ids_Nk`, so that a token does not
        depend on its neighbours."""
        num_per_token = ids_Nk.shape[1]
        exchange = self.exchange
        if exchange is not None:
            ids_Nk = exchange.places_X[ids_Nk]
        ids_M, order_M = ids_Nk.flatten().sort(stable=True)
        # Not `bincount`: the compiler cannot know the size of its result.
        ends_X = torch.searchsorted(
            ids_M, torch.arange(1, self.num_experts + 1, device=ids_M.device)
        )
        x_ME = x_NE[order_M // num_per_token]
        if exchange is None:
            y_ME = self._each(x_ME, ends_X)
        else:
            y_ME = exchange(x_ME, ends_X, self._each)
        y_NkE = torch.empty_like(y_ME).index_copy(0, order_M, y_ME).view(*ids_Nk.shape, -1)
        return (y_NkE * weights_Nk.unsqueeze(-1).to(y_NkE.dtype)).sum(1)

    def _each(self, x_ME: Tensor, ends_X: Tensor) -> Tensor:
        """Outputs of each expert for its tokens, which are sorted by expert and end at `ends_X`."""
        bf16 = x_ME.is_cuda and x_ME.dtype == torch.bfloat16 and len(x_ME)
        if bf16 and not self.arithmetic.invariant and self.act == "silu":
            return _grouped(x_ME, self.gate_up_proj, self.down_proj, ends_X.int())
        return _one_by_one(x_ME, ends_X, self._one)

    def _one(self, expert: int, x_nE: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        act = self.arithmetic.activation(self.act)
        gate, up = linear(x_nE, self.gate_up_proj[expert], None).chunk(2, -1)
        return linear(act(gate) * up, self.down_proj[expert], None)


class ClampedExperts(StackedExperts):
    """Experts of gpt-oss: with biases and clamped gates. The matrices keep the layout of its files,
    which hold all experts of a layer in one tensor: inputs by outputs, with the numbers of gate and
    up alternating."""

    def __init__(self, hidden_size: int, c: ExpertsConfig) -> None:
        nn.Module.__init__(self)
        number, size = c.num_experts, c.moe_intermediate_size
        self.num_experts = number
        assert c.swiglu_limit is not None
        self.limit = c.swiglu_limit
        self.alpha = c.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(number, hidden_size, 2 * size))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(number, 2 * size))
        self.down_proj = nn.Parameter(torch.empty(number, size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.zeros(number, hidden_size))

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield f"experts.{name}", tensor

    def _each(self, x_ME: Tensor, ends_X: Tensor) -> Tensor:
        bf16 = x_ME.is_cuda and x_ME.dtype == torch.bfloat16 and len(x_ME)
        if not bf16 or self.arithmetic.invariant:
            return _one_by_one(x_ME, ends_X, self._one)
        grouped_mm: Any = F.grouped_mm
        rows_M = torch.arange(len(x_ME), device=x_ME.device)
        expert_M = torch.searchsorted(ends_X, rows_M, right=True)
        both = grouped_mm(x_ME, self.gate_up_proj, offs=ends_X.int())
        act = self._gated(both + self.gate_up_proj_bias[expert_M])
        y_ME: Tensor = grouped_mm(act, self.down_proj, offs=ends_X.int())
        return y_ME + self.down_proj_bias[expert_M]

    def _one(self, expert: int, x_nE: Tensor) -> Tensor:
        linear = self.arithmetic.linear
        both = linear(x_nE, self.gate_up_proj[expert].T, self.gate_up_proj_bias[expert])
        return linear(self._gated(both), self.down_proj[expert].T, self.down_proj_bias[expert])

    def _gated(self, both: Tensor) -> Tensor:
        gate = both[..., 0::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * self.arithmetic.sigmoid(gate * self.alpha))


def _one_by_one(x_ME: Tensor, ends_X: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    counts_X = ends_X.diff(prepend=ends_X.new_zeros(1))
    parts = [
        compute(expert, x_nE)
        for expert, x_nE in enumerate(x_ME.split_with_sizes(counts_X.tolist()))
        if len(x_nE)
    ]
    # Without tokens the weights still get a gradient, of zeros, because ranks sum gradients.
    return torch.cat(parts) if parts else compute(0, x_ME)


def _grouped(x_ME: Tensor, gate_up_XFE: Tensor, down_XEF: Tensor, ends_X: Tensor) -> Tensor:
    grouped_mm: Any = F.grouped_mm
    gate, up = grouped_mm(x_ME, gate_up_XFE.transpose(1, 2), offs=ends_X).chunk(2, -1)
    y_ME: Tensor = grouped_mm(F.silu(gate) * up, down_XEF.transpose(1, 2), offs=ends_X)
    return y_ME


class SparseMoE(nn.Module):
    """A sparse mixture of experts in place of an MLP. `place`: its index among the layers with
    experts."""

    def __init__(self, hidden_size: int, c: ExpertsConfig, place: int, act: str = "silu") -> None:
        super().__init__()
        self.place = place
        self.gate = Router(hidden_size, c)
        self.experts = (
            StackedExperts(hidden_size, c, act)
            if c.swiglu_limit is None
            else ClampedExperts(hidden_size, c)
        )
        own = c.shared_expert_intermediate_size
        shared = own or c.moe_intermediate_size * c.n_shared_experts
        self.shared_experts = MLP(hidden_size, shared, act=act) if shared else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if own else None
        if self.shared_expert_gate is not None:
            self.shared_expert_gate.quantisable = False

    def forward(self, x: Tensor, routing: Routing | None) -> Tensor:
        x_NE = x.reshape(-1, x.shape[-1])
        ids_Nk, weights_Nk = self.gate(x_NE, self.place, routing)
        y = self.experts(x_NE, ids_Nk, weights_Nk).view(x.shape)
        if self.shared_experts is None:
            return y  # type: ignore[no-any-return]
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.gate.arithmetic.sigmoid(self.shared_expert_gate(x))
        return y + shared  # type: ignore[no-any-return]
