"""Statistics of evaluations, compared with results by hand, by enumeration and by simulation."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.statistics import clustered_wilson, compare_paired, pass_at_k, sign_flip_p, wilson


def test_the_interval_by_hand() -> None:
    low, high = wilson(50, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson(0, 10)[0] == 0.0 and round(wilson(0, 10)[1], 4) == 0.2775


@pytest.mark.parametrize("attempts", [1, 2, 5])
@pytest.mark.parametrize("solved", [0, 1, 2, 5])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_solution(
    attempts: int, solved: int, k: int
) -> None:
    if solved > attempts:
        return
    if k > attempts:
        with pytest.raises(ValueError, match=f"at least {k} attempts"):
            pass_at_k(attempts, solved, k)
        return
    chosen = list(itertools.combinations([1] * solved + [0] * (attempts - solved), k))
    share = sum(any(each) for each in chosen) / len(chosen)
    assert pass_at_k(attempts, solved, k) == pytest.approx(share)


def test_attempts_that_agree_within_a_task_count_as_one() -> None:
    assert clustered_wilson([8] * 30 + [0] * 20, 8) == pytest.approx(wilson(30, 50), abs=0.01)


def test_attempts_that_do_not_depend_on_the_task_count_each() -> None:
    rng = Random(0)
    counts = [sum(rng.random() < 0.5 for _ in range(8)) for _ in range(4000)]
    low, high = clustered_wilson(counts, 8)
    alone = wilson(sum(counts), 32000)
    assert high - low == pytest.approx(alone[1] - alone[0], rel=0.1)


def test_no_attempt_solved_is_no_certainty() -> None:
    assert clustered_wilson([0] * 20, 4) == (0.0, pytest.approx(wilson(0, 80)[1]))


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_the_sign_flip_test_is_the_enumeration_of_all_flips(gains: list[int]) -> None:
    sums = [
        sum(sign * gain for sign, gain in zip(signs, gains, strict=True))
        for signs in itertools.product((1, -1), repeat=len(gains))
    ]
    expected = sum(abs(each) >= abs(sum(gains)) for each in sums) / len(sums)
    assert sign_flip_p(gains) == pytest.approx(expected)


def test_with_one_attempt_it_is_mcnemars_exact_test() -> None:
    gains = [1] * 8 + [-1] * 1 + [0] * 50
    assert sign_flip_p(gains) == pytest.approx(2 * (1 + 9) / 2**9)


def test_a_comparison_by_hand() -> None:
    before, after = {"a": 0, "b": 1, "c": 2, "d": 0}, {"a": 2, "b": 1, "c": 1, "d": 2}
    found = compare_paired(before, after, attempts=2)
    assert (found.num_tasks, found.before, found.after) == (4, 3 / 8, 6 / 8)
    assert found.difference == pytest.approx(3 / 8)
    assert (found.gained, found.lost) == (2, 1)
    assert found.low < 0 < found.difference < found.high <= 1
    assert found.p_value == sign_flip_p([2, 0, -1, 2]) == 0.5


def test_the_same_on_both_sides_is_no_difference() -> None:
    solved = {"a": 1, "b": 0}
    found = compare_paired(solved, solved, attempts=1)
    assert (found.difference, found.low, found.high, found.p_value) == (0, 0, 0, 1)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        compare_paired({"a": 1}, {"b": 1}, attempts=1)


def test_false_alarms_come_as_often_as_promised() -> None:
    rng = Random(1)
    rounds = 400
    chances = [sign_flip_p([rng.choice((-1, 0, 1)) for _ in range(40)]) for _ in range(rounds)]
    alarms = sum(chance < 0.05 for chance in chances)
    assert alarms / rounds < 0.08


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_one_attempt_at_each_task_is_the_plain_interval(solved: list[bool]) -> None:
    expected = wilson(sum(solved), len(solved))
    assert clustered_wilson([int(each) for each in solved], 1) == pytest.approx(expected)


@given(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_tries_count_for_at_least_a_task_and_at_most_an_attempt_each(
    attempts: int, counts: list[int]
) -> None:
    solved = [min(count, attempts) for count in counts]
    low, high = clustered_wilson(solved, attempts)
    tasks, total = len(solved), len(solved) * attempts
    share = sum(solved) / total
    widest, narrowest = wilson(share * tasks, tasks), wilson(sum(solved), total)
    assert widest[0] - 1e-9 <= low <= narrowest[0] + 1e-9
    assert narrowest[1] - 1e-9 <= high <= widest[1] + 1e-9
