"""Candidates for tasks: changes of a repository that break something its tests check.

A `Draft` is cheap and has an id that is the same in every build; its `make` does the work. `prove`
decides what becomes of it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import tokenize
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os.path import commonprefix
from pathlib import Path
from random import Random

from etude.core.errors import EtudeError
from etude.factory.hiding import functions_of
from etude.factory.leaks import Hunk, hunks
from etude.factory.mutations import Function, Site, SourceFile
from etude.factory.recipe import Recipe
from etude.factory.sources import git, read_commit
from etude.factory.survey import Survey
from etude.factory.swebench import Row, patched
from etude.factory.task import Files, is_test_file

KINDS = ("token", "bug", "bugs", "stub", "removal", "history", "split")
"""The kinds of tasks, the easiest first."""
BUGS_AT_ONCE = (2, 3, 4)
BUGS_PER_FUNCTION, TOKENS_PER_FUNCTION = 2, 4
_LEAST_LINES = 3
"""Fewest lines of a function that is worth deleting."""
_WIDEST = 0.5
"""A function that more than this share of all tests runs is too basic to be deleted."""
_COMMITS = 600
_LARGEST_CHANGE = 250
_OTHER_TESTS = 30
_LONGEST_TOKEN = 40
"""Most lines of a function for a task of one token, so that a small model can read it."""
_TOKEN_TESTS, _TOKEN_TESTS_S = 12, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A task that is not proven yet."""

    base: Files
    broken: Files
    """Files that are put over the base."""
    solution: Files
    tests: tuple[str, ...]
    """Tests that may notice the change."""
    test_files: Files = field(default_factory=dict)
    """The files of these tests, if they are not in the base."""
    noticed_by: tuple[frozenset[str], ...] = ()
    """At least one test of each set must fail."""
    shows_tests: bool = False
    """True if the agent sees the failing tests."""
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Draft:
    id: str
    kind: str
    make: Callable[[], Candidate | None]
    """Returns None if there is no candidate in it."""


