"""A model whose arithmetic is invariant, on any device: what it computes for a token does not depend on the plan.

It is the model definition as the trainer runs it, over a cache. For models that have kernels of their own on CUDA there
is a faster way to the same promise: `CudaRunner` with `invariant`.

Shapes: N new tokens, R rows that draw, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from etude.engine.plan import Drawn, Draws, Ints, Plan
from etude.engine.runner import BLOCK_SIZE
from etude.engine.sampler import sample
from etude.model.attention import KVCache
from etude.model.experts import Routing
from etude.model.files import load_weights, weights
from etude.model.tiled_attention import PagedInTiles
from etude.model.transformer import Transformer


class InvariantRunner:
    overlaps = False
    block_size = BLOCK_SIZE

    def __init__(self, model: Transformer, num_blocks: int) -> None:
        self.num_blocks, self._model = num_blocks, model
        weight = model.model.embed_tokens.weight.detach()
        self._device = weight.device
        self._cache = KVCache(model.config, num_blocks, BLOCK_SIZE, like=weight)
        self._experts: Tensor | None = None
        if experts := model.config.experts:
            kind = torch.uint8 if experts.num_experts <= 256 else torch.int16
            places = (num_blocks * BLOCK_SIZE, len(experts.layers), experts.num_experts_per_tok)
            self._experts = torch.zeros(places, dtype=kind, device=self._device)

    @torch.inference_mode()
    def start(self, plan: Plan) -> Callable[[], Drawn]:
        attend = PagedInTiles(
            self._cache,
            self._model.config.num_attention_heads,
            slots_N=plan.slots_N,
            starts_B=plan.starts_B,
            lengths_B=plan.lengths_B,
            blocks_BM=plan.blocks_BM,
        )
        tokens_N, positions_N, slots_N, rows_R = (
            torch.from_numpy(x).to(self._device) for x in (plan.tokens_N, plan.positions_N, plan.slots_N, plan.rows_R)
        )
        routing = None if self._experts is None else Routing()
        hidden_NE = self._model(tokens_N, positions_N, attend, routing)
        if self._experts is not None and routing is not None:
            self._experts.index_copy_(0, slots_N, routing.used().to(self._experts.dtype))
        drawn = Drawn(tokens=[], logprobs=[])
        if len(rows_R):
            drawn = sample_as_trained(self._model.logits(hidden_NE[rows_R]), plan.draws)
        return lambda: drawn

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        if self._experts is None:
            return None
        shape = (self.num_blocks, self.block_size, *self._experts.shape[1:])
        where = torch.from_numpy(blocks).to(self._device)
        return self._experts.view(shape)[where].flatten(0, 1)[:length].cpu().numpy().tobytes()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        like = self._model.model.embed_tokens.weight
        model = Transformer(self._model.config).to(like.device, like.dtype).requires_grad_(False)
        load_weights(model.compute_with(self._model.arithmetic), tensors)

        def swap() -> None:
            self._model = model

        return swap

    def weights(self) -> dict[str, Tensor]:
        return weights(self._model)


def sample_as_trained(logits_RV: Tensor, draws: Draws) -> Drawn:
    """As `sample`, with log-probs taken as the trainer takes them. It knows nothing of top-k and top-p, though: a row
    that cuts tokens off keeps the log-prob under what it was drawn from."""
    drawn = sample(logits_RV, draws)
    greedy_R = draws.temperature_R == 0
    divisor_R = torch.from_numpy(np.where(greedy_R, np.float32(1), draws.temperature_R)).to(logits_RV.device)
    logp_RV = torch.log_softmax(logits_RV / divisor_R[:, None], -1)
    tokens_R = torch.tensor(drawn.tokens, device=logits_RV.device)
    whole_R = greedy_R | ((draws.top_k_R == 0) & (draws.top_p_R >= 1))
    logprobs_R = np.where(whole_R, logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy(), drawn.logprobs)
    return replace(drawn, logprobs=logprobs_R.tolist())
