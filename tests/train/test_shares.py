"""How long a step lasts when ranks share it: against every way to cut it, and examples that a person can check."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.train.rows import Cost, balance

BY_TOKEN = Cost(per_token=1.0, per_pair=0.0)
COST = Cost(per_token=10.0, per_pair=1.0)


def lasts(shapes: list[tuple[int, int]], ranks: int, cost: Cost) -> float:
    rounds = zip(*balance(shapes, ranks, cost), strict=True)
    return sum(max((p.stop - p.start) * cost.row(shapes[p.of][1]) for p in round) for round in rounds)


def cut(rows: int, count: int) -> list[int]:
    """In so many pieces, as equal as can be."""
    return [rows * (number + 1) // count - rows * number // count for number in range(count)]


def best(shapes: list[tuple[int, int]], ranks: int, cost: Cost) -> float:
    """Of all ways to cut each microbatch evenly that fill the fewest rounds, or one more, or are whole: those in which
    the costliest piece costs least, dealt by cost."""
    ways = []
    for counts in product(*(range(1, rows + 1) for rows, _ in shapes)):
        costs = [
            size * cost.row(width)
            for (rows, width), count in zip(shapes, counts, strict=True)
            for size in cut(rows, count)
        ]
        costs.sort(reverse=True)
        ways.append((costs[0], len(costs), sum(costs[::ranks])))
    fewest = math.ceil(len(shapes) / ranks)
    found = [length for _, number, length in ways if number == len(shapes)]
    for most in (fewest * ranks, (fewest + 1) * ranks):
        fitting = [way for way in ways if way[1] <= most]
        found.append(min(fitting)[2] if fitting else math.inf)
    return min(found)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 40)), min_size=1, max_size=3), st.integers(2, 4))
def test_a_step_lasts_as_long_as_it_must(shapes: list[tuple[int, int]], ranks: int) -> None:
    assert lasts(shapes, ranks, COST) <= best(shapes, ranks, COST) * (1 + 1e-9)


def test_by_hand() -> None:
    assert lasts([(4, 10)] * 3, 2, BY_TOKEN) == 60, "twelve rows of ten tokens are six for each"
    assert lasts([(8, 10)], 4, BY_TOKEN) == 20
    assert lasts([(1, 10), (1, 10), (1, 10)], 2, BY_TOKEN) == 20, "a row is never cut"
    assert lasts([(2, 10), (1, 20)], 2, BY_TOKEN) == 20
    assert lasts([(5, 10)], 2, BY_TOKEN) == 30


def test_what_a_row_costs() -> None:
    assert Cost(per_token=3.0, per_pair=0.5).row(4) == 4 * 3.0 + 0.5 * 4 * 4 / 2


def test_a_rank_that_finds_nobody_says_so(tmp_path: Path) -> None:
    alone = (
        "from pathlib import Path; from etude.train.ranks import Ranks\n"
        f"Ranks.on_this_machine(0, 2, Path({str(tmp_path / 'meeting')!r}), timeout_s=1.0)"
    )
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=False)
    assert "EtudeError: rank 0 of 2 did not find all others within 1 s" in done.stderr


@pytest.mark.parametrize("size", ["", "1"])
def test_without_torchrun_a_process_is_alone(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.train.ranks import Ranks

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert (Ranks.of_torchrun(1.0).rank, Ranks.of_torchrun(1.0).size) == (0, 1)
