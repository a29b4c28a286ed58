"""Sparse models whose rows are divided among ranks: all take the step of one, and route as one."""

from __future__ import annotations

import numpy as np
import pytest

from etude.train.distributed import SINGLE_PROCESS
from tests.train import sparse_work
from tests.train.sparse_work import Layout, SparseRun, run_sparse, whole
from tests.train.together import together

LAYOUTS = (
    Layout("qwen3_moe", context_parallel=2),
    Layout("qwen3_moe", expert_parallel=2),
    Layout("qwen3_moe", context_parallel=2, expert_parallel=2),
    Layout("qwen3_moe", context_parallel=4, expert_parallel=2, adapted=True),
    Layout("deepseek_v3", context_parallel=2, expert_parallel=2, optimizer="muon"),
    Layout("gpt_oss", context_parallel=2, expert_parallel=4),
)


@pytest.fixture(scope="module")
def four() -> list[dict[Layout, SparseRun]]:
    return together(4, sparse_work.run_layouts, LAYOUTS)


def name_of(layout: Layout) -> str:
    return "-".join(map(str, layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_ranks_take_the_step_of_one_and_route_as_one(
    four: list[dict[Layout, SparseRun]], layout: Layout
) -> None:
    alone = run_sparse(SINGLE_PROCESS, layout._replace(context_parallel=1, expert_parallel=1))
    runs = [rank[layout] for rank in four]
    for run in runs:
        for a, b in zip(alone.steps, run.steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-5)
            assert b.entropy == pytest.approx(a.entropy, rel=1e-5)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
            assert 0 < a.router_mismatch_frac == b.router_mismatch_frac
            assert 0 < a.experts_replaced_frac == b.experts_replaced_frac
            for own, other in zip(a.recomputed, b.recomputed, strict=True):
                assert other.router_mismatch == own.router_mismatch
                assert other.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert run.loss == pytest.approx(alone.loss, rel=1e-5)
        for name, bias in alone.biases.items():
            assert bias.any() and np.array_equal(run.biases[name], bias)
    for step, gradients in enumerate(alone.gradients):
        union = whole([run.gradients[step] for run in runs])
        assert union.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = np.abs(union[name] - gradient).max()
            assert error <= 1e-5 * max(np.abs(gradient).max(), 1e-3), (step, name)
