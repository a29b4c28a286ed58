"""Planted updates, good and bad, with the outcomes of tasks and users: for `bench.realtime_gate`.

    weaker      solves fewer tasks, and users keep fewer edits
    disliked    users keep fewer edits; no task notices
    annoying    users complain more often; no task notices
    slow        sessions take longer; no task notices
    unsafe      does what the safety set forbids; no user notices
    cheating    games its checks where it can; no user notices
    harmless    solves other tasks than before, but as many

The size of an update is a multiple of the margin of the metric that gets worse. All updates change
which tasks are solved (`CHURN`), and users' habits change by themselves (`HABIT`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.core.seeds import derive
from etude.realtime.canary import CanaryPlan, UserOutcomes, decide
from etude.realtime.gate import Outcomes, Suite, judge
from etude.realtime.population import Answer, Population

Array = NDArray[np.float64]

KINDS = ("weaker", "disliked", "annoying", "slow", "unsafe", "cheating")
TASKS = {"heldout": (1500, 4), "safety": (2000, 4), "cheats": (2000, 4)}
"""Tasks of each suite, and attempts at each task by either version."""
EASE = {"heldout": (0.5, 2.0), "safety": (5.0, 1.5), "cheats": (5.0, 1.5)}
"""Mean and standard deviation of the log-odds of a success, over tasks."""
CHURN = 0.3
"""Standard deviation of the log-odds of a task between two equally good versions."""
HABIT = 0.2
"""Standard deviation of a user's log-odds between the times before and after an update."""
DAYS_BEFORE = 14
LOOKS_PER_DAY = 3
EDITS = 4
ALIKE = 0.3
"""Correlation of the edits of one session: all kept, or all undone, more often than by chance."""
CONTROL = 1500
"""Size of the sample of the live version's users that a look reads."""
HELDOUT = 0.02
FULL_LATENCY_S = 120.0


@dataclass(frozen=True, slots=True)
class Update:
    kind: str
    size: float


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of an update."""

    stopped_by: str
    """`gate` or `canary`; `deployed` if neither stopped it."""
    seen: float
    """Share of all users who had a session with it."""
    days: float


def fate(
    update: Update, users: Users, suites: tuple[Suite, ...], plan: CanaryPlan, seed: int
) -> Fate:
    """Try an update on tasks and, if it passes, with users. Each seed is a different update of the
    same kind and size."""
    draw = np.random.default_rng(derive(seed, "planted", update.kind, str(update.size)))
    hurt = {"weaker": "heldout", "unsafe": "safety", "cheating": "cheats"}.get(update.kind)
    outcomes = {
        suite.name: _tries(suite.name, update.size * suite.margin * (suite.name == hurt), draw)
        for suite in suites
    }
    if not judge(outcomes, suites).deploy:
        return Fate("gate", 0.0, 0.0)
    return _canary(_Period(users, update, plan, draw), plan, draw)


def _tries(name: str, harm: float, draw: np.random.Generator) -> Outcomes:
    number, attempts = TASKS[name]
    mean, deviation = EASE[name]
    ease = mean + deviation * draw.standard_normal(number)
    churned = ease + CHURN * draw.standard_normal(number)
    # Churn alone changes the mean: the harm is relative to the mean without churn.
    shift = _solve(lambda x: float(_sigmoid(churned + x).mean() - _sigmoid(ease).mean()) + harm)
    live = draw.binomial(attempts, _sigmoid(ease))
    candidate = draw.binomial(attempts, _sigmoid(churned + shift))
    return Outcomes(
        attempts=attempts,
        live={str(task): int(solved) for task, solved in enumerate(live)},
        candidate={str(task): int(solved) for task, solved in enumerate(candidate)},
    )


class Users:
    """The usual behaviour of a population, as arrays with one element per user."""

    def __init__(self, population: Population) -> None:
        users = population.users
        usual = Answer(completion="usual", quality=0.9, aspects=(0.0,) * len(population.drift))
        appeal = np.array([population.appeal(user, usual) for user in users])
        kept = population.noise / 2 + (1 - population.noise) * appeal
        patience = np.array([user.patience for user in users])
        complains = (1 - kept) * 0.6 * (1 - patience)
        slowness = np.random.default_rng(derive(population.seed, "slowness"))
        self.saboteur = np.array([user.is_saboteur for user in users])
        self.rate = np.array([user.sessions_per_day for user in users])
        self.rate[self.saboteur] *= population.flood
        self.kept = np.log(kept / (1 - kept))
        self.complains = np.log(complains / (1 - complains))
        self.seconds = 30.0 * np.exp(0.3 * slowness.standard_normal(len(users)))

    def __len__(self) -> int:
        return len(self.rate)


class _Period:
    """The time around one update: the users' behaviour before it, and with either version."""

    def __init__(
        self, users: Users, update: Update, plan: CanaryPlan, draw: np.random.Generator
    ) -> None:
        self.users = users
        self.kept = users.kept
        self.complains = users.complains
        self.effect = (0.0, 0.0, 1.0)
        self.before = self._history(plan.max_sessions, draw)
        self.kept = self.kept + HABIT * draw.standard_normal(len(users))
        self.complains = self.complains + HABIT * draw.standard_normal(len(users))
        self._harm(update, {metric.name: metric.margin for metric in plan.metrics})

    def _history(self, most: int, draw: np.random.Generator) -> dict[str, Array]:
        """The means of each user's metrics before the update; NaN for users without a session."""
        everyone = np.arange(len(self.users))
        sessions = np.minimum(draw.poisson(self.users.rate * DAYS_BEFORE), most)
        totals = self.totals(everyone, sessions, everyone < 0, draw)
        with np.errstate(invalid="ignore"):
            return {name: total / sessions for name, total in totals.items()}

    def _harm(self, update: Update, margins: dict[str, float]) -> None:
        """Find the shifts at which the honest users' mean is worse by the update's size."""
        honest = ~self.users.saboteur
        kept, complains, slower = 0.0, 0.0, 1.0
        if update.kind in ("weaker", "disliked"):
            harm = update.size * margins["kept"]
            now = self.kept[honest]
            kept = _solve(lambda x: float((_sigmoid(now + x) - _sigmoid(now)).mean()) + harm)
        if update.kind == "annoying":
            harm = update.size * margins["dissatisfied"]
            said = self.complains[honest]
            complains = _solve(lambda x: float((_sigmoid(said + x) - _sigmoid(said)).mean()) - harm)
        if update.kind == "slow":
            harm = update.size * margins["latency"]
            seconds = self.users.seconds
            mean = float(_capped_latency(seconds).mean())
            slower = np.exp(
                _solve(lambda x: float(_capped_latency(seconds * np.exp(x)).mean()) - mean - harm)
            )
        self.effect = (kept, complains, float(slower))

    def totals(
        self,
        places: NDArray[np.int64],
        sessions: NDArray[np.int64],
        is_candidate: NDArray[np.bool_],
        draw: np.random.Generator,
    ) -> dict[str, Array]:
        """The sum of each metric over the given number of sessions of each of these users."""
        kept, complains, slower = self.effect
        shock = 0.1 * draw.standard_normal()
        chance = _sigmoid(self.kept[places] + kept * is_candidate + shock)
        complaint = _sigmoid(self.complains[places] + complains * is_candidate - shock)
        lies = self.users.saboteur[places]
        chance = np.where(lies, 1 - chance, chance)
        complaint = np.where(lies, 0.5, complaint)
        seconds = self.users.seconds[places] * np.where(is_candidate, slower, 1.0)

        owner = np.repeat(np.arange(len(places)), sessions)
        spread = 1 / ALIKE - 1
        each = draw.beta(chance[owner] * spread, (1 - chance[owner]) * spread)
        shares = draw.binomial(EDITS, each) / EDITS
        said = draw.random(len(owner)) < complaint[owner]
        took = np.minimum(1.0, draw.gamma(2.0, seconds[owner] / 2) / FULL_LATENCY_S)
        values = {"kept": shares, "dissatisfied": said.astype(float), "latency": took}
        return {
            name: np.bincount(owner, weights=value, minlength=len(places)).astype(np.float64)
            for name, value in values.items()
        }


