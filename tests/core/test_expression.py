"""Expressions over the parts of a score: their values, and the syntax that they refuse."""

from __future__ import annotations

import sys

import pytest

from etude.core.expression import Expression

PARTS = {"tests": 1.0, "style": 0.5, "lint": 0.25, "environment": 2.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tests * (0.8 + 0.2 * min(style, lint))", 0.85),
        ("tests", 1.0),
        (" -style + +1 ", 0.5),
        ("max(tests, style, 3) / 2", 1.5),
        ("environment - lint * 4", 1.0),
        ("(style >= 0.5) * 3 + (lint == 1)", 3.0),
        ("0 < lint < style <= 0.5 != tests > -1", 1.0),
        ("0 < style < lint", 0.0),
        ("1e3 * 2", 2000.0),
    ],
)
def test_it_says_what_it_says(text: str, value: float) -> None:
    assert Expression.parse(text).value(PARTS) == pytest.approx(value)


def test_it_knows_its_names() -> None:
    assert Expression.parse("a * min(b, 2) + (a > c)").names == {"a", "b", "c"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "a +", "a b", "a; b", "a = 1", "lambda: 1", "[a for a in b]", "a if b else c"),
        *("__import__('os')", "open('x')", "min(a)", "min(*a)", "max(a, key=b)", "abs(a)"),
        *("a.b", "a[0]", "'a'", "True", "None", "a ** 9 ** 9", "a // 2", "a % 2", "a and b"),
        *("not a", "~a", "a in b", "a is b", "(a, b)", "{a}", "f'{a}'", "(b := 1)", "1j", "..."),
        *("1" * 400, "1" * 5000, "(" * 500 + "a", "-" * 900 + "a" * 200, "min(min)(a, b)"),
    ],
)
def test_nothing_else_is_let_in(text: str) -> None:
    with pytest.raises(ValueError):
        Expression.parse(text)


def test_deep_ones_are_read_or_refused() -> None:
    """Every expression that can be parsed has a value, however little of the stack is left."""
    assert Expression.parse("-" * 90 + "tests").value(PARTS) == 1.0
    assert Expression.parse("+".join(["tests"] * 90)).value(PARTS) == 90.0
    for text in ("-" * 980 + "tests", "-" * 100 + "tests", "+".join("a" * 200)):
        with pytest.raises(ValueError, match="deep"):
            Expression.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "typos * 2",
            "needs 'typos', which is not one of the parts: environment, lint, style, tests",
        ),
        ("1 / (tests - 1)", "divides by zero"),
        ("1e300 * 1e300 * 1e300", "is inf with"),
    ],
)
def test_what_has_no_value_is_an_error_and_no_zero(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Expression.parse(text).value(PARTS)


def test_one_that_the_stack_cannot_hold_is_refused() -> None:
    depth, frame = 0, sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        depth += 1
    limit, told = sys.getrecursionlimit(), ""
    sys.setrecursionlimit(depth + 60)
    try:
        Expression.parse("-" * 90 + "tests")
    except ValueError as e:
        told = str(e)
    finally:
        sys.setrecursionlimit(limit)
    assert "nested too deep" in told
