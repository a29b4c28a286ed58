"""The native CPU runner: a forward pass in one call of `native.c`, if that is built and supports
the model.

`pip install` compiles it if the machine has a compiler; it is a plain shared library, and its
threads are those of torch. It computes dense models in fp32 and bf16; `runner.TorchRunner` computes
all others, operator by operator. A token gets the same bits whatever else is in its pass.

Matrices have the layout that `native.c` reads. Shapes: U units of 32 outputs, I inputs of a matrix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from etude.core.isa import Isa, chosen_isa, load_library
from etude.engine.adapters import OWN_SLOT
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.sampler import sample
from etude.model.files import hf_state_dict as published
from etude.model.files import load_weights
from etude.model.lora import Adapter, merged
from etude.model.transformer import ModelConfig, Transformer

UNIT, MAX_HEAD = 32, 256
BLOCK_SIZE = 32
_FP32, _BF16, _TILES = range(3)
_NUMBER, _DATA = ctypes.c_int64, ctypes.c_void_p


LIBRARY = load_library(Path(__file__).parent, "_native")
if LIBRARY:
    LIBRARY.scratch_bytes.restype = _NUMBER
ISA = chosen_isa(LIBRARY.best_isa()) if LIBRARY else Isa.GENERIC


class _Layer(ctypes.Structure):
    """Pointers to the weights and the KV cache of one layer, as `native.h` declares them."""

    _fields_ = [
        (name, _DATA)
        for name in (
            "norm",
            "bias",
            "q_norm",
            "k_norm",
            "mlp_norm",
            "qkv",
            "out",
            "gate_up",
            "down",
            "keys",
            "values",
        )
    ]


class _Model(ctypes.Structure):
    """The sizes of a model and pointers to its weights, as `native.h` declares them."""

    _fields_ = [
        *(
            (name, _NUMBER)
            for name in (
                "isa",
                "format",
                "num_layers",
                "hidden",
                "inner",
                "heads",
                "kv_heads",
                "head_size",
                "vocabulary",
            )  # fmt: skip
        ),
        ("eps", ctypes.c_double),
        *((name, _DATA) for name in ("rope", "embedding", "head", "norm", "layers")),
    ]


class _Pass(ctypes.Structure):
    """The inputs and outputs of one forward pass, as `native.h` declares them."""

    _fields_ = [
        *((name, _NUMBER) for name in ("num_tokens", "num_rows", "width")),
        *(
            (name, _DATA)
            for name in (
                "tokens",
                "positions",
                "slots",
                "starts",
                "sequence",
                "blocks",
                "rows",
                "logits",
                "scratch",
            )
        ),
        *((name, _NUMBER) for name in ("longest", "threads")),
    ]


SUPPORTED = {"qkv_bias": (True,), "qk_norm": ("head",)}
"""The features that `native.c` computes beyond a plain layer; it runs no model with any other
feature."""


def unsupported(c: ModelConfig, dtype: torch.dtype) -> list[str]:
    """The reasons why `native.c` does not run a model, as text; empty if it does."""
    sizes = {"hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size}
    sizes |= {"head_dim": c.head_dim}
    odd = [f"{name} {size}" for name, size in sizes.items() if size % UNIT]
    too_large = [f"head_dim {c.head_dim}"] if c.head_dim > MAX_HEAD else []
    kind = [] if dtype in (torch.float32, torch.bfloat16) else [f"{dtype}"]
    missing = [] if LIBRARY is not None else ["no compiled native.c"]
    return missing + kind + c.unsupported_features(SUPPORTED) + odd + too_large


class CpuRunner:
    """A runner for dense models on a CPU, with the forward pass in C."""

    overlaps = False
    block_size = BLOCK_SIZE
    num_windowed_blocks = 0

    def __init__(self, model: Transformer, num_blocks: int, *, with_adapter: bool = False) -> None:
        """`with_adapter`: weights may include one."""
        self.num_blocks = num_blocks
        self._with_adapter = with_adapter
        self._base: dict[str, Tensor] = {}  # the weights under an adapter
        self._own: dict[str, Tensor] = {}  # the adapter
        self.config = model.config
        self._like = model.model.embed_tokens.weight.detach()
        c = model.config
        shape = (
            c.num_hidden_layers,
            num_blocks,
            c.num_key_value_heads,
            self.block_size * c.head_dim,
        )
        # Zeros, because a position past the end of a sequence gets weight 0, which does not cancel
        # a NaN.
        self._keys = self._like.new_zeros(shape)
        self._values = self._like.new_zeros(shape)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._weights = _PrepackedWeights(model, self._keys, self._values)
        self._staging: Transformer | None = None
        self._spare: _PrepackedWeights | None = None

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        assert LIBRARY is not None
        counts_B = np.diff(batch.query_starts_B, append=len(batch.tokens_N))
        sequence_N = np.arange(len(batch.query_starts_B)).repeat(counts_B)
        logits_RV = torch.empty(len(batch.logits_indices_R), self.config.vocab_size)
        read = (
            batch.tokens_N, batch.positions_N, batch.slot_mapping_N, batch.query_starts_B,
            sequence_N, batch.block_table_BM, batch.logits_indices_R
        )  # fmt: skip
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in read)
        run = _Pass(
            len(batch.tokens_N), len(batch.logits_indices_R), batch.block_table_BM.shape[1],
            *(array.ctypes.data for array in read), logits_RV.data_ptr(), 0,
            batch.block_table_BM.shape[1] * self.block_size, torch.get_num_threads(),
        )  # fmt: skip
        model = ctypes.byref(self._weights.model)
        needed = LIBRARY.scratch_bytes(model, ctypes.byref(run))
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        run.scratch = self._scratch.data_ptr()
        LIBRARY.forward(model, ctypes.byref(run))
        with torch.inference_mode():
            sampled = (
                sample(logits_RV, batch.sampling)
                if len(batch.logits_indices_R)
                else SamplerOutput(tokens=[], logprobs=[])
            )
        return lambda: sampled

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return None

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Prepare a second set of matrices in addition to those in use, so that the swap takes no
        time. The set used before is filled again: freeing and allocating so much memory would block
        the engine's thread."""
        if self._with_adapter:
            self._base = dict(tensors)
        return self._prepare(tensors)

    def _prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        if self._staging is None:
            self._staging = Transformer(self.config).to(self._like.dtype).requires_grad_(False)
        load_weights(self._staging, tensors)
        weights, self._spare = self._spare, None
        if weights is None:
            weights = _PrepackedWeights(self._staging, self._keys, self._values)
        else:
            weights.fill(self._staging)

        def swap() -> None:
            self._weights, self._spare = weights, self._weights

        return swap

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        """Merge the adapter of the weights into the matrices that were prepared last: in fp32 the
        result is the same except for the order of sums."""
        assert slot == OWN_SLOT and self._like.dtype == torch.float32
        if adapter is None:
            own, put = {}, None
        else:
            own = dict(adapter.tensors)
            wide = {name: tensor.float() for name, tensor in (self._base | own).items()}
            put = self._prepare(merged(wide, adapter.config))

        def swap() -> None:
            self._own = own
            if put is not None:
                put()

        return swap

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights; an adapter is returned as it was given, since it is now part of
        the matrices."""
        if self._own:
            return {name: tensor.clone() for name, tensor in self._own.items()}
        with torch.device("meta"):
            shell = Transformer(self.config)
        return published(shell, state=self._weights.plain(shell, self._like.dtype))


class _PrepackedWeights:
    """The weights of a model prepacked for `native.c`, and `model`, which points to them."""

    def __init__(self, model: Transformer, keys: Tensor, values: Tensor) -> None:
        c = model.config
        dtype = model.model.embed_tokens.weight.dtype
        self._held = {name: tensor.contiguous() for name, tensor in _laid_out(model)}
        self._rope = model.rope.to(dtype).float().contiguous()
        self._layers = (_Layer * c.num_hidden_layers)(
            *(
                self._layer(f"model.layers.{number}", k, v)
                for number, (k, v) in enumerate(zip(keys, values, strict=True))
            )
        )
        bf16 = _TILES if ISA == Isa.AMX else _BF16
        self.model = _Model(
            ISA, bf16 if dtype == torch.bfloat16 else _FP32, c.num_hidden_layers, c.hidden_size,
            c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
            c.vocab_size, c.rms_norm_eps, self._rope.data_ptr(),
            self._at("model.embed_tokens.weight"), self._at(HEAD), self._at("model.norm.weight"),
            ctypes.cast(self._layers, _DATA),
        )  # fmt: skip

    def fill(self, model: Transformer) -> None:
        """Write other values into the same memory."""
        for name, tensor in _laid_out(model):
            self._held[name].copy_(tensor)

    def plain(self, shell: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
        """The model's parameters, converted back from the prepacked layout."""
        state = {}
        for name, like in shell.state_dict().items():
            held = self._held[name]
            if held.dtype == torch.int32:
                held = unpacked(held, len(like), dtype)
            state[name] = deinterleave_gate_up(held) if name.endswith(GATE_UP) else held
        return state

    def _layer(self, path: str, keys: Tensor, values: Tensor) -> _Layer:
        at = {field: self._at(f"{path}.{name}") for field, name in LAYER.items()}
        return _Layer(**at, keys=keys.data_ptr(), values=values.data_ptr())

    def _at(self, name: str) -> int | None:
        return self._held[name].data_ptr() if name in self._held else None


