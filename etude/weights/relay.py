"""A relay as a follower sees it: another place to ask for an object before the store is asked.

A relay (`serve.relay`) stands in each region and downloads what its workers want once. Objects are
named by their hash, so nothing that it says has to be believed, and whatever goes wrong with it
costs a download from the store and nothing else.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request

from etude.core.types import VersionRef
from etude.weights.records import hash_of

TIMEOUT_S = 60.0
"""Without a byte from it. It downloads what it does not have first."""
TOKEN_VARIABLE = "ETUDE_TOKEN"


class Relay:
    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def shard(self, target: VersionRef, hash: str) -> bytes | None:
        """Its bytes, checked; None if they cannot be had here."""
        request = urllib.request.Request(
            f"{self._url}/shards/{target.epoch}/{target.version}/{hash}"
        )
        if token := os.environ.get(TOKEN_VARIABLE):
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                data: bytes = answer.read()
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return None
        return data if hash_of(data) == hash else None
