"""Causal attention of packed sequences by cuDNN: one kernel call for all of them, forward and
backward, on Hopper devices and later ones.

cuDNN is called through its own Python frontend (`pip install nvidia-cudnn-frontend`), because
torch's entry point to the same kernels rebuilds the plan on every call. A plan is built for a
capacity: a number of sequences, a sequence length and a number of tokens, all rounded up to powers
of two, so that a run with varying lengths builds few plans. The starts of sequences are read on the
device.

Shapes as in `attention`, and B borders: the start of each sequence and the end of the last one; the
rest is filled with that end, which stands for sequences without a token.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

SWITCH = "ETUDE_CUDNN_ATTENTION"
"""Environment variable; set to 0 to attend without cuDNN, for comparison."""
MIN_VERSION = 90600
"""First cuDNN version with packed sequences that have fewer key heads than query heads."""
MIN_BORDERS = 8
MIN_LENGTH = 128
GRADIENT_OF = {"dO": "o", "dQ": "q", "dK": "k", "dV": "v"}
"""cuDNN's names of tensors; "o" is the output of attention, "stats" the log-sum-exp of its
scores."""


def available(device: torch.device) -> bool:
    """True if frontend, library and device support it and it is not switched off."""
    return os.environ.get(SWITCH) != "0" and _works(device)


@cache
def _works(device: torch.device) -> bool:
    """Try a small attention."""
    if device.type != "cuda" or importlib.util.find_spec("cudnn") is None:
        return False
    import cudnn

    capability = torch.cuda.get_device_capability(device)
    if cudnn.backend_version() < MIN_VERSION or capability < (9, 0):
        return False
    borders_B = torch.tensor(padded([0, 3, MIN_LENGTH]), dtype=torch.int32, device=device)
    q_THD = torch.zeros(MIN_LENGTH, 2, 128, dtype=torch.bfloat16, device=device)
    k_TKD = torch.zeros(MIN_LENGTH, 1, 128, dtype=torch.bfloat16, device=device)
    try:
        results = _forward(q_THD, k_TKD, k_TKD, borders_B, MIN_LENGTH, 1.0)
        _backward(q_THD, k_TKD, k_TKD, *results, q_THD, borders_B, MIN_LENGTH, 1.0)
    except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as e:
        warnings.warn(
            f"cuDNN attention is not available, the trainer goes on without it: {e}", stacklevel=2
        )
        return False
    return True


def knows(q_THD: Tensor, v_TKV: Tensor) -> bool:
    """True if cuDNN is used for heads of this size and dtype."""
    size = q_THD.shape[-1]
    sizes_fit = size % 16 == 0 and size <= 128 and size == v_TKV.shape[-1]
    return sizes_fit and v_TKV.dtype == torch.bfloat16


def padded(borders: Sequence[int]) -> list[int]:
    """Pad borders to the capacity of the next larger plan."""
    return [*borders, *[borders[-1]] * (max(MIN_BORDERS, room(len(borders))) - len(borders))]


def room(count: int) -> int:
    return 1 << (count - 1).bit_length()


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, borders_B: Tensor, longest: int, scale: float
) -> Tensor:
    """Attend each token to itself and to the earlier tokens of its sequence."""
    q_THD, k_TKD = q_THD.contiguous(), k_TKD.contiguous()
    # In most models values are a part of a wider tensor. As of 9.19 cuDNN respects the layout of
    # their gradient only if it sums that gradient over several heads.
    if k_TKD.shape[1] == q_THD.shape[1]:
        v_TKD = v_TKD.contiguous()
    mixed_THD: Tensor = _forward(q_THD, k_TKD, v_TKD, borders_B, longest, scale)[0]
    return mixed_THD


@torch.library.custom_op("etude::packed_attention", mutates_args=(), device_types="cuda")
def _forward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, borders_B: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    mixed_THD, logsumexp_TH1 = _results(q_THD)
    tensors = {"q": q_THD, "k": k_TKD, "v": v_TKD, "o": mixed_THD, "stats": logsumexp_TH1}
    _run(tensors, borders_B, longest, scale)
    return mixed_THD, logsumexp_TH1


@_forward.register_fake
def _(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, borders_B: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    return _results(q_THD)


def _results(q_THD: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = q_THD.shape
    logsumexp_TH1 = q_THD.new_empty((num_tokens, num_heads, 1), dtype=torch.float32)
    return torch.empty_like(q_THD, memory_format=torch.contiguous_format), logsumexp_TH1


@torch.library.custom_op("etude::packed_attention_backward", mutates_args=(), device_types="cuda")
def _backward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, mixed_THD: Tensor, logsumexp_TH1: Tensor,
    slope_THD: Tensor, borders_B: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = {"q": q_THD, "k": k_TKD, "v": v_TKD}
    given |= {"o": mixed_THD, "stats": logsumexp_TH1, "dO": slope_THD}
    dq, dk, dv = _gradients(q_THD, k_TKD, v_TKD)
    _run(given | {"dQ": dq, "dK": dk, "dV": dv}, borders_B, longest, scale)
    return dq, dk, dv


@_backward.register_fake
def _(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, mixed_THD: Tensor, logsumexp_TH1: Tensor,
    slope_THD: Tensor, borders_B: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients(q_THD, k_TKD, v_TKD)


def _gradients(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_TKD, v_TKD)
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THD, k_TKD, v_TKD, borders_B, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(q_THD, k_TKD, v_TKD, *output, borders_B)


def _go_back(ctx: Any, slope_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *kept, borders_B = ctx.saved_tensors
    found = _backward(*kept, slope_THD.contiguous(), borders_B, ctx.longest, ctx.scale)
    return (*found, None, None, None)


_forward.register_autograd(_go_back, setup_context=_keep)


def check_layouts(tensors: dict[str, Tensor]) -> None:
    """Refuse tensors whose layout would make cuDNN read or write out of place."""
    heads = tensors["q"].shape[1]
    keys = tensors["k"].shape[1]
    size = tensors["q"].shape[2]
    apart = {name for name, tensor in tensors.items() if not tensor.is_contiguous()}
    inner = tensors["v"].stride()[1:]
    if apart - {"v"} or (apart and keys == heads) or inner != (size, 1):
        raise ValueError(
            f"cuDNN does not support the layout of these tensors (not contiguous: {sorted(apart)})"
        )


def _run(tensors: dict[str, Tensor], borders_B: Tensor, longest: int, scale: float) -> None:
    """Fill the tensors that cuDNN computes from the others."""
    import cudnn

    device = borders_B.device
    q_THD = tensors["q"]
    k_TKD = tensors["k"]
    v_TKD = tensors["v"]
    num_tokens, heads, size = q_THD.shape
    check_layouts(tensors)
    plan = _plan(
        device, len(borders_B) - 1, max(MIN_LENGTH, room(longest)), room(num_tokens),
        heads, k_TKD.shape[1], size, v_TKD.stride(0), scale, backward="dO" in tensors,
    )  # fmt: skip
    starts = torch.outer(plan.strides, borders_B)
    lengths = borders_B.diff()
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=device)
    buffers = {plan.tensors[name]: tensor.data_ptr() for name, tensor in tensors.items()}
    buffers[plan.lengths] = lengths.data_ptr()
    first = starts.data_ptr()
    row_bytes = len(borders_B) * starts.element_size()
    buffers |= {id: first + row * row_bytes for row, id in enumerate(plan.starts)}
    handle = _handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    plan.graph.execute(buffers, workspace.data_ptr(), handle=handle)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _empty_graph(device: torch.device) -> Any:
    import cudnn

    return cudnn.pygraph(
        io_data_type=cudnn.data_type.BFLOAT16,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A graph that is ready to run. Its tensors are identified by number."""

    graph: Any
    tensors: dict[str, int]
    lengths: int
    starts: list[int]
    """Tensors with the starts of sequences, one for each of the `strides`."""
    strides: Tensor
    """Distance between tokens."""
    workspace: int
    """In bytes."""


