"""The assignment of users to versions after any sequence of decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core import traffic
from etude.core.traffic import BLUE, GREEN, HELDOUT, Change, decided

USERS = [f"user {n}" for n in range(2000)]


def after(*words: str) -> list[Change]:
    """The changes after these decisions, one word each; updates are numbered from 1."""
    changes, version = [traffic.start(0, 0.0, 0.1)], 0
    for number, word in enumerate(words, start=1):
        last, now = changes[-1], float(number)
        match word:
            case "refuse":
                version += 1
                changes.append(traffic.refuse(last, version, now, "worse"))
            case "canary":
                version += last.action != "canary"
                share = 0.05 if last.action != "canary" else 0.25
                changes.append(traffic.canary(last, version, now, share))
            case "promote":
                changes.append(traffic.promote(last, now, "", 0.05))
            case "settle":
                changes.append(traffic.settle(last, now, ""))
            case "roll_back":
                changes.append(traffic.roll_back(last, now, "worse"))
            case "hold":
                changes.append(traffic.hold(last, now, "stopped"))
            case "resume":
                changes.append(traffic.resume(last, now))
    return changes


def test_an_update_goes_out_to_more_and_more_users_and_only_adds_some() -> None:
    first, more = after("canary")[-1].traffic, after("canary", "canary")[-1].traffic
    seen = [{user for user in USERS if t.arm(user).version == 1} for t in (first, more)]
    assert seen[0] < seen[1]
    assert 60 < len(seen[0]) < 120 and 380 < len(seen[1]) < 520
    live = after("canary", "canary", "promote")[-1].traffic
    assert live.version == 1 and 0 < sum(live.arm(user).version == 0 for user in USERS) < 400


def test_held_out_users_never_see_one() -> None:
    heldout = {user for user in USERS if after()[-1].traffic.is_heldout(user)}
    assert 150 < len(heldout) < 250
    for words in (("canary",), ("canary", "promote"), ("canary", "promote", "settle")):
        traffic_now = after(*words)[-1].traffic
        assert all(traffic_now.arm(user).version == 0 for user in heldout)
        assert {user for user in USERS if traffic_now.arm(user).pool == HELDOUT} == heldout


def test_propensities_are_the_shares_that_come_about() -> None:
    now = after("canary", "canary")[-1].traffic
    for pool in (BLUE, GREEN, HELDOUT):
        arms = [arm for user in USERS if (arm := now.arm(user)).pool == pool]
        assert len(arms) / len(USERS) == pytest.approx(arms[0].propensity, abs=0.04)


def test_what_is_taken_back_is_seen_by_nobody_at_once() -> None:
    for words in (("canary",), ("canary", "promote"), ("canary", "promote", "settle")):
        back = after(*words, "roll_back")[-1]
        assert {back.traffic.arm(user).version for user in USERS} == {0}
    with pytest.raises(ValueError, match="no pool has an earlier version to go back to"):
        after("roll_back")
    with pytest.raises(ValueError, match="no pool has an earlier version to go back to"):
        after("canary", "roll_back", "roll_back")


def test_a_hold_ends_what_is_being_compared() -> None:
    held = after("canary", "hold")[-1]
    assert held.held and held.traffic.version == 0 and held.traffic.beside is None
    held = after("canary", "promote", "hold")[-1]
    assert held.held and held.traffic.version == 1 and held.traffic.beside is None
    assert decided(after("canary", "promote", "hold")) == 1
    assert not after("hold", "resume")[-1].held


def test_what_is_not_held_cannot_be_resumed() -> None:
    """Otherwise a canary would continue without anybody watching it."""
    for words in ((), ("canary",), ("canary", "promote"), ("hold", "resume")):
        with pytest.raises(ValueError, match="nothing is stopped"):
            after(*words, "resume")


def test_a_pin_is_for_the_live_version_or_the_one_before() -> None:
    last = after("canary", "promote", "settle")[-1]
    assert traffic.pin(last, 1, 9.0).traffic.version == 1
    assert traffic.pin(last, 0, 9.0).traffic.version == 0
    assert traffic.pin(last, 0, 9.0).held
    with pytest.raises(ValueError, match="neither live nor the previous version"):
        traffic.pin(last, 7, 9.0)
    pinned = traffic.pin(after("canary")[-1], 0, 9.0).traffic
    assert {pinned.arm(user).version for user in USERS} == {0}


WORDS = ("refuse", "canary", "promote", "settle", "roll_back", "hold", "resume")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=14))
def test_no_pool_ever_goes_back(words: list[str]) -> None:
    done: list[str] = []
    for word in words:
        last = after(*done)[-1]
        fits = {
            "promote": last.action == "canary",
            "settle": last.action == "promote",
            "roll_back": False,
            "canary": last.action not in ("promote",) and not last.held,
            "refuse": last.action not in ("canary", "promote") and not last.held,
            "resume": last.held,
        }
        can_go_back = last.action in ("canary", "promote", "settle")
        if fits.get(word, True) or (word == "roll_back" and can_go_back):
            done.append(word)
    changes = after(*done)
    for before, now in zip(changes, changes[1:], strict=False):
        assert all(now.traffic.pools[pool] >= v for pool, v in before.traffic.pools.items())
        assert now.number == before.number + 1
        assert now.traffic.version in now.traffic.pools.values()
        arms = {now.traffic.arm(user).pool for user in USERS[:50]}
        assert arms <= now.traffic.serving


def test_whoever_asks_without_a_name_is_answered_live() -> None:
    now = after("canary")[-1].traffic
    for traffic_now in (now, replace(now, heldout_share=1.0), replace(now, share=1.0)):
        arm = traffic_now.arm("")
        assert (arm.pool, arm.version, arm.propensity) == (now.live, now.version, 1.0)


@pytest.mark.parametrize("heldout_share", [0.0, 0.1])
def test_the_pools_that_serve_are_those_that_answer_somebody(heldout_share: float) -> None:
    first = traffic.start(0, 0.0, heldout_share)
    compared = traffic.canary(first, 1, 1.0, 0.3)
    promoted = traffic.promote(compared, 2.0, "", 0.3)
    settled = traffic.settle(promoted, 3.0, "")
    assert (first.traffic.salt, settled.traffic.salt) == ("", "")
    assert (compared.traffic.salt, promoted.traffic.salt) == ("update 1", "watch 1")
    for change in (first, compared, promoted, settled):
        answering = {change.traffic.arm(user).pool for user in USERS}
        assert change.traffic.serving == answering


def test_a_decision_has_figures_and_reasons_of_its_own() -> None:
    compared = replace(after("canary")[-1], why="the gate", evidence={"kept loss": 0.01})
    for following in (
        traffic.promote(compared, 2.0, "", 0.05),
        traffic.roll_back(compared, 2.0, ""),
        traffic.canary(compared, 1, 2.0, 0.5),
        compared.next("hold", 1, 2.0),
    ):
        assert (following.evidence, following.why, following.time) == ({}, "", 2.0)
