"""Incremental detokenization. Pure, and exact: the pieces joined are what the whole would have
given.

A piece is handed out only when nothing that follows can change it: not while a character lacks
bytes, not while it may be the beginning of a stop text, and not while it may be the beginning of a
tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from etude.model.tokenizer import TOOL_CALL_END, TOOL_CALL_START

REPLACEMENT_CHARACTER = "\ufffd"  # what the beginning of a character decodes to


class IncrementalDetokenizer:
    """Decodes a growing list of tokens, each time from a little before the end only."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # from the last but one place where all of the text was certain
        self._tokens: list[int] = []
        self._known = 0  # of those tokens, the ones before the last such place
        self._given = 0  # characters behind that place that were handed out

    def push(self, token: int) -> str:
        self._tokens.append(token)
        # A token may be written in another way at the beginning of a text, so one certain stretch
        # goes before it.
        start = len(self._decode(self._tokens[: self._known])) + self._given
        text = self._decode(self._tokens)
        # Only what may be the beginning of a character waits: a stop text may end right before it,
        # in the same token.
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
    """Lets text through up to the first stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        if self.found:
            return ""
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


class ToolCallSplitter:
    """Splits a text into content and tool calls; a call comes whole, with its markers. A call that
    is never closed is content."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> tuple[str, list[str]]:
        self._held += text
        said, calls = "", list[str]()
        while (start := self._held.find(TOOL_CALL_START)) >= 0:
            end = self._held.find(TOOL_CALL_END, start + len(TOOL_CALL_START))
            said += self._held[:start]
            self._held = self._held[start:]
            if end < 0:
                return said, calls
            length = end + len(TOOL_CALL_END) - start
            calls.append(self._held[:length])
            self._held = self._held[length:]
        kept = overlap(self._held, TOOL_CALL_START)
        said += self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return said, calls

    def end(self) -> str:
        said, self._held = self._held, ""
        return said


def first_of(stops: Sequence[str], text: str) -> int | None:
    """Where the first of these texts begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next(
        (n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0
    )