@cache
def _plan(
    device: torch.device, sequences: int, length: int, tokens: int,
    heads: int, keys: int, size: int, value_stride: int, scale: float, backward: bool,
) -> _Plan:  # fmt: skip
    import cudnn

    types, graph = cudnn.data_type, _empty_graph(device)

    def numbers(name: str, count: int, data_type: Any) -> Any:
        dim = [count, 1, 1, 1]
        return graph.tensor(name=name, dim=dim, stride=[1] * 4, data_type=data_type)

    starts: dict[str, Any] = {}
    strides: dict[str, int] = {}

    def place(name: str) -> dict[str, Any]:
        """Layout of a tensor, as if all sequences had one length; the real starts are in its
        `starts`, which a gradient shares with the tensor that it is the gradient of."""
        of = GRADIENT_OF.get(name, name)
        width = 1 if name == "stats" else size
        own = keys if of in ("k", "v") else heads
        stride = value_stride if name == "v" else own * width
        if of == name or stride != strides[of]:
            starts[name] = numbers(f"starts of {name}", sequences + 1, types.INT64)
        strides[name] = stride
        return {
            "dim": [sequences, own, length, width],
            "stride": [length * stride, width, stride, 1],
            "data_type": types.FLOAT if name == "stats" else types.BFLOAT16,
            "ragged_offset": starts.get(name) or starts[of],
        }

    given = ["q", "k", "v", "o", "stats", "dO"] if backward else ["q", "k", "v"]
    tensors = {name: graph.tensor(name=name, **place(name)) for name in given}
    lengths = numbers("lengths", sequences, types.INT32)
    how = {
        "attn_scale": scale, "use_causal_mask": True, "use_padding_mask": True,
        "seq_len_q": lengths, "seq_len_kv": lengths,
    }  # fmt: skip
    if backward:
        most = {"max_total_seq_len_q": tokens, "max_total_seq_len_kv": tokens}
        found = zip(("dQ", "dK", "dV"), graph.sdpa_backward(**tensors, **most, **how), strict=True)
    else:
        found = zip(("o", "stats"), graph.sdpa(**tensors, generate_stats=True, **how), strict=True)
    for name, tensor in found:
        to = place(name)
        tensor.set_output(True).set_dim(to["dim"]).set_stride(to["stride"])
        tensor.set_data_type(to["data_type"])
        tensor.set_ragged_offset(to["ragged_offset"])
        tensors[name] = tensor
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return _Plan(
        graph,
        {name: tensor.get_uid() for name, tensor in tensors.items()},
        lengths.get_uid(),
        [each.get_uid() for each in starts.values()],
        torch.tensor([strides[name] for name in starts], dtype=torch.int64, device=device),
        max(1, graph.get_workspace_size()),
    )
