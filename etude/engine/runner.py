"""The model operator by operator, on any device. N new tokens, R rows that draw, L layers with experts, k experts of a
token."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from etude.engine.plan import Drawn, Ints, Plan
from etude.engine.sampler import sample
from etude.model.attention import KVCache, Paged
from etude.model.experts import Routing
from etude.model.files import load_weights, weights
from etude.model.transformer import Transformer

BLOCK_SIZE = 16


class CpuRunner:
    overlaps = False
    block_size = BLOCK_SIZE

    def __init__(self, model: Transformer, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._plain, self._ours = model, False
        self._spare: Transformer | None = None
        self._model = _packed(model)
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
            torch.from_numpy(x[order_N]).to(self._device) for x in (plan.tokens_N, plan.positions_N, plan.slots_N)
        )
        routing = None if self._experts is None else Routing()
        hidden_NE = self._model(tokens_N, positions_N, attend, routing)
        if self._experts is not None and routing is not None:
            self._experts.index_copy_(0, slots_N, routing.used().to(self._experts.dtype))
        drawn = Drawn(tokens=[], logprobs=[])
        if len(plan.rows_R):
            place_N = np.empty_like(order_N)
            place_N[order_N] = np.arange(len(order_N))
            hidden_RE = hidden_NE[torch.from_numpy(place_N[plan.rows_R]).to(self._device)]
            drawn = sample(self._model.logits(hidden_RE), plan.draws)
        return lambda: drawn

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        if self._experts is None:
            return None
        shape = (self.num_blocks, self.block_size, *self._experts.shape[1:])
        by_block = self._experts.view(shape)[torch.from_numpy(blocks).to(self._device)]
        return by_block.flatten(0, 1)[:length].cpu().numpy().tobytes()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """A second model beside the one that serves, so that changing over takes no time. The one that served before
        is filled again: to give back and fetch so much memory would hold up the engine's thread."""
        plain, self._spare = self._spare, None
        if plain is None:
            like = self._plain.model.embed_tokens.weight
            plain = Transformer(self._plain.config).to(like.device, like.dtype).requires_grad_(False)
        load_weights(plain, tensors)
        model = _packed(plain)

        def swap() -> None:
            self._spare = self._plain if self._ours else None
            self._plain, self._model, self._ours = plain, model, True

        return swap

    def weights(self) -> dict[str, Tensor]:
        return weights(self._plain)


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
    weight = model.model.embed_tokens.weight
    on_cpu = weight.dtype == torch.bfloat16 and not weight.is_cuda
    with torch.inference_mode():
        return _PackedTransformer(model) if on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported() else model
