"""Data that the trainer refuses, and the words in which it does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from etude.core.checks import check_batch
from etude.core.errors import EtudeError
from etude.core.sampling import RegionSpan, SamplingParams, SamplingSpan, VersionSpan
from etude.core.types import Batch, Row

ROW = Row(
    sample="g.0",
    tokens=(5, 6, 7),
    mask=(False, True, True),
    logprobs=(0.0, -1.0, -2.0),
    advantages=(0.0, 0.5, 0.5),
    versions=(VersionSpan(3, 1), VersionSpan(4, 1)),
)


def drawn(count: int, **params: Any) -> SamplingSpan:
    return SamplingSpan(SamplingParams(**params), count)


def check(*rows: Row, oldest: int = 3) -> None:
    check_batch(
        Batch(step=5, rows=rows, oldest=oldest),
        max_tokens=3,
        vocab_size=8,
        where="memory: batches/5",
    )


def test_a_good_batch_passes() -> None:
    check(ROW, replace(ROW, sampling=(drawn(1, temperature=0.5), drawn(1))))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"logprobs": (0.0, math.nan, -2.0)}, "a log-prob is not finite"),
        ({"advantages": (0.0, math.inf, 0.5)}, "an advantage is not finite"),
        ({"advantages": (0.0, 1e30, 0.5)}, "its advantage is 1e+30"),
        ({"logprobs": (0.0, 0.5, -2.0)}, "a sampled token has the log-prob 0.5"),
        ({"logprobs": (0.0, -9999.0, -2.0)}, "a sampled token has the log-prob -9999"),
        (
            {"logprobs": (0.0, -89.0, -2.0)},
            "a sampled token has the log-prob -89: it must be between -36.7368 and 0",
        ),
        ({"mask": (False, False, False), "versions": ()}, "none of its tokens was sampled"),
        ({"mask": (True, False, True)}, "its first token is marked as sampled"),
        (
            {"tokens": (5, 6, 7, 7), "mask": (False, True, True, False)},
            "tokens, mask, log-probs and advantages have 4",
        ),
        ({"tokens": (5, 6, 8)}, "a token is outside the vocabulary of 8"),
        ({"tokens": (5, -1, 7)}, "a token is outside the vocabulary of 8"),
        ({"versions": (VersionSpan(3, 1),)}, "2 tokens were sampled, and 1 have a weight version"),
        (
            {"versions": (VersionSpan(3, 3), VersionSpan(4, -1))},
            "a span of -1 tokens has a weight version",
        ),
        (
            {"regions": (RegionSpan("east", 3), RegionSpan("west", -1))},
            "a span of -1 tokens has a region",
        ),
        ({"regions": (RegionSpan("east", 1),)}, "2 tokens were sampled, and 1 have a region"),
        (
            {"versions": (VersionSpan(3, 1), VersionSpan(5, 1))},
            "a token comes from version 5, but only versions 3 to 4 are possible",
        ),
        ({"versions": (VersionSpan(2, 2),)}, "a token comes from version 2"),
        (
            {"sampling": (drawn(3), drawn(-1))},
            "a span of -1 tokens has sampling parameters",
        ),
        ({"sampling": (drawn(1),)}, "2 tokens were sampled, and 1 have sampling parameters"),
        (
            {"sampling": (drawn(1), drawn(1, temperature=math.inf))},
            "a token was sampled at temperature inf",
        ),
        ({"sampling": (drawn(2, temperature=-1.0),)}, "a token was sampled at temperature -1.0"),
        (
            {"sampling": (drawn(1), drawn(1, top_p=0.9))},
            "a token was sampled with top_p, which the trainer cannot recompute",
        ),
        ({"sampling": (drawn(2, temperature=0.0),)}, "a token was sampled with temperature 0"),
    ],
)
def test_each_fault_is_named_with_its_row(change: dict[str, Any], told: str) -> None:
    with pytest.raises(EtudeError) as caught:
        check(ROW, replace(ROW, sample="g.1", **change))
    assert str(caught.value).startswith(f"memory: batches/5, row of g.1: {told}")


def test_an_over_long_row_and_an_empty_batch() -> None:
    long = replace(
        ROW,
        tokens=(1,) * 4,
        mask=(False, True, True, False),
        logprobs=(0.0,) * 4,
        advantages=(0.0,) * 4,
    )
    with pytest.raises(EtudeError, match="it has 4 tokens, more than the context of 3"):
        check(long)
    with pytest.raises(EtudeError, match="has no rows: there is nothing to learn from"):
        check()


def test_figures_of_a_batch_that_cannot_be() -> None:
    with pytest.raises(EtudeError, match="has a mean reward of nan. No step was taken"):
        check_batch(
            Batch(step=5, rows=(ROW,), oldest=3, reward=math.nan),
            max_tokens=3,
            vocab_size=8,
            where="here",
        )
    with pytest.raises(EtudeError, match="has tokens of version -2"):
        check(replace(ROW, versions=(VersionSpan(-2, 2),)), oldest=-2)


def test_the_last_values_that_pass() -> None:
    check(replace(ROW, advantages=(0.0, 1e15, -1e15)))
    check(replace(ROW, logprobs=(0.0, 1e-4, 0.0)))
    check(replace(ROW, tokens=(0, 7, 0)))
    check(replace(ROW, regions=(RegionSpan("east", 1), RegionSpan("west", 1))))
    check(replace(ROW, logprobs=(5.0, -1.0, -1.0)))  # only sampled tokens have a log-prob
    with pytest.raises(EtudeError, match="the gradient cannot be computed above 1e"):
        check(replace(ROW, advantages=(0.0, 0.5, -1.1e15)))
    with pytest.raises(EtudeError, match="the log-prob 0.01"):
        check(replace(ROW, logprobs=(0.0, 0.01, -1.0)))
    with pytest.raises(EtudeError, match="a log-prob is not finite"):
        check(replace(ROW, logprobs=(math.nan, -1.0, -1.0)))
