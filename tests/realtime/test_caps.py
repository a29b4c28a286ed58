"""Caps on the influence of a few users."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from etude.realtime.robust import Caps, admit

CAPS = Caps(per_user=8, per_organisation_share=0.2)


@dataclass(frozen=True)
class Sent:
    id: str
    user: str
    organisation: str = ""


def sent(counts: dict[str, int], organisation: str = "") -> list[Sent]:
    return [
        Sent(f"{user}/{number}", user, organisation)
        for user, count in counts.items()
        for number in range(count)
    ]


@given(
    counts=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 30)),
    organisations=st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["", "x", "y"])),
    per_user=st.integers(1, 10),
    share=st.floats(0.05, 1.0),
)
def test_caps_hold_and_nothing_is_lost(
    counts: dict[str, int], organisations: dict[str, str], per_user: int, share: float
) -> None:
    samples = [Sent(each.id, each.user, organisations.get(each.user, "")) for each in sent(counts)]
    found = admit(samples, Caps(per_user=per_user, per_organisation_share=share), salt="update 1")
    ids = [*found.kept, *(id for ids in found.dropped.values() for id in ids)]
    assert sorted(ids) == sorted(each.id for each in samples)

    of = {each.id: each for each in samples}
    assert max(Counter(of[id].user for id in found.kept).values(), default=0) <= per_user
    sizes = Counter(of[id].organisation for id in found.kept if of[id].organisation)
    assert max(sizes.values(), default=0) <= max(1.0, share * len(found.kept))


def test_a_flood_takes_nothing_from_others() -> None:
    others = sent(dict.fromkeys("abcdef", 4))
    calm = admit([*others, *sent({"z": 8})], CAPS, salt="s")
    flood = admit([*others, *sent({"z": 20_000})], CAPS, salt="s")
    assert len(flood.kept) == len(calm.kept) == 6 * 4 + 8
    assert {each.id for each in others} <= set(flood.kept)
    assert len(flood.dropped["user_cap"]) == 20_000 - 8


def test_many_accounts_of_one_organisation_are_one_voice() -> None:
    others = sent({f"user {n}": 2 for n in range(40)})
    ring = sent({f"ring {n}": 8 for n in range(200)}, "ring")
    found = admit([*others, *ring], CAPS, salt="s")
    assert sum(id.startswith("ring") for id in found.kept) == 20
    assert len(found.kept) == 100


def test_which_of_a_users_samples_stay_depends_on_the_update() -> None:
    samples = sent({"a": 100})
    first = admit(samples, CAPS, salt="update 1").kept
    assert admit(samples[::-1], CAPS, salt="update 1").kept == first
    assert admit(samples, CAPS, salt="update 2").kept != first
