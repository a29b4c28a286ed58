"""Grammar matching over tokens: which may come next, by llguidance."""

from __future__ import annotations

from collections.abc import Iterable

import llguidance
import numpy as np
from numpy.typing import NDArray


class GrammarMatcher:
    """An engine's `Constraint`: the place in a grammar that one answer has come to."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next; at the end of the grammar, and if it cannot be followed
        further, only the end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little", count=self._vocab_size).astype(np.bool_)

    def allowed_after(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
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
        return reason(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles grammars into matchers for one model. Takes a second to make for a large
    vocabulary."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos
        )

    def compile(self, grammar: str) -> GrammarMatcher:
        """Raises ValueError for what is no grammar, or is more than can be enforced."""
        guide = GrammarMatcher(
            llguidance.LLMatcher(self._tokenizer, grammar, log_level=0), self._vocab_size
        )
        if guide.error is not None:
            raise ValueError(f"grammar or JSON schema: {guide.error}")
        return guide


def reason(message: str) -> str:
    """What went wrong, in a line for whoever wrote the grammar: behind it llguidance tells of its
    own state."""
    text = message.partition("<state>")[0].strip()
    if text.startswith("NoExtension"):
        return "nothing can satisfy it"
    if text.startswith(("panic", "Parser Error")):
        return "it is too large to be enforced; offer fewer tools, or a smaller schema"
    first, _, rest = text.partition("\n")
    # of a pattern that is shown in between
    why = rest.rpartition("\nerror: ")[2] if "\nerror: " in rest else ""
    return f"{first} {why}".strip()[:500]
