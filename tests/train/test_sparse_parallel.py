"""Sparse models whose rows, experts or both are divided among ranks: the ranks take the same step
as a single rank, with the same routing."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.errors import EtudeError
from etude.model.experts import StackedExperts
from etude.model.transformer import init_from_scratch
from etude.train.distributed import SINGLE_PROCESS, shard_rows
from etude.train.expert_parallel import check_expert_parallel, expert_places
from etude.train.learner import Learner
from tests.small_model import config
from tests.train import sparse_work
from tests.train.distributed_work import joined_rows
from tests.train.sparse_work import EXPERTS, SPARSE, Layout, SparseRun, run_sparse, whole
from tests.train.together import together

LAYOUTS = (
    Layout("qwen3_moe", context_parallel=2, expert_parallel=2),
    Layout("qwen3_moe", expert_parallel=4, adapted=True),
    Layout("deepseek_v3", context_parallel=2),
    Layout("gpt_oss", context_parallel=2, expert_parallel=2, optimizer="muon"),
)


@pytest.fixture(scope="module")
def four() -> list[dict[Layout, SparseRun]]:
    return together(4, sparse_work.run_layouts, LAYOUTS)


def name_of(layout: Layout) -> str:
    return f"{layout.model}-cp{layout.context_parallel}-ep{layout.expert_parallel}" + (
        "-lora" if layout.adapted else ""
    )


@cache
def alone(layout: Layout) -> SparseRun:
    """The same layout on one rank."""
    return run_sparse(SINGLE_PROCESS, layout._replace(context_parallel=1, expert_parallel=1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_ranks_take_the_step_of_one_and_route_as_one(
    four: list[dict[Layout, SparseRun]], layout: Layout
) -> None:
    one, runs = alone(layout), [rank[layout] for rank in four]
    for run in runs:
        for a, b in zip(one.steps, run.steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5)
            assert b.entropy == pytest.approx(a.entropy, rel=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
            assert a.router_mismatch_frac is not None and 0 < a.router_mismatch_frac < 1
            assert b.router_mismatch_frac == a.router_mismatch_frac
            assert a.experts_replaced_frac is not None and 0 < a.experts_replaced_frac < 1
            assert b.experts_replaced_frac == a.experts_replaced_frac
            for own, other in zip(a.recomputed, b.recomputed, strict=True):
                assert other.router_mismatch == own.router_mismatch
                assert other.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert run.loss == pytest.approx(one.loss, rel=1e-5)
        assert run.num_shares == 4 // layout.context_parallel
    # later ones are at weights that an optimizer has moved, which can make rounding large
    for step, error in enumerate((1e-5, 1e-4, 1e-4)):
        union = whole([run.gradients[step] for run in runs])
        assert union.keys() == one.gradients[step].keys()
        for name, gradient in one.gradients[step].items():
            most = error * max(np.abs(gradient).max(), 1e-3)
            assert np.abs(union[name] - gradient).max() <= most, (step, name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_ranks_publish_what_one_does(four: list[dict[Layout, SparseRun]], layout: Layout) -> None:
    one = alone(layout)
    union = joined_rows([rank[layout].rows for rank in four])
    assert union.keys() == one.rows.keys()
    for name, (_, rows) in one.rows.items():
        if name.endswith("correction_bias"):  # every rank has all of it
            for rank in four:
                assert rows.any() and np.array_equal(rank[layout].rows[name][1], rows)
        else:
            np.testing.assert_allclose(union[name], rows, atol=5e-3, err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_ranks_saved_goes_on_in_another_layout(
    four: list[dict[Layout, SparseRun]], ranks: int
) -> None:
    layout = next(layout for layout in LAYOUTS if layout.optimizer == "muon")
    states = [rank[layout].state for rank in four]
    there = layout._replace(context_parallel=1, expert_parallel=ranks)
    if ranks == 1:
        found = [sparse_work.load(SINGLE_PROCESS, there, states)]
    else:
        found = together(ranks, sparse_work.load, there, states)
    saved, loaded = joined_rows([rank[layout].rows for rank in four]), joined_rows(found)
    assert loaded.keys() == saved.keys()
    for name in loaded:
        if not name.endswith("correction_bias"):
            assert np.array_equal(loaded[name], saved[name]), name


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_a_part_is_made_up_of_what_its_ranks_own(groups: int, size: int, each: int) -> None:
    ranks = groups * size
    places = expert_places(ranks * each, ranks, size).tolist()
    assert sorted(places) == list(range(ranks * each))
    for rank in range(ranks):
        part, sharer = rank % size, rank // size
        own = [places[expert] for expert in range(rank * each, (rank + 1) * each)]
        rows = shard_rows(groups * each, sharer, groups)
        start = part * groups * each
        assert own == list(range(start + rows.start, start + rows.stop))


def test_experts_without_a_token_have_a_gradient() -> None:
    """The other ranks that share them wait for it."""
    for shape in (SPARSE["qwen3_moe"], SPARSE["gpt_oss"]):
        experts = next(
            module
            for module in init_from_scratch(shape, 0).modules()
            if isinstance(module, StackedExperts)
        )
        x_NE = torch.zeros(0, shape.hidden_size, requires_grad=True)
        experts._each(x_NE, torch.zeros(EXPERTS.num_experts, dtype=torch.int64)).sum().backward()
        for parameter in experts.parameters():
            assert parameter.grad is not None and not parameter.grad.any()


def test_experts_that_cannot_be_divided_are_refused_by_name() -> None:
    sparse = SPARSE["qwen3_moe"]
    with pytest.raises(EtudeError, match="expert_parallel = 2: the model has no experts"):
        check_expert_parallel(config(), ranks=2, size=2)
    with pytest.raises(
        EtudeError, match="expert_parallel = 2 does not support batch-invariant arithmetic"
    ):
        check_expert_parallel(sparse, ranks=2, size=2, invariant=True)
    with pytest.raises(EtudeError, match="8 experts cannot be shared equally among 16 ranks"):
        check_expert_parallel(sparse, ranks=16, size=2)
    with pytest.raises(EtudeError, match="expert_parallel = 2 does not divide the 1 ranks"):
        Learner(init_from_scratch(sparse, 0), SINGLE_PROCESS, expert_parallel=2)
    check_expert_parallel(sparse, ranks=EXPERTS.num_experts, size=2)
