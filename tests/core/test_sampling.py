"""Sampling parameters: their names, their ranges, and whether the trainer can recompute tokens
sampled with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etude.core.sampling import SamplingParams, SamplingSpan, sampling_spans


@pytest.mark.parametrize(
    ("params", "filters", "untrainable"),
    [
        ({}, (), None),
        ({"temperature": 0.7}, (), None),
        ({"temperature": 0.0}, (), "temperature 0"),
        ({"top_p": 0.9}, ("top_p",), "top_p"),
        ({"min_p": 0.1}, ("min_p",), "min_p"),
        ({"repetition_penalty": 1.1}, ("repetition_penalty",), "repetition_penalty"),
        ({"top_k": 5, "grammar": "start: /a/"}, ("top_k", "grammar"), "top_k, grammar"),
    ],
)
def test_a_parameter_that_filters_is_named(
    params: dict[str, object], filters: tuple[str, ...], untrainable: str | None
) -> None:
    made = SamplingParams(**params)  # type: ignore[arg-type]
    assert (made.filters, made.untrainable) == (filters, untrainable)
    assert made.reads_history == bool({"grammar", "repetition_penalty"} & params.keys())


def test_equal_neighbours_are_one_span() -> None:
    plain, warm = SamplingParams(), SamplingParams(temperature=2.0)
    spans = [SamplingSpan(plain, 2), SamplingSpan(SamplingParams(), 3), SamplingSpan(warm, 1)]
    assert sampling_spans(spans) == (SamplingSpan(plain, 5), SamplingSpan(warm, 1))
    assert sampling_spans([]) == ()


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("temperature", [0.0, 0.001, 1e9], [-1.0, 0.0009, math.inf, math.nan]),
        ("top_p", [1e-9, 1.0], [0.0, 1.001, math.nan]),
        ("top_k", [0, 1], [-1]),
        ("min_p", [0.0, 1.0], [-0.001, 1.001, math.nan]),
        ("repetition_penalty", [0.01, 100.0], [0.0099, 100.1, math.nan]),
    ],
)
def test_what_nothing_can_be_drawn_with_is_refused_by_name(
    name: str, accepted: list[Any], refused: list[Any]
) -> None:
    for value in accepted:
        SamplingParams(**{name: value}).check()
    for value in refused:
        with pytest.raises(ValueError, match=f"{name} must be"):
            SamplingParams(**{name: value}).check()
