"""The next action of the loop, given the contents of the store. Pure.

    collect ─> train ─> evaluate ─> gate ─> canary ─> deploy ─> watch ─> settle
                                      │        │                  │
                                   refuse   roll back         roll back

The loop keeps no state. A batch, a published version, a report and a change of traffic are each
written once and never modified, so a loop that is killed at any point and restarted finds the same
next action, and no action is done twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.core.traffic import Change, canary, promote, refuse, roll_back, settle
from etude.core.updates import SessionFigures
from etude.realtime.canary import CanaryDecision, CanaryPlan, UserOutcomes
from etude.realtime.gate import Verdict
from etude.realtime.signals import SessionOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The contents of the store that decide on the next action."""

    first: int
    """The version that the loop begins with."""
    last: int
    """The version that the loop ends with."""
    published: int
    """The newest version; -1 if there is none."""
    batched: int
    """The newest step that has a batch; `first` if there is none."""
    base: int
    """The version that training on this batch begins with."""
    is_abandoned: bool
    """True if all users whose sessions are in this batch were deleted."""
    change: Change | None
    """The newest change of traffic."""
    decided: int
    """The newest version whose update has ended, whether it was deployed or not."""
    evaluated: frozenset[int]
    """The versions whose reports are complete."""


@dataclass(frozen=True, slots=True)
class AwaitVersion:
    """Wait until the trainer has published the version."""

    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """Let the first version answer users."""

    version: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Collect sessions for the batch of a step, which is trained from the live weights."""

    step: int
    base: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    version: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a version without trying it."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Gate:
    candidate: int
    live: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the users' outcomes with the new version and with the old one."""

    new: int
    old: int


@dataclass(frozen=True, slots=True)
class Held:
    """Do nothing: an operator stopped the loop."""

    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """End the loop: all steps of the stage are done."""


Next = AwaitVersion | Start | Collect | Evaluate | Refuse | Gate | Compare | Held | Done


def next_action(facts: Facts) -> Next:
    change = facts.change
    if change is None:
        return AwaitVersion(facts.first) if facts.published < facts.first else Start(facts.first)
    if change.held:
        return Held(change.why)
    live = change.traffic.version
    if change.action == "canary":
        return Compare(new=change.version, old=live)
    if change.action == "promote":
        assert change.traffic.beside is not None
        return Compare(new=live, old=change.traffic.pools[change.traffic.beside])
    if facts.batched > facts.decided:
        candidate = facts.batched
        if facts.published < candidate:
            return AwaitVersion(candidate)
        if facts.base != live:
            return Refuse(
                candidate, f"made from version {facts.base}, which was rolled back in the meantime"
            )
        if facts.is_abandoned:
            return Refuse(candidate, "all users whose sessions it was trained on were deleted")
        for version in (facts.first, live, candidate):
            if version not in facts.evaluated:
                return Evaluate(version)
        return Gate(candidate=candidate, live=live)
    return Done() if facts.batched >= facts.last else Collect(step=facts.batched + 1, base=live)


def lineage(base: int, bases: Mapping[int, int], *, max_lag: int) -> frozenset[int]:
    """The version and its ancestors, at most `max_lag` of them. `bases` maps each version to the
    version it was trained from."""
    found = [base]
    while len(found) <= max_lag and found[-1] in bases:
        found.append(bases[found[-1]])
    return frozenset(found)


def after_gate(
    last: Change, candidate: int, verdict: Verdict, plan: CanaryPlan, now: float
) -> Change:
    why = "; ".join(verdict.reasons)
    change = (
        canary(last, candidate, now, plan.ramp[0], why)
        if verdict.deploy
        else refuse(last, candidate, now, why)
    )
    return replace(change, evidence=verdict.evidence)


def after_look(
    last: Change, decision: CanaryDecision, now: float, *, control_share: float
) -> Change | None:
    """The change of traffic that follows from a look at the users' outcomes; None for no change
    yet."""
    why = "; ".join(decision.reasons)
    match decision.action:
        case "continue":
            return None
        case "roll_back":
            change = roll_back(last, now, why)
        case "promote" if last.action == "promote":
            change = settle(last, now, why)
        case "promote" if decision.share < 1.0:
            change = canary(last, last.version, now, decision.share, why)
        case _:
            change = promote(last, now, why, control_share)
    return replace(change, evidence=decision.evidence)


def user_outcomes(
    figures: Iterable[SessionFigures],
    *,
    new: int,
    old: int,
    first_seen: float,
    since: float,
    until: float,
) -> list[UserOutcomes]:
    """The outcomes of each user with either version, from sessions that began between `since` and
    `until`. Sessions with tokens of both versions, or of another one, are left out. A user's past
    ends when the first users saw the new version (`first_seen`): a longer one would contain effects
    of the new version and so subtract them.

        kept           share of the answers that were kept, among those known to be kept or lost
        dissatisfied   share of the answers that a user complained about
        judged         share of the answers with any feedback: a model that avoids being judged has
                       learnt a trick
    """
    sessions: defaultdict[tuple[str, int], list[Mapping[str, float]]] = defaultdict(list)
    before: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for one in figures:
        if one.started < first_seen:
            before[one.user].append(one.metrics)
        elif since <= one.started <= until and len(one.versions) == 1:
            (version,) = one.versions
            if version in (new, old):
                sessions[one.user, version].append(one.metrics)
    return [
        UserOutcomes(
            user=user,
            is_candidate=version == new,
            sessions=len(found),
            totals={name: sum(each[name] for each in found) for name in METRICS},
            before=_means(before.get(user, ())),
        )
        for (user, version), found in sorted(sessions.items())
    ]


METRICS = ("kept", "dissatisfied", "judged")


def session_figures(outcome: SessionOutcome) -> SessionFigures:
    """The metrics of a session. If no answer is known to be kept or lost, `kept` is one half:
    `judged` records that it is unknown."""
    session, answers = outcome.session, outcome.answers
    decided = [answer.kept for answer in answers if answer.kept is not None]
    return SessionFigures(
        user=session.user,
        organisation=session.organisation,
        session=session.session,
        started=session.started,
        versions=tuple(sorted(outcome.versions)),
        metrics={
            "kept": sum(decided) / len(decided) if decided else 0.5,
            "dissatisfied": sum(answer.dissatisfied for answer in answers) / len(answers),
            "judged": sum(answer.worth is not None for answer in answers) / len(answers),
        },
        events=outcome.events,
    )


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return (
        {name: sum(each[name] for each in found) / len(found) for name in METRICS} if found else {}
    )
