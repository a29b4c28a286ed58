"""What linters and type checkers say of an edit: only what is new or gone, since what was wrong
before is nobody's news.

A source looks at a text as if the file had it; nothing is written. `servers.LanguageServers` asks
real language servers in the sandbox, `FakeDiagnostics` a function.
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
    """One complaint."""

    line: int
    """From 1 on."""
    code: str
    message: str
    source: str
    """Who says so."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Not the line: an edit moves what stands below it."""
        return self.source, self.code, self.message


class DiagnosticSource(Protocol):
    """Who looks at texts."""

    async def check(self, path: str, text: str) -> Sequence[Diagnostic]:
        """Complaints about a file of the working copy, if this were its text."""

    def missing(self) -> Mapping[str, str]:
        """Those that cannot be asked any more, as `Diagnostic.source` names them, each with the
        reason, and once only."""


class FakeDiagnostics:
    """A `DiagnosticSource` that is a function of path and text; without one, there is nothing to
    complain about."""

    def __init__(
        self, check: Callable[[str, str], Sequence[Diagnostic]] = lambda path, text: ()
    ) -> None:
        self._check = check

    async def check(self, path: str, text: str) -> Sequence[Diagnostic]:
        return self._check(path, text)

    def missing(self) -> Mapping[str, str]:
        return {}


class Diagnostics:
    """What the edits of one session changed."""

    def __init__(self, source: DiagnosticSource) -> None:
        self._source = source
        self._last: dict[str, tuple[str, Sequence[Diagnostic]]] = {}
        self._lost: set[str] = set()

    async def changed(self, path: str, before: str | None, after: str) -> str:
        """In lines for the model; empty if nothing changed."""
        if not path.endswith(SUFFIXES):
            return ""
        old = [] if before is None else await self._of(path, before)
        new = await self._of(path, after)
        self._last[path] = (after, new)
        missing = self._source.missing()
        self._lost |= missing.keys()
        # what nobody says any more is not mended
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
