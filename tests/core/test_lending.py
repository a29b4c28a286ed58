"""Lending to RL under any load and at any hours: users never have less than they were promised."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.lending import DAY_S, FirstTokens, LoanPolicy, SlotPolicy, UsersLoad, lendable_s

NIGHT = ("22:00-06:00",)
HOUR = 3600.0


@pytest.mark.parametrize(
    ("hour", "left"), [(21.99, 0.0), (22.0, 8.0), (23.5, 6.5), (0.0, 6.0), (5.5, 0.5), (6.0, 0.0)]
)
def test_hours_go_over_midnight(hour: float, left: float) -> None:
    assert lendable_s(NIGHT, 20_000 * DAY_S + hour * HOUR) == pytest.approx(left * HOUR)


def test_no_hours_are_all_hours_and_the_longest_span_counts() -> None:
    assert lendable_s((), 5.0) == math.inf
    assert lendable_s(("01:00-02:00", "01:30-03:00"), 1.75 * HOUR) == 1.25 * HOUR
    assert lendable_s(("00:00-00:00",), 7.0) == DAY_S - 7.0


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.sampled_from([0.0, 0.9, 1.1, math.inf]))),
    st.integers(1, 64),
)
def test_slots_stay_within_what_there_is_and_only_lateness_beside_rl_takes_them(
    waits: list[tuple[float, float]], slots: int
) -> None:
    """This includes users who wait behind others after RL lost its slots."""
    policy, allowed = SlotPolicy(slots=slots, max_ttft_s=1.0), slots
    for wait, since_rl_s in waits:
        policy.first_token(wait, since_rl_s=since_rl_s)
        now = policy.decide(0.0)
        assert 0 <= now <= slots
        if wait > 1.0 and since_rl_s <= 1.0:
            assert now == allowed // 2
        else:
            assert now >= allowed
        allowed = now


def test_one_late_request_of_hundred_is_within_the_promise() -> None:
    policy = SlotPolicy(slots=8, max_ttft_s=1.0)
    for _ in range(150):
        policy.first_token(0.5, since_rl_s=0.0)
    policy.first_token(2.0, since_rl_s=0.0)
    assert policy.decide(0.0) == 8
    policy.first_token(2.0, since_rl_s=0.0)
    assert policy.decide(0.0) == 4
    assert [policy.decide(0.0) for _ in range(5)] == [5, 6, 7, 8, 8]


def test_nothing_is_lent_by_day() -> None:
    policy = SlotPolicy(slots=8, max_ttft_s=1.0, hours=NIGHT)
    assert [policy.decide(hour * HOUR) for hour in (5.0, 7.0, 21.0, 22.0)] == [8, 0, 0, 8]


def loan(**changes: object) -> LoanPolicy:
    given: dict[str, object] = {
        "slots": 10, "keep": 1, "max_load": 0.8, "max_ttft_s": 1.0, "calm_s": 60.0,
        "return_s": 100.0, "hours": NIGHT,
    }  # fmt: skip
    return LoanPolicy(**(given | changes))  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.floats(1.0, 1000.0),
            st.integers(0, 60),
            st.one_of(st.none(), st.floats(0.0, 2.0)),
        ),
        max_size=200,
    ),
    st.integers(1, 4),
)
def test_whatever_users_do_they_are_left_what_they_were_promised(
    steps: list[tuple[float, int, float | None]], keep: int
) -> None:
    """A fleet of four workers, each of which decides for itself, one after the other."""
    now, policies = 21.5 * HOUR, [loan(keep=keep) for _ in range(4)]
    lent = [False] * 4
    for passed, active, ttft in steps:
        now += passed
        for number, policy in enumerate(policies):
            users = UsersLoad(lent.count(False), active, ttft)
            before = list(lent)
            if lent[number]:
                lent[number] = not policy.recalls(now, users)
            else:
                lent[number] = policy.lends(now, users)
            if lent[number]:
                assert lendable_s(NIGHT, now) > 100.0, "it could not be back in time"
                assert ttft is None or ttft <= 1.0
                assert active <= 0.8 * 10 * lent.count(False)
            if lent[number] > before[number]:
                assert lent.count(False) >= keep


def test_a_worker_goes_when_it_was_calm_for_long_and_comes_back_when_users_do() -> None:
    policy, now = loan(hours=()), 0.0
    calm, busy = UsersLoad(2, 4), UsersLoad(2, 5)
    assert not policy.lends(now, calm) and not policy.lends(now + 59.0, calm)
    assert not policy.lends(now + 59.5, busy), "more than half of what it would leave"
    assert not policy.lends(now + 61.0, calm), "the calm begins anew"
    assert policy.lends(now + 121.0, calm)
    assert not policy.recalls(now + 122.0, UsersLoad(1, 8))
    assert policy.recalls(now + 122.0, UsersLoad(1, 9))
    assert policy.recalls(now + 122.0, UsersLoad(0, 0)), "nobody is left"
    assert not policy.recalls(now + 122.0, UsersLoad(1, 1, ttft_p99_s=1.0)), "as was promised"
    assert policy.recalls(now + 122.0, UsersLoad(1, 1, ttft_p99_s=1.1))
    assert policy.recalls(now + 122.0, None), "nobody knows"


def test_it_is_back_by_its_deadline_and_learns_how_long_that_takes() -> None:
    policy, quiet = loan(), UsersLoad(1, 0)
    assert not policy.recalls(6 * HOUR - 101.0, quiet)
    assert policy.recalls(6 * HOUR - 100.0, quiet)
    policy.returned(250.0)
    assert policy.recalls(6 * HOUR - 250.0, quiet)


def test_the_p99_is_of_the_last_minute() -> None:
    waits = FirstTokens()
    assert waits.p99(0.0) is None
    for number in range(1, 101):
        waits.add(now=100.0, asked=100.0 - number)
    assert waits.p99(100.0) == 99.0
    assert waits.p99(160.0) is None


def test_a_lent_worker_needs_a_run_and_its_gateway() -> None:
    text = 'name = "users"\n[[stage]]\nkind = "rl"\nsteps = 1\n[engine.lend]\n'
    assert parse(text + 'hours = ["22:00-06:00"]').engine.lend is not None
    with pytest.raises(EtudeError, match="run and gateway go together"):
        parse(text + 'gateway = "http://127.0.0.1:1"')
    with pytest.raises(EtudeError, match="hours"):
        parse(text + 'hours = ["22-6"]')
