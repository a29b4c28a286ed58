"""A relay as a follower sees it: another place to ask for an object before the store is asked.

A relay (`serve.relay`) stands in each region and downloads what its workers want once. Objects are
named by their hash, so nothing that it says has to be believed, and whatever goes wrong with it
costs a download from the store and nothing else.
"""

from __future__ import annotations

import http.client
import math
import os
import time
import urllib.request
from collections.abc import Callable

from etude.core.types import VersionRef
from etude.weights.records import hash_of

TIMEOUT_S = 60.0
"""Without a byte from it. It downloads what it does not have first."""
PAUSE_S = 300.0
"""How long a relay that let a reader wait in vain is not asked again: to wait for every object anew
would hold each version back for minutes."""
TOKEN_VARIABLE = "ETUDE_TOKEN"


class Relay:
    def __init__(
        self,
        url: str,
        timeout_s: float = TIMEOUT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._now = now
        self._paused_until = -math.inf

    def shard(self, target: VersionRef, hash: str) -> bytes | None:
        """Its bytes, checked; None if they cannot be had here."""
        if self._now() < self._paused_until:
            return None
        request = urllib.request.Request(
            f"{self._url}/shards/{target.epoch}/{target.version}/{hash}"
        )
        if token := os.environ.get(TOKEN_VARIABLE):
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                data: bytes = answer.read()
        except (OSError, http.client.HTTPException) as e:
            if isinstance(getattr(e, "reason", e), TimeoutError):  # urllib wraps that of connecting
                self._paused_until = self._now() + PAUSE_S
            return None
        return data if hash_of(data) == hash else None
