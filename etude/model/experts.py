"""Layers of which every token uses a few experts only.

Which experts a token uses is decided by comparing scores that lie close together, and rounding may turn the decision.
A trainer that decides otherwise than the engine did trains another model than the one that sampled. So the engine
records the choice (`Routing.used`), and the trainer may replay it (`Routing.replay`): the scores still are its own, and
so is their gradient.

Shapes: N tokens, X experts, k experts of a token, M = N * k pairs of a token and an expert of it, E hidden size, F size
within an expert, L layers that have experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.model.config import ExpertsConfig
from etude.model.layers import MLP


class Routing:
    """The choices of one forward pass. `replay`: [.., L, k] of any integer type, with the leading dimensions of the
    tokens; where it is negative, the router decides."""

    def __init__(self, replay: Tensor | None = None) -> None:
        self.replay = replay
        self._used: list[Tensor] = []

    def choose(self, place: int, own: Tensor) -> Tensor:
        """The experts of all tokens in one layer, number `place` of those with experts; the router says `own`."""
        chosen = own
        if self.replay is not None:
            replayed = self.replay[..., place, :].reshape(own.shape).long()
            chosen = torch.where(replayed < 0, own, replayed)
        self._used.append(chosen)
        return chosen

    def used(self) -> Tensor:
        """[N, L, k], after the pass."""
        return torch.stack(self._used, 1)


class Router(nn.Module):
    """Scores every expert for a token. Always in fp32: a choice is not a place to round."""

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, c: ExpertsConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_experts) if c.sigmoid else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """A model that is cast to bf16 keeps the bias as it is; one that is moved takes it along."""
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None:
            self.e_score_correction_bias = bias.to(self.weight.device)
        return self

    def forward(self, x_NE: Tensor, place: int, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """(ids_Nk, weights_Nk) of the experts of each token."""
        c = self.c
        logits_NX = F.linear(x_NE.float(), self.weight.float())
        scores_NX = logits_NX.sigmoid() if c.sigmoid else logits_NX.softmax(-1)
        with torch.no_grad():
            ids_Nk = self._eligible(scores_NX).topk(c.num_experts_per_tok, -1).indices
            if routing is not None:
                ids_Nk = routing.choose(place, ids_Nk)
        weights_Nk = scores_NX.gather(-1, ids_Nk)
        if c.norm_topk_prob:
            weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + 1e-20)
        return ids_Nk, weights_Nk * c.routed_scaling_factor

    def _eligible(self, scores_NX: Tensor) -> Tensor:
        """The scores by which experts are chosen: with the bias that balances their load, and only in the groups whose
        two best experts are the best."""
        if self.e_score_correction_bias is None:
            return scores_NX
        scores_NX = scores_NX + self.e_score_correction_bias
        if self.c.n_group == self.c.topk_group:
            return scores_NX
        scores_NGX = scores_NX.view(len(scores_NX), self.c.n_group, -1)
        group_NG = scores_NGX.topk(2, -1).values.sum(-1)
        best_Ng = group_NG.topk(self.c.topk_group, -1).indices
        out_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, best_Ng, False)
        return scores_NGX.masked_fill(out_NG.unsqueeze(-1), -torch.inf).flatten(-2)


class Stack(nn.Module):
    """The weights of all experts of a layer, one behind the other."""

    def __init__(self, hidden_size: int, c: ExpertsConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.num_experts, hidden_size, c.moe_intermediate_size))

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for kind, stacked in tensors.items():
            for number, tensor in enumerate(stacked):
                if kind == "down_proj":
                    yield f"experts.{number}.down_proj.weight", tensor
                else:
                    for name, view in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                        yield f"experts.{number}.{name}.weight", view

    def forward(self, x_NE: Tensor, ids_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
        """The weighted sum of what the experts of each token make of it. Sorted by expert, so that each reads its
        tokens in one product; added up in the order of `ids_Nk`, so that a token does not depend on its neighbours."""
        num_per_token = ids_Nk.shape[1]
        order_M = ids_Nk.flatten().argsort(stable=True)
        counts_X = torch.bincount(ids_Nk.flatten(), minlength=len(self.down_proj))
        x_ME = x_NE[order_M // num_per_token]
        product = _grouped if x_NE.is_cuda and x_NE.dtype == torch.bfloat16 else _one_by_one
        y_ME = product(x_ME, self.gate_up_proj, self.down_proj, counts_X)
        y_NkE = torch.empty_like(y_ME).index_copy(0, order_M, y_ME).view(*ids_Nk.shape, -1)
        return (y_NkE * weights_Nk.unsqueeze(-1).to(y_NkE.dtype)).sum(1)


def _one_by_one(x_ME: Tensor, gate_up_XFE: Tensor, down_XEF: Tensor, counts_X: Tensor) -> Tensor:
    parts = []
    for expert, x_nE in enumerate(x_ME.split_with_sizes(counts_X.tolist())):
        if len(x_nE):
            gate, up = F.linear(x_nE, gate_up_XFE[expert]).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up, down_XEF[expert]))
    return torch.cat(parts) if parts else x_ME


def _grouped(x_ME: Tensor, gate_up_XFE: Tensor, down_XEF: Tensor, counts_X: Tensor) -> Tensor:
    grouped_mm: Any = F.grouped_mm
    ends_X = counts_X.cumsum(0).int()
    gate, up = grouped_mm(x_ME, gate_up_XFE.transpose(1, 2), offs=ends_X).chunk(2, -1)
    y_ME: Tensor = grouped_mm(F.silu(gate) * up, down_XEF.transpose(1, 2), offs=ends_X)
    return y_ME


class Experts(nn.Module):
    """In the place of an MLP. `place`: which of the layers with experts this is."""

    def __init__(self, hidden_size: int, c: ExpertsConfig, place: int) -> None:
        super().__init__()
        self.place = place
        self.gate = Router(hidden_size, c)
        self.experts = Stack(hidden_size, c)
        shared = c.moe_intermediate_size * c.n_shared_experts
        self.shared_experts = MLP(hidden_size, shared) if shared else None

    def forward(self, x: Tensor, routing: Routing | None) -> Tensor:
        x_NE = x.reshape(-1, x.shape[-1])
        ids_Nk, weights_Nk = self.gate(x_NE, self.place, routing)
        y = self.experts(x_NE, ids_Nk, weights_Nk).view(x.shape)
        return y + self.shared_experts(x) if self.shared_experts else y  # type: ignore[no-any-return]
