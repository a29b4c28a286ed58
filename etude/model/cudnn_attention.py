"""Causal attention of packed sequences by cuDNN: all of them in one kernel call, forward and
backward, on Hopper devices and later ones.

cuDNN is asked through its own Python frontend (`pip install nvidia-cudnn-frontend`): torch's entry
to the same kernels builds the plan of a call anew every time. A plan is made for room: so many
sequences, so long a sequence, so many tokens, all rounded up to powers of two, so that a run whose
lengths vary makes few of them. Where sequences begin is read on the device.

Shapes as in `attention`, and B borders: where each sequence begins and the last one ends, the rest
filled with that end, which stands for sequences without a token.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

MIN_VERSION = 90600
"""Of cuDNN: packed sequences with fewer key heads than query heads."""
MIN_BORDERS = 8
MIN_LENGTH = 128
GRADIENT_OF = {"dO": "o", "dQ": "q", "dK": "k", "dV": "v"}
"""Names as cuDNN has them."""


@cache
def available(device: torch.device) -> bool:
    """Whether frontend, library and device can do it: a small attention is tried."""
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
        warnings.warn(f"the trainer attends without cuDNN, which answers: {e}", stacklevel=2)
        return False
    return True


def knows(q_THD: Tensor, v_TKV: Tensor) -> bool:
    """Whether it is asked for heads of that size and type."""
    size = q_THD.shape[-1]
    sizes_fit = size % 16 == 0 and size <= 128 and size == v_TKV.shape[-1]
    return sizes_fit and v_TKV.dtype == torch.bfloat16


def padded(borders: Sequence[int]) -> list[int]:
    """Borders with room for as many sequences as the next plan has."""
    return [*borders, *[borders[-1]] * (max(MIN_BORDERS, room(len(borders))) - len(borders))]


def room(count: int) -> int:
    return 1 << (count - 1).bit_length()


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, borders_B: Tensor, longest: int, scale: float
) -> Tensor:
    """Each token attends to those of its sequence that stand before it, and to itself."""
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


def _run(tensors: dict[str, Tensor], borders_B: Tensor, longest: int, scale: float) -> None:
    """Fill the tensors that cuDNN computes from the others."""
    import cudnn

    device, q_THD = borders_B.device, tensors["q"]
    layouts = tuple((name, *x.shape[1:], *x.stride()) for name, x in tensors.items())
    size = (len(borders_B) - 1, max(MIN_LENGTH, room(longest)), room(len(q_THD)))
    plan = _plan(device, *size, scale, layouts)
    handle = _handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    strides = tuple(x.stride(0) for x in tensors.values())
    starts = dict(zip(tensors, torch.outer(_on_device(device, strides), borders_B), strict=True))
    lengths = borders_B.diff()
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=device)
    buffers = {plan.lengths: lengths.data_ptr()}
    buffers |= {plan.starts[name]: starts[name].data_ptr() for name in plan.starts}
    buffers |= {plan.tensors[name]: tensor.data_ptr() for name, tensor in tensors.items()}
    plan.graph.execute(buffers, workspace.data_ptr(), handle=handle)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@cache
def _on_device(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


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
    """A graph that is ready to run, what its tensors are called in it, and how many bytes it needs
    beside them."""

    graph: Any
    tensors: dict[str, int]
    starts: dict[str, int]
    """Where the sequences of a tensor begin, in numbers."""
    lengths: int
    workspace: int


@cache
def _plan(
    device: torch.device, sequences: int, length: int, tokens: int, scale: float,
    layouts: tuple[tuple[str, int, int, int, int, int], ...],
) -> _Plan:  # fmt: skip
    """`layouts`: name, heads and size of each tensor, its strides from token to token, from head to
    head and within a head. What is not among them is computed."""
    import cudnn

    types, graph = cudnn.data_type, _empty_graph(device)

    def numbers(name: str, count: int, data_type: Any) -> Any:
        dim = [count, 1, 1, 1]
        return graph.tensor(name=name, dim=dim, stride=[1] * 4, data_type=data_type)

    lengths = numbers("lengths", sequences, types.INT32)
    starts: dict[str, Any] = {}
    described: dict[str, dict[str, Any]] = {}
    token_strides = {name: token for name, _, _, token, _, _ in layouts}
    for name, heads, size, token, head, one in layouts:
        like = GRADIENT_OF.get(name)
        if like and token == token_strides[like]:
            starts[name] = starts[like]
        else:
            starts[name] = numbers(f"starts of {name}", sequences + 1, types.INT64)
        described[name] = {
            # as if all were of one length; where a sequence really begins, `starts` says
            "dim": [sequences, heads, length, size],
            "stride": [length * token, head, token, one],
            "data_type": types.FLOAT if name == "stats" else types.BFLOAT16,
        }

    def given(name: str) -> Any:
        return graph.tensor(name=name, **described[name], ragged_offset=starts[name])

    tensors = {name: given(name) for name in ("q", "k", "v")}
    how = {
        "attn_scale": scale, "use_causal_mask": True, "use_padding_mask": True,
        "seq_len_q": lengths, "seq_len_kv": lengths,
    }  # fmt: skip
    if "dO" in described:
        tensors |= {name: given(name) for name in ("o", "stats", "dO")}
        room_for = {"max_total_seq_len_q": tokens, "max_total_seq_len_kv": tokens}
        found = graph.sdpa_backward(**tensors, **room_for, **how)
    else:
        found = graph.sdpa(**tensors, generate_stats=True, **how)
    computed = [name for name in described if name not in tensors]
    for name, tensor in zip(computed, found, strict=True):
        to = described[name]
        tensor.set_output(True).set_dim(to["dim"]).set_stride(to["stride"])
        tensor.set_data_type(to["data_type"])
        tensor.set_ragged_offset(starts[name])
        tensors[name] = tensor
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return _Plan(
        graph,
        {name: tensor.get_uid() for name, tensor in tensors.items()},
        {name: tensor.get_uid() for name, tensor in starts.items()},
        lengths.get_uid(),
        max(1, graph.get_workspace_size()),
    )
