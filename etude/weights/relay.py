"""A relay from a follower's view: another source for an object, tried before the store.

A relay (`serve.relay`) runs in each region and downloads the objects that its workers request once.
Objects are named by their hash, so a relay need not be trusted, and any failure of it only costs a
download from the store.
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
"""The longest wait without a byte from the relay, which first downloads objects that it does not
have."""
PAUSE_S = 300.0
"""The pause after a relay timed out: waiting again for every object would delay each version by
minutes."""
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
        """The bytes of a shard, checked; None if the relay cannot provide them."""
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
            if isinstance(getattr(e, "reason", e), TimeoutError):  # urllib wraps a connect timeout
                self._paused_until = self._now() + PAUSE_S
            return None
        return data if hash_of(data) == hash else None