class Drafts:
    """The drafts of one repository."""

    def __init__(
        self,
        name: str,
        files: Files,
        recipe: Recipe,
        survey: Survey,
        history: Path | None,
        rows: Sequence[Row] = (),
        kinds: Collection[str] = KINDS,
    ) -> None:
        """`files`: the repository's, with those that its build makes. `history`: a bare clone.
        `rows`: make drafts from these alone. `kinds`: the wanted ones of `KINDS`."""
        self._name = name
        self._files = files
        self._recipe = recipe
        self._survey = survey
        self._history = history
        self._rows = rows
        self._kinds = kinds
        self._parsed: dict[str, SourceFile | None] = {}
        self._told: Counter[tuple[str, tuple[object, ...]]] = Counter()

    def all(self) -> Iterator[Draft]:
        """All drafts, taking kinds in turn, always in the same order."""
        if self._rows:
            yield from self._of_rows()
            return
        of_kind = {
            "token": self._tokens(),
            "bug": self._bugs(),
            "bugs": self._several(),
            "stub": self._deletions("stub"),
            "removal": self._deletions("removal"),
        }
        if self._history is not None:
            of_kind |= {"history": self._commits(), "split": self._commits(split=True)}
        streams = [stream for kind, stream in of_kind.items() if kind in self._kinds]
        while streams:
            for stream in list(streams):
                if (draft := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    yield draft

    def _rng(self, kind: str) -> Random:
        return Random(f"{self._name} {kind}")

    def _draft(self, kind: str, *told: object, make: Callable[[], Candidate | None]) -> Draft:
        """A draft with an id made of `told`. Several places of a line may have the same `told`:
        each after the first adds its number to the id."""
        earlier = self._told[kind, told]
        self._told[kind, told] += 1
        words = (*told, earlier) if earlier else told
        digest = hashlib.blake2b(repr(words).encode(), digest_size=4).hexdigest()
        return Draft(f"{self._name}-{kind}-{digest}", kind, make)

    def _sources(self) -> list[str]:
        """The package's files that tests run, sorted by path."""
        return [
            path
            for path in sorted(self._survey.lines)
            if path in self._files
            and not is_test_file(path)
            and any(fnmatchcase(path, pattern) for pattern in self._recipe.sources)
        ]

    def _file(self, path: str) -> SourceFile | None:
        if path not in self._parsed:
            try:
                self._parsed[path] = SourceFile(self._files[path])
            except ValueError:
                self._parsed[path] = None
        return self._parsed[path]

    def _covered(self, path: str, site: Site) -> set[str]:
        return self._survey.covering(path, [site.line])

    def _sites(self, kind: str) -> Iterator[tuple[str, Site]]:
        """Places for bugs that a test runs. Files, functions and kinds of mutation take turns, so
        that a file with thousands of places does not drown out the others."""
        rng = self._rng(kind)
        paths = self._sources()
        rng.shuffle(paths)
        streams = [self._sites_of(path, kind) for path in paths]
        while streams:
            for stream in list(streams):
                if (found := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    yield found

    def _sites_of(self, path: str, kind: str) -> Iterator[tuple[str, Site]]:
        file = self._file(path)
        if file is None:
            return
        rng = Random(f"{self._name} {kind} {path}")
        functions: dict[str, list[Site]] = {}
        for site in file.sites:
            if site.function not in file.asserting:
                functions.setdefault(site.function, []).append(site)
        names = list(functions)
        for _ in range(TOKENS_PER_FUNCTION if kind == "token" else BUGS_PER_FUNCTION):
            rng.shuffle(names)
            for name in names:
                by_kind: dict[str, list[Site]] = {}
                for site in functions[name]:
                    if self._covered(path, site):
                        by_kind.setdefault(site.kind, []).append(site)
                if by_kind:
                    chosen = rng.choice(by_kind[rng.choice(sorted(by_kind))])
                    functions[name].remove(chosen)
                    yield path, chosen

    def _bugs(self) -> Iterator[Draft]:
        for path, site in self._sites("bug"):
            told = (path, site.function, site.line, site.kind, str(type(site.replacement)))
            yield self._draft("bug", *told, make=lambda p=path, s=site: self._mutated([(p, s)]))  # type: ignore[misc]

    def _tokens(self) -> Iterator[Draft]:
        for path, site in self._sites("token"):
            told = (path, site.function, site.line, site.kind, str(type(site.replacement)))
            yield self._draft("token", *told, make=lambda p=path, s=site: self._token(p, s))  # type: ignore[misc]

    def _token(self, path: str, site: Site) -> Candidate | None:
        """A candidate with one token replaced in a short function, and with visible tests."""
        file = self._file(path)
        assert file is not None
        around = [each for each in file.functions if each.first <= site.line <= each.last]
        if not around or around[0].last - around[0].first >= _LONGEST_TOKEN:
            return None
        before = self._files[path]
        after = file.mutated([site])
        covering = self._covered(path, site)
        tests = self._survey.choose(covering, _TOKEN_TESTS, _TOKEN_TESTS_S)
        # and tests that run the rest of the function, so that no other change of it passes for a
        # repair
        beside = self._survey.covering(path, around[0].body_lines) - covering
        if len(tests) < _TOKEN_TESTS:
            tests += self._survey.choose(beside, _TOKEN_TESTS - len(tests), _TOKEN_TESTS_S)
        if not covering or not is_one_token(before, after):
            return None
        return Candidate(
            base=self._files,
            broken={path: after},
            solution={path: before},
            tests=tests,
            shows_tests=True,
            facts={
                "mutations": site.kind,
                "functions": f"{path}:{around[0].name}",
                "lines": f"{around[0].first} to {around[0].last}",
            },
        )

    def _several(self) -> Iterator[Draft]:
        rng = self._rng("sizes")
        sites = self._sites("bugs")
        while True:
            chosen: list[tuple[str, Site]] = []
            for path, site in itertools.islice(sites, rng.choice(BUGS_AT_ONCE)):
                if all(site.function != other.function for _, other in chosen):
                    chosen.append((path, site))
            if len(chosen) < 2:
                return
            told = [(path, site.function, site.line, site.kind) for path, site in chosen]
            yield self._draft("bugs", *told, make=lambda c=chosen: self._mutated(c))  # type: ignore[misc]

    def _mutated(self, chosen: list[tuple[str, Site]]) -> Candidate | None:
        noticed = [self._covered(path, site) for path, site in chosen]
        tests = self._survey.choose(set().union(*noticed))
        noticed = [each & set(tests) for each in noticed]
        if not all(noticed):
            return None
        broken: dict[str, bytes] = {}
        for path in dict.fromkeys(path for path, _ in chosen):
            file = self._file(path)
            assert file is not None
            broken[path] = file.mutated([site for where, site in chosen if where == path])
        return Candidate(
            base=self._files,
            broken=broken,
            solution={path: self._files[path] for path in broken},
            tests=tests,
            noticed_by=tuple(map(frozenset, noticed)),
            facts={
                "mutations": ", ".join(site.kind for _, site in chosen),
                "functions": ", ".join(dict.fromkeys(f"{p}:{s.function}" for p, s in chosen)),
            },
        )

    def _deletions(self, kind: str) -> Iterator[Draft]:
        rng = self._rng(kind)
        found = [
            (path, function)
            for path in self._sources()
            if (file := self._file(path)) is not None
            for function in file.functions
            if function.name not in file.asserting
        ]
        rng.shuffle(found)
        if kind == "removal":  # removing an imported name breaks whole files of tests
            found = [each for each in found if not each[1].is_decorated]
            found.sort(key=lambda each: not each[1].is_method)
        for path, function in found:
            if function.name.rpartition(".")[2].startswith("__") and kind == "removal":
                continue
            # each function becomes a task of one of the two kinds
            if (Random(f"{self._name} {path} {function.name}").random() < 0.5) != (kind == "stub"):
                continue
            make = lambda p=path, f=function: self._deleted(kind, p, f)  # noqa: E731
            yield self._draft(kind, path, function.name, make=make)

    def _deleted(self, kind: str, path: str, function: Function) -> Candidate | None:
        covered = [line for line in function.body_lines if self._survey.covering(path, [line])]
        tests = self._survey.covering(path, covered)
        if len(covered) < _LEAST_LINES or len(tests) > max(_WIDEST * len(self._survey.seconds), 20):
            return None
        file = self._file(path)
        assert file is not None
        broken = file.stubbed(function) if kind == "stub" else file.without(function)
        return Candidate(
            base=self._files,
            broken={path: broken},
            solution={path: self._files[path]},
            tests=self._survey.choose(tests),
            facts={"functions": f"{path}:{function.name}", "head": function.head},
        )

    def _commits(self, *, split: bool = False) -> Iterator[Draft]:
        assert self._history is not None
        listed = git(self._history, "log", "--no-merges", f"-{_COMMITS}", "--format=%H %P", "HEAD")
        for line in listed.decode().splitlines():
            commit, *parents = line.split()
            if len(parents) != 1 or (int(commit[:2], 16) % 4 == 0) != split:
                continue
            make = lambda c=commit, p=parents[0]: self._reversed(c, p, split=split)  # noqa: E731
            yield self._draft("split" if split else "history", commit, make=make)

    def _reversed(self, commit: str, parent: str, *, split: bool) -> Candidate | None:
        """The working copy before a commit, or with half of it, and the commit's tests."""
        assert self._history is not None
        listed = git(self._history, "diff-tree", "-r", "--no-commit-id", "--name-status", commit)
        changed = dict(
            line.split("\t")[:2][::-1] for line in listed.decode(errors="replace").splitlines()
        )
        tests = {path for path in changed if path.endswith(".py") and is_test_file(path)}
        sources = {
            path
            for path in changed
            if path not in tests
            and not is_test_file(path)
            and any(fnmatchcase(path, each) for each in self._recipe.sources)
        }
        python = [path for path in sources if path.endswith(".py")]
        if not tests or not python or any(changed[path] == "D" for path in tests | sources):
            return None
        try:
            before, after = read_commit(self._history, parent), read_commit(self._history, commit)
        except EtudeError:
            return None
        base = {**_generated(self._files, before), **before}
        broken: Files = {}
        solution: Files = {path: after[path] for path in sorted(sources)}
        if split:
            halves = split_change(before, solution)
            if halves is None:
                return None
            broken, solution = halves
        if _size({**before, **broken}, solution) > _LARGEST_CHANGE:
            return None
        old = {path: before.get(path, b"") for path in tests}
        changed_tests, others = _changed_tests(old, after, tests)
        if not changed_tests:
            return None
        stable = [name for name in others if name in self._survey.seconds]
        message = git(self._history, "log", "-1", "--format=%B", commit).decode(errors="replace")
        return Candidate(
            base=base,
            broken=broken,
            solution=solution,
            tests=(*changed_tests, *stable[:_OTHER_TESTS]),
            test_files={path: after[path] for path in sorted(tests)},
            noticed_by=(frozenset(changed_tests),),
            facts={
                "commit": commit,
                "parent": parent,
                "message": message.strip(),
                "functions": ", ".join(solution),
            },
        )

    def _of_rows(self) -> Iterator[Draft]:
        for row in self._rows:
            make = lambda r=row: self._of_row(r)  # noqa: E731
            yield self._draft("row", row.instance_id, make=make)

    def _of_row(self, row: Row) -> Candidate | None:
        if self._history is None:
            return None
        try:
            commit = read_commit(self._history, row.base_commit)
            base = {**_generated(self._files, commit), **commit}
            broken = patched(base, row.setup_patch)
            solution = patched({**base, **broken}, row.patch)
            tests = patched({**base, **broken}, row.test_patch)
        except EtudeError:
            return None
        return Candidate(
            base=base,
            broken=broken,
            solution=solution,
            tests=(*row.fail_to_pass, *row.pass_to_pass),
            test_files=tests,
            noticed_by=(frozenset(row.fail_to_pass),),
            facts={
                "row": row.instance_id,
                "parent": row.base_commit,
                "message": row.problem_statement,
                "functions": ", ".join(solution),
            },
        )


def is_one_token(before: bytes, after: bytes) -> bool:
    """True if exactly one token was replaced, added or removed."""
    old, new = _tokens_of(before), _tokens_of(after)
    same = len(commonprefix([old, new]))
    ends = len(commonprefix([old[same:][::-1], new[same:][::-1]]))
    return max(len(old), len(new)) - same - ends == 1


def _tokens_of(content: bytes) -> list[str]:
    return [each.string for each in tokenize.tokenize(io.BytesIO(content).readline)]


def split_change(before: Files, solution: Files) -> tuple[Files, Files] | None:
    """The change of a commit as two halves: (files with the first half done, files with all). None
    if there is only one hunk, or if a half is not valid Python."""
    found_in = {path: _hunks(before.get(path, b""), after) for path, after in solution.items()}
    total = sum(map(len, found_in.values()))
    if total < 2:
        return None
    done: dict[str, bytes] = {}
    left = total // 2
    for path, found in found_in.items():
        taken = found[: min(left, len(found))]
        left -= len(taken)
        if taken:
            done[path] = _apply(before.get(path, b""), solution[path], taken)
        if path.endswith(".py") and path in done:
            try:
                compile(done[path], path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                return None
    rest = {path: after for path, after in solution.items() if done.get(path) != after}
    return (done, rest) if rest else None


def _hunks(before: bytes, after: bytes) -> list[Hunk]:
    return hunks(before.splitlines(keepends=True), after.splitlines(keepends=True))


def _apply(before: bytes, after: bytes, hunks: list[Hunk]) -> bytes:
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    for low, high, from_line, to_line in reversed(hunks):
        old[low:high] = new[from_line:to_line]
    return b"".join(old)


def _size(before: Files, after: Files) -> int:
    """Number of lines that differ."""
    return sum(
        (b - a) + (d - c)
        for path, content in after.items()
        for a, b, c, d in _hunks(before.get(path, b""), content)
    )


def _generated(now: Files, then: Files) -> Files:
    """Files that the build makes, which no commit has."""
    return {
        path: content
        for path, content in now.items()
        if path.endswith("_version.py") and path not in then
    }


def _changed_tests(
    before: Files, after: Files, paths: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tests that are new or changed, and the others of the same files."""
    changed: list[str] = []
    others: list[str] = []
    for path in sorted(paths):
        try:
            old, new = functions_of(before[path]), functions_of(after[path])
        except (ValueError, KeyError):
            continue
        for name, source in new.items():
            if name.rpartition("::")[2].startswith("test"):
                (others if old.get(name) == source else changed).append(f"{path}::{name}")
    return tuple(changed), tuple(others)
