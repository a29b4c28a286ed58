"""The model on a CPU, a pass in one call: `native.c`, where it is built and knows the model.

`pip install` compiles it if the machine has a compiler; it is a plain shared library, and its threads are those of
torch. It computes dense models in bf16 or fp32; `runner.CpuRunner` computes whatever it cannot, operator by operator.
A token gets the same bits whatever else is in its pass.

Matrices are laid out as `native.c` reads them. Shapes: U units of 32 outputs, I inputs of a matrix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from etude.engine.plan import Drawn, Ints, Plan
from etude.engine.sampler import sample
from etude.model.files import load_weights
from etude.model.heads import GroupedHeads
from etude.model.layers import MLP
from etude.model.transformer import Block, ModelConfig, Transformer

UNIT, PAGE, MAX_HEAD = 32, 16, 256
_NUMBER, _DATA = ctypes.c_int64, ctypes.c_void_p


def _load() -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            library = ctypes.CDLL(str(path))
            library.scratch_bytes.restype = _NUMBER
            return library
    return None


LIBRARY = _load()


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, _DATA)
        for name in ("norm", "bias", "q_norm", "k_norm", "mlp_norm", "qkv", "out", "gate_up", "down", "keys", "values")
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(
            (name, _NUMBER)
            for name in (
                "is_bf16",
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
    _fields_ = [
        *((name, _NUMBER) for name in ("num_tokens", "num_rows", "width")),
        *(
            (name, _DATA)
            for name in ("tokens", "positions", "slots", "sequence", "blocks", "rows", "logits", "scratch")
        ),
        *((name, _NUMBER) for name in ("longest", "threads")),
    ]


def can_run(config: ModelConfig, dtype: torch.dtype) -> bool:
    c = config
    sizes = (c.hidden_size, c.intermediate_size, c.head_dim)
    dense = c.latent is None and c.experts is None
    return (
        LIBRARY is not None
        and dtype in (torch.bfloat16, torch.float32)
        and dense
        and not any(size % UNIT for size in sizes)
        and c.head_dim <= MAX_HEAD
    )


class NativeRunner:
    overlaps = False
    block_size = PAGE

    def __init__(self, model: Transformer, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.config, self._like = model.config, model.model.embed_tokens.weight.detach()
        c = model.config
        shape = (c.num_hidden_layers, num_blocks, c.num_key_value_heads, PAGE * c.head_dim)
        # Zeros: what lies past the end of a sequence gets weight 0, which does not help against a NaN.
        self._keys, self._values = self._like.new_zeros(shape), self._like.new_zeros(shape)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._weights = _Weights(model, self._keys, self._values)

    def start(self, plan: Plan) -> Callable[[], Drawn]:
        assert LIBRARY is not None
        counts_B = np.diff(plan.starts_B, append=len(plan.tokens_N))
        sequence_N = np.arange(len(plan.starts_B)).repeat(counts_B)
        logits_RV = torch.empty(len(plan.rows_R), self.config.vocab_size)
        read = (plan.tokens_N, plan.positions_N, plan.slots_N, sequence_N, plan.blocks_BM, plan.rows_R)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in read)
        run = _Pass(
            len(plan.tokens_N), len(plan.rows_R), plan.blocks_BM.shape[1], *(array.ctypes.data for array in read),
            logits_RV.data_ptr(), 0, plan.blocks_BM.shape[1] * PAGE, torch.get_num_threads(),
        )  # fmt: skip
        model = ctypes.byref(self._weights.model)
        needed = LIBRARY.scratch_bytes(model, ctypes.byref(run))
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        run.scratch = self._scratch.data_ptr()
        LIBRARY.forward(model, ctypes.byref(run))
        with torch.inference_mode():
            drawn = sample(logits_RV, plan.draws) if len(plan.rows_R) else Drawn(tokens=[], logprobs=[])
        return lambda: drawn

    def experts(self, blocks: Ints, length: int) -> bytes | None:
        return None

    def prepare(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """A second set of matrices beside those that serve, so that changing over takes no time."""
        model = Transformer(self.config).to(self._like.dtype).requires_grad_(False)
        load_weights(model, tensors)
        weights = _Weights(model, self._keys, self._values)

        def swap() -> None:
            self._weights = weights

        return swap


class _Weights:
    """Everything that `model` points to lives as long as this does."""

    def __init__(self, model: Transformer, keys: Tensor, values: Tensor) -> None:
        self._held: list[Tensor] = []
        c, dtype = model.config, model.model.embed_tokens.weight.dtype
        embedding = model.model.embed_tokens.weight
        head = embedding if model.lm_head is None else model.lm_head.weight
        layers = (_Layer * c.num_hidden_layers)(
            *(self._layer(block, k, v) for block, k, v in zip(model.model.layers, keys, values, strict=True))  # type: ignore[arg-type]
        )
        self.model = _Model(
            int(dtype == torch.bfloat16), c.num_hidden_layers, c.hidden_size, c.intermediate_size,
            c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size, c.rms_norm_eps,
            self._at(model.rope.to(dtype).float()), self._at(embedding.detach()), self._at(packed(head)),
            self._numbers(model.model.norm.weight), ctypes.cast(layers, _DATA),
        )  # fmt: skip
        self._layers = layers

    def _layer(self, block: Block, keys: Tensor, values: Tensor) -> _Layer:
        heads, mlp = block.self_attn, block.mlp
        assert isinstance(heads, GroupedHeads) and isinstance(mlp, MLP)
        return _Layer(
            norm=self._numbers(block.input_layernorm.weight),
            bias=self._numbers(heads.qkv_proj.bias),
            q_norm=self._numbers(heads.q_norm.weight if heads.q_norm else None),
            k_norm=self._numbers(heads.k_norm.weight if heads.k_norm else None),
            mlp_norm=self._numbers(block.post_attention_layernorm.weight),
            qkv=self._at(packed(heads.qkv_proj.weight)),
            out=self._at(packed(heads.o_proj.weight)),
            gate_up=self._at(packed(paired(mlp.gate_up_proj.weight))),
            down=self._at(packed(mlp.down_proj.weight)),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
        )

    def _numbers(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._at(tensor.detach().float())

    def _at(self, tensor: Tensor) -> int:
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()


def packed(matrix: Tensor) -> Tensor:
    """Unit by unit, and within a unit word by word: one input in fp32, two in bf16. Filled up with zeros."""
    words = F.pad(matrix.detach(), (0, 0, 0, -len(matrix) % UNIT)).view(torch.int32)
    return words.view(-1, UNIT, words.shape[1]).transpose(1, 2).contiguous()


def paired(gate_up: Tensor) -> Tensor:
    """Half a unit of the gate, half a unit of its partner, and so on."""
    return gate_up.detach().view(2, -1, UNIT // 2, gate_up.shape[1]).transpose(0, 1).flatten(0, 2)
