"""Incremental detokenization. Pure and exact: the pieces joined equal the whole text decoded at
once.

A piece is returned only when no later token can change it: not while a character lacks bytes, and
not while the text may be the beginning of a stop text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # the decoding of an incomplete character


class IncrementalDetokenizer:
    """Decoder of a growing list of tokens; each step decodes only a little before the end."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # from the last but one place up to which the text was certain
        self._tokens: list[int] = []
        self._known = 0  # number of those tokens before the last such place
        self._given = 0  # characters after that place that were returned

    def push(self, token: int) -> str:
        return self._text_of((token,), self._decode([*self._tokens, token]))

    def extend(self, tokens: Sequence[int]) -> str:
        """Push several tokens at once: the same text as one by one, in less time."""
        text = self._decode([*self._tokens, *tokens])
        # Vocabularies differ in how they decode bytes that are not a character, whole or in parts.
        if REPLACEMENT_CHARACTER in text:
            return "".join(map(self.push, tokens))
        return self._text_of(tokens, text)

    def _text_of(self, tokens: Sequence[int], text: str) -> str:
        """`text`: the decoding of all held tokens and these."""
        # A token may be decoded differently at the beginning of a text, so one certain stretch is
        # kept before it.
        start = len(self._decode(self._tokens[: self._known])) + self._given
        self._tokens += tokens
        # Only a possible beginning of a character is held back: a stop text may end right before
        # it, in the same token.
        certain = text.rstrip(REPLACEMENT_CHARACTER)
        if certain == text:
            self._tokens = self._tokens[self._known :]
            self._known = len(self._tokens)
            self._given = 0
        else:
            self._given += len(certain[start:])
        return certain[start:]

    def end(self) -> str:
        return self._decode(self._tokens)[
            len(self._decode(self._tokens[: self._known])) + self._given :
        ]


class StopStringFilter:
    """Passes text through up to the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.has_stops = bool(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found:
            return ""
        if not self._stops:
            return text
        self._held += text
        if (cut := first_of(self._stops, self._held)) is not None:
            self.found = True
            return self._held[:cut]
        return self._release(
            len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        )

    def end(self) -> str:
        return "" if self.found else self._release(len(self._held))

    def _release(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


class Mark(str):
    """The text of a control token. A `str` that is not a mark is text, whatever it spells."""

    __slots__ = ()


class PieceStream:
    """An answer in pieces of text and marks, up to its first stop text."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], controls: Mapping[int, str],
        stops: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._controls = controls
        self._decoder = IncrementalDetokenizer(decode)
        self._finder = StopStringFilter(stops)
        self._waiting: deque[str] = deque()  # the pieces whose text has not all been passed
        self._passed = 0  # characters of these that have

    @property
    def is_stopped(self) -> bool:
        """True once a stop text has been found."""
        return self._finder.found

    def push(self, token: int) -> list[str]:
        return self._read(self._decoder.push(token), self._controls.get(token))

    def extend(self, tokens: Sequence[int]) -> list[str]:
        """Push several tokens at once."""
        if self._finder.has_stops:
            return [piece for token in tokens for piece in self.push(token)]
        pieces: list[str] = []
        run: list[int] = []
        for token in tokens:
            if token not in self._controls:
                run.append(token)
                continue
            if run:
                pieces += self._read(self._decoder.extend(run), None)
                run = []
            pieces += self.push(token)
        return pieces + self._read(self._decoder.extend(run), None) if run else pieces

    def _read(self, text: str, mark: str | None) -> list[str]:
        if mark and text.endswith(mark):
            self._waiting += filter(None, (text[: -len(mark)], Mark(mark)))
        elif not self._waiting and not self._finder.has_stops:
            return [text] if text else []
        elif text:
            self._waiting.append(text)
        return self._released(self._finder.push(text))

    def end(self) -> list[str]:
        rest = self._decoder.end()
        self._waiting.append(rest)
        pieces = self._released(self._finder.push(rest) + self._finder.end())
        if self._waiting and self._passed:  # a stop text began in it
            pieces.append(str(self._waiting[0][: self._passed]))
        return list(filter(None, pieces))

    def _released(self, text: str) -> list[str]:
        self._passed += len(text)
        pieces: list[str] = []
        while self._waiting and self._passed:
            piece = self._waiting[0]
            if len(piece) > self._passed:
                if isinstance(piece, Mark):  # whole or not at all
                    break
                self._waiting[0] = piece[self._passed :]
                piece = piece[: self._passed]
            else:
                self._waiting.popleft()
            pieces.append(piece)
            self._passed -= len(piece)
        return pieces


def first_of(stops: Sequence[str], text: str) -> int | None:
    """Position of the first of these texts."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `mark`."""
    at = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[:1], at + 1)
    return len(text) - at if at >= 0 else 0
