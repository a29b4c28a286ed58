"""Filters over rollouts, against a plain loop over the same rows."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from etude.bench.dash import _row
from etude.core.errors import EtudeError
from etude.dash import answers
from etude.dash.answers import short
from etude.dash.table import Filter, RolloutTable, cause_of
from etude.store.rollouts import RolloutRow

DONE = 4
"""The last step that is done."""


def became(row: RolloutRow) -> str:
    if row.step is None:
        return row.dropped or ""
    return "trained" if row.step <= DONE else "batched"


def passes(row: RolloutRow, wanted: Filter) -> bool:
    def within(value: float | None, low: float | None, high: float | None) -> bool:
        if low is None and high is None:
            return True
        return (
            value is not None and (low is None or value >= low) and (high is None or value <= high)
        )

    text = (wanted.text or "").lower()
    places = (row.id, row.task.lower(), (row.error or "").lower(), row.source.lower(), *row.flags)
    return (
        within(row.reward, wanted.reward_min, wanted.reward_max)
        and within(row.length, wanted.length_min, wanted.length_max)
        and within(row.turns, wanted.turns_min, wanted.turns_max)
        and within(row.seconds, wanted.seconds_min, wanted.seconds_max)
        and wanted.step in (None, row.step)
        and wanted.task in (None, row.task)
        and wanted.status in (None, row.status)
        and wanted.group in (None, row.group)
        and wanted.source in (None, row.source)
        and wanted.became in (None, became(row))
        and wanted.cause in (None, cause_of(row.error))
        and (wanted.version is None or row.versions[0] <= wanted.version <= row.versions[-1])
        and (wanted.flag is None or wanted.flag in row.flags)
        and (wanted.solved is None or (row.reward == 1.0) == wanted.solved)
        and any(text in place for place in places)
    )


def rows(count: int = 3000) -> list[RolloutRow]:
    chance = random.Random(3)
    return [_row(number, chance) for number in range(count)]


def some_filters(found: list[RolloutRow]) -> list[Filter]:
    chance, failed = random.Random(5), next(row for row in found if row.error)
    one = chance.choice(found)
    return [
        Filter(),
        Filter(reward_min=0.2, reward_max=0.6),
        Filter(length_min=4000, turns_max=9, seconds_min=3.0),
        Filter(status="failed"),
        Filter(became="no_signal", solved=False),
        Filter(became="trained", version=3),
        Filter(became="batched", version=4),
        Filter(step=one.step, source=one.source),
        Filter(task=one.task),
        Filter(group=one.group),
        Filter(flag="reads-the-tests"),
        Filter(cause=cause_of(failed.error)),
        Filter(text="TIMEOUT"),
        Filter(text="g00001"),
        Filter(text="the-tests", status="done"),
        Filter(task="none of them"),
    ]


def test_filters_find_what_a_loop_finds() -> None:
    found = rows()
    table = RolloutTable()
    for start in range(0, len(found), 700):
        table.add(found[start : start + 700])
        table.advance(DONE if start else DONE - 2)
    hits = 0
    for wanted in some_filters(found):
        expected = [place for place, row in enumerate(found) if passes(row, wanted)]
        assert table.find(wanted).tolist() == expected, wanted
        hits += bool(expected)
        counts = table.facets(table.find(wanted))
        assert sum(counts["status"].values()) == len(expected)
    assert hits >= 14


def test_sorting_puts_what_has_no_number_last() -> None:
    found, table = rows(500), RolloutTable()
    table.add(found)
    places = table.find(Filter())
    for sort, sign in (("reward", 1), ("-reward", -1)):
        rewards = [row.reward for row in table.page(places, sort, offset=0, limit=500)]
        numbers = [reward for reward in rewards if reward is not None]
        assert numbers == sorted(numbers, key=lambda value: sign * value)
        assert rewards[: len(numbers)] == numbers
    newest = table.page(places, "new", offset=1, limit=2)
    assert [row.id for row in newest] == [found[-2].id, found[-3].id]
    with pytest.raises(EtudeError, match="cannot sort by 'id'"):
        table.page(places, "id", offset=0, limit=1)


def test_a_later_row_takes_the_place_of_an_earlier_one() -> None:
    table = RolloutTable()
    table.add(rows(10))
    table.add([replace(table.rows[4], reward=0.125, flags=("late",))])
    assert len(table) == 10
    assert table.find(Filter(reward_min=0.125, reward_max=0.125)).tolist() == [10]
    assert table.facets(table.find(Filter()))["flag"]["late"] == 1
    assert len(table.find(Filter())) == 10


def test_an_empty_table() -> None:
    table = RolloutTable()
    nothing = table.find(Filter(text="x", flag="y", version=1))
    assert table.facets(nothing)["status"] == {}
    assert table.histogram("reward", nothing) == {"edges": [], "counts": []}


def test_a_histogram_counts_all_that_have_a_number() -> None:
    table = RolloutTable()
    table.add(rows(800))
    places = table.find(Filter())
    told = table.histogram("reward", places)
    finite = sum(math.isfinite(row.reward) for row in table.rows if row.reward is not None)
    assert sum(told["counts"]) == finite
    assert (told["edges"][0], told["edges"][-1]) == (0.0, 1.0)
    table.add([replace(rows(1)[0], id=f"{each}", reward=each) for each in (-2.0, 3.0)])
    wide = table.histogram("reward", table.find(Filter()))
    assert (wide["edges"][0], wide["edges"][-1]) == (-2.0, 3.0)
    assert sum(wide["counts"]) == finite + 2


def test_lengths_are_shown_in_as_many_parts_of_the_same_size() -> None:
    table = RolloutTable()
    table.add([replace(row, length=number) for number, row in enumerate(rows(801))])
    parts = answers._by_length(table, table.find(Filter()))
    assert [part["dispatched"] for part in parts] == [100] * 7 + [101]
    assert (parts[0]["name"], parts[-1]["name"]) == ("0 to 100", "700 to 800")


def test_errors_that_differ_in_numbers_have_one_cause() -> None:
    one = cause_of("sandbox: timeout after 30.5 s in '/tmp/a/b.py', id 0x7f12ab")
    two = cause_of("sandbox: timeout after 12 s in '/home/x.py', id 0xff0000\nTraceback")
    assert one == two == "sandbox: timeout after … s in '…', id …"


def test_a_row_tells_what_a_traceback_ends_with() -> None:
    frames = '  File "/work/agent.py", line 4, in main\n    argv[1]\n' * 9
    error = f"agent: Traceback (most recent call last):\n{frames}IndexError: list index"
    table = RolloutTable()
    found = [replace(row, error=told) for row, told in zip(rows(2), (error, None), strict=True)]
    assert [short(table, row)["error"] for row in found] == ["agent: IndexError: list index", None]


def test_nothing_is_trained_before_the_first_step_is_done() -> None:
    table, row = RolloutTable(), replace(_row(0, random.Random(0)), step=1)
    table.add([row])
    assert table.became(row) == "batched"
    table.advance(1)
    assert table.became(row) == "trained"


def test_a_filter_is_read_from_the_texts_of_a_query() -> None:
    given = [("task", ""), ("step", "3"), ("reward_min", "0.5"), ("solved", "false"), ("text", "x")]
    assert Filter.of(given) == Filter(step=3, reward_min=0.5, solved=False, text="x")
    assert Filter.of([("solved", "true")]).solved is True
    for name, text in (("solved", "yes"), ("solved", "True"), ("step", "1.5"), ("reward_min", "x")):
        with pytest.raises(
            EtudeError, match=f"'{text}' is not a valid value for the filter {name}"
        ):
            Filter.of([(name, text)])
