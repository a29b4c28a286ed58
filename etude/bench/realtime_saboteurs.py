"""Benchmark of poisoned feedback: loss of gain to 5 % saboteurs over six updates.

In `etude bench realtime` saboteurs come as often as others. Here they come ten times as often, so
that the caps take effect, and there is no model: a policy answers in a style (four numbers, sampled
around its own) and learns from the feedback of 1,000 simulated users, one update per day, with the
caps, the credit and the signals of the loop. Saboteurs report the opposite of their opinion and
send every event twenty times. The style that all users like drifts. With and without saboteurs the
users are the same; in the latter case the saboteurs are honest. The gain is the increase of the
honest users' mean appeal (from 0 to 1) from the policy's first style to its style after the last
update.

    clean.gain          without saboteurs, with the caps of docs/realtime.md; mean over the seeds
    caps.gain           with saboteurs and caps
    open.gain           with saboteurs, without caps
    X.shrinks           loss against clean.gain, as a share of it
    X.shrinks_low, X.shrinks_high   95 % interval, by resampling seeds (bootstrap)
    X.shrinks_max       of the worst seed
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.core.feedback import STRENGTHS, FeedbackEvent, score
from etude.core.seeds import derive
from etude.realtime.credit import ContextMean, CreditSample, advantages
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.realtime.robust import Caps, admit

SEEDS = 12
USERS = 1000
UPDATES = 6
SABOTEURS = 0.05
MORE_SESSIONS = 10
SPREAD = 0.4
"""Standard deviation of an answer's style around the policy's."""
LEARNING_RATE = 0.35
DRIFT = 0.02
CAPS = Caps(per_user=4, per_organisation_share=0.2)
"""The defaults of `[realtime]`."""
VARIANTS = {"clean": (0.0, CAPS), "caps": (SABOTEURS, CAPS), "open": (SABOTEURS, None)}

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: str
    user: str
    organisation: str
    style: Array
    reward: float


def collect(population: Population, style: Array, day: int) -> list[Sample]:
    """The settled samples of a day, without the answers that got no feedback."""
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


def learn(style: Array, samples: list[Sample], caps: Caps | None, *, update: str) -> Array:
    """Take one update by REINFORCE with a common baseline."""
    if caps is not None:
        kept = set(admit(samples, caps, salt=update).kept)
        samples = [one for one in samples if one.id in kept]
    credited = advantages(
        ContextMean(window=len(samples)),
        [(CreditSample(id=one.id, session=one.id), one.reward) for one in samples],
    )
    away = np.array([one.style - style for one in samples]) / SPREAD
    return np.asarray(style + LEARNING_RATE * (np.array(credited) @ away) / len(samples))


def gain(seed: int, saboteurs: float, caps: Caps | None) -> float:
    population = Population.of(USERS, seed=seed, saboteurs=saboteurs, drift=DRIFT)
    everybody = Population.of(USERS, seed=seed, saboteurs=SABOTEURS, drift=DRIFT).users
    honest = [user for user in everybody if not user.is_saboteur]

    def appeal(style: Array) -> float:
        answer = Answer(completion="", quality=0.7, aspects=tuple(map(float, style)))
        return statistics.fmean(population.appeal(user, answer, UPDATES) for user in honest)

    first = np.random.default_rng(derive(seed, "first")).uniform(-1.0, 1.0, 4)
    style = first
    for day in range(UPDATES):
        samples = collect(population, style, day)
        style = learn(style, samples, caps, update=f"{seed}/{day}")
    return appeal(style) - appeal(first)


def shrinks(found: Sequence[float], clean: Sequence[float]) -> dict[str, float]:
    """The loss against the gain without saboteurs. The users of each seed are the same in both."""
    ours, theirs = np.array(found), np.array(clean)
    drawn = np.random.default_rng(0).integers(0, len(ours), (10_000, len(ours)))
    low, high = np.quantile(1 - ours[drawn].mean(1) / theirs[drawn].mean(1), [0.025, 0.975])
    return {
        "shrinks": float(1 - ours.mean() / theirs.mean()),
        "shrinks_low": float(low),
        "shrinks_high": float(high),
        "shrinks_max": float((1 - ours / theirs).max()),
    }


def run() -> dict[str, float]:
    gains = {
        name: [gain(seed, saboteurs, caps) for seed in range(SEEDS)]
        for name, (saboteurs, caps) in VARIANTS.items()
    }
    return {
        "users": float(USERS),
        "seeds": float(SEEDS),
        **{f"{name}.gain": statistics.mean(found) for name, found in gains.items()},
        **{
            f"{name}.{figure}": value
            for name in ("caps", "open")
            for figure, value in shrinks(gains[name], gains["clean"]).items()
        },
    }
