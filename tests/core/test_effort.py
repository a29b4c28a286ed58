"""The price of effort, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from etude.core.effort import Effort, concave, num_calls, num_turns
from etude.core.types import Score, Segment, Trajectory


@pytest.mark.parametrize(
    ("x", "k", "q", "expected"),
    [
        (0.0, 1.0, 0.5, 0.0),
        (3.0, 1.0, 0.0, 3.0),  # linear
        (3.0, 1.0, 0.5, 2.0),  # (4^0.5 - 1) / 0.5
        (3.0, 1.0, 2.0, 0.75),  # (4^-1 - 1) / -1
        (3.0, 1.0, 1.0, math.log(4.0)),
        (3.0, 5.0, 0.5, 1.2),  # (16^0.5 - 1) / 2.5
        (10.0, 1.0, 0.5, 4.633250),
        (100.0, 1.0, 2.0, 0.990099),
    ],
)
def test_by_hand(x: float, k: float, q: float, expected: float) -> None:
    assert concave(x, k=k, q=q) == pytest.approx(expected, rel=1e-6)


def test_the_limit_at_q_1_has_no_hole() -> None:
    limit = concave(7.0, k=2.0, q=1.0)
    for q in (1 - 1e-12, 1 + 1e-12):
        assert concave(7.0, k=2.0, q=q) == pytest.approx(limit, rel=1e-11)


@pytest.mark.parametrize("q", [0.3, 1.0, 1.7])
def test_more_always_costs_more_and_each_piece_less(q: float) -> None:
    prices = [concave(float(x), k=0.5, q=q) for x in range(50)]
    steps = [after - before for before, after in zip(prices, prices[1:], strict=False)]
    assert all(step > 0 for step in steps) and all(
        b < a for a, b in zip(steps, steps[1:], strict=False)
    )


def test_what_an_attempt_used() -> None:
    """Two segments: in the first the model answers twice, then a summary opens a second one."""
    first = Segment(
        prompt=(1,),
        tokens=(2, 3, 4, 5),
        mask=(True, True, False, True),
        logprobs=(0.0,) * 4,
        versions=(),
    )
    second = Segment(
        prompt=(1, 9), tokens=(6, 7), mask=(False, True), logprobs=(0.0,) * 2, versions=()
    )
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "assistant", "content": "done", "tool_calls": None},
        {"role": "assistant", "content": "done", "tool_calls": 3},
    ]
    attempt = Trajectory(
        id="a",
        task="t",
        group="g",
        segments=(first, second),
        score=Score(1.0),
        status="done",
        messages=messages,
    )
    assert (attempt.num_sampled, num_turns(attempt), num_calls(attempt)) == (4, 3, 2)
    effort = Effort(scale=0.5, k=1.0, q=1.0, tokens=0.1, calls=1.0, turns=2.0)
    assert effort.penalty(attempt) == pytest.approx(0.5 * math.log(1 + 0.4 + 2 + 6))
