"""Diagnostics of linters and type checkers for an edit. Only new and fixed ones are reported, since
earlier ones are not news.

A source checks a text as if the file contained it; nothing is written. `servers.LanguageServers`
asks real language servers in the sandbox, `FakeDiagnostics` calls a function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

SHOWN = 10
SUFFIXES = (".py", ".pyi")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One complaint of a linter or type checker."""

    line: int
    """Counted from 1."""
    code: str
    message: str
    source: str
    """Name of the linter or type checker."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """The key that identifies a complaint across an edit. It lacks the line number, since an
        edit moves the lines below it."""
        return self.source, self.code, self.message


class DiagnosticSource(Protocol):
    """A source of diagnostics for texts."""

    async def check(self, path: str, text: str) -> Sequence[Diagnostic]:
        """Diagnostics of a file of the working copy, if it had this text."""

    def missing(self) -> Mapping[str, str]:
        """Sources that have become unavailable, as named in `Diagnostic.source`, each with the
        reason. Each is reported only once."""


class FakeDiagnostics:
    """A `DiagnosticSource` that calls a function of path and text; by default there are no
    diagnostics."""

    def __init__(
        self, check: Callable[[str, str], Sequence[Diagnostic]] = lambda path, text: ()
    ) -> None:
        self._check = check

    async def check(self, path: str, text: str) -> Sequence[Diagnostic]:
        return self._check(path, text)

    def missing(self) -> Mapping[str, str]:
        return {}


class Diagnostics:
    """Tracks how the edits of one session change its diagnostics."""

    def __init__(self, source: DiagnosticSource) -> None:
        self._source = source
        self._last: dict[str, tuple[str, Sequence[Diagnostic]]] = {}
        self._lost: set[str] = set()

    async def changed(self, path: str, before: str | None, after: str) -> str:
        """The change as lines for the model; empty if nothing changed."""
        if not path.endswith(SUFFIXES):
            return ""
        old = [] if before is None else await self._of(path, before)
        new = await self._of(path, after)
        self._last[path] = (after, new)
        missing = self._source.missing()
        self._lost |= missing.keys()
        # a diagnostic whose source is gone is not fixed
        old = [each for each in old if each.source not in self._lost]
        absent = [f"(no diagnostics of {name}: {reason})" for name, reason in missing.items()]
        return "\n".join([*_told(old, new), *absent])

    async def _of(self, path: str, text: str) -> Sequence[Diagnostic]:
        known, found = self._last.get(path, (None, ()))
        return found if known == text else await self._source.check(path, text)


def _told(old: Sequence[Diagnostic], new: Sequence[Diagnostic]) -> list[str]:
    was = Counter(each.identity for each in old)
    added = []
    for each in sorted(new, key=lambda each: each.line):
        if was[each.identity] > 0:
            was[each.identity] -= 1
        else:
            added.append(each)
    gone = was.total()
    if not added and not gone:
        return []
    lines = [f"diagnostics: {len(added)} new, {gone} gone"]
    lines += [f"  line {e.line}: {e.code} {e.message} ({e.source})" for e in added[:SHOWN]]
    return lines + ([f"  ... {len(added) - SHOWN} more"] if len(added) > SHOWN else [])
