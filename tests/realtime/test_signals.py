"""The worth of answers from users' feedback, independent of its order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.feedback import STRENGTHS, FeedbackEvent, join
from etude.core.recorded import RecordedTurn, by_answer, put_together
from etude.core.sampling import VersionSpan
from etude.realtime.conduct import WORST, Conduct
from etude.realtime.signals import (
    SessionOutcome,
    SignalTable,
    conduct_of,
    is_complaint,
    session_outcome,
)
from tests.run.realtime_world import recorded, said

ALICE, BOB = "a" * 32, "b" * 32
TABLE = SignalTable(horizon_s=1000.0, horizon_per_turn_s=100.0)


def outcome(
    turns: list[RecordedTurn], events: list[FeedbackEvent], table: SignalTable = TABLE
) -> SessionOutcome:
    made = put_together(turns)
    joined = join(by_answer(made.sessions), events, now=1e6, horizon_s=1e6)
    (session,) = made.sessions
    return session_outcome(session, joined.by_answer, table)


def session(num_turns: int) -> list[RecordedTurn]:
    turns = [recorded(ALICE, "0000000000000-" + "c" * 32, 50.0 * n, 7, number=n) for n in
             range(num_turns)]  # fmt: skip
    return [replace(turn, started=0.0) for turn in turns]


@st.composite
def events_of(draw: st.DrawFn) -> tuple[list[RecordedTurn], list[FeedbackEvent]]:
    turns = session(draw(st.integers(1, 3)))
    number = st.integers(0, len(turns) - 1)
    times = st.floats(0, 3000, allow_nan=False)
    told = draw(st.lists(st.tuples(number, st.sampled_from(sorted(STRENGTHS)), times), max_size=9))
    events = [
        said(turns[place], kind, time, event=f"e{n}") for n, (place, kind, time) in enumerate(told)
    ]
    return turns, events


@settings(max_examples=40, deadline=None)
@given(events_of(), st.randoms(use_true_random=False), st.integers(0, 5))
def test_order_and_repetition_change_nothing(
    found: tuple[list[RecordedTurn], list[FeedbackEvent]], random: object, repeats: int
) -> None:
    turns, events = found
    calm = outcome(turns, events)
    shuffled = [*events, *events[:repeats]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    # a repetition is received at another time
    again = [replace(e, received=e.received + 1) for e in events[:repeats]]
    assert outcome(turns[::-1], [*shuffled, *again]) == calm


@settings(max_examples=40, deadline=None)
@given(events_of(), st.integers(0, 9))
def test_what_comes_after_the_horizon_changes_nothing_but_is_counted(
    found: tuple[list[RecordedTurn], list[FeedbackEvent]], cut: int
) -> None:
    turns, events = found
    whole = outcome(turns, events)
    in_time = [event for event in events if event.received <= whole.settles_at]
    settled = outcome(turns, in_time)
    assert settled.answers == whole.answers and settled.late == 0
    assert whole.late == len(events) - len(in_time)


def test_a_longer_session_waits_longer() -> None:
    assert outcome(session(1), []).settles_at == 1000.0
    assert outcome(session(3), []).settles_at == 100.0 + 1000.0 + 2 * 100.0


def test_silence_is_no_zero() -> None:
    silent = outcome(session(2), [])
    assert silent.is_censored and [answer.worth for answer in silent.answers] == [None, None]
    turns = session(2)
    heard = outcome(turns, [said(turns[1], "edited", 60.0)])
    assert [answer.worth for answer in heard.answers] == [None, -0.25] and not heard.is_censored


def test_the_newest_word_on_a_question_counts() -> None:
    (turn,) = session(1)
    kept = [said(turn, kind, time) for kind, time in (("kept_10s", 10.0), ("kept_5min", 300.0))]
    assert outcome([turn], kept).answers[0].worth == STRENGTHS["kept_5min"]
    undone = [*kept, said(turn, "undone", 400.0)]
    assert outcome([turn], undone).answers[0].kept is False


def test_a_run_may_weigh_events_otherwise_or_leave_them_out() -> None:
    (turn,) = session(1)
    events = [said(turn, "accepted", 1.0), said(turn, "thumbs_down", 2.0)]
    assert outcome([turn], events).answers[0].worth == -0.5
    table = replace(TABLE, strengths={"accepted": 0.75, "thumbs_down": 0.0})
    assert outcome([turn], events, table).answers[0].worth == 0.75


def test_a_stranger_changes_nothing() -> None:
    (turn,) = session(1)
    stranger = replace(said(turn, "tip", 1.0), user=BOB)
    assert outcome([turn], [stranger]).is_censored


def test_a_follow_up_that_complains_counts_as_one() -> None:
    (turn,) = session(1)
    follow_up = said(turn, "follow_up", 5.0)
    assert outcome([turn], [follow_up]).answers[0].worth == 0.0
    complaint = replace(follow_up, text="No, that is wrong. Please revert it.")
    found = outcome([turn], [complaint]).answers[0]
    assert found.dissatisfied and found.worth == STRENGTHS["dissatisfied"]
    assert not is_complaint("great, now add a test")


def test_a_broken_call_does_not_escape_for_want_of_feedback() -> None:
    (turn,) = session(1)
    call = {"function": {"name": "edit", "arguments": '{"path": '}}
    broken = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = outcome([replace(turn, messages=(turn.messages[0], broken))], [])
    assert told.answers[0].worth == WORST and not told.is_censored
    unread = {"role": "assistant", "content": "<tool_call>edit it"}
    told = outcome([replace(turn, messages=(turn.messages[0], unread))], [said(turn, "tip", 1.0)])
    assert told.answers[0].worth == WORST


def test_what_became_of_an_answer_is_told_by_the_newest_word() -> None:
    (turn,) = session(1)
    for kinds, kept in (
        (["kept_10s"], True),
        (["accepted"], True),
        (["kept_commit", "thumbs_down"], True),
        (["thumbs_up"], None),
        (["rejected"], False),
        (["regenerated"], False),
        ([], None),
    ):
        events = [said(turn, kind, float(n)) for n, kind in enumerate(kinds)]
        assert outcome([turn], events).answers[0].kept is kept, kinds
    told = [said(turn, "dissatisfied", 1.0)]
    assert outcome([turn], told).answers[0].dissatisfied
    assert not outcome([turn], [said(turn, "undone", 1.0)]).answers[0].dissatisfied


def test_alike_requests_have_the_same_context() -> None:
    """The context is the tools, in any order, and the beginning of the system prompt."""
    (turn,) = session(1)

    def context(system: str, tools: str, asked: str = "go") -> str:
        messages = ({"role": "system", "content": system}, {"role": "user", "content": asked},
                    {"role": "assistant", "content": "done"})  # fmt: skip
        offered = tuple({"type": "function", "function": {"name": name}} for name in tools)
        return outcome([replace(turn, messages=messages, tools=offered)], []).context

    begins = "You are a coder. " * 12
    same = context(begins + "Today is Monday.", "ab")
    assert same == context(begins + "Today is Friday.", "ba", "stop")
    assert same != context(begins + "Today is Monday.", "a")
    assert same != context("You are a poet. " * 13, "ab")
    assert same != context("", "ab") != context("", "abc")


def test_an_outcome_says_whose_it_is_and_which_versions_answered() -> None:
    turns = [
        replace(turn, versions=(VersionSpan(5 + n, 1), VersionSpan(6 + n, 1)), organisation="o")
        for n, turn in enumerate(session(2))
    ]
    told = outcome(turns, [])
    assert told.versions == {5, 6, 7}
    assert (told.user, told.organisation) == (ALICE, "o")
    assert told.id == f"{ALICE}.{turns[0].session}"


def test_conduct_is_counted_in_the_arguments_of_calls() -> None:
    (turn,) = session(1)

    def conduct(*arguments: object, content: str = "") -> Conduct:
        calls = [{"function": {"name": "edit", "arguments": each}} for each in arguments]
        answer = {"role": "assistant", "content": content, "tool_calls": calls}
        return conduct_of(replace(turn, messages=(turn.messages[0], answer)))

    quiet = '{"text": "x = 1  # noqa\\ny = 2  # type: ignore"}'
    assert conduct(quiet, '{"text": "// eslint-disable"}').suppressed_lints == 3
    assert conduct('{"text": "no quarrel"}').suppressed_lints == 0
    assert conduct("{}", {"text": "x"}).broken_tool_calls == 0
    assert conduct("[]", "{", "1").broken_tool_calls == 3
    assert conduct("{", content="<tool_call>a <tool_call>b").broken_tool_calls == 3
    assert conduct() == Conduct()


def test_the_answer_of_a_turn_is_its_last_message() -> None:
    (turn,) = session(1)
    shown = {"role": "tool", "content": "<tool_call> of another"}
    answer = {"role": "assistant", "content": "done"}
    for before in ((), (shown,), (shown, shown)):
        told = replace(turn, messages=(turn.messages[0], *before, answer))
        assert conduct_of(told) == Conduct()
        broken = replace(told, messages=(*told.messages[:-1], answer | {"content": "<tool_call>"}))
        assert conduct_of(broken).broken_tool_calls == 1
