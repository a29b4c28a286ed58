"""Baselines for one rollout per prompt: unbiased, by enumeration, and able to learn."""

from __future__ import annotations

import itertools
import math
from statistics import pvariance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.realtime.credit import (
    BASELINE,
    Baseline,
    ContextMean,
    CreditSample,
    Ridge,
    SimilarPrompts,
    advantages,
    embed,
)

PROMPTS = ["fix the failing test", "fix the failing build", "write a haiku", "write a poem"]


def sample(number: int, session: str = "", context: str = "", prompt: str = "") -> CreditSample:
    return CreditSample(
        id=str(number),
        session=session or f"session {number}",
        context=context or "ab"[number % 2],
        prompt=prompt or PROMPTS[number % len(PROMPTS)],
    )


SMALL_WINDOW = {
    "context_mean": lambda: ContextMean(window=5),
    "similar_prompts": lambda: SimilarPrompts(window=5),
    "ridge": lambda: Ridge(window=5),
}


@pytest.mark.parametrize("name", BASELINE)
def test_the_expected_gradient_is_the_true_one(name: str) -> None:
    """Summed over all ways in which four sessions can choose between two answers: without sampling,
    and with no tolerance except rounding."""
    chances = [0.3, 0.6, 0.5, 0.8]
    earned = [(0.0, 1.0), (-1.0, 0.5), (0.25, 0.0), (1.0, 0.75)]
    true = [c * (1 - c) * (b - a) for c, (a, b) in zip(chances, earned, strict=True)]
    found = [0.0] * 4
    for answers in itertools.product((0, 1), repeat=4):
        weight = math.prod(c if a else 1 - c for c, a in zip(chances, answers, strict=True))
        batch = [(sample(n), earned[n][answer]) for n, answer in enumerate(answers)]
        for n, advantage in enumerate(advantages(BASELINE[name](), batch)):
            found[n] += weight * (answers[n] - chances[n]) * advantage
    assert found == pytest.approx(true, abs=1e-9)


@pytest.mark.parametrize("name", BASELINE)
@settings(max_examples=20, deadline=None)
@given(rewards=st.lists(st.floats(-1, 1), min_size=3, max_size=8), other=st.floats(-1, 1))
def test_no_reward_of_the_own_session_counts(name: str, rewards: list[float], other: float) -> None:
    def expected(own: float) -> float:
        baseline = BASELINE[name]()
        for number, reward in enumerate(rewards):
            baseline.observe(sample(number), reward)
        baseline.observe(sample(100, session="mine"), own)
        return baseline(sample(101, session="mine"))

    assert expected(other) == pytest.approx(expected(0.0), abs=1e-8)


@pytest.mark.parametrize("name", SMALL_WINDOW)
def test_only_the_newest_samples_count(name: str) -> None:
    """A baseline can therefore be rebuilt from them."""
    old, fresh = SMALL_WINDOW[name](), SMALL_WINDOW[name]()
    for number in range(12):
        old.observe(sample(number), number / 12)
        if number >= 7:
            fresh.observe(sample(number), number / 12)
    asked = sample(50)
    assert old(asked) == pytest.approx(fresh(asked), abs=1e-9)


@pytest.mark.parametrize("name", BASELINE)
def test_without_others_nothing_is_expected(name: str) -> None:
    alone = sample(0)
    assert advantages(BASELINE[name](), [(alone, 0.5)]) == pytest.approx([0.5])


def test_a_context_is_drawn_to_all_by_its_size() -> None:
    baseline = ContextMean(prior=1.0)
    for number in range(3):
        baseline.observe(sample(number, context="python"), 1.0)
    baseline.observe(sample(10, context="rust"), 0.0)
    assert baseline(sample(99, context="python")) == pytest.approx((3 + 0.75) / 4)
    assert baseline(sample(99, context="new")) == pytest.approx(0.75)


def test_similar_prompts_are_those_with_the_same_words() -> None:
    baseline = SimilarPrompts(neighbours=2, prior=0.0)
    rewards = {"fix the test of parser": 1.0, "fix the test of lexer": 0.8, "write a poem": -1.0}
    for number, (prompt, reward) in enumerate(rewards.items()):
        baseline.observe(sample(number, prompt=prompt), reward)
    assert baseline(sample(9, prompt="fix the test of printer")) == pytest.approx(0.9, abs=0.05)


def test_ridge_learns_from_features() -> None:
    baseline = Ridge(num_features=1, penalty=0.01)
    for number in range(50):
        x = number / 50
        seen = CreditSample(id=str(number), session=str(number), features=(x,))
        baseline.observe(seen, 0.5 * x - 0.2)
    asked = CreditSample(id="asked", session="asked", features=(0.5,))
    assert baseline(asked) == pytest.approx(0.05, abs=0.01)
    with pytest.raises(ValueError, match="num_features = 1"):
        baseline(CreditSample(id="none", session="none"))


@pytest.mark.parametrize("name", [name for name in BASELINE if name != "none"])
def test_a_baseline_takes_most_of_what_the_prompt_explains(name: str) -> None:
    draw = np.random.default_rng(0)
    levels = [-0.9, 0.9, -0.3, 0.5]
    batch = [
        (
            CreditSample(id=str(n), session=str(n), context=str(n % 4), prompt=PROMPTS[n % 4]),
            levels[n % 4] + 0.1 * float(draw.standard_normal()),
        )
        for n in range(200)
    ]
    credited = advantages(BASELINE[name](), batch)
    assert pvariance(credited) < 0.15 * pvariance([reward for _, reward in batch])


def test_an_embedding_is_the_same_everywhere() -> None:
    assert embed("Fix the Test", 64) @ embed("fix the test", 64) == pytest.approx(1.0)
    assert abs(embed("fix the test", 64) @ embed("ode to rain", 64)) < 0.5
    assert not embed("", 8).any()
    assert np.flatnonzero(embed("etude", 64)).tolist() == [36]


def test_the_type_of_all() -> None:
    baselines: list[Baseline] = [make() for make in BASELINE.values()]
    assert len(baselines) == 4


@pytest.mark.parametrize("name", ["similar_prompts", "ridge"])
def test_what_left_the_window_is_as_if_it_had_never_been(name: str) -> None:
    """However often the same sessions come and go."""
    seen = [(sample(n, session=f"s{n * n % 7}"), (-1.0) ** n * n / 8) for n in range(23)]
    for end in range(5, len(seen)):
        long, short = SMALL_WINDOW[name](), SMALL_WINDOW[name]()
        for one, reward in seen[:end]:
            long.observe(one, reward)
        for one, reward in seen[end - 5 : end]:
            short.observe(one, reward)
        for session in (f"s{n}" for n in range(8)):
            asked = sample(end, session=session)
            assert long(asked) == pytest.approx(short(asked), abs=1e-9), (end, session)
