"""Choice of a task's tests among those that run its lines."""

from __future__ import annotations

from etude.factory.survey import MAX_TESTS, Survey

SURVEY = Survey(
    seconds={"wide": 1.0, "narrow": 1.0, "middle": 1.5},
    lines={
        "a.py": {1: frozenset({"wide", "narrow", "middle"}), 2: frozenset({"wide", "middle"})},
        "b.py": {1: frozenset({"wide"})},
    },
    start_s=0.5,
)


def test_tests_are_found_by_the_lines_that_they_run() -> None:
    assert SURVEY.covering("a.py", [2, 3]) == {"wide", "middle"}
    assert SURVEY.covering("b.py", [1]) == {"wide"}
    assert SURVEY.covering("c.py", [1]) == SURVEY.covering("a.py", []) == set()
    assert SURVEY.breadth == {"wide": 3, "middle": 2, "narrow": 1}


def test_those_that_run_least_beside_it_come_first() -> None:
    names = ["wide", "middle", "narrow"]
    assert SURVEY.choose(names) == ("middle", "narrow", "wide")
    assert SURVEY.choose(names, most=2) == ("middle", "narrow")
    assert SURVEY.choose(names, most_s=2.5) == ("middle", "narrow")
    assert SURVEY.choose(names, most_s=2.4) == ("narrow",)
    assert SURVEY.choose(names, most_s=0.1) == ("narrow",), "one in any case"
    many = [f"t{number:03}" for number in range(MAX_TESTS + 5)]
    quick = Survey(seconds=dict.fromkeys(many, 0.0), lines={}, start_s=0.0)
    assert quick.choose(reversed(many)) == tuple(many[:MAX_TESTS])


def test_what_they_take() -> None:
    assert SURVEY.estimate_s(["narrow", "middle", "unknown"]) == 3.0


def test_it_is_read_as_it_was_written() -> None:
    assert Survey.from_bytes(SURVEY.to_bytes()) == SURVEY