HEAD, GATE_UP = "lm_head.weight", "gate_up_proj.weight"
LAYER = {
    "norm": "input_layernorm.weight",
    "bias": "self_attn.qkv_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "qkv": "self_attn.qkv_proj.weight",
    "out": "self_attn.o_proj.weight",
    "gate_up": "mlp.gate_up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def _laid_out(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The parameters by name, in the layout of `native.c`; copies, so the model may change."""
    state = model.state_dict()
    embedding = state["model.embed_tokens.weight"]
    yield "model.embed_tokens.weight", embedding.clone()
    yield HEAD, prepacked(state.pop(HEAD, embedding))
    for name, tensor in state.items():
        if tensor is not embedding:
            whole = interleave_gate_up(tensor) if name.endswith(GATE_UP) else tensor
            yield name, prepacked(whole) if tensor.ndim == 2 else tensor.float().clone()


def prepacked(matrix: Tensor) -> Tensor:
    """Prepack a matrix: unit by unit, and within a unit word by word, one input in fp32 or two in
    bf16. Padded with zeros."""
    words = F.pad(matrix.detach(), (0, 0, 0, -len(matrix) % UNIT)).view(torch.int32)
    return words.view(-1, UNIT, words.shape[1]).transpose(1, 2).contiguous()


def unpacked(words: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    return words.transpose(1, 2).reshape(-1, words.shape[1]).view(dtype)[:num_rows]


def interleave_gate_up(gate_up: Tensor) -> Tensor:
    """Alternate half a unit of the gate and half a unit of `up`."""
    return gate_up.detach().view(2, -1, UNIT // 2, gate_up.shape[1]).transpose(0, 1).flatten(0, 2)


def deinterleave_gate_up(gate_up: Tensor) -> Tensor:
    return gate_up.view(-1, 2, UNIT // 2, gate_up.shape[1]).transpose(0, 1).flatten(0, 2)
