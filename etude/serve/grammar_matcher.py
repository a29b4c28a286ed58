"""Grammar matching over tokens, by llguidance."""

from __future__ import annotations

from collections.abc import Iterable

import llguidance
import numpy as np
from numpy.typing import NDArray


class GrammarMatcher:
    """An engine's `Constraint`: the position of one answer in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Mask of the tokens that may come next. At the end of the grammar, and if it cannot be
        followed any further, only the end-of-sequence token may."""
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
        """The reason why the grammar could not be followed to its end; None if there was no
        failure."""
        return reason(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Compiles grammars into matchers for one model. Creating it takes a second for a large
    vocabulary."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json.decode(), n_vocab=vocab_size, eos_token=eos
        )

    def compile(self, grammar: str) -> GrammarMatcher:
        """Compile a grammar. Raises ValueError if it is invalid, or too large to enforce."""
        guide = GrammarMatcher(
            llguidance.LLMatcher(self._tokenizer, grammar, log_level=0), self._vocab_size
        )
        if guide.error is not None:
            raise ValueError(f"grammar or JSON schema: {guide.error}")
        return guide


def reason(message: str) -> str:
    """The error as one line for the author of the grammar, without llguidance's internal state."""
    text = message.partition("<state>")[0].strip()
    if text.startswith("NoExtension"):
        return "no text satisfies it"
    if text.startswith(("panic", "Parser Error")):
        return "it is too large to enforce; offer fewer tools, or use a smaller schema"
    first, _, rest = text.partition("\n")
    # llguidance shows the pattern between the first line and the error
    why = rest.rpartition("\nerror: ")[2] if "\nerror: " in rest else ""
    return f"{first} {why}".strip()[:500]
