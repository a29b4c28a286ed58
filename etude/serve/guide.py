"""Holds an engine to a grammar: which tokens may come next, by llguidance."""

from __future__ import annotations

from collections.abc import Iterable

import llguidance
import numpy as np
from numpy.typing import NDArray


class Guide:
    """An engine's `Constraint`: the place in a grammar that one answer has come to."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next; at the end of the grammar, and if it cannot be followed further, only the end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little", count=self._vocab_size).astype(np.bool_)

    def ahead(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
        matcher, masks = self._matcher, []
        for token in draft:
            if matcher.is_stopped() or not matcher.try_consume_tokens([token]):
                break
            masks.append(self.allowed())
        matcher.rollback(len(masks))
        return masks

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def error(self) -> str | None:
        """Why the grammar could not be followed to its end, if it could not."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None


class Guides:
    """Turns grammars into guides for one model. Takes a second to make for a large vocabulary."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos)

    def guide(self, grammar: str) -> Guide:
        """Raises ValueError for what is no grammar, or is more than can be enforced."""
        guide = Guide(llguidance.LLMatcher(self._tokenizer, grammar, log_level=0), self._vocab_size)
        if guide.error is not None:
            raise ValueError(f"grammar or JSON schema: {guide.error}")
        return guide


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:500]
