"""From settled sessions to a batch: choose the sessions to train on, and drop the others with a
reason. Pure.

Users do not wait for a free slot of a window, so their sessions are sorted here instead: a session
is pending until it is settled, then trained on once or dropped for a named reason. Tokens are
trained on only if they come from the live version or from the few versions it was trained from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from etude.core.advantage import oldest_version, to_rows, untrainable_params
from etude.core.checks import row_fault
from etude.core.exports import trajectories
from etude.core.ledger import Dropped, Issued, Ledger, Reason
from etude.core.types import Batch, Credit, Row, Trajectory, plain_text
from etude.core.updates import CreditedAnswer
from etude.realtime.credit import Baseline, CreditSample, advantages
from etude.realtime.robust import Caps, admit
from etude.realtime.signals import SessionOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Conditions that a session must meet to be trained on."""

    versions: frozenset[int]
    """Versions that its tokens may come from."""
    is_heldout: Callable[[str], bool]
    """True for a user who never sees an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sorted:
    """The sessions that were neither trained on nor dropped so far, by their next state."""

    issued: tuple[Issued, ...]
    """Ledger entries of the sessions that it did not know before."""
    dropped: tuple[Dropped, ...]
    ready: tuple[SessionOutcome, ...]
    pending: int


def sort_out(
    outcomes: Iterable[SessionOutcome], ledger: Ledger, rules: Rules, *, now: float
) -> Sorted:
    """Sort the sessions without a fate into dropped, ready and pending ones. An open sample of the
    ledger without a session was deleted."""
    there = {outcome.id: outcome for outcome in outcomes}
    drops: defaultdict[tuple[Reason, str], list[str]] = defaultdict(list)
    for id in sorted(set(ledger.open_samples()) - there.keys()):
        drops["deleted", ""].append(id)
    ready, pending = [], 0
    for id, outcome in sorted(there.items()):
        if ledger.has_fate(id):
            continue
        if why := _refusal(outcome, rules, now):
            drops[why].append(id)
        elif now < outcome.settles_at:
            pending += 1
        else:
            ready.append(outcome)
    return Sorted(
        issued=tuple(_issued(one) for id, one in sorted(there.items()) if id not in ledger),
        dropped=dropped_entries(drops),
        ready=tuple(ready),
        pending=pending,
    )


def dropped_entries(drops: Mapping[tuple[Reason, str], Sequence[str]]) -> tuple[Dropped, ...]:
    return tuple(
        Dropped(samples=tuple(ids), reason=reason, detail=detail)
        for (reason, detail), ids in drops.items()
    )


def _issued(outcome: SessionOutcome) -> Issued:
    version = min(outcome.versions, default=0)
    return Issued(group=outcome.id, task=outcome.id, samples=(outcome.id,), version=version)


def _refusal(outcome: SessionOutcome, rules: Rules, now: float) -> tuple[Reason, str] | None:
    """The reason why a session cannot be trained on; None if it can, now or once it is settled."""
    if rules.is_heldout(outcome.user):
        return "heldout", ""
    if strangers := sorted(outcome.versions - rules.versions):
        return "stale", f"version {strangers[0]}"
    if now >= outcome.settles_at and outcome.is_censored:
        return "censored", ""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A batch, and the fate of the sessions that were ready for it."""

    batch: Batch | None
    """None if no session is left to learn from."""
    dropped: tuple[Dropped, ...]
    answers: tuple[CreditedAnswer, ...] = ()

    @property
    def samples(self) -> tuple[str, ...]:
        """The samples that are trained on."""
        return samples_of(self.batch) if self.batch is not None else ()


def samples_of(batch: Batch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.sample for row in batch.rows))


