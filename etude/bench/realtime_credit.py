"""Benchmark of credit without groups: bias and variance of the policy gradient, by estimator.

There are 600 prompts of 12 kinds, with words that the kinds share only in part. A policy with one
parameter per kind chooses between two answers; their expected rewards depend on kind and prompt, so
the gradient over the prompts is known exactly. A batch has 128 rollouts: one each for 128 prompts,
or for `group` 8 for each of 16 (the leave-one-out mean of the others, `rloo`). Baselines have
observed 1,024 rollouts before, with parameters that differ from the current ones by about a few
updates.

    E.bias           distance of the mean gradient over batches from the true one, over its length;
                     measured against the same rollouts with the exact expected reward as the
                     baseline, which has no bias and shares most of the noise
    E.bias_noise     its value by chance alone: only a larger bias is significant
    E.variance       mean squared distance of a batch's gradient from the mean, over the squared
                     length of the true one
    E.vs_group       the same over `group`'s: below 1, it learns more from the same number of
                     rollouts
    E.us_per_sample  microseconds of processor time to observe or credit a sample

`own_included` is `context_mean` with each sample's own reward in its baseline, which is biased.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.core.advantage import rloo
from etude.realtime.credit import BASELINE, CreditSample, advantages

KINDS = 12
PROMPTS = 600
ROLLOUTS = 128
GROUP = 8
BEFORE = 1024
BATCHES = 400
SEED = 0

Array = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts with their kinds, and the mean rewards of both answers."""

    texts: list[str]
    kind: Places
    ease: Array
    """Probability of reward 1 for the first answer."""
    better: Array
    """Increase of this probability for the second answer."""


def draw_prompts(draw: np.random.Generator) -> Prompts:
    kind = draw.integers(0, KINDS, PROMPTS)
    about = draw.normal(0.0, 0.25, KINDS)
    ease = np.clip(0.4 + about[kind] + draw.normal(0.0, 0.1, PROMPTS), 0.02, 0.78)
    better = np.clip(draw.normal(0.1, 0.06, KINDS)[kind], 0.0, 0.2)
    texts = []
    for one in kind:
        words = [f"word{one}_{n}" for n in draw.integers(0, 6, 5)]
        words += [f"shared_{n}" for n in draw.integers(0, 40, 5)]
        texts.append(" ".join(words))
    return Prompts(texts, kind, ease, better)


def true_gradient(prompts: Prompts, odds: Array) -> Array:
    """The gradient of the expected reward with respect to each kind's parameter, which is the
    log-odds of the second answer."""
    chance = _sigmoid(odds[prompts.kind])
    slopes = chance * (1 - chance) * prompts.better
    return np.bincount(prompts.kind, weights=slopes, minlength=KINDS) / PROMPTS


@dataclass(frozen=True, slots=True)
class Rollouts:
    places: Places
    second: NDArray[np.bool_]
    """True if the second answer was chosen."""
    rewards: Array

    def samples(self, prompts: Prompts, name: str) -> list[tuple[CreditSample, float]]:
        return [
            (
                CreditSample(
                    id=f"{name}/{number}",
                    session=f"{name}/{number}",
                    context=str(prompts.kind[place]),
                    prompt=prompts.texts[place],
                ),
                float(reward),
            )
            for number, (place, reward) in enumerate(zip(self.places, self.rewards, strict=True))
        ]

    def gradients(self, prompts: Prompts, odds: Array, advantage: Array) -> tuple[Array, Array]:
        """The gradients with these advantages and with the exact ones."""
        kind = prompts.kind[self.places]
        chance = _sigmoid(odds[kind])
        value = prompts.ease[self.places] + chance * prompts.better[self.places]

        def gradient(advantage: Array) -> Array:
            score = (self.second - chance) * advantage
            return np.bincount(kind, weights=score, minlength=KINDS) / len(self.places)

        return gradient(advantage), gradient(self.rewards - value)


def roll_out(prompts: Prompts, odds: Array, places: Places, draw: np.random.Generator) -> Rollouts:
    second = draw.random(len(places)) < _sigmoid(odds[prompts.kind[places]])
    chance = prompts.ease[places] + second * prompts.better[places]
    return Rollouts(places, second, (draw.random(len(places)) < chance).astype(float))


def run() -> dict[str, float]:
    draw = np.random.default_rng(SEED)
    prompts = draw_prompts(draw)
    odds = draw.normal(0.0, 0.7, KINDS)
    length = np.linalg.norm(true_gradient(prompts, odds))
    figures: dict[str, float] = {}
    for name, estimate in _estimators(prompts, odds).items():
        took = -time.process_time()
        pairs = [estimate(np.random.default_rng([SEED, n])) for n in range(BATCHES)]
        took += time.process_time()
        found, exact = (np.array(each) for each in zip(*pairs, strict=True))
        apart = found - exact
        noise = np.sqrt(apart.var(axis=0, ddof=1).sum() / BATCHES)
        figures[f"{name}.bias"] = float(np.linalg.norm(apart.mean(axis=0)) / length)
        figures[f"{name}.bias_noise"] = float(noise / length)
        figures[f"{name}.variance"] = float(found.var(axis=0, ddof=1).sum() / length**2)
        figures[f"{name}.us_per_sample"] = 1e6 * took / BATCHES / (ROLLOUTS + BEFORE)
    for name in _estimators(prompts, odds):
        figures[f"{name}.vs_group"] = figures[f"{name}.variance"] / figures["group.variance"]
    return figures


Estimator = Callable[[np.random.Generator], tuple[Array, Array]]
"""Returns a batch's gradient, and that of the same rollouts with the exact baseline."""


def _estimators(prompts: Prompts, odds: Array) -> dict[str, Estimator]:
    def group(draw: np.random.Generator) -> tuple[Array, Array]:
        places = np.repeat(draw.integers(0, PROMPTS, ROLLOUTS // GROUP), GROUP)
        rollouts = roll_out(prompts, odds, places, draw)
        by_group = rollouts.rewards.reshape(-1, GROUP).tolist()
        return rollouts.gradients(prompts, odds, np.concatenate([rloo(each) for each in by_group]))

    def own_included(draw: np.random.Generator) -> tuple[Array, Array]:
        rollouts = roll_out(prompts, odds, draw.integers(0, PROMPTS, ROLLOUTS), draw)
        kind = prompts.kind[rollouts.places]
        sums = np.bincount(kind, weights=rollouts.rewards, minlength=KINDS)
        means = sums / np.maximum(1, np.bincount(kind, minlength=KINDS))
        return rollouts.gradients(prompts, odds, rollouts.rewards - means[kind])

    def single(name: str) -> Estimator:
        def estimate(draw: np.random.Generator) -> tuple[Array, Array]:
            baseline = BASELINE[name]()
            older = odds - 0.2 * draw.standard_normal(KINDS)
            past = roll_out(prompts, older, draw.integers(0, PROMPTS, BEFORE), draw)
            for sample, reward in past.samples(prompts, "before"):
                baseline.observe(sample, reward)
            rollouts = roll_out(prompts, odds, draw.integers(0, PROMPTS, ROLLOUTS), draw)
            credited = advantages(baseline, rollouts.samples(prompts, "now"))
            return rollouts.gradients(prompts, odds, np.array(credited))

        return estimate

    return (
        {"group": group}
        | {name: single(name) for name in BASELINE}
        | {"own_included": own_included}
    )


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