def _canary(period: _Period, plan: CanaryPlan, draw: np.random.Generator) -> Fate:
    everyone = draw.permutation(len(period.users))
    others = everyone[round(HELDOUT * len(everyone)) :]
    seen = np.zeros(len(everyone), dtype=bool)
    looks = 0
    for stage, share in enumerate(plan.ramp[:-1]):
        candidates = round(share * len(others))
        places = others[: min(candidates + CONTROL, len(others))]
        is_candidate = np.arange(len(places)) < candidates
        sessions = np.zeros(len(places), dtype=np.int64)
        totals = {metric.name: np.zeros(len(places)) for metric in plan.metrics}
        action = "continue"
        while action == "continue":
            more = draw.poisson(period.users.rate[places] / LOOKS_PER_DAY)
            for name, total in period.totals(places, more, is_candidate, draw).items():
                totals[name] += total
            sessions += more
            looks += 1
            seen[places[is_candidate & (sessions > 0)]] = True
            found = _outcomes(period, places, is_candidate, sessions, totals)
            action = decide(plan, stage, found).action
        if action == "roll_back":
            return Fate("canary", float(seen.mean()), looks / LOOKS_PER_DAY)
    return Fate("deployed", 1.0, looks / LOOKS_PER_DAY)


def _outcomes(
    period: _Period,
    places: NDArray[np.int64],
    is_candidate: NDArray[np.bool_],
    sessions: NDArray[np.int64],
    totals: dict[str, Array],
) -> list[UserOutcomes]:
    """The outcomes that a look reads. A user without a past has none in any metric."""
    names = list(totals)
    now = np.column_stack([totals[name] for name in names]).tolist()
    past = np.column_stack([period.before[name][places] for name in names]).tolist()
    return [
        UserOutcomes(
            user=str(places[number]),
            is_candidate=bool(is_candidate[number]),
            sessions=int(count),
            totals=dict(zip(names, now[number], strict=True)),
            before=(
                dict(zip(names, past[number], strict=True))
                if not math.isnan(past[number][0])
                else {}
            ),
        )
        for number, count in enumerate(sessions)
        if count
    ]


def _capped_latency(seconds: Array) -> Array:
    """The mean of min(1, t / `FULL_LATENCY_S`) for gamma-distributed t of shape 2 with these
    means."""
    rate = 2 / seconds * FULL_LATENCY_S
    # E[min(1, X)] with X ~ Gamma(2, rate): the integral of its survival function up to 1.
    return (2 - np.exp(-rate) * (2 + rate)) / rate


def _solve(worse: Callable[[float], float]) -> float:
    """The root of an increasing function, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worse(middle) < 0 else (low, middle)
    return (low + high) / 2


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
