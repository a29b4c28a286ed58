"""The reference runner: torch operators, on any device. N new tokens, R sampled rows, L layers with
experts, k experts of a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from etude.engine.adapters import OWN_SLOT, TorchAdapters
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.sampler import sample
from etude.model.attention import KVCache, PagedAttention
from etude.model.experts import Routing
from etude.model.files import hf_state_dict, load_weights
from etude.model.lora import Adapter
from etude.model.transformer import ModelConfig, Transformer

BLOCK_SIZE, MAX_BLOCK_SIZE = 16, 1024
SCALE_BYTES = 4
"""Size of the scale of a row of FP8 keys or values."""


def block_size(config: ModelConfig) -> int:
    """Tokens of a block. A model with recurrent layers has larger blocks, up to the size at which
    the keys and values of a block take as much memory as the states at its end."""
    size = BLOCK_SIZE
    state = state_bytes(config, 2)
    while size < MAX_BLOCK_SIZE and size * kv_bytes(config, 2) < state:
        size *= 2
    return size


def kv_bytes(config: ModelConfig, element_size: int, *, fp8: bool = False) -> int:
    """Bytes of the keys and values of one token, in elements of this size or in FP8."""
    return len(config.cached_layers) * _layer_bytes(config, element_size, fp8)


def windowed_bytes(config: ModelConfig, element_size: int, *, fp8: bool = False) -> int:
    """The part of `kv_bytes` that belongs to layers with a window."""
    return len(config.windowed_layers) * _layer_bytes(config, element_size, fp8)


def _layer_bytes(config: ModelConfig, element_size: int, fp8: bool) -> int:
    heads, size = config.cached_heads
    row = size + SCALE_BYTES if fp8 else size * element_size
    return heads * row * (1 if config.latent else 2)


def state_bytes(config: ModelConfig, element_size: int) -> int:
    """Bytes of the states of recurrent layers at the end of a block."""
    if (c := config.linear) is None:
        return 0
    memory = c.num_value_heads * c.key_head_dim * c.value_head_dim * 4
    return len(c.layers) * (memory + c.conv_dim * (c.conv_kernel_dim - 1) * element_size)


class RoutedExpertsCache:
    """A buffer of the experts that each token was routed to, by slot like its keys and values;
    empty for a model without experts."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._ids: Tensor | None = None
        if experts := config.experts:
            kind = getattr(torch, experts.id_dtype)
            places = (num_blocks, block_size, len(experts.layers), experts.num_experts_per_tok)
            self._ids = torch.zeros(places, dtype=kind, device=device)

    @contextmanager
    def recorded(self, slot_mapping_N: Tensor) -> Iterator[Routing | None]:
        """Record the routed experts of a pass over tokens in these slots."""
        if self._ids is None:
            yield None
            return
        routing = Routing()
        yield routing
        self._ids.flatten(0, 1).index_copy_(0, slot_mapping_N, routing.chosen().to(self._ids.dtype))

    def read(self, blocks: Ints, length: int) -> bytes | None:
        if self._ids is None:
            return None
        chosen = self._ids[torch.from_numpy(blocks).to(self._ids.device)]
        return chosen.flatten(0, 1)[:length].cpu().numpy().tobytes()


