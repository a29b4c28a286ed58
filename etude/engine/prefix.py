"""Keys and values of finished sequences, kept for the next turn of the same session.

A session comes back with its whole history and a little more, so a turn mostly costs what is new in it. An entry is
used only whole, and only by the weights that computed it: what a request computes then depends on its own history
alone, not on who else was served in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from torch import Tensor


class PrefixCache:
    """At most `max_tokens` tokens; the least recently used sequence goes first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()  # tokens -> their keys and values

    def put(self, tokens: Sequence[int], kv: Tensor) -> None:
        key = _key(tokens)
        if key not in self._entries:
            self.num_tokens += len(tokens)
        self._entries[key] = kv
        self._entries.move_to_end(key)
        while self.num_tokens > self.max_tokens:
            evicted, _ = self._entries.popitem(last=False)
            self.num_tokens -= len(evicted) // _BYTES

    def find(self, tokens: Sequence[int]) -> tuple[int, Tensor] | None:
        """The longest entry that `tokens` goes on from, and its length. Always shorter than `tokens`: the last token
        has to be computed, for its logits."""
        whole = _key(tokens)
        # A scan is enough: a few hundred entries, and comparing bytes stops at the first difference.
        best = max(
            (key for key in self._entries if len(key) < len(whole) and whole.startswith(key)), key=len, default=None
        )
        if best is None:
            return None
        self._entries.move_to_end(best)
        return len(best) // _BYTES, self._entries[best]

    def clear(self) -> None:
        self._entries.clear()
        self.num_tokens = 0


_BYTES = 4  # of a token in a key


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()
