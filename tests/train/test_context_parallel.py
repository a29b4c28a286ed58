"""Rows whose tokens are divided among ranks: each computes a part, and all take the same step as a
single rank."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.core.errors import EtudeError
from etude.model.attention import CausalAttention
from etude.model.transformer import init_from_scratch
from etude.train.context_parallel import (
    ContextParallelAttention,
    ContextSharding,
    ContextShare,
    check_context_parallel,
)
from etude.train.distributed import SINGLE_PROCESS
from etude.train.learner import Learner
from tests.train import distributed_work
from tests.train.distributed_work import MODELS, OBJECTIVES, Curve, joined
from tests.train.together import together


@given(st.lists(st.integers(1, 30), min_size=1), st.integers(1, 5))
def test_every_token_is_of_one_rank_and_sees_its_sequence_up_to_itself(
    lengths: list[int], size: int
) -> None:
    sharding = ContextSharding.of(lengths, size)
    assert sharding.num_tokens - sum(lengths) in range(2 * size)
    parts = [sharding.places_of(rank) for rank in range(size)]
    assert sorted(place for part in parts for place in part) == list(range(sharding.num_tokens))
    assert {len(part) for part in parts} == {2 * sharding.chunk}
    start_of = np.repeat(np.cumsum([0, *sharding.lengths])[:-1], sharding.lengths)
    for rank, part in enumerate(parts):
        queries = []
        for piece in sharding.pieces_of(rank):
            assert len(queries) == piece.first
            queries += range(piece.low, piece.high)
            assert (start_of[piece.low : piece.high] == piece.start).all()
        assert queries == part


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 5), st.data())
def test_a_rank_finds_what_is_its_own(lengths: list[int], size: int, data: st.DataObject) -> None:
    total, found, count = sum(lengths), [], 0
    indices = data.draw(st.lists(st.integers(0, total - 1), unique=True).map(sorted))
    for rank in range(size):
        share = ContextShare.of(lengths, cast(Any, SimpleNamespace(rank=rank, size=size)))
        places = share.sharding.places_of(rank)
        own_t = share.take(torch.arange(total)[:, None], fill=-1).squeeze(1)
        assert own_t.tolist() == [place if place < total else -1 for place in places]
        assert share.num_tokens == (own_t >= 0).sum()
        assert (own_t[: share.num_tokens] >= 0).all()
        own_n, places_n = share.find(torch.tensor(indices, dtype=torch.int64))
        assert own_t[own_n].tolist() == [indices[place] for place in places_n]
        found += places_n.tolist()
        count += share.num_tokens
    assert sorted(found) == list(range(len(indices))) and count == total


@given(st.integers(1, 6), st.integers(1, 5))
def test_every_rank_has_the_same_work(size: int, chunk: int) -> None:
    """A long row: each token attends to all before it."""
    sharding = ContextSharding.of([2 * size * chunk], size)
    work = {sum(place + 1 for place in sharding.places_of(rank)) for rank in range(size)}
    assert len(work) == 1


@dataclass
class _Gathered:
    """A group that already has the values of the other ranks."""

    rank: int
    whole_TX: list[Tensor]

    def gather(self, own_tX: Tensor, sharding: ContextSharding) -> Tensor:
        return self.whole_TX.pop(0)


@pytest.mark.parametrize(
    ("device", "dtype", "error"),
    [
        ("cpu", torch.float32, 1e-5),
        # one kernel for all pieces
        pytest.param(
            "cuda",
            torch.bfloat16,
            1e-2,
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ],
)
def test_the_parts_attend_as_the_whole_does(device: str, dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator(device).manual_seed(0)
    sharding = ContextSharding.of([700, 1, 130, 65], 3)
    q, k, v = (
        torch.randn(sharding.num_tokens, heads, 64, device=device, generator=generator).to(dtype)
        for heads in (4, 2, 2)
    )
    whole = CausalAttention(sharding.lengths, torch.device(device))(0, q, k, v)
    for rank in range(3):
        own = torch.tensor(sharding.places_of(rank), device=device)
        attend = ContextParallelAttention(sharding, cast(Any, _Gathered(rank, [k, v])))
        mixed = attend(0, q[own], k[own], v[own])
        assert (mixed.flatten(1) - whole[own].flatten(1)).abs().max() < error


def _by_hand(
    q_tHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    queries: Tensor,
    keys: Tensor,
    longest_q: int,
    longest_k: int,
    dropout: float,
    is_causal: bool,
    wants_mask: bool,
    *,
    scale: float | None,
) -> tuple[Tensor]:
    """The documented behaviour of the device's kernel with these arguments."""
    assert is_causal and not wants_mask and dropout == 0.0
    assert (longest_q, longest_k) == (int(queries.diff().max()), int(keys.diff().max()))
    assert queries.dtype == keys.dtype == torch.int32
    found = []
    for n in range(len(queries) - 1):
        own = (queries[n], queries[n + 1]), (keys[n], keys[n + 1])
        q, (k, v) = q_tHD[slice(*own[0])], (each[slice(*own[1])] for each in (k_TKD, v_TKD))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        ahead = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
        scores = torch.einsum("thd,shd->hts", q, k) * (scale or q.shape[-1] ** -0.5)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        found.append(torch.einsum("hts,shd->thd", weights, v))
    return (torch.cat(found),)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_kernel_is_given_the_keys_of_each_piece(
    scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _by_hand, raising=False)
    generator = torch.Generator().manual_seed(0)
    sharding = ContextSharding.of([70, 1, 13, 7], 3)
    q, k = (torch.randn(sharding.num_tokens, n, 16, generator=generator) for n in (4, 2))
    v = torch.randn(sharding.num_tokens, 2, 10, generator=generator)  # narrower than the keys
    whole = CausalAttention(sharding.lengths, torch.device("cpu"))(0, q, k, v, scale)
    for rank in range(3):
        own = torch.tensor(sharding.places_of(rank))
        attend = ContextParallelAttention(sharding, cast(Any, _Gathered(rank, [])))
        mixed = attend._together(q[own], k, v, scale)
        assert mixed.shape == (len(own), 4, 10)
        torch.testing.assert_close(mixed.flatten(1), whole[own].flatten(1), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def four() -> list[dict[tuple[str, int], Curve]]:
    return together(4, distributed_work.divide, (2, 4))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", OBJECTIVES)
def test_the_step_is_that_of_one_rank(
    four: list[dict[tuple[str, int], Curve]], model: str, size: int
) -> None:
    alone = distributed_work.divide(SINGLE_PROCESS, (1,))[model, 1]
    curves = [rank[model, size] for rank in four]
    for curve in curves:
        for a, b in zip(alone.steps, curve.steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5, abs=1e-7)
            assert b.entropy == pytest.approx(a.entropy, rel=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
            assert [row.argmax for row in b.recomputed] == [row.argmax for row in a.recomputed]
            for own, other in zip(a.recomputed, b.recomputed, strict=True):
                assert other.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert curve.exam == pytest.approx(alone.exam, rel=1e-5)
    union = joined(curves)
    for name, (_, rows) in alone.rows.items():
        np.testing.assert_allclose(union[name], rows, rtol=1e-3, atol=1e-5, err_msg=name)


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(
        EtudeError, match="does not support recurrent layers and invariant arithmetic"
    ):
        check_context_parallel(MODELS["hybrid"], invariant=True)
    with pytest.raises(EtudeError, match="context_parallel = 2 does not divide the 1 ranks"):
        Learner(init_from_scratch(MODELS["dense"], 0), SINGLE_PROCESS, context_parallel=2)
