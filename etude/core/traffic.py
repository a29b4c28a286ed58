"""Traffic: the assignment of users to weights, and its changes. Pure.

Workers are grouped in pools. Two of them, blue and green, take turns: one is live and answers
users, the other gets the next version. So an update goes live, or is rolled back, by changing which
pool is live: no weights are moved, and a pool's version never goes down. A third pool keeps the
weights that it started with, for users who never see an update.

All decisions form a list of changes, each with the complete traffic. The newest one applies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

BLUE, GREEN, HELDOUT = "blue", "green", "heldout"

Action = Literal["start", "refuse", "canary", "promote", "settle", "roll_back", "hold", "resume"]
"""The decision of a change.

    start      the first version answers
    refuse     a version did not pass the gate, and is never seen by a user
    canary     some users are answered by a version that passed
    promote    most users are, and some by the previous version, for comparison
    settle     all users are: the update is complete
    roll_back  nobody is answered by that version any more
    hold       somebody stopped the loop
    resume     the loop continues
"""
ENDS: frozenset[Action] = frozenset({"start", "refuse", "settle", "roll_back"})
"""Actions that end an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The pool and version that answer a user."""

    pool: str
    version: int
    propensity: float
    """The chance that a user is assigned to this arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    live: str
    """The pool that answers users."""
    pools: Mapping[str, int]
    """The version that each pool serves."""
    beside: str | None = None
    """The pool that answers a share of them."""
    share: float = 0.0
    salt: str = ""
    """A salt that changes with each update, so that it is not always the same users who are
    first."""
    heldout_share: float = 0.0
    """Share of the users who stay with the version that the loop started with."""

    @property
    def version(self) -> int:
        return self.pools[self.live]

    @property
    def serving(self) -> set[str]:
        """The pools that answer somebody."""
        kept = {HELDOUT} if self.heldout_share else set()
        return {self.live} | kept | ({self.beside} if self.beside is not None else set())

    def is_heldout(self, user: str) -> bool:
        return _draw(user, HELDOUT) < self.heldout_share

    def arm(self, user: str) -> Arm:
        """The arm of a user, the same at every gateway. Requests without a name go to the live
        pool, since their user is not known."""
        others = 1.0 - self.heldout_share
        if not user:
            return self._arm(self.live, 1.0)
        if self.is_heldout(user):
            return self._arm(HELDOUT, self.heldout_share)
        if self.beside is not None and _draw(user, self.salt) < self.share:
            return self._arm(self.beside, others * self.share)
        return self._arm(self.live, others * (1.0 - (self.share if self.beside else 0.0)))

    def _arm(self, pool: str, propensity: float) -> Arm:
        return Arm(pool=pool, version=self.pools[pool], propensity=propensity)


def _draw(user: str, salt: str) -> float:
    """A number from 0 to 1, uniform over users."""
    digest = hashlib.blake2b(user.encode(), key=salt.encode()[:64], digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One decision, and the traffic that applies from then on."""

    number: int
    action: Action
    version: int
    """The version that it is about."""
    traffic: Traffic
    time: float
    why: str = ""
    held: bool = False
    """Somebody stopped the loop: nothing is trained or deployed until it is resumed."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The figures that the decision is based on."""

    def next(self, action: Action, version: int, time: float, why: str = "") -> Change:
        """The same traffic with another action."""
        return replace(
            self,
            number=self.number + 1,
            action=action,
            version=version,
            time=time,
            why=why,
            evidence={},
        )


def start(version: int, time: float, heldout_share: float) -> Change:
    pools = {BLUE: version} | ({HELDOUT: version} if heldout_share else {})
    traffic = Traffic(live=BLUE, pools=pools, heldout_share=heldout_share)
    return Change(number=0, action="start", version=version, traffic=traffic, time=time)


def other_pool(traffic: Traffic) -> str:
    return GREEN if traffic.live == BLUE else BLUE


def refuse(last: Change, version: int, time: float, why: str) -> Change:
    return last.next("refuse", version, time, why)


def canary(last: Change, version: int, time: float, share: float, why: str = "") -> Change:
    """Have a share of users answered by the version, in the pool that is not live; or a larger
    share than before."""
    traffic = last.traffic
    pool = other_pool(last.traffic)
    served = traffic.pools.get(pool, -1)
    assert served < version or (last.action == "canary" and served == version), (pool, served)
    beside = replace(
        traffic,
        pools={**traffic.pools, pool: version},
        beside=pool,
        share=share,
        salt=f"update {version}",
    )
    return replace(last.next("canary", version, time, why), traffic=beside)


def promote(last: Change, time: float, why: str, share: float) -> Change:
    """Make the version live; a share of users is now answered by the previous one, for
    comparison."""
    traffic = last.traffic
    assert last.action == "canary" and traffic.beside is not None
    swapped = replace(
        traffic,
        live=traffic.beside,
        beside=traffic.live,
        share=share,
        salt=f"watch {last.version}",
    )
    return replace(last.next("promote", last.version, time, why), traffic=swapped)


def settle(last: Change, time: float, why: str) -> Change:
    assert last.action == "promote"
    return replace(last.next("settle", last.version, time, why), traffic=_alone(last.traffic))


def roll_back(last: Change, time: float, why: str, *, held: bool = False) -> Change:
    """Stop answering users with the newest update. ValueError if there is no version to return
    to."""
    traffic = last.traffic
    if traffic.beside is not None and last.action == "canary":
        return replace(
            last.next("roll_back", last.version, time, why), traffic=_alone(traffic), held=held
        )
    pool = other_pool(traffic)
    before = traffic.pools.get(pool)
    if before is None or before > traffic.version:
        raise ValueError(
            f"version {traffic.version} is live, and no pool has an earlier version to go back to"
        )
    back = replace(_alone(traffic), live=pool)
    return replace(last.next("roll_back", traffic.version, time, why), traffic=back, held=held)


def hold(last: Change, time: float, why: str) -> Change:
    """Stop until `resume`. A comparison in progress ends, since nobody would watch it: a canary is
    rolled back, and a promoted version stays."""
    if last.action == "canary":
        return roll_back(last, time, why, held=True)
    if last.action == "promote":
        return replace(settle(last, time, why), held=True)
    return replace(last.next("hold", last.traffic.version, time, why), held=True)


def resume(last: Change, time: float) -> Change:
    """Continue the loop. ValueError if it was not stopped: a comparison in progress would get
    lost."""
    if not last.held:
        raise ValueError("nothing is stopped, so there is nothing to resume")
    return replace(last.next("resume", last.traffic.version, time), held=False)


def pin(last: Change, version: int, time: float) -> Change:
    """Keep users on this version until `resume`: the live one, or the previous one. ValueError for
    any other."""
    why = f"pinned to version {version}"
    traffic = last.traffic
    if version == traffic.version:
        return hold(last, time, why)
    before = traffic.pools.get(other_pool(traffic))
    if version == before and before < traffic.version:
        return roll_back(last, time, why, held=True)
    raise ValueError(
        f"version {version} is neither live nor the previous version: version "
        f"{traffic.version} is live"
    )


def _alone(traffic: Traffic) -> Traffic:
    return replace(traffic, beside=None, share=0.0, salt="")


def decided(changes: Sequence[Change]) -> int:
    """The newest version with a final decision."""
    return max((change.version for change in changes if change.action in ENDS), default=-1)
