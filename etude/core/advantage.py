"""Advantage estimators: from the rewards of a group to one advantage for each attempt. To add one,
add an entry to `ADVANTAGE`.

    reward minus effort     the worth of an attempt, less the price of its effort (`core.effort`; no
                            price by default)
    within a group          attempts are each other's baseline, for a whole attempt or turn by turn
    process rewards         the credits that an environment gives to turns or segments, less the
                            mean of all credits of the group, are added for their tokens (none by
                            default)
    across a batch          one scale for the advantages of all its groups

The advantage of a token is that of its attempt, plus the credits that cover it: centered process
rewards, and the shifts of a turn-by-turn baseline. Process rewards are centered over the group
because a constant one does not tell which turn was better: it changes no token's advantage. A token
that no credit covers has the advantage of its attempt.

An attempt whose reward is None broke in infrastructure: it gets no advantage and changes no
statistic of the others. Advantages follow from the group alone, so recovery and audit can compute
them again from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean

from etude.core.checks import LARGEST, row_fault
from etude.core.effort import Effort
from etude.core.sampling import expand_spans
from etude.core.types import Credit, Group, Row, Segment, Trajectory, turn_places, turns

GroupAdvantages = Callable[[Sequence[float]], list[float]]
"""The rewards of a group -> an advantage for each attempt; 0 means that it teaches nothing."""
BatchScale = Callable[[Sequence[float]], float]
"""All advantages of a batch -> the positive factor to multiply them by."""

CHEAT = "cheat:"
"""The prefix of the flags of an attempt that is suspected of a trick; the rest names the trick."""

ROUNDING = 1e-9
"""Rewards count as equal if their relative difference is smaller."""


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Dr. GRPO: reward minus the group mean. No division by the standard deviation, which would
    amplify the small differences within groups that are nearly always, or nearly never, solved."""
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """RLOO: reward minus the mean of the others, an unbiased baseline. Equal to `dr_grpo` up to the
    factor n / (n - 1)."""
    if len(rewards) < 2:
        return [0.0] * len(rewards)
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """GRPO: `dr_grpo` divided by the group's own standard deviation, as in the paper. Every group
    pulls equally hard, even one in which a single attempt differs."""
    advantages = dr_grpo(rewards)
    deviation = root_mean_square(advantages)
    return (
        [advantage / deviation for advantage in advantages] if deviation else [0.0] * len(rewards)
    )


def self_imitation(rewards: Sequence[float]) -> list[float]:
    """Self-imitation: the positive part of `dr_grpo`, so an attempt below the mean is passed over.
    A good attempt shows what to do; a bad one only shows what not to do, and a small policy that is
    pushed away from its own samples drifts to untried behaviour."""
    return [max(0.0, advantage) for advantage in dr_grpo(rewards)]


def constant_advantage(rewards: Sequence[float]) -> list[float]:
    """The same advantage for every attempt: for `distill`, where a teacher scores each token and
    every attempt is trained on."""
    return [1.0] * len(rewards)


def unscaled(advantages: Sequence[float]) -> float:
    return 1.0


