"""Duration of a step when ranks share it: against every possible division, and examples that can be
checked by hand."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.train.packing import SequenceCostModel, plan_microbatches

BY_TOKEN = SequenceCostModel(per_token=1.0, per_pair=0.0)
COST = SequenceCostModel(per_token=10.0, per_pair=1.0)


def lasts(lengths: list[int], limit: int, ranks: int, cost: SequenceCostModel) -> float:
    rounds = zip(*plan_microbatches(lengths, limit, ranks, cost), strict=True)
    return sum(
        max(sum(cost(lengths[index]) for index in some) for some in together) for together in rounds
    )


def best(lengths: list[int], ranks: int, cost: SequenceCostModel) -> float:
    """The best of all divisions of the items, one microbatch for each rank."""
    ways = product(range(ranks), repeat=len(lengths))
    return min(
        max(
            sum(cost(length) for length, r in zip(lengths, way, strict=True) if r == rank)
            for rank in range(ranks)
        )
        for way in ways
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=6), st.integers(2, 4))
def test_a_step_lasts_hardly_longer_than_it_must(lengths: list[int], ranks: int) -> None:
    """Graham, 1969: assigning the costliest first, each to the rank with the least, is at most a
    third worse than the best."""
    bound = 4 / 3 - 1 / (3 * ranks)
    assert lasts(lengths, sum(lengths), ranks, COST) <= bound * best(lengths, ranks, COST) * (
        1 + 1e-9
    )


def test_by_hand() -> None:
    assert lasts([10] * 12, 40, 2, BY_TOKEN) == 60, "twelve rows of ten tokens are six for each"
    assert lasts([10] * 8, 80, 4, BY_TOKEN) == 20
    assert lasts([10] * 3, 10, 2, BY_TOKEN) == 20, "a row is never cut"
    assert lasts([10, 10, 20], 20, 2, BY_TOKEN) == 20
    assert lasts([10] * 5, 50, 2, BY_TOKEN) == 30


def test_what_a_row_costs() -> None:
    assert SequenceCostModel(per_token=3.0, per_pair=0.5)(4) == 4 * 3.0 + 0.5 * 4 * 4 / 2


def test_a_rank_that_finds_nobody_says_so(tmp_path: Path) -> None:
    alone = (
        "from pathlib import Path; from etude.train.distributed import World\n"
        f"World.on_one_machine(0, 2, Path({str(tmp_path / 'meeting')!r}), timeout_s=1.0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", alone], capture_output=True, text=True, check=False
    )
    assert "EtudeError: rank 0 of 2 could not connect to all others within 1 s" in done.stderr


@pytest.mark.parametrize("size", ["", "1"])
def test_without_torchrun_a_process_is_alone(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.train.distributed import World

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert (World.from_torchrun(1.0).rank, World.from_torchrun(1.0).world_size) == (0, 1)
