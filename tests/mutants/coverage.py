"""The tests that may catch a mistake: those that run its line and, for a value that is computed
when a module is imported, those that read it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.mutants.mutate import Mutant
from tests.mutants.slots import ROOT

# Files that run inside sandboxes, where no tracer can follow. They run whenever a sandbox is
# started, that is, whenever `STARTS` runs.
WALLED = (
    "sandbox/zygote.py",
    "sandbox/spares.py",
    "sandbox/root.py",
    "sandbox/output.py",
    "sandbox/guest.py",
    "sandbox/command.py",
    "sandbox/keeper.py",
    "sandbox/layers.py",
    "sandbox/kernel.py",
    "sandbox/syscalls.py",
    "sandbox/limits.py",
)
STARTS = "sandbox/namespaces.py"

Lines = Mapping[str, set[int]]
"""File, relative to etude/ -> line numbers."""


@dataclass
class Coverage:
    """For each test file, its tests, and the lines by context and file (see `lines`)."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def sources(self) -> dict[str, str]:
        folder = ROOT / "etude"
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}

    def tests_for(self, mutant: Mutant) -> dict[str, float]:
        """The tests that may catch a mutant, the fastest first, with the duration of each in
        seconds."""
        file = mutant.file.removeprefix("etude/")
        span = {file: set(range(mutant.first, mutant.last + 1))}
        found = {}
        for name, run in self.files.items():
            hit = _contexts(run, span)
            if file in WALLED:
                hit |= _contexts_in(run, STARTS)
            if mutant.imported and hit:
                called = _contexts_in(run, file) | (hit - {"import"})
                called |= _contexts(run, self._readers(mutant)) - {"import"}
                hit = called or set(run["tests"])
            for test, of in run["tests"].items():
                if not of["passed"] or hit.isdisjoint({test, *of["shares"]}):
                    continue
                shared = sum(
                    other["seconds"]
                    for other in run["tests"].values()
                    if other["shares"] == of["shares"]
                )
                found[test] = (shared if of["shares"] else of["seconds"], name, of["seconds"])
        return {test: found[test][2] for test in sorted(found, key=lambda test: found[test][:2])}

    def _readers(self, mutant: Mutant) -> Lines:
        return readers(mutant, self.sources)


def readers(mutant: Mutant, sources: Mapping[str, str]) -> Lines:
    """The lines that use a name assigned by a statement at the top of a module or a class."""
    tree = ast.parse(sources[mutant.file.removeprefix("etude/")])
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno == mutant.first
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    if not names:
        return {}
    word = re.compile(rf"\b(?:{'|'.join(sorted(names))})\b")
    return {
        file: {n for n, line in enumerate(text.splitlines(), start=1) if word.search(line)}
        for file, text in sources.items()
        if word.search(text)
    }


def _contexts(run: Mapping[str, Any], lines: Lines) -> set[str]:
    """The contexts that run one of these lines."""
    return {
        context
        for context, of in run["lines"].items()
        if any(not wanted.isdisjoint(of.get(file, ())) for file, wanted in lines.items())
    }


def _contexts_in(run: Mapping[str, Any], file: str) -> set[str]:
    """The contexts that run any line of a file, except importing it."""
    return {context for context, of in run["lines"].items() if file in of} - {"import"}
