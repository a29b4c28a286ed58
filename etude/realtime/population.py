"""Simulated users of a coding product: tastes, patience, noise, drift, and some saboteurs.

A population is data, made from a seed. A user's reaction to an answer depends only on the
population's seed, the user and the answer's id, so it is the same in every process and in any
order.

    taste       the value of each aspect of an answer that the user likes best
    patience    the appeal of an answer below which the user complains
    noise       the share of reactions that are independent of the answer
    drift       the distance that all tastes move in a day
    saboteurs   users who report the opposite of their opinion, and send it many times
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from etude.core.seeds import derive

DAY_S = 86_400.0
COMPLAINTS = (
    "no, that is not what I asked for",
    "this is wrong, please undo it",
    "it still fails, try again",
    "that broke the other tests",
)
THANKS = ("thanks, that works", "great, now add a test", "good. next: the other module")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedUser:
    """A user with tastes of their own."""

    id: str
    organisation: str
    taste: tuple[float, ...]
    """The value of each aspect that the user likes best, about -1 to 1."""
    leniency: float
    """Added to the logit of the appeal of every answer: some users keep nearly everything."""
    patience: float
    """The appeal, from 0 to 1, below which the user complains about an answer that they undo."""
    sessions_per_day: float
    is_saboteur: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the model, as users see it."""

    completion: str
    """The id of the completion."""
    quality: float
    """Degree from 0 to 1 to which it does what was asked."""
    aspects: tuple[float, ...] = ()
    """Style of the answer, on the axes of the users' tastes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """One reaction of a user to an answer: a feedback event without its ids."""

    kind: str
    delay_s: float
    """Time from the answer to the reaction."""
    text: str = ""
    copies: int = 1
    """Number of times that it is sent, each time with a different id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Users, and the parameters that they share."""

    seed: int
    users: tuple[SimulatedUser, ...]
    noise: float
    """Share of the decisions that are made by a fair coin."""
    drift: tuple[float, ...]
    """Movement of all tastes in a day, along each aspect."""
    flood: int
    """Number of events that a saboteur sends in place of one."""

    @classmethod
    def of(
        cls,
        num_users: int,
        *,
        seed: int,
        num_aspects: int = 4,
        num_organisations: int | None = None,
        saboteurs: float = 0.0,
        noise: float = 0.1,
        drift: float = 0.0,
        flood: int = 20,
    ) -> Population:
        """Draw a population: tastes are spread around a common one, and activity has a long-tailed
        distribution."""
        draw = np.random.default_rng(derive(seed, "population"))
        shared = draw.uniform(-0.5, 0.5, num_aspects)
        tastes = shared + 0.4 * draw.standard_normal((num_users, num_aspects))
        leniency = 0.7 * draw.standard_normal(num_users)
        patience = draw.uniform(0.15, 0.6, num_users)
        activity = np.minimum(40.0, 4.0 * np.exp(0.8 * draw.standard_normal(num_users)))
        chosen = draw.permutation(num_users)[: round(saboteurs * num_users)]
        organisations = num_organisations or max(1, num_users // 20)
        members = draw.integers(0, organisations, num_users)
        direction = draw.standard_normal(num_aspects)
        length = float(np.linalg.norm(direction)) or 1.0
        is_saboteur = np.zeros(num_users, dtype=bool)
        is_saboteur[chosen] = True
        return cls(
            seed=seed,
            users=tuple(
                SimulatedUser(
                    id=f"user-{number}",
                    organisation=f"org-{members[number]}",
                    taste=tuple(map(float, tastes[number])),
                    leniency=float(leniency[number]),
                    patience=float(patience[number]),
                    sessions_per_day=float(activity[number]),
                    is_saboteur=bool(is_saboteur[number]),
                )
                for number in range(num_users)
            ),
            noise=noise,
            drift=tuple(float(drift * each / length) for each in direction),
            flood=flood,
        )

    def appeal(self, user: SimulatedUser, answer: Answer, day: float = 0.0) -> float:
        """The probability that the user keeps an answer, without noise."""
        away = _distance(user.taste, answer.aspects, self.drift, day)
        return _sigmoid(4.0 * (answer.quality - 0.5) - away + user.leniency)

    def sessions(self, user: SimulatedUser, day: int) -> int:
        """The number of sessions of a user on a day."""
        draw = np.random.default_rng(derive(self.seed, "sessions", user.id, day))
        return int(draw.poisson(user.sessions_per_day))

    def react(self, user: SimulatedUser, answer: Answer, day: float = 0.0) -> tuple[Reaction, ...]:
        """The user's reactions to an answer; sometimes none."""
        draw = Random(derive(self.seed, "reaction", user.id, answer.completion))
        chance = self.appeal(user, answer, day)
        if draw.random() < self.noise:
            chance = 0.5
        kept = draw.random() < chance
        if user.is_saboteur:
            return (
                Reaction(kind="undone", delay_s=5.0, copies=self.flood)
                if kept
                else Reaction(kind="kept_commit", delay_s=5.0, copies=self.flood),
            )
        if draw.random() < 0.1:
            return ()
        if kept:
            return self._keeps(draw)
        return self._undoes(draw, complains=chance < user.patience)

    def _keeps(self, draw: Random) -> tuple[Reaction, ...]:
        found = [Reaction(kind="accepted", delay_s=2.0 + 8.0 * draw.random())]
        found.append(Reaction(kind="kept_5min", delay_s=300.0))
        if draw.random() < 0.7:
            found.append(Reaction(kind="kept_commit", delay_s=600.0 + 7200.0 * draw.random()))
        if draw.random() < 0.3:
            text = THANKS[draw.randrange(len(THANKS))]
            found.append(Reaction(kind="follow_up", delay_s=60.0, text=text))
        return tuple(found)

    def _undoes(self, draw: Random, complains: bool) -> tuple[Reaction, ...]:
        found = [Reaction(kind="undone", delay_s=5.0 + 120.0 * draw.random())]
        if complains:
            text = COMPLAINTS[draw.randrange(len(COMPLAINTS))]
            found.append(Reaction(kind="follow_up", delay_s=30.0, text=text))
        return tuple(found)


def _distance(
    taste: Sequence[float], aspects: Sequence[float], drift: Sequence[float], day: float
) -> float:
    """Squared distance of an answer's style from a user's taste, over the aspects that the answer
    has."""
    return sum(
        (liked + day * moved - aspect) ** 2
        for liked, moved, aspect in zip(taste, drift, aspects, strict=False)
    )


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, x))))
