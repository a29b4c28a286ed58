"""Who computes a model, and the model on a CPU, operator by operator.

N new tokens, R rows that draw, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from etude.engine import native
from etude.engine.plan import Drawn, Ints, Plan, Runner
from etude.engine.sampler import sample
from etude.model.attention import KVCache, Paged
from etude.model.experts import Routing
from etude.model.files import load_weights
from etude.model.transformer import ModelConfig, Transformer

BLOCK_SIZE = 16


def num_blocks(config: ModelConfig, item_bytes: int, max_batch: int, kv_bytes: int) -> int:
    """Blocks for four times as many tokens as can run at once, so that sessions find what they said before; in any case
    within `kv_bytes`, and in any case for one sequence."""
    heads, size = config.cached_heads
    token_bytes = config.num_hidden_layers * heads * size * item_bytes * (1 if config.latent else 2)
    context = config.max_position_embeddings
    tokens = max(context, min(4 * max_batch * context, kv_bytes // token_bytes))
    return -(-tokens // BLOCK_SIZE)


def runner_for(model: Transformer, max_batch: int, kv_bytes: int) -> Runner:
    """The fastest that knows the model. But one request at a time is answered by the operators of the model definition,
    as they are: whoever runs these too gets the same bits, and that is what a deterministic run is checked by."""
    weight = model.model.embed_tokens.weight
    blocks = num_blocks(model.config, weight.element_size(), max_batch, kv_bytes)
    if max_batch > 1 and native.can_run(model.config, weight.dtype):
        return native.NativeRunner(model, blocks)
    return CpuRunner(model, blocks)


class CpuRunner:
    overlaps = False
    block_size = BLOCK_SIZE

    def __init__(self, model: Transformer, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._model = _packed(model)
        self._cache = KVCache(model.config, num_blocks, BLOCK_SIZE, like=model.model.embed_tokens.weight.detach())
        self._experts: Tensor | None = None
        if experts := model.config.experts:
            kind = torch.uint8 if experts.num_experts <= 256 else torch.int16
            places = (num_blocks * BLOCK_SIZE, len(experts.layers), experts.num_experts_per_tok)
            self._experts = torch.zeros(places, dtype=kind)

    @torch.inference_mode()
    def start(self, plan: Plan) -> Callable[[], Drawn]:
        attend = Paged(
            self._cache,
            ids=plan.ids_B.tolist(),
            slots_N=plan.slots_N,
            starts=plan.starts_B.tolist(),
            lengths=plan.lengths_B.tolist(),
            blocks_BM=plan.blocks_BM,
            num_single=plan.num_single,
        )
        order_N = attend.order_N
        tokens_N, positions_N, slots_N = (
            torch.from_numpy(x[order_N]) for x in (plan.tokens_N, plan.positions_N, plan.slots_N)
        )
        routing = None if self._experts is None else Routing()
        hidden_NE = self._model(tokens_N, positions_N, attend, routing)
        if self._experts is not None and routing is not None:
            self._experts.index_copy_(0, slots_N, routing.used().to(self._experts.dtype))
        drawn = Drawn(tokens=[], logprobs=[])
        if len(plan.rows_R):
            place_N = np.empty_like(order_N)
            place_N[order_N] = np.arange(len(order_N))
            hidden_RE = hidden_NE[torch.from_numpy(place_N[plan.rows_R])]
            drawn = sample(self._model.logits(hidden_RE), plan.draws)
        return lambda: drawn

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        if self._experts is None:
            return None
        shape = (self.num_blocks, self.block_size, *self._experts.shape[1:])
        return self._experts.view(shape)[torch.from_numpy(blocks)].flatten(0, 1)[:length].numpy().tobytes()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """A second model beside the one that serves, so that changing over takes no time."""
        like = self._model.model.embed_tokens.weight
        model = Transformer(self._model.config).to(like.dtype).requires_grad_(False)
        load_weights(model, tensors)
        model = _packed(model)

        def swap() -> None:
            self._model = model

        return swap


class _Packed(nn.Linear):
    """A matrix in the order in which the CPU's units for bf16 read it. Products have the same bits as without."""

    def __init__(self, plain: nn.Linear | nn.Embedding) -> None:
        rows, columns = plain.weight.shape
        has_bias = isinstance(plain, nn.Linear) and plain.bias is not None
        super().__init__(columns, rows, bias=has_bias, device="meta")
        self.load_state_dict(plain.state_dict(), assign=True)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


class _PackedTransformer(Transformer):
    """On the parameters of another model. The head is packed too, whether or not it is the table of embeddings."""

    def __init__(self, model: Transformer) -> None:
        with torch.device("meta"):
            super().__init__(model.config)
        self.load_state_dict(model.state_dict(), assign=True)
        self.rope = model.rope
        self._head = _Packed(self.model.embed_tokens if self.lm_head is None else self.lm_head)
        for path, module in list(self.named_modules()):
            if isinstance(module, nn.Linear) and module is not self.lm_head:
                self.set_submodule(path, _Packed(module))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()  # type: ignore[no-any-return]


def _packed(model: Transformer) -> Transformer:
    """The same model for inference only. It costs the memory of the matrices once more, and makes decoding of a small
    model about a third faster."""
    is_bf16 = model.model.embed_tokens.weight.dtype == torch.bfloat16
    with torch.inference_mode():
        return _PackedTransformer(model) if is_bf16 and torch.ops.mkldnn._is_mkldnn_bf16_supported() else model
