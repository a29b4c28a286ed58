"""The routers of a sparse model during a training step: router replay, router mismatch, and load
balancing.

The load of the experts is balanced by the method of the model's family. DeepSeek's routers have a
bias for each expert that only affects the choice; after a step it is raised a little for experts
with less than their share of tokens and lowered for the others, and it is published like any
weight. Other families have an auxiliary loss, which is lowest when all experts are equally likely
and equally used.

If the tokens of a microbatch are divided among ranks (`context_parallel`), a rank's routing covers
its own tokens. Counts are summed over all ranks at the end of a step; the loss is a product of two
means over all tokens of the microbatch, so these ranks exchange the sums of both.

Shapes: T tokens that are read (by this rank), N those that the loss counts, X experts, k experts of
a token, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Row
from etude.model.config import ExpertsConfig
from etude.model.experts import Router, Routing, read_ids
from etude.model.transformer import Transformer
from etude.train.context_parallel import ContextShare
from etude.train.distributed import SINGLE_PROCESS, World
from etude.train.packing import PackedMicrobatch

BIAS_STEP = 1e-3
"""The step of a bias, as in DeepSeek-V3; scores are between 0 and 1."""


class ExpertRouters:
    """The routers of a sparse model during one step: replay, mismatches and load balancing. Call
    `begin_microbatch`, the forward pass and `end_microbatch` for each microbatch, then
    `end_step`."""

    def __init__(
        self, model: Transformer, *, min_score: float = 0.0, router_balance: bool = False
    ) -> None:
        self._config = model.config.experts
        self._min_score = min_score
        self._balance = router_balance
        modules = model.modules() if self._config else ()
        self._routers = [module for module in modules if isinstance(module, Router)]
        self.num_replayed = self.num_mismatched = self.num_replaced = 0
        """Tokens with replayed experts, those of them for which any router would have chosen
        differently, and replayed experts that were replaced."""
        size = (len(self._routers), self._config.num_experts if self._config else 0)
        self.loads_LX = torch.zeros(size, dtype=torch.int64)

    @property
    def mismatch_frac(self) -> float | None:
        """The share of the replayed tokens for which a router disagrees; None if nothing was
        replayed."""
        return self.num_mismatched / self.num_replayed if self.num_replayed else None

    @property
    def replaced_frac(self) -> float | None:
        """The share of the replayed experts that scored below `min_score`, and were replaced."""
        if not self.num_replayed or not self._config:
            return None
        return self.num_replaced / (
            self.num_replayed * len(self._routers) * self._config.num_experts_per_tok
        )

    def begin_microbatch(self, micro: PackedMicrobatch) -> Routing | None:
        """The routing to pass to the forward pass; None if nothing is replayed or balanced."""
        if not self._config or (micro.experts_TLk is None and not self._balance):
            return None
        replay, share = micro.experts_TLk, micro.share
        if replay is not None and share is not None:
            replay = share.take(replay, fill=-1)
        return Routing(
            replay,
            min_score=self._min_score,
            keep_scores=self._balance and not self._config.sigmoid,
        )

    def token_mismatches(self, routing: Routing | None, micro: PackedMicrobatch) -> Tensor:
        """The router mismatch of each token that the loss counts; call before `end_microbatch`. 1
        if any router would have chosen another expert at the position that predicts the token, and
        0 if not; NaN if nothing was replayed."""
        indices_N, share = micro.logits_indices_N, micro.share
        if routing is None or routing.replay is None:
            return torch.full_like(indices_N, torch.nan, dtype=torch.float32)
        mismatches_T = routing.mismatches().float()
        if share is None:
            return mismatches_T[indices_N]
        own_n, places_n = share.find(indices_N)
        return share.group.assemble(mismatches_T[own_n], places_n, len(indices_N))

    def end_microbatch(self, routing: Routing | None, micro: PackedMicrobatch) -> Tensor | float:
        """Count mismatches and loads; return the load-balancing loss, a mean over the tokens of the
        microbatch."""
        # a rank without work only takes part in collectives
        if routing is None or not self._config or not micro.num_loss_tokens:
            return 0.0
        if routing.replay is not None:
            self.num_replayed += int((routing.replay[..., 0, 0] >= 0).sum())
            self.num_mismatched += int(routing.mismatches().sum())
            self.num_replaced += int(routing.replaced().sum())
        if not self._balance:
            return 0.0
        share = micro.share
        num_tokens = len(micro.tokens_T) if share is None else share.num_tokens
        used_TLk = routing.chosen()[:num_tokens]
        for layer, load_X in enumerate(self.loads_LX):
            load_X += used_TLk[:, layer].flatten().bincount(minlength=len(load_X)).cpu()
        if self._config.sigmoid:
            return 0.0
        scores_TX = [scores[:num_tokens] for scores in routing.scores]
        return self._config.router_aux_loss_coef * balance_loss(scores_TX, used_TLk, share)

    @torch.no_grad()
    def end_step(self, world: World = SINGLE_PROCESS) -> None:
        """Sum the counts over all ranks and adjust the routers' biases, after the last
        microbatch."""
        counts = (
            self.num_replayed,
            self.num_mismatched,
            self.num_replaced,
            *self.loads_LX.flatten().tolist(),
        )
        self.num_replayed, self.num_mismatched, self.num_replaced, *loads = map(
            int, world.all_reduce_sum(*counts)
        )
        self.loads_LX = torch.tensor(loads).view(self.loads_LX.shape)
        for router, load_X in zip(self._routers, self.loads_LX, strict=True):
            if self._balance and (bias_X := router.e_score_correction_bias) is not None:
                bias_X += BIAS_STEP * (load_X.double().mean() - load_X).sign().to(bias_X)


def experts_to_replay(
    row: Row, config: ExpertsConfig | None, fetch: Callable[[str], bytes]
) -> Tensor | None:
    """The routed experts of the first tokens of a row, [tokens, L, k]. `fetch` reads them by the
    key in the row."""
    if row.experts is None:
        return None
    if config is None:
        raise EtudeError(
            f"the row of {row.sample} has recorded experts, but the model has none: another "
            f"model sampled it"
        )
    try:
        ids = read_ids(fetch(row.experts), config)
    except ValueError as e:
        raise EtudeError(
            f"the recorded experts of the row of {row.sample} do not fit this model: {e}"
        ) from e
    if len(ids) > len(row.tokens):
        raise EtudeError(
            f"the recorded experts of the row of {row.sample} belong to another row: they are "
            f"for {len(ids)} tokens, but the row has {len(row.tokens)}"
        )
    return ids


def balance_loss(
    scores_TX: Sequence[Tensor], used_TLk: Tensor, share: ContextShare | None = None
) -> Tensor:
    """The load-balancing loss of Switch Transformers: the number of experts times the sum over them
    of load times mean score, all layers taken together. `share`: the tokens are only a part of the
    microbatch, and the loss is that of the whole."""
    scores_TLX = torch.stack(list(scores_TX), 1)
    num_tokens, num_layers, num_experts = scores_TLX.shape
    load_X = used_TLk.flatten().bincount(minlength=num_experts)
    sums_2X = torch.stack((load_X.to(scores_TLX), scores_TLX.sum((0, 1))))
    if share is not None:
        sums_2X, num_tokens = share.group.sum(sums_2X), share.total
    means_2X = sums_2X / (num_tokens * num_layers)
    return num_experts * means_2X.prod(0).sum()
