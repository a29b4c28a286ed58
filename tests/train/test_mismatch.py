"""The mismatch between engine and trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from etude.core.sampling import RegionSpan, VersionSpan
from etude.core.types import RecomputedRow, Row
from etude.train.mismatch import measure_mismatch, mismatch_stats, router_mismatch


def row(name: str, old: list[float], version: int, *regions: RegionSpan) -> Row:
    """One prompt token, then sampled ones with an unsampled one after the first."""
    mask = (False, True, False, *[True] * (len(old) - 1))
    numbers = iter(old)
    logprobs = tuple(next(numbers) if said else 0.0 for said in mask)
    return Row(
        sample=name,
        tokens=tuple(range(10, 10 + len(mask))),
        mask=mask,
        logprobs=logprobs,
        advantages=(0.0,) * len(mask),
        versions=(VersionSpan(version, len(old)),),
        regions=regions,
    )


def again(values: list[float], **more: object) -> RecomputedRow:
    return RecomputedRow(logprobs=tuple(values), **more)  # type: ignore[arg-type]


def test_a_gap_by_hand() -> None:
    d = np.array([0.0, math.log(2), math.log(4), -math.log(2)])
    old = np.full(4, -3.0)
    got = mismatch_stats(old, old + d)
    k3 = [0.0, 1 - math.log(2), 3 - math.log(4), math.log(2) - 0.5]
    assert (got.num_tokens, got.argmax_flip_frac, got.router_mismatch_frac) == (4, None, None)
    assert got.k1 == pytest.approx(-math.log(4) / 4)
    assert got.k1_p99 == pytest.approx(math.log(4))
    assert got.k3 == pytest.approx(sum(k3) / 4)
    assert got.k3_p99 == got.k3_max == pytest.approx(k3[2])
    assert (got.ratio_p1, got.ratio_p99, got.ratio_max) == pytest.approx((0.5, 4.0, 4.0))
    assert got.ess == pytest.approx(7.5**2 / (4 * 21.25))


def test_p99_leaves_out_the_hundredth() -> None:
    old, new = np.zeros(100), np.zeros(100)
    new[17] = 5.0
    assert mismatch_stats(old, new).k3_p99 == 0.0
    new[18] = 5.0
    assert mismatch_stats(old, new).k3_p99 > 100


def test_all_tokens_of_all_rows_count() -> None:
    rng = np.random.default_rng(0)
    old, shift = -rng.exponential(size=(4, 150)), rng.normal(size=(4, 150)) * 0.3
    rows = [row(str(i), each.tolist(), version=0) for i, each in enumerate(old)]
    found = measure_mismatch(rows, [again(each) for each in (old + shift).tolist()], step=1).all
    assert found == mismatch_stats(old.ravel(), (old + shift).ravel())
    assert found.num_tokens == 600 and 0 < found.ess < 1
    assert found.ratio_p1 < 1 < found.ratio_p99 < found.ratio_max
    assert found.argmax_flip_frac is None and found.router_mismatch_frac is None


def test_no_gap_where_there_is_none() -> None:
    old = np.float32([-0.5, -0.25]).tolist()
    found = measure_mismatch([row("a", old, 3)], [again(old)], step=4)
    assert (found.all.k1, found.all.k3, found.all.k3_max, found.all.ratio_max) == (0, 0, 0, 1)
    assert found.all.ess == 1


def test_the_gap_of_each_lag_and_region() -> None:
    """The second session began in one region and ended in the other."""
    rows = [
        row("a", [-1.0, -1.0], 5, RegionSpan("x", 2)),
        row("b", [-1.0, -1.0], 3, RegionSpan("x", 1), RegionSpan("y", 1)),
        row("c", [-1.0, -1.0], 3, RegionSpan("y", 2)),
    ]
    found = measure_mismatch(
        rows, [again([-1.0, -1.0]), again([-1.0, -2.5]), again([-1.0, -1.0])], step=6
    )
    assert list(found.by_lag) == [0, 2] and list(found.by_region) == ["x", "y"]
    assert found.by_lag[0].k3 == 0 == found.by_region["x"].k3
    assert found.by_lag[2].num_tokens == 4 and found.by_region["y"].num_tokens == 3


def test_the_worst_tokens_have_their_text() -> None:
    rows = [row("a", [-1.0, -1.0, -1.0], version=0), row("b", [-1.0, -1.0], version=0)]
    found = measure_mismatch(
        rows,
        [again([-1.0, -1.1, -1.0]), again([-1.0, -3.0])],
        step=1,
        decode=lambda ids: f"<{ids[-1]}>",
        num_worst=2,
    )
    first, second = found.worst
    assert (first.sample, first.position, first.token, first.text, first.new) == (
        "b",
        3,
        13,
        "<13>",
        -3.0,
    )
    assert (second.sample, second.position) == ("a", 3)
    nine = [row("a", [-1.0] * 9, version=0)], [again([-1.0 - n / 10 for n in range(9)])]
    assert [worst.position for worst in measure_mismatch(*nine, step=1).worst] == [
        10,
        9,
        8,
        7,
        6,
    ], "five, if nobody says how many"


def test_flips_are_counted_where_they_are_certain() -> None:
    """The first token was the engine's likeliest and is not the trainer's; for the second it is
    unknown; the third is the likeliest of both."""
    old = [math.log(0.6), math.log(0.4), math.log(0.9)]
    found = measure_mismatch([row("a", old, 0)], [again(old, argmax=(1, 2, 14))], step=1)
    assert found.all.argmax_flip_frac == 0.5


def test_routers_disagree_by_their_sets() -> None:
    old = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]]])
    new = np.array([[[2, 1], [4, 3]], [[1, 2], [3, 5]]])
    assert router_mismatch(old, new).tolist() == [False, True]
    found = measure_mismatch(
        [row("a", [-1.0, -1.0], 0)],
        [again([-1.0, -1.0], router_mismatch=tuple(router_mismatch(old, new)))],
        step=1,
    )
    assert found.all.router_mismatch_frac == 0.5
