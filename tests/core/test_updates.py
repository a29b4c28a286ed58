"""The versions that have seen the data of a deleted user."""

from __future__ import annotations

from etude.core.updates import (
    is_of_user,
    simulated_group,
    step_of_simulated,
    steps_back,
    versions_that_saw,
)

BASES = {2: 0, 3: 0, 10: 3, 11: 10, 12: 2}


def test_what_was_made_from_a_version_has_seen_what_it_saw() -> None:
    assert versions_that_saw([3], BASES) == (3, 10, 11)
    assert versions_that_saw((10, 2), BASES) == (2, 10, 11, 12)
    assert versions_that_saw({0}, BASES) == (0, 2, 3, 10, 11, 12)
    assert versions_that_saw([12], BASES) == (12,)
    assert versions_that_saw([], BASES) == ()
    assert versions_that_saw([64, 8, 1], {}) == (1, 8, 64)


def test_how_far_a_version_lies_behind() -> None:
    """A version without an entry was made from the previous one."""
    assert [steps_back(version, 12, BASES) for version in (12, 2, 0)] == [0, 1, 2]
    assert steps_back(11, 12, BASES) is None, "it was not made from that one"
    assert steps_back(13, 12, BASES) is None
    assert steps_back(3, 7, {}) == 4


def test_groups_of_simulated_rollouts_say_for_which_step_they_are() -> None:
    assert step_of_simulated(simulated_group(17, 3)) == 17
    for other in ("g000001", "", f"{simulated_group(17, 3)}.0"):
        assert step_of_simulated(other) is None


def test_sessions_of_users_are_known_by_their_ids() -> None:
    user, session = "0a" * 16, "1700000000000-" + "f" * 32
    assert is_of_user(f"{user}.{session}")
    for other in ("g000001.0", f"{user}.{session}.0", f"{user}/{session}", f"{user[1:]}.{session}"):
        assert not is_of_user(other)
