"""The choice of sessions to train on, and the reasons for dropping the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.feedback import FeedbackEvent, join
from etude.core.ledger import Batched, Ledger
from etude.core.recorded import RecordedTurn, by_answer, put_together
from etude.core.sampling import SamplingParams, VersionSpan
from etude.core.types import Batch, Row
from etude.realtime.collect import Rules, make_update, mixed, sort_out
from etude.realtime.credit import BASELINE
from etude.realtime.cycle import lineage
from etude.realtime.robust import Caps
from etude.realtime.signals import SessionOutcome, SignalTable, session_outcome
from etude.store.production import digest
from tests.run.realtime_world import recorded, said

TABLE = SignalTable(horizon_s=100.0, horizon_per_turn_s=0.0)
RULES = Rules(versions=frozenset({5, 6}), is_heldout=lambda user: user == digest("held out"))
LATER = 1000.0
CAPS = Caps(per_user=2, per_organisation_share=0.2)


def name(number: int) -> str:
    return f"{number:013d}-{digest(str(number))}"


def outcomes(turns: list[RecordedTurn], events: list[FeedbackEvent]) -> list[SessionOutcome]:
    made = put_together(turns)
    joined = join(by_answer(made.sessions), events, now=1e6, horizon_s=1e6)
    return [session_outcome(session, joined.by_answer, TABLE) for session in made.sessions]


def asked(user: str, number: int = 0, version: int = 6) -> RecordedTurn:
    return recorded(digest(user), name(number), 0.0, version)


def test_every_session_has_one_fate() -> None:
    both = replace(asked("mixed"), versions=(VersionSpan(6, 1), VersionSpan(4, 1)))
    turns = [asked("plain"), asked("held out"), asked("old", version=4), both, asked("silent")]
    heard = [said(turn, "kept_5min", 1.0) for turn in turns[:-1]]
    early = sort_out(outcomes(turns, heard), Ledger(), RULES, now=50.0)
    assert early.pending == 2 and not early.ready, "the silent one may still be heard of"
    late = sort_out(outcomes(turns, heard), Ledger(), RULES, now=LATER)
    fates = {entry.label: entry.samples for entry in late.dropped}
    assert {label: len(samples) for label, samples in fates.items()} == {
        "heldout": 1,
        "stale (version 4)": 2,
        "censored": 1,
    }
    assert [one.user for one in late.ready] == [digest("plain")]
    assert len(late.issued) == len(turns)


def test_what_is_gone_from_the_store_is_dropped_as_deleted() -> None:
    turns = [asked("plain"), asked("another")]
    first = sort_out(outcomes(turns, []), Ledger(), RULES, now=50.0)
    ledger = Ledger([*first.issued, *first.dropped])
    second = sort_out(outcomes(turns[:1], []), ledger, RULES, now=60.0)
    assert [(entry.reason, len(entry.samples)) for entry in second.dropped] == [("deleted", 1)]
    assert not second.issued


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(4, 6), st.booleans()), min_size=1, max_size=14
    ),
    st.floats(0.0, 200.0),
)
def test_the_ledger_balances_and_a_second_look_finds_nothing_new(
    sessions: list[tuple[int, int, bool]], now: float
) -> None:
    turns = [asked(f"u{user}", n, version) for n, (user, version, _) in enumerate(sessions)]
    told = zip(turns, sessions, strict=True)
    events = [said(turn, "undone", 1.0) for turn, (_, _, speaks) in told if speaks]
    found = sort_out(outcomes(turns, events), Ledger(), RULES, now=now)
    ledger = Ledger([*found.issued, *found.dropped])
    update = make_update(
        found.ready, step=7, base=6, caps=CAPS, baseline=BASELINE["context_mean"](),
        max_tokens=64,
    )  # fmt: skip
    for entry in update.dropped:
        ledger.apply(entry)
    if update.batch is not None:
        ledger.apply(Batched(step=7, samples=update.samples))
        assert {row.sample for row in update.batch.rows} == set(update.samples)
    assert len(ledger.open_samples()) == found.pending
    again = sort_out(outcomes(turns, events), ledger, RULES, now=now)
    assert (again.issued, again.dropped, again.ready) == ((), (), ())


def test_a_flood_of_one_user_is_cut() -> None:
    turns = [asked("flood", n) for n in range(9)] + [asked(f"u{n}", 50 + n) for n in range(5)]
    ready = outcomes(turns, [said(turn, "undone", 1.0) for turn in turns])
    update = make_update(
        ready, step=7, base=6, caps=CAPS, baseline=BASELINE["none"](), max_tokens=64
    )
    flooding = digest("flood")
    assert sum(sample.startswith(flooding) for sample in update.samples) == 2
    assert {entry.label: len(entry.samples) for entry in update.dropped} == {"capped (user_cap)": 7}


def test_each_answer_is_credited_by_what_its_own_user_said_of_it() -> None:
    first = recorded(digest("a"), name(1), 0.0, 6)
    second = replace(recorded(digest("a"), name(1), 5.0, 6, number=1), started=0.0)
    third = replace(recorded(digest("a"), name(1), 9.0, 6, number=2), started=0.0)
    events = [said(first, "kept_commit", 1.0), said(third, "undone", 10.0)]
    update = make_update(
        outcomes([first, second, third], events),
        step=7, base=5, caps=CAPS, baseline=BASELINE["none"](), max_tokens=64,
    )  # fmt: skip
    assert update.batch is not None and update.batch.base == 5
    (row,) = update.batch.rows
    assert row.advantages == (0, 0, 0.75, 0.75, 0, 0, 0, 0, 0, 0, -1.0, -1.0)
    assert sum(row.mask) == 6, "what nobody judged was sampled too, and pulls nowhere"


def test_what_the_trainer_cannot_recompute_is_named() -> None:
    turn = replace(asked("top"), params=SamplingParams(top_p=0.5))
    update = make_update(
        outcomes([turn], [said(turn, "tip", 1.0)]),
        step=7, base=6, caps=CAPS, baseline=BASELINE["none"](), max_tokens=64,
    )  # fmt: skip
    assert update.batch is None
    assert [entry.label for entry in update.dropped] == ["sampling (top_p)"]


def test_only_what_a_version_was_made_from_counts_as_its_own() -> None:
    bases = {1: 0, 2: 1, 3: 1, 4: 3}  # 2 was refused
    assert lineage(4, bases, max_lag=0) == {4}
    assert lineage(4, bases, max_lag=1) == {4, 3}
    assert lineage(4, bases, max_lag=9) == {4, 3, 1, 0}


def row_of(sample: str, *advantages: float) -> Row:
    count = len(advantages)
    return Row(
        sample=sample,
        tokens=tuple(range(count + 1)),
        mask=(False, *(True,) * count),
        logprobs=(0.0,) * (count + 1),
        advantages=(0.0, *advantages),
        versions=(VersionSpan(3, count),),
    )


@given(
    users=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    simulated=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    share=st.floats(0.01, 0.99),
)
def test_a_mixture_is_the_weighted_sum_of_two_steps(
    users: list[int], simulated: list[int], share: float
) -> None:
    """For a loss that is a mean over tokens, with any number of tokens of either kind."""

    def step(batch: Batch, start: str = "") -> float:
        """The step of a policy whose tokens all have the same gradient."""
        tokens = sum(sum(row.mask) for row in batch.rows)
        return sum(sum(r.advantages) for r in batch.rows if r.sample.startswith(start)) / tokens

    def batch(name: str, sizes: list[int], value: float) -> Batch:
        rows = tuple(row_of(f"{name}{n}", *(value,) * size) for n, size in enumerate(sizes))
        return Batch(step=4, rows=rows, oldest=3, reward=0.5)

    apart = batch("u", users, 0.7), batch("s", simulated, -0.4)
    together = mixed(*apart, share)
    assert step(together, "u") == pytest.approx((1 - share) * step(apart[0]))
    assert step(together, "s") == pytest.approx(share * step(apart[1]))
    assert (together.step, together.oldest, together.reward) == (4, 3, 0.5)


def test_the_order_of_sessions_changes_nothing() -> None:
    turns = [asked(f"u{n}", n) for n in range(6)] + [asked("old", 9, version=4)]
    found = outcomes(turns, [said(turn, "undone", 1.0) for turn in turns])
    forth, back = (sort_out(each, Ledger(), RULES, now=LATER) for each in (found, found[::-1]))
    assert forth == back and [one.id for one in forth.ready] == sorted(one.id for one in back.ready)