def unit_std(advantages: Sequence[float]) -> float:
    """Scale to unit standard deviation over the batch (REINFORCE++-baseline): the size of a step
    does not depend on the scale of the rewards, while groups keep their differences."""
    return 1.0 / (root_mean_square(advantages) or 1.0)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def differ(rewards: Sequence[float]) -> bool:
    """True if rewards differ by more than rounding. Dividing by the deviation would make a rounding
    error as large as any other difference."""
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING * max(map(abs, rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The outcome of each attempt of a group, by its id: its advantage, or the reason why it is not
    trained on."""

    advantages: dict[str, float]
    """The attempts that teach something. The advantage is 0 only for one that learns from its
    credits alone."""
    credit: dict[str, tuple[Credit, ...]] = field(default_factory=dict)
    """Centered process rewards and shifts of the baseline, for the attempts that have one other
    than 0."""
    failed: tuple[str, ...] = ()
    """Attempts with no score, or with no sampled token."""
    malformed: dict[str, str] = field(default_factory=dict)
    """Attempts that cannot be trained on, and why."""
    untrainable: dict[str, str] = field(default_factory=dict)
    """Attempts sampled in a way that the trainer cannot recompute, with the names of the
    parameters."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Attempts suspected of a trick, with its name."""
    no_signal: tuple[str, ...] = ()
    """The attempts of a group that teaches nothing."""
    passed_over: tuple[str, ...] = ()
    """Attempts without an advantage in a group that teaches something; they are part of the
    baseline."""

    def distinct_advantages(self) -> list[float]:
        """The values that determine the scale of a batch: the advantage of each attempt, or, if it
        has credits, the advantage plus the credits of each turn or segment that they name, once
        each."""
        return [
            advantage + added
            for id, advantage in self.advantages.items()
            for added in _added(self.credit.get(id, ()))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    per_group: GroupAdvantages = dr_grpo
    batch_scale: BatchScale = unscaled
    by_turn: bool = False
    """Use as the baseline of a turn the mean of the attempts that came as far (`turn_baselines`).
    For `dr_grpo`, whose baseline is the mean of all."""
    effort: Effort | None = None
    keep_zero_std: bool = False
    """Estimate advantages even if all attempts were worth the same."""
    use_credit: bool = True
    """Add process rewards."""
    train_summaries: bool = True
    """Give summaries the advantage of their attempt; otherwise they have none."""
    max_tokens: int | None = None
    """Tokens of a row, at most; None: any number."""
    max_lag: int | None = None
    """The most versions by which a token may be newer than its group's admission; None: any
    number."""
    quarantine: bool = False
    """Set aside attempts that are suspected of a trick. Their rewards do not count either: they
    must not be part of the baseline of the others."""

    def estimate(self, group: Group) -> GroupOutcome:
        scored = [t for t in group.trajectories if t.reward is not None and t.num_sampled]
        heard = {t.id for t in scored}
        quarantined = {
            t.id: names for t in scored if self.quarantine and (names := suspected_tricks(t))
        }
        said = [t for t in scored if t.id not in quarantined]
        untrainable = {t.id: names for t in said if (names := untrainable_params(t))}
        malformed = {
            t.id: why
            for t in said
            if t.id not in untrainable and (why := self._fault(t, group.admitted))
        }
        attempts = [t for t in said if t.id not in malformed and t.id not in untrainable]
        worth = [self._net_reward(t) for t in attempts]
        values = (
            self.per_group(worth) if self.keep_zero_std or differ(worth) else [0.0] * len(worth)
        )
        if not all(map(math.isfinite, values)):
            malformed |= {
                t.id: f"the advantages of its group are not finite: {values}" for t in attempts
            }
            attempts, worth, values = [], [], []
        credit = centered_credit(attempts) if self.use_credit else {}
        if self.by_turn and differ(worth):
            for id, shifts in turn_baselines(attempts, worth).items():
                credit[id] = (*credit.get(id, ()), *shifts)
        advantages = {t.id: advantage for t, advantage in zip(attempts, values, strict=True)}
        taught = {id for id, advantage in advantages.items() if advantage != 0.0 or id in credit}
        return GroupOutcome(
            advantages={id: adv for id, adv in advantages.items() if id in taught},
            credit=credit,
            failed=tuple(t.id for t in group.trajectories if t.id not in heard),
            malformed=malformed,
            untrainable=untrainable,
            quarantined=quarantined,
            no_signal=() if taught else tuple(advantages),
            passed_over=tuple(id for id in advantages if id not in taught) if taught else (),
        )

    def _net_reward(self, trajectory: Trajectory) -> float:
        assert trajectory.reward is not None
        return trajectory.reward - (self.effort.penalty(trajectory) if self.effort else 0.0)

    def _fault(self, trajectory: Trajectory, admitted: int) -> str | None:
        assert trajectory.reward is not None
        if not abs(trajectory.reward) <= LARGEST:  # also rejects NaN
            return f"its reward is {trajectory.reward}"
        if wrong := [c.value for c in _credits(trajectory) if not abs(c.value) <= LARGEST]:
            return f"a credit of it is {wrong[0]}"
        newest = admitted + self.max_lag if self.max_lag is not None else 1 << 62
        faults = (
            row_fault(row, oldest=admitted, newest=newest, max_tokens=self.max_tokens)
            for row in to_rows(trajectory, 0.0)
        )
        return next((fault for fault in faults if fault is not None), None)


def counted_rewards(group: Group, outcome: GroupOutcome) -> tuple[float, ...]:
    """The finite rewards of the attempts that are not quarantined. A reward from a trick is not
    progress, and a value that is not finite is not a reward: the estimator drops such attempts by
    name."""
    return tuple(
        t.reward
        for t in group.trajectories
        if t.reward is not None and math.isfinite(t.reward) and t.id not in outcome.quarantined
    )


ADVANTAGE: dict[str, AdvantageEstimator] = {
    "dr_grpo": AdvantageEstimator(),
    "rloo": AdvantageEstimator(per_group=rloo),
    "grpo": AdvantageEstimator(per_group=grpo),
    "reinforce_plus_plus_baseline": AdvantageEstimator(batch_scale=unit_std),
    "self_imitation": AdvantageEstimator(per_group=self_imitation),
    "by_turn": AdvantageEstimator(by_turn=True),
}


def turn_baselines(
    attempts: Sequence[Trajectory], worth: Sequence[float]
) -> dict[str, tuple[Credit, ...]]:
    """Credits, by attempt, that turn the mean of the group into the mean of the attempts that took
    at least as many turns; zeros are left out.

    An attempt that goes on has not succeeded yet, so later turns belong mostly to attempts that
    fail. Measured against the mean of all, nearly all of them are pushed away, good or bad. That
    cancels out over many samples, but within a batch it is noise. The number of turns that an
    attempt has reached is known before the turn, so the baseline adds no bias except a factor (n -
    1) / n, where n attempts came as far, themselves included: a turn that only one attempt took
    counts for nothing. Sub-agents speak in between, in an order that is not recorded, so their
    turns are not numbered and keep the mean of all."""
    places = [
        [place for place in turn_places(t.segments) if t.segments[place[0]].kind != "subagent"]
        for t in attempts
    ]
    shifts = []
    for number in range(max(map(len, places))):
        reached = [value for value, own in zip(worth, places, strict=True) if len(own) > number]
        shifts.append(fmean(worth) - fmean(reached))
    none = ROUNDING * max(map(abs, worth))
    credits = {
        t.id: tuple(
            Credit(shift, *place)
            for place, shift in zip(own, shifts, strict=False)
            if abs(shift) > none
        )
        for t, own in zip(attempts, places, strict=True)
    }
    return {id: some for id, some in credits.items() if some}


def centered_credit(attempts: Sequence[Trajectory]) -> dict[str, tuple[Credit, ...]]:
    """Credits, by attempt, minus the mean of all credits of all attempts. Credits that are then 0
    are left out, and the result is empty if all are the same."""
    values = [credit.value for attempt in attempts for credit in _credits(attempt)]
    if not differ(values):
        return {}
    mean = fmean(values)
    centered = {
        t.id: tuple(replace(c, value=c.value - mean) for c in _credits(t) if c.value != mean)
        for t in attempts
    }
    return {id: credits for id, credits in centered.items() if credits}


def _added(credits: Sequence[Credit]) -> list[float]:
    """The sum of the credits for each turn or segment that they name; [0.0] if there are no
    credits."""
    places = dict.fromkeys((credit.segment, credit.turn) for credit in credits)
    return [
        sum(c.value for c in credits if c.segment == segment and c.turn in (None, turn))
        for segment, turn in places
    ] or [0.0]


def _credits(trajectory: Trajectory) -> tuple[Credit, ...]:
    return () if trajectory.score is None else trajectory.score.credit


def to_rows(
    trajectory: Trajectory,
    advantage: float,
    credit: Sequence[Credit] = (),
    *,
    scale: float = 1.0,
    train_summaries: bool = True,
) -> list[Row]:
    """One row for each segment. Every sampled token of all segments gets the one advantage of the
    trajectory, plus the credits that cover it, all multiplied by `scale`. Without
    `train_summaries`, the last answer of a segment that another one continues has advantage 0."""
    summed_up = {
        _summed_up(trajectory.segments, each.parent)
        for each in trajectory.segments
        if each.kind == "turns"
    }
    return [
        Row(
            sample=trajectory.id,
            tokens=segment.prompt + segment.tokens,
            mask=(False,) * len(segment.prompt) + segment.mask,
            logprobs=(0.0,) * len(segment.prompt) + segment.logprobs,
            advantages=(0.0,) * len(segment.prompt)
            + _token_advantages(
                segment,
                scale * advantage,
                [replace(c, value=scale * c.value) for c in credit if c.segment == number],
                without_last=not train_summaries and number in summed_up,
            ),
            versions=segment.versions,
            regions=segment.regions,
            sampling=segment.sampling,
            experts=segment.experts,
        )
        for number, segment in enumerate(trajectory.segments)
    ]


def _summed_up(segments: Sequence[Segment], parent: int | None) -> int | None:
    """The segment that a conversation continues, skipping the sub-agents that worked for it: a
    parent is merely the newest segment before."""
    while parent is not None and segments[parent].kind == "subagent":
        parent = segments[parent].parent
    return parent


def _token_advantages(
    segment: Segment, advantage: float, credits: Sequence[Credit], *, without_last: bool
) -> tuple[float, ...]:
    tokens = [advantage if sampled else 0.0 for sampled in segment.mask]
    answers = turns(segment) if credits else []
    for credit in credits:
        for answer in answers if credit.turn is None else [answers[credit.turn]]:
            for place in answer:
                tokens[place] += credit.value
    for answer in turns(segment)[-1:] if without_last else ():
        for place in answer:
            tokens[place] = 0.0
    return tuple(tokens)


def untrainable_params(trajectory: Trajectory) -> str | None:
    """The names of the sampling parameters that keep an attempt from being trained on."""
    spans = [span for segment in trajectory.segments for span in segment.sampling]
    names = dict.fromkeys(names for span in spans if (names := span.params.untrainable))
    return ", ".join(names) or None


def suspected_tricks(trajectory: Trajectory) -> str | None:
    """The names of the tricks that an attempt is suspected of."""
    flags = () if trajectory.score is None else trajectory.score.flags
    return ", ".join(f.removeprefix(CHEAT) for f in flags if f.startswith(CHEAT)) or None


def oldest_version(rows: Sequence[Row]) -> int:
    return min(chain.from_iterable(expand_spans(row.versions) for row in rows))
