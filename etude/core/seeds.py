"""Seeds. Every random choice of a run follows from its one seed through names: derive(run seed,
task, attempt, turn)."""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A seed of 63 bits that depends on every part and on their order, the same on every
    machine."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
