"""Which weights answer which user, and how that changes. Pure.

Workers stand in pools. Two of them, blue and green, take turns: the one that answers users is live,
the other is given the next version. So an update goes live, and is taken back, by a word of which
pool is live: no weights are moved, and a pool's version never goes down. A third pool keeps the
weights that it began with, for users who never see an update.

Everything that was ever decided is a list of changes, each whole. The newest one is what holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

BLUE, GREEN, HELDOUT = "blue", "green", "heldout"

Action = Literal["start", "refuse", "canary", "promote", "settle", "roll_back", "hold", "resume"]
"""What a change does.

    start      the first version answers
    refuse     a version did not pass the gate, and is never seen by a user
    canary     some users are answered by a version that passed
    promote    most are, and some by the version before, to compare with
    settle     all are: the update is over
    roll_back  nobody is answered by that version any more
    hold       somebody stopped the loop
    resume     it goes on
"""
ENDS: frozenset[Action] = frozenset({"start", "refuse", "settle", "roll_back"})
"""What ends an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What a user is answered by."""

    pool: str
    version: int
    propensity: float
    """The chance that a user had to be in this arm."""


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
    """Another one for each update, so that the same users are not always first."""
    heldout_share: float = 0.0
    """Users who stay with the version that the loop began with."""

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
        """The same for the same user, at every gateway. Nobody knows who asks without a name: that
        is answered live."""
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
    """From 0 to 1, evenly over users."""
    digest = hashlib.blake2b(user.encode(), key=salt.encode()[:64], digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One decision, and what holds from then on."""

    number: int
    action: Action
    version: int
    """That it is about."""
    traffic: Traffic
    time: float
    why: str = ""
    held: bool = False
    """Somebody stopped the loop: nothing is trained or deployed until it is resumed."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The figures that it was decided by."""

    def next(self, action: Action, version: int, time: float, why: str = "") -> Change:
        """The same traffic, with another word."""
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
    """A share of users is answered by the version, in the pool that is not live; or a larger share
    than before."""
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
    """The version is live; a share of users is now answered by the one before, to compare."""
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
    """Nobody is answered by the newest update any more. ValueError if there is none that could be
    taken back."""
    traffic = last.traffic
    if traffic.beside is not None and last.action == "canary":
        return replace(
            last.next("roll_back", last.version, time, why), traffic=_alone(traffic), held=held
        )
    pool = other_pool(traffic)
    before = traffic.pools.get(pool)
    if before is None or before > traffic.version:
        raise ValueError(
            f"version {traffic.version} is live, and no pool holds one before it: there is "
            f"nothing to go back to"
        )
    back = replace(_alone(traffic), live=pool)
    return replace(last.next("roll_back", traffic.version, time, why), traffic=back, held=held)


def hold(last: Change, time: float, why: str) -> Change:
    """Nothing more happens until `resume`. What is being compared ends, since nobody would look at
    it: a canary is taken back, and what was promoted stays."""
    if last.action == "canary":
        return roll_back(last, time, why, held=True)
    if last.action == "promote":
        return replace(settle(last, time, why), held=True)
    return replace(last.next("hold", last.traffic.version, time, why), held=True)


def resume(last: Change, time: float) -> Change:
    """The loop goes on. ValueError if nobody stopped it: what is being compared would be lost from
    sight."""
    if not last.held:
        raise ValueError("nothing is stopped: there is nothing to resume")
    return replace(last.next("resume", last.traffic.version, time), held=False)


def pin(last: Change, version: int, time: float) -> Change:
    """Users stay with this version until `resume`: the live one, or the one before. ValueError if
    it is neither."""
    why = f"pinned to version {version}"
    traffic = last.traffic
    if version == traffic.version:
        return hold(last, time, why)
    before = traffic.pools.get(other_pool(traffic))
    if version == before and before < traffic.version:
        return roll_back(last, time, why, held=True)
    raise ValueError(
        f"version {version} is neither live nor the one before: version {traffic.version} is live"
    )


def _alone(traffic: Traffic) -> Traffic:
    return replace(traffic, beside=None, share=0.0, salt="")


def decided(changes: Sequence[Change]) -> int:
    """The newest version that something was decided about for good."""
    return max((change.version for change in changes if change.action in ENDS), default=-1)
