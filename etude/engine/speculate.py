"""Speculative decoding without a draft model: drafts are copied from texts that an answer may
repeat (prompt lookup, n-gram speculation). Pure: no tensor, no clock.

An edited file is mostly repeated. So the engine gives the model a draft, some tokens that may come
next, and lets it read all of them in one pass. Each position is sampled with the request's own
random number for it, exactly as in a separate pass; sampled tokens are accepted as long as they
equal the draft, and one token more. A wrong draft only costs work: tokens and log-probs are those
of plain decoding, even when sampled.

A draft continues a text after the position where the last tokens of the request occur in it. The
texts are, in order, the client's prediction (the file before the edit), the request's own prompt
and answer, and further drafts (earlier answers to the same task). The longest match wins; of
equally long ones in one text the first at or after the pointer, which is where the last draft from
that text was abandoned: an edit continues after it, and seldom before. In a repetitive text this
also leaves the most to continue with.

Shapes: S tokens of a text, M positions in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MIN_LENGTH, FIRST_LENGTH, MAX_LENGTH = 8, 16, 128
"""Tokens of a draft. Found by counting passes over real edits; from 64 to 128 they still fall by 6
%."""
MAX_DRAFT_TOKENS = 240
"""Draft tokens in one pass. Up to 16 sequences then compute at most 256 tokens."""
MAX_MATCH = 16
"""The longest match that is searched for."""
TOKENS_PER_MATCHED_TOKEN = 8
"""The longest draft after a match of n tokens is this many times n."""
SEPARATOR = -1
"""Separates drafts; no token is equal to it."""


def next_length(length: int, drafted: int, accepted: int) -> int:
    """The length of the next draft: twice the last if all of that was right, otherwise half."""
    return min(2 * length, MAX_LENGTH) if accepted == drafted else max(length // 2, MIN_LENGTH)


def longest_match(text_S: Ints, tail: Ints) -> tuple[int, Ints]:
    """The length of the longest suffix of `tail` that occurs in the text with something after it,
    and all positions after these occurrences."""
    places_M = np.flatnonzero((text_S[:-1] == tail[-1]) & (text_S[1:] != SEPARATOR)) + 1
    for length in range(1, len(tail)):
        longer_M = places_M[places_M > length]
        longer_M = longer_M[text_S[longer_M - length - 1] == tail[-length - 1]]
        if not len(longer_M):
            return (length if len(places_M) else 0), places_M
        places_M = longer_M
    return (len(tail) if len(places_M) else 0), places_M


class LookupText:
    """A text that drafts are copied from, with a pointer to the position where the last one was
    abandoned."""

    def __init__(self, tokens_S: Ints) -> None:
        self.tokens_S = tokens_S
        self.pointer = 0

    def find(self, tail: Ints) -> tuple[int, int]:
        """Find the longest match; return its length and the position after it."""
        begin = self.pointer - len(tail)
        end = self.pointer
        if (
            begin >= 0
            and end < len(self.tokens_S)
            and np.array_equal(self.tokens_S[begin:end], tail)
        ):
            return len(tail), end
        length, places_M = longest_match(self.tokens_S, tail)
        if not length:
            return 0, 0
        behind = int(np.searchsorted(places_M, self.pointer))
        return length, int(places_M[behind % len(places_M)])


class NgramDrafter:
    """The n-gram drafter of one request. The tokens of each call show how much of the last draft
    was accepted."""

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        prediction: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._history = np.full(len(prompt) + max_tokens, SEPARATOR, np.int64)
        self._history_len = 0
        joined = [token for draft in drafts for token in (*draft, SEPARATOR)]
        self._own_text = LookupText(self._history[:0])
        self._sources = [
            LookupText(np.array(prediction, np.int64)),
            self._own_text,
            LookupText(np.array(joined, np.int64)),
        ]
        self._length = FIRST_LENGTH
        self._draft: list[int] = []
        self._source = self._own_text
        self._place = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Propose a draft after `tokens`, the prompt and the answer so far: at most `limit` tokens,
        often none."""
        self._observe(tokens)
        tail = self._history[max(0, self._history_len - MAX_MATCH) : self._history_len]
        longest = 0
        for text in self._sources:
            length, place = text.find(tail)
            if length > longest:
                longest, self._place, self._source = length, place, text
            if length == len(tail):
                break
        end = self._place + max(0, min(limit, self._length, TOKENS_PER_MATCHED_TOKEN * longest))
        going_on = self._source.tokens_S[self._place : end].tolist()
        self._draft = list(takewhile(lambda token: token != SEPARATOR, going_on))
        return self._draft

    def _observe(self, tokens: Sequence[int]) -> None:
        new = np.array(tokens[self._history_len :], np.int64)
        if self._draft and len(new):
            going_on = self._source.tokens_S[self._place : self._place + len(new)]
            same = _num_alike(going_on, new)
            self._length = next_length(self._length, len(self._draft), min(same, len(self._draft)))
            if same:
                self._source.pointer = self._place + same
            elif self._source.pointer == self._place:
                # or a repetitive text would return here for ever
                self._source.pointer += 1
            self._draft = []
        self._history[self._history_len : len(tokens)] = new
        self._history_len = len(tokens)
        self._own_text.tokens_S = self._history[: self._history_len]


def _num_alike(a_S: Ints, b_S: Ints) -> int:
    """The length of the common prefix."""
    count = min(len(a_S), len(b_S))
    differ = np.flatnonzero(a_S[:count] != b_S[:count])
    return int(differ[0]) if len(differ) else count
