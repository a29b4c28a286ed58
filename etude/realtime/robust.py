"""Caps on the share of a batch that comes from one user or organisation, which bound the influence
of a few."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class Sent(Protocol):
    """Anything that originates from a user of an organisation."""

    @property
    def id(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def organisation(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Limits on the part of a batch that comes from one user or one organisation."""

    per_user: int
    """Samples of one user in a batch."""
    per_organisation_share: float
    """Share of the samples in a batch; users without an organisation count only as themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Ids of the samples within the caps, and of the others by reason."""

    kept: tuple[str, ...]
    dropped: Mapping[str, tuple[str, ...]]
    """By reason: `user_cap` or `organisation_cap`."""


def admit(samples: Sequence[Sent], caps: Caps, *, salt: str) -> Admitted:
    """Keep the samples within the caps. A user's samples are kept in the order of a hash of their
    ids that the user cannot foresee (`salt`: a secret, or the update's name), so sending more of
    them changes only which ones are kept."""
    ordered = sorted(samples, key=lambda one: _lot(one.id, salt))
    dropped: defaultdict[str, list[str]] = defaultdict(list)
    of_user: Counter[str] = Counter()
    within: list[Sent] = []
    for one in ordered:
        of_user[one.user] += 1
        if of_user[one.user] > caps.per_user:
            dropped["user_cap"].append(one.id)
        else:
            within.append(one)
    limit = _organisation_limit(within, caps.per_organisation_share)
    of_organisation: Counter[str] = Counter()
    kept: list[str] = []
    for one in within:
        of_organisation[one.organisation] += bool(one.organisation)
        if of_organisation[one.organisation] > limit:
            dropped["organisation_cap"].append(one.id)
        else:
            kept.append(one.id)
    return Admitted(
        kept=tuple(kept), dropped={reason: tuple(ids) for reason, ids in dropped.items()}
    )


def _organisation_limit(samples: Sequence[Sent], share: float) -> int:
    """The largest limit on the samples of one organisation that is at most `share` of the samples
    left when every organisation is cut to the limit; at least 1."""
    sizes = Counter(one.organisation for one in samples if one.organisation)
    alone = sum(not one.organisation for one in samples)
    limit = max(sizes.values(), default=0)
    while limit > 1:
        total = alone + sum(min(size, limit) for size in sizes.values())
        if limit <= share * total:
            break
        limit -= 1
    return max(limit, 1)


def _lot(id: str, salt: str) -> bytes:
    return hashlib.blake2b(id.encode(), key=salt.encode()[:64], digest_size=8).digest()