class TorchRunner:
    """The reference runner: torch operators over a paged KV cache, on the device of the model."""

    overlaps = False

    def __init__(
        self,
        model: Transformer,
        num_blocks: int,
        *,
        num_windowed_blocks: int = 0,
        with_adapters: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_windowed_blocks = num_windowed_blocks
        self.block_size = block_size(model.config)
        self._adapters = TorchAdapters(model) if with_adapters else None
        self._plain = model
        self._owns_model = False
        self._spare: Transformer | None = None
        self._model = self._ready(model)
        weight = model.model.embed_tokens.weight.detach()
        self._device = weight.device
        self._cache = KVCache(
            model.config, num_blocks, self.block_size, weight, self.num_windowed_blocks,
            fp8=model.arithmetic.fp8_kv,
        )  # fmt: skip
        self._used = RoutedExpertsCache(model.config, num_blocks, self.block_size, self._device)

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        attend = PagedAttention(
            self._cache,
            ids=batch.seq_ids_B.tolist(),
            slot_mapping_GN=batch.slot_mapping_GN,
            starts=batch.query_starts_B.tolist(),
            lengths=batch.seq_lens_B.tolist(),
            block_table_GBM=batch.block_table_GBM,
            num_decode=batch.num_decode,
        )
        order_N = attend.order_N
        tokens_N, positions_N, slot_mapping_N = (
            torch.from_numpy(x[order_N]).to(self._device)
            for x in (batch.tokens_N, batch.positions_N, batch.slot_mapping_N)
        )
        if self._adapters:
            self._adapters.use(batch.adapters_N[order_N])
        with self._used.recorded(slot_mapping_N) as routing:
            hidden_NE = self._model(tokens_N, positions_N, attend, routing)
        sampled = SamplerOutput(tokens=[], logprobs=[])
        if len(batch.logits_indices_R):
            place_N = np.empty_like(order_N)
            place_N[order_N] = np.arange(len(order_N))
            hidden_RE = hidden_NE[
                torch.from_numpy(place_N[batch.logits_indices_R]).to(self._device)
            ]
            sampled = sample(self._model.logits(hidden_RE), batch.sampling)
        return lambda: sampled

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return self._used.read(blocks, length)

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Fill a second model in addition to the one that serves, so that the swap takes no time.
        Afterwards the old one is the spare: freeing and allocating so much memory would block the
        engine's thread."""
        plain, self._spare = self._spare, None
        if plain is None:
            like = self._plain.model.embed_tokens.weight
            plain = (
                Transformer(self._plain.config).to(like.device, like.dtype).requires_grad_(False)
            ).compute_with(self._plain.arithmetic)
        load_weights(plain, tensors)
        model = self._ready(plain)

        def swap() -> None:
            self._spare = self._plain if self._owns_model else None
            self._plain = plain
            self._model = model
            self._owns_model = True

        return swap

    def _ready(self, model: Transformer) -> Transformer:
        """Prepare the model that computes with these parameters."""
        model.quantise()
        if self._adapters is None:
            return model if model.arithmetic.fp8 else _prepacked(model)
        self._adapters.attach(model)
        return model

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        assert self._adapters is not None
        return self._adapters.prepare(slot, adapter)

    def weights(self) -> dict[str, Tensor]:
        own = self._adapters.tensors(OWN_SLOT) if self._adapters else {}
        return own or hf_state_dict(self._plain)


class _PrepackedLinear(nn.Linear):
    """A linear layer whose weight is prepacked, in the order in which the CPU's bf16 units read it.
    Its products have the same bits as those of the plain layer."""

    def __init__(self, plain: nn.Linear | nn.Embedding) -> None:
        rows, columns = plain.weight.shape
        has_bias = isinstance(plain, nn.Linear) and plain.bias is not None
        super().__init__(columns, rows, bias=has_bias, device="meta")
        self.load_state_dict(plain.state_dict(), assign=True)
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._prepacked, self.bias, "none", [], ""
        )
        return product


class _PrepackedTransformer(Transformer):
    """A transformer with prepacked linear layers, on the parameters of another model. The head is
    prepacked too, whether or not it is the embedding table."""

    def __init__(self, model: Transformer) -> None:
        with torch.device("meta"):
            super().__init__(model.config)
        self.load_state_dict(model.state_dict(), assign=True)
        self.rope = model.rope
        self.local_rope = model.local_rope
        self._head = _PrepackedLinear(
            self.model.embed_tokens if self.lm_head is None else self.lm_head
        )
        for path, module in list(self.named_modules()):
            if isinstance(module, nn.Linear) and module is not self.lm_head:
                self.set_submodule(path, _PrepackedLinear(module))
        self.compute_with(model.arithmetic)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.bent(self._head(hidden).float())


def _prepacked(model: Transformer) -> Transformer:
    """A prepacked copy of the model for inference on a CPU in bf16; elsewhere the model itself. The
    copy takes the memory of the matrices once more, and makes decoding of a small model about a
    third faster."""
    weight = model.model.embed_tokens.weight
    on_cpu = weight.dtype == torch.bfloat16 and not weight.is_cuda
    with torch.inference_mode():
        return (
            _PrepackedTransformer(model)
            if on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            else model
        )