def mixed(users: Batch, simulated: Batch, share: float) -> Batch:
    """Merge both batches, weighted as if simulated rollouts had `share` of the sampled tokens,
    however many they have. Where the loss is a mean over tokens, the gradient is (1 - share) times
    that of the users' batch alone plus share times that of the simulated one."""
    batches, shares = (users, simulated), (1 - share, share)
    counts = [sum(sum(row.mask) for row in batch.rows) for batch in batches]
    rows = tuple(
        replace(row, advantages=tuple(weight * sum(counts) / count * a for a in row.advantages))
        for batch, weight, count in zip(batches, shares, counts, strict=True)
        for row in batch.rows
    )
    return replace(users, rows=rows, oldest=oldest_version(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    outcome: SessionOutcome
    trajectory: Trajectory
    rewards: list[tuple[int, int, float]] = field(default_factory=list)
    """(segment, turn, worth) of each answer that can be trained on."""


def make_update(
    ready: Sequence[SessionOutcome],
    *,
    step: int,
    base: int,
    caps: Caps,
    baseline: Baseline,
    max_tokens: int,
) -> Update:
    """Make a batch with one row for every segment of a session. The credit of an answer is its
    worth by its own user's feedback, minus the baseline."""
    drops: defaultdict[tuple[Reason, str], list[str]] = defaultdict(list)
    admitted = admit(ready, caps, salt=f"update {step}")
    for detail, ids in admitted.dropped.items():
        drops["capped", detail].extend(ids)
    kept = set(admitted.kept)
    chosen: list[_Chosen] = []
    for outcome in sorted(ready, key=lambda one: one.id):
        if outcome.id in kept:
            found = _trainable(outcome, newest=step - 1, max_tokens=max_tokens)
            if isinstance(found, _Chosen):
                chosen.append(found)
            else:
                drops[found].append(outcome.id)
    rows, answers = _credited(chosen, baseline)
    batch = None
    if rows:
        worth = [answer.worth for answer in answers]
        batch = Batch(
            step=step,
            rows=tuple(rows),
            oldest=oldest_version(rows),
            reward=sum(worth) / len(worth),
            base=None if base == step - 1 else base,
        )
    return Update(batch=batch, dropped=dropped_entries(drops), answers=tuple(answers))


def _trainable(
    outcome: SessionOutcome, *, newest: int, max_tokens: int
) -> _Chosen | tuple[Reason, str]:
    made = trajectories([outcome.session], {}, unheard=True)
    if not made.made:
        return "malformed", next(iter(made.dropped))
    trajectory: Trajectory = made.made[0]
    if names := untrainable_params(trajectory):
        return "sampling", names
    for row in to_rows(trajectory, 0.0):
        if row_fault(row, oldest=0, newest=newest, max_tokens=max_tokens):
            return "malformed", ""
    rewards = list(_rewards(outcome))
    if not rewards:
        return "malformed", "redacted"
    return _Chosen(outcome=outcome, trajectory=trajectory, rewards=rewards)


def _rewards(outcome: SessionOutcome) -> Iterator[tuple[int, int, float]]:
    """(segment, turn, worth) of the answers with a known worth. The turn counts only answers with
    log-probs: the others are not among the turns of the trajectory (`core.recorded`)."""
    worth = {answer.turn.answer: answer.worth for answer in outcome.answers}
    for number, segment in enumerate(outcome.session.segments):
        exact = [turn for turn in segment.turns if turn.logprobs]
        for place, turn in enumerate(exact):
            if (value := worth[turn.answer]) is not None:
                yield number, place, value


def _credited(
    chosen: Sequence[_Chosen], baseline: Baseline
) -> tuple[list[Row], list[CreditedAnswer]]:
    rewarded = [
        (_credit_sample(one, segment, turn), value)
        for one in chosen
        for segment, turn, value in one.rewards
    ]
    values = iter(advantages(baseline, rewarded))
    rows: list[Row] = []
    for one in chosen:
        credits = [Credit(next(values), segment, turn) for segment, turn, _ in one.rewards]
        judged = {credit.segment for credit in credits}
        made = to_rows(one.trajectory, 0.0, credits)
        rows += [row for number, row in enumerate(made) if number in judged]
    answers = [
        CreditedAnswer(sample=sample.session, context=sample.context, worth=value)
        for sample, value in rewarded
    ]
    return rows, answers


def _credit_sample(one: _Chosen, segment: int, turn: int) -> CreditSample:
    """The baseline's view of an answer: the context of its session and, as the prompt, the newest
    message before the answer, which is the most informative one."""
    recorded = [each for each in one.outcome.session.segments[segment].turns if each.logprobs][turn]
    asked = [plain_text(message.get("content")) for message in recorded.messages[:-1]]
    return CreditSample(
        id=f"{one.outcome.id}@{segment}.{turn}",
        session=one.outcome.id,
        context=one.outcome.context,
        prompt=asked[-1] if asked else "",
    )
