"""Benchmark of poisoned feedback: what 5 % saboteurs take from the gain of six updates.

A policy answers in a style (four numbers, sampled around its own) and learns from what 2,000
simulated users do about its answers, a day an update. Saboteurs say the opposite of what they
think, in ten times as many sessions, and send every event twenty times. The style that all users
like drifts. Gain: how much more honest users like the policy's style after the last update than
the first one's, by their appeal, from 0 to 1. Means over the seeds:

    clean.gain          without saboteurs
    caps_clean.gain     the same with the caps and the trimming, which cost something themselves
    open.gain           with saboteurs, no protection
    caps.gain           with caps per user and organisation
    caps_trim.gain      with the caps, and without the tenth of the users at either end by their
                        mean advantage
    X.shrinks           what is missing to clean.gain, as a share of it
    caps_trim.shrinks_max   of the worst seed
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.core.feedback import STRENGTHS, FeedbackEvent, score
from etude.core.seeds import derive
from etude.realtime.credit import ContextMean, CreditSample, advantages
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.realtime.robust import Caps, admit, within_trim

SEEDS = 3
USERS = 2000
UPDATES = 6
SABOTEURS = 0.05
MORE_SESSIONS = 10
SPREAD = 0.4
"""Deviation of the style of an answer from the policy's."""
LEARNING_RATE = 0.35
DRIFT = 0.02
CAPS = Caps(per_user=4)
TRIM = 0.1

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: str
    user: str
    organisation: str
    style: Array
    reward: float


def collect(population: Population, style: Array, day: int) -> list[Sample]:
    """A day's settled samples. Answers about which nobody did anything are not among them."""
    draw = np.random.default_rng(derive(population.seed, "styles", day))
    samples = []
    for user in population.users:
        more = MORE_SESSIONS if user.is_saboteur else 1
        for number in range(more * population.sessions(user, day)):
            id = f"{user.id}/{day}/{number}"
            tried = style + SPREAD * draw.standard_normal(len(style))
            reward = _reward(population, user, id, tried, day)
            if reward is not None:
                samples.append(
                    Sample(
                        id=id,
                        user=user.id,
                        organisation=user.organisation,
                        style=tried,
                        reward=reward,
                    )
                )
    return samples


def _reward(
    population: Population, user: SimulatedUser, id: str, style: Array, day: int
) -> float | None:
    answer = Answer(completion=id, quality=0.7, aspects=tuple(map(float, style)))
    return score(
        FeedbackEvent(
            event=f"{id}/{reaction.kind}/{copy}",
            user=user.id,
            completion=id,
            kind=reaction.kind,
            strength=STRENGTHS[reaction.kind],
            time=reaction.delay_s,
            received=reaction.delay_s,
        )
        for reaction in population.react(user, answer, day)
        for copy in range(reaction.copies)
    )


def learn(style: Array, samples: list[Sample], *, caps: bool, trim: bool, update: str) -> Array:
    """One update by REINFORCE, a baseline for all, and the protections."""
    if caps:
        kept = set(admit(samples, CAPS, salt=update).kept)
        samples = [one for one in samples if one.id in kept]
    credited = advantages(
        ContextMean(window=len(samples)),
        [(CreditSample(id=one.id, session=one.id), one.reward) for one in samples],
    )
    if trim:
        stays = within_trim([one.user for one in samples], credited, TRIM)
        samples = [one for one, stay in zip(samples, stays, strict=True) if stay]
        credited = [each for each, stay in zip(credited, stays, strict=True) if stay]
    away = np.array([one.style - style for one in samples]) / SPREAD
    return np.asarray(style + LEARNING_RATE * (np.array(credited) @ away) / len(samples))


def appeal(population: Population, style: Array, day: int) -> float:
    """How much honest users like a style."""
    answer = Answer(completion="", quality=0.7, aspects=tuple(map(float, style)))
    return statistics.fmean(
        population.appeal(user, answer, day) for user in population.users if not user.is_saboteur
    )


def gain(seed: int, *, saboteurs: bool, caps: bool, trim: bool) -> float:
    population = Population.of(
        USERS, seed=seed, saboteurs=SABOTEURS if saboteurs else 0.0, drift=DRIFT
    )
    first = np.random.default_rng(derive(seed, "first")).uniform(-1.0, 1.0, 4)
    style = first
    for day in range(UPDATES):
        samples = collect(population, style, day)
        style = learn(style, samples, caps=caps, trim=trim, update=f"{seed}/{day}")
    return appeal(population, style, UPDATES) - appeal(population, first, UPDATES)


def run() -> dict[str, float]:
    variants = {
        "clean": (False, False, False),
        "caps_clean": (False, True, True),
        "open": (True, False, False),
        "caps": (True, True, False),
        "caps_trim": (True, True, True),
    }
    gains = {
        name: [gain(seed, saboteurs=s, caps=c, trim=t) for seed in range(SEEDS)]
        for name, (s, c, t) in variants.items()
    }
    shrinks = {
        name: [1 - found / clean for found, clean in zip(each, gains["clean"], strict=True)]
        for name, each in gains.items()
        if name != "clean"
    }
    return {
        "users": float(USERS),
        **{f"{name}.gain": statistics.mean(found) for name, found in gains.items()},
        **{f"{name}.shrinks": statistics.mean(found) for name, found in shrinks.items()},
        "caps_trim.shrinks_max": max(shrinks["caps_trim"]),
    }
