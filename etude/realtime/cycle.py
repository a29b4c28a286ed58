"""What the loop does next, given what lies in the store. Pure.

    collect ─> train ─> evaluate ─> gate ─> canary ─> deploy ─> watch ─> settle
                                      │        │                  │
                                   refuse   roll back         roll back

The loop remembers nothing. A batch, a published version, a report and a change of traffic are each
written once and never again, so whoever is killed anywhere, and starts again, finds the same next
thing to do, and what was done before is not done twice.
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
    """What lies in the store."""

    first: int
    """The version that the loop begins with."""
    last: int
    """The one that it ends with."""
    published: int
    """The newest version; -1 if there is none."""
    batched: int
    """The newest step that has a batch; `first` if none has."""
    base: int
    """The version that this batch begins with."""
    is_abandoned: bool
    """Whether all users whose sessions it was made of were deleted."""
    change: Change | None
    """The newest of them."""
    decided: int
    """The newest version that an update ended with, well or badly."""
    evaluated: frozenset[int]
    """The versions whose reports are all there."""


@dataclass(frozen=True, slots=True)
class AwaitVersion:
    """Until the trainer has published it."""

    version: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first version answers users."""

    version: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Sessions for the batch of a step, which begins with the weights that are live."""

    step: int
    base: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    version: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """A version that nobody needs to try."""

    version: int
    why: str


@dataclass(frozen=True, slots=True)
class Gate:
    candidate: int
    live: int


@dataclass(frozen=True, slots=True)
class Compare:
    """What users did with the new version, and with the other one beside it."""

    new: int
    old: int


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody stopped the loop."""

    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """All steps of the stage are taken."""


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
            return Refuse(candidate, f"made from version {facts.base}, which was taken back since")
        if facts.is_abandoned:
            return Refuse(candidate, "all users whose sessions it was made of were deleted")
        for version in (facts.first, live, candidate):
            if version not in facts.evaluated:
                return Evaluate(version)
        return Gate(candidate=candidate, live=live)
    return Done() if facts.batched >= facts.last else Collect(step=facts.batched + 1, base=live)


def lineage(base: int, bases: Mapping[int, int], *, max_lag: int) -> frozenset[int]:
    """The version, and those before it that it was made from, `max_lag` of them at most. `bases`:
    what each version was made from."""
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
    """What a look at the users' outcomes changes; None: nothing yet."""
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
    """By user, what became of their answers by either version that began in this time. A session
    that saw both, or any other, says nothing of one. A user's past ends when the first users saw
    the new version (`first_seen`): it would otherwise explain away what the version did.

        kept           share of the answers that were kept, of those that somebody decided about
        dissatisfied   share of the answers that a user complained about
        judged         share of the answers that anything is known about: a model that avoids being
                       judged has learnt a trick
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
    """One of which nobody decided anything counts as kept by half: that it is unknown, `judged`
    says."""
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
