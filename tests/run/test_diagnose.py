"""Causes concluded from figures, without a model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from etude.core.events import MismatchStats
from etude.run.diagnose import (
    Diagnosis,
    LayerRouterMismatch,
    RoundingBound,
    TemperatureFit,
    TopPCut,
    compare_experts,
    find_cut,
    fit_temperature,
    grouped,
    of_temperature,
)
from etude.run.operators import Operator
from etude.train.mismatch import mismatch_stats

LEAST = RoundingBound(1e-6, 1e-5)


def of(k3: float, k3_max: float | None = None) -> MismatchStats:
    worst = 5 * k3 if k3_max is None else k3_max
    return MismatchStats(
        num_tokens=9, k1=0.0, k3=k3, k3_p99=worst, k3_max=worst, ratio_p1=1.0, ratio_p99=1.0,
        ratio_max=1.0, ess=1.0, argmax_flip_frac=None, router_mismatch_frac=None,
    )  # fmt: skip


def of_gaps(
    *, worst: float | None = None, known: dict[str, Any] | None = None, **gaps: float
) -> Diagnosis:
    found = {name: of(k3, worst) for name, k3 in gaps.items()}
    return Diagnosis(gaps=found, rounding=dict.fromkeys(found, LEAST), **(known or {}))


def test_rounding_is_said_below_the_bound_only() -> None:
    below = of_gaps(alone=9e-7)
    assert below.causes == below.unexplained == []
    (told,) = of_gaps(alone=0.3).unexplained
    assert "k3 3.0e-01" in told and "rounding causes up to 1.0e-06" in told
    assert of_gaps(alone=1.1e-6).unexplained
    assert of_gaps(alone=1e-7, worst=1e-4).unexplained  # one token alone


def test_a_setting_is_compared_with_the_one_that_it_changes() -> None:
    settings = {"batch": 1e-7, "kernels": 0.1, "chunking": 0.1, "cache": 0.1, "swap": 0.1}
    (cause,) = of_gaps(alone=1e-7, **settings).causes
    assert cause.startswith("engine kernels")
    (cause,) = of_gaps(alone=1e-7, **{**settings, "batch": 0.1}).causes
    assert cause.startswith("batch")
    assert [
        each.partition(":")[0] for each in of_gaps(alone=1e-7, **{**settings, "cache": 3.0}).causes
    ] == [
        "engine kernels",
        "cache",
    ]


def test_precision_explains_no_more_than_rounding_does() -> None:
    kinds = ("bfloat16", "float32")
    within = Diagnosis(
        gaps={"alone": of(1e-3), "precision": of(1e-9)},
        rounding={"alone": RoundingBound(2e-3, 1e-1), "precision": LEAST},
        kinds=kinds,
    )
    assert (
        "rounding to bfloat16 causes a k3 of up to 2.0e-03" in within.causes[0]
        and not within.unexplained
    )
    above = of_gaps(alone=1e-3, precision=1e-9, known={"kinds": kinds})
    assert "something that the engine computes in bfloat16 is wrong" in above.causes[0]
    assert of_gaps(alone=1e-3, precision=1e-3).unexplained


def fit(asked: float, fitted: float, preference: float = 0.0) -> TemperatureFit:
    return TemperatureFit(asked=asked, fitted=fitted, k3=0.0, k3_max=0.0, preference=preference)


@pytest.mark.parametrize(
    ("fits", "agreeing", "expected"),
    [
        ([fit(1.0, 0.8), fit(0.5, 0.4)], [], "logits: the engine's are 1.250 times"),
        ([fit(1.0, 0.7), fit(0.5, 0.7)], [], "the engine computes at 0.700 whatever"),
        ([fit(1.0, 0.5)], [0.5], "the engine computes at 0.500 whatever"),
        (
            [fit(0.5, 1.0, 9.0)],
            [1.0],
            "recorded before temperature is applied; tokens are sampled after",
        ),
        ([fit(0.5, 1.0, -9.0)], [1.0], "does not apply it"),
        ([fit(0.5, 1.0)], [], "the tokens do not tell"),
        ([fit(0.5, 0.8)], [], "those of temperature 0.800, but the trainer computes at 0.5"),
        ([fit(1.0, 0.5), fit(0.5, 0.9)], [], "0.500 where 1 was requested, 0.900 where 0.5"),
    ],
)
def test_what_a_temperature_says(
    fits: list[TemperatureFit], agreeing: list[float], expected: str
) -> None:
    assert expected in of_temperature(fits, agreeing)


@pytest.mark.parametrize("factor", [0.3, 0.97, 1.5, 4.0])
def test_the_temperature_is_found(factor: float) -> None:
    logits_NV = 2 * torch.randn(
        40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    tokens_N = torch.arange(40) % 30
    logp_NV, old_NV = (
        torch.log_softmax(logits_NV / 0.7, -1),
        torch.log_softmax(logits_NV / (0.7 * factor), -1),
    )
    found = fit_temperature(old_NV.gather(1, tokens_N[:, None])[:, 0], tokens_N, logp_NV, 0.7)
    assert found.fitted == pytest.approx(0.7 * factor, rel=1e-6) and found.k3 < 1e-12


def test_a_cut_within_rounding_is_none() -> None:
    logp_NV = torch.log_softmax(torch.randn(50, 20, generator=torch.Generator().manual_seed(0)), -1)
    new_N = logp_NV[:, 0]
    old_N = new_N + 0.01
    assert find_cut(old_N, new_N, logp_NV, RoundingBound(1.0, 1.0)) is None


def test_experts_within_rounding_and_beyond() -> None:
    own_TLk = torch.tensor([[[0, 1], [2, 3]], [[4, 2], [0, 5]], [[3, 1], [1, 2]], [[0, 3], [4, 5]]])
    swapped = torch.tensor([3, 1, 2, 0, 4, 5])
    recorded_TLk = own_TLk.flip(-1).clone()  # their order does not count
    recorded_TLk[:, 1] = swapped[recorded_TLk[:, 1]]
    first, second = compare_experts(recorded_TLk, own_TLk, [own_TLk] * 8, layers=(1, 2))
    assert (first.layer, first.mismatch_frac, first.swapped) == (1, 0.0, None)
    assert (second.layer, second.mismatch_frac, second.bound, second.swapped) == (
        2,
        0.5,
        0.0,
        (0, 3),
    )
    assert [
        each.bound for each in compare_experts(own_TLk, own_TLk, [recorded_TLk] * 8, layers=(1, 2))
    ] == [0.0, 0.5]


def test_operators_of_many_layers_make_one_line() -> None:
    many = [Operator(f"model.layers.{layer}.self_attn", 0.1, 0.01) for layer in (10, 2, 1)]
    assert grouped([*many, Operator("rope", 0.1, 0.01, "why")]) == [
        "operator: rope (why)",
        "operator: model.layers.*.self_attn of 3 layers, first model.layers.1.self_attn",
    ]


def test_a_bound_is_above_its_draws() -> None:
    draws = [
        mismatch_stats(torch.zeros(3).numpy(), torch.full((3,), size).numpy())
        for size in (1e-3, 1.1e-3) * 4
    ]
    bound = RoundingBound.of(draws)
    assert max(draw.k3 for draw in draws) < bound.k3 < 2 * max(draw.k3 for draw in draws)
    assert not bound.holds(of(math.inf))


@pytest.mark.parametrize("top_p", [0.3, 0.7, 0.95])
def test_the_top_p_is_found_that_explains_the_log_probs(top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logp_NV = torch.log_softmax(
        2 * torch.randn(60, 20, generator=generator, dtype=torch.float64), -1
    )
    order_NV = logp_NV.sort(-1, descending=True)
    sums_NV = order_NV.values.exp().cumsum(-1)
    kept_N = (sums_NV < top_p).sum(-1)  # the last place that is kept
    mass_N = sums_NV.gather(1, kept_N[:, None])[:, 0]
    tokens_N = order_NV.indices[:, 0]
    new_N = logp_NV.gather(1, tokens_N[:, None])[:, 0]
    found = find_cut(new_N - mass_N.log(), new_N, logp_NV, LEAST)
    assert found is not None and found.k3 < 1e-9
    # any value that keeps the same tokens would do
    low = sums_NV.gather(1, (kept_N - 1).clamp(min=0)[:, None])[:, 0][kept_N > 0].max()
    assert low <= found.top_p <= mass_N.min()
    assert find_cut(new_N, new_N, logp_NV, LEAST) is None
    # log-probs that are wrong in other ways are not explained by it
    noise_N = torch.rand(60, generator=generator, dtype=torch.float64)
    assert find_cut(new_N + noise_N, new_N, logp_NV, LEAST) is None


def experts(mismatch: float, swapped: tuple[int, int] | None = None) -> dict[str, Any]:
    fine = LayerRouterMismatch(layer=1, mismatch_frac=0.0, bound=0.0)
    wrong = LayerRouterMismatch(layer=2, mismatch_frac=mismatch, bound=0.01, swapped=swapped)
    return {"experts": (fine, wrong)}


def scale(**fits: tuple[float, float, float]) -> dict[str, Any]:
    """Setting -> requested temperature, fitted temperature, and the k3 that is left."""
    return {
        "fits": {
            name: TemperatureFit(asked=asked, fitted=fitted, k3=k3, k3_max=5 * k3, preference=9.0)
            for name, (asked, fitted, k3) in fits.items()
        }
    }


@pytest.mark.parametrize(
    ("gaps", "known", "causes", "unexplained"),
    [
        ({"alone": 0.1}, {"cut": TopPCut(0.9, 1e-7)}, ["top-p: sampled with top-p 0.90"], []),
        ({"alone": 0.1}, {"cut": TopPCut(0.9, 0.01)}, ["top-p"], []),
        ({"alone": 0.1}, {"cut": TopPCut(0.9, 0.02)}, ["top-p"], ["alone: k3 1.0e-01"]),
        ({"alone": 1e-7, "replay": 0.1}, experts(0.5),
         ["recorded experts: not the ones that the engine computed with (50.0% of the tokens "
          "in layer 2; rounding: 1.0%)"], []),
        ({"alone": 1e-7, "replay": 0.1}, experts(0.5, (1, 4)),
         ["recorded experts: not the ones that the engine computed with, experts 1 and 4 are"], []),
        ({"alone": 0.2, "replay": 0.1}, experts(0.5, (1, 4)),
         ["router: the engine chooses other experts than the trainer, experts 1 and 4"], []),
        ({"alone": 0.2, "replay": 0.1}, experts(0.5), [], ["alone: k3 2.0e-01"]),
        ({"alone": 1e-7, "replay": 0.1}, experts(0.01), [],
         ["replay: k3 1.0e-01 and 5.0e-01 at the worst token"]),
        ({"alone": 1e-7, "temperature": 0.1}, {}, [], ["temperature: k3 1.0e-01"]),
        ({"alone": 1e-7, "temperature": 0.1},
         scale(alone=(1.0, 1.0, 0.0), temperature=(0.5, 1.0, 0.0)),
         ["temperature: log-probs are recorded before temperature"], []),
        ({"alone": 0.1}, scale(alone=(1.0, 0.5, 1e-7)), ["temperature: the recorded"], []),
        ({"alone": 0.1}, scale(alone=(1.0, 0.5, 0.009)), ["temperature: the recorded"],
         ["alone: k3 1.0e-01 and 5.0e-01 at the worst token, while rounding causes up to "
          "1.0e-06 and 1.0e-05; k3 9.0e-03 remains at the temperature that fits best"]),
        ({"alone": 0.1}, scale(alone=(1.0, 0.5, 0.02)), [], ["alone: k3 1.0e-01"]),
        ({"alone": 2e-6}, scale(alone=(1.0, 1.01, 9e-7)), [], ["alone"]),
        ({"alone": 2e-6}, scale(alone=(1.0, 1.1, 9e-7)), ["temperature"], []),
        ({"alone": 0.1}, {"operators": (Operator("rope", 0.1, 0.01),)}, ["operator: rope"], []),
        ({"alone": 1e-7, "temperature": 0.1}, {"operators": (Operator("rope", 0.1, 0.01),)},
         ["operator: rope"], []),
        ({"alone": 0.1}, {"argmax_flip_frac": 0.5}, [],
         ["alone: k3 1.0e-01 and 5.0e-01 at the worst token, while rounding causes up to "
          "1.0e-06 and 1.0e-05; every operator agrees: it arises after the logits"]),
    ],
)  # fmt: skip
def test_what_explains_what(
    gaps: dict[str, float], known: dict[str, Any], causes: list[str], unexplained: list[str]
) -> None:
    found = of_gaps(known=known, **gaps)
    for told, expected in ((found.causes, causes), (found.unexplained, unexplained)):
        assert len(told) == len(expected), told
        assert all(a.startswith(b) for a, b in zip(told, expected, strict=True)), told
