"""The canary decides whether more users may see a candidate.

It compares product metrics between users who see the candidate and users who see the live version.
The test is a confidence sequence, which holds at all looks at once, so it may be evaluated after
every session. The unit of randomization is the user, since the sessions of one user are alike; each
user's own past is subtracted (CUPED), since users differ more than versions do.

    roll back    some metric is shown to be worse; or the stage has had its share of sessions and
                 some metric may still be worse by more than its margin
    promote      every metric is shown not to be worse by more than its margin
    continue     neither yet

Every decision is a function of the outcomes so far: no state is kept between two looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Action = Literal["continue", "promote", "roll_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A product metric: one number for each session, from 0 to 1 or so."""

    name: str
    margin: float
    """The most by which a candidate may be worse."""
    higher_is_better: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """The stages in which a candidate reaches all users, and the error rates of each."""

    metrics: tuple[Metric, ...]
    ramp: tuple[float, ...] = (0.01, 0.05, 0.25, 1.0)
    """Share of the users in each stage; in the last one the candidate is the live version."""
    confidence: float = 0.95
    """One-sided, for each stage: the probability that a candidate which is worse by a metric's
    margin is not promoted, however many looks there are."""
    false_alarms: float = 0.02
    """Probability that a candidate which is not worse is rolled back for being worse, over all
    looks, stages and metrics."""
    min_users: int = 30
    """Users needed in each arm: with fewer, the variance between users is not known."""
    first_slack: float = 3.0
    """Factor on the margins in the first stage: its few users are enough to find a version that is
    plainly broken, and the next stages find the rest."""
    max_sessions: int = 40
    """Sessions of one user that count in a stage, so that no user dominates it."""
    stage_sessions: float = 30.0
    """The stage ends when the candidate's users have had this many counted sessions on average."""

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError(
                "a canary needs at least one metric: without any, every candidate would pass"
            )
        if list(self.ramp) != sorted(set(self.ramp)) or not 0 < self.ramp[0] <= self.ramp[-1] == 1:
            raise ValueError(f"ramp must be increasing shares that end with 1, not {self.ramp}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOutcomes:
    """One user's metrics, in the sessions of a stage and in those before the update."""

    user: str
    is_candidate: bool
    sessions: int
    totals: Mapping[str, float]
    """The sum of each metric over these sessions."""
    before: Mapping[str, float] = field(default_factory=dict)
    """The mean of each metric over the user's sessions before the update; empty without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """A metric in both arms, so far. Gains and bounds are signed so that higher is better."""

    metric: Metric
    live: float
    candidate: float
    gain: float
    low: float
    high: float
    """`low` and `high` are the confidence sequence of the gain. `low` holds at all looks with the
    plan's confidence, `high` with a higher one, since a false alarm may come from any metric and
    any stage."""

    @property
    def is_worse(self) -> bool:
        return self.high < 0

    @property
    def is_safe(self) -> bool:
        return self.low > -self.metric.margin

    @property
    def text(self) -> str:
        return (
            f"{self.metric.name}: {self.live:.4g} live, {self.candidate:.4g} candidate, gain "
            f"{self.gain:+.4f} ({self.low:+.4f} to {self.high:+.4f}, margin {self.metric.margin:g})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryDecision:
    """The next action on a candidate, with its reasons."""

    action: Action
    share: float
    """Share of the users who see the candidate from now on."""
    figures: tuple[MetricFigures, ...]
    reasons: tuple[str, ...]

    @property
    def evidence(self) -> dict[str, float]:
        """For each metric, the value of either version, and the gain with its interval."""
        found: dict[str, float] = {}
        for each in self.figures:
            name = each.metric.name
            found |= {f"{name} live": each.live, f"{name} candidate": each.candidate}
            found |= {f"{name} gain": each.gain, f"{name} low": each.low, f"{name} high": each.high}
        return found


def decide(plan: CanaryPlan, stage: int, users: Sequence[UserOutcomes]) -> CanaryDecision:
    """Decide on the candidate from the outcomes in this stage of the ramp. `users` are all users
    who had a session in it, except the held-out ones."""
    if not 0 <= stage < len(plan.ramp) - 1:
        raise ValueError(
            f"stage {stage} has nothing to decide: from the last stage on, the candidate is "
            f"live for all users"
        )
    share = plan.ramp[stage]
    candidates = [user for user in users if user.is_candidate and user.sessions]
    live = [user for user in users if not user.is_candidate and user.sessions]
    counted = sum(min(user.sessions, plan.max_sessions) for user in candidates)
    is_over = bool(candidates) and counted / len(candidates) >= plan.stage_sessions
    if min(len(candidates), len(live)) < plan.min_users:
        reason = (
            f"{len(candidates)} users of the candidate and {len(live)} of the live version so "
            f"far; at least {plan.min_users} of each are needed"
        )
        return _undecided(share, is_over, (), (reason,))

    slack = 1.0 if stage else plan.first_slack
    metrics = [replace(metric, margin=slack * metric.margin) for metric in plan.metrics]
    found = tuple(_compare(metric, candidates, live, plan) for metric in metrics)
    texts = tuple(each.text for each in found)
    if any(each.is_worse for each in found):
        why = tuple(f"worse: {each.text}" for each in found if each.is_worse)
        return CanaryDecision(action="roll_back", share=0.0, figures=found, reasons=why)
    if all(each.is_safe for each in found):
        further = plan.ramp[stage + 1]
        return CanaryDecision(action="promote", share=further, figures=found, reasons=texts)
    unsafe = tuple(each.text for each in found if not each.is_safe)
    return _undecided(share, is_over, found, unsafe)


def _undecided(
    share: float, is_over: bool, found: tuple[MetricFigures, ...], reasons: tuple[str, ...]
) -> CanaryDecision:
    """Continue, or roll back if the stage is over: the candidate has not been shown to be safe."""
    if not is_over:
        return CanaryDecision(action="continue", share=share, figures=found, reasons=reasons)
    why = tuple(f"undecided: {reason}" for reason in reasons)
    return CanaryDecision(action="roll_back", share=0.0, figures=found, reasons=why)


def _compare(
    metric: Metric,
    candidates: Sequence[UserOutcomes],
    live: Sequence[UserOutcomes],
    plan: CanaryPlan,
) -> MetricFigures:
    sign = 1.0 if metric.higher_is_better else -1.0
    arms = [_Arm.of(users, metric.name, plan.max_sessions) for users in (candidates, live)]
    slope = _slope(arms)
    (candidate, candidate_variance), (control, live_variance) = (a.mean(slope) for a in arms)
    variance = max(candidate_variance + live_variance, 1e-12)
    tuned = (metric.margin / 4) ** 2
    # shared among all metrics and stages; the last stage is the watch, when the candidate is live
    false_alarms = plan.false_alarms / (len(plan.metrics) * len(plan.ramp))
    gain = sign * (candidate - control)
    return MetricFigures(
        metric=metric,
        live=control,
        candidate=candidate,
        gain=gain,
        low=gain - mixture_radius(variance, 2 * (1 - plan.confidence), tuned),
        high=gain + mixture_radius(variance, 2 * false_alarms, tuned),
    )


@dataclass(frozen=True, slots=True)
class _Arm:
    """One metric of the users of an arm, one array element per user."""

    sessions: NDArray[np.float64]
    totals: NDArray[np.float64]
    before: NDArray[np.float64]
    """The user's mean before the update; NaN without any session then."""

    @classmethod
    def of(cls, users: Sequence[UserOutcomes], name: str, max_sessions: int) -> _Arm:
        sessions = np.array([user.sessions for user in users], dtype=float)
        totals = np.array([user.totals[name] for user in users])
        before = np.array([user.before.get(name, np.nan) for user in users])
        counted = np.minimum(sessions, max_sessions)
        return cls(counted, totals * counted / sessions, before)

    def mean(self, slope: tuple[float, float]) -> tuple[float, float]:
        """The mean per session, adjusted for the users' past, and the variance of this mean over
        users."""
        factor, middle = slope
        past = np.nan_to_num(self.before - middle)
        totals = self.totals - factor * past * self.sessions
        count = self.sessions.sum()
        mean = totals.sum() / count
        spread = ((totals - mean * self.sessions) ** 2).sum() / count**2
        return float(mean), float(spread * len(totals) / (len(totals) - 1))


def _slope(arms: Sequence[_Arm]) -> tuple[float, float]:
    """The regression slope of a user's mean now on their mean before, over both arms, and the
    average of the means before."""
    before = np.concatenate([each.before for each in arms])
    known = ~np.isnan(before)
    if not known.any():
        return 0.0, 0.0
    means = np.concatenate([each.totals / each.sessions for each in arms])[known]
    weights = np.concatenate([each.sessions for each in arms])[known]
    middle = float(np.average(before[known], weights=weights))
    past = before[known] - middle
    spread = float(weights @ past**2)
    shared = float(weights @ (past * (means - np.average(means, weights=weights))))
    return (shared / spread if spread else 0.0), middle


def mixture_radius(variance: float, alpha: float, tuned_variance: float) -> float:
    """Half-width of a confidence interval that holds at all looks at once: the normal mixture's
    confidence sequence (Robbins, 1970; Howard et al., 2021).

    `variance` is the estimate's variance now, `tuned_variance` the variance at which the radius is
    to be smallest. The bound is exact for estimates whose errors are sub-Gaussian with that
    variance (the mean of n numbers between 0 and 1 is, with 1 / 4n), and asymptotic for estimated
    variances.
    """
    information = 1 / variance
    prior = 1 / tuned_variance / (2 * math.log(1 / alpha) + math.log(1 + 2 * math.log(1 / alpha)))
    total = information + prior
    return math.sqrt(total * math.log(total / (prior * alpha**2))) / information
