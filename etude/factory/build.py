"""The build: prepares every source, then proves drafts of all of them in turn until there are
enough tasks.

`build.jsonl` has a line for each draft that was examined. A build that was interrupted, or is asked
for more tasks, continues after them: drafts come in the same order every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import VENVS
from etude.factory.candidates import KINDS, Draft, Drafts
from etude.factory.check import set_aside, task_folders
from etude.factory.harbor import read_task, write_task
from etude.factory.install import Installer, PipInstaller
from etude.factory.leaks import windows_of_folder
from etude.factory.prepare import Discarded, Workshop, check_names, is_prepared, prepare
from etude.factory.prove import REPETITIONS, Rejected, Repository, Seen, digests_of, prove
from etude.factory.recipe import HeuristicProposer, Proposer
from etude.factory.sources import name_of
from etude.factory.swebench import Row, read_rows, write_rows
from etude.sandbox.pool import open_sandbox_pool

PER_SOURCE = 50
"""Tasks of a source, if no limit is given."""
KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a build."""

    limit: int | None = None
    """Most tasks in the folder, of all sources together."""
    kinds: Collection[str] = KINDS
    heldout: Sequence[str] = ()
    """More sources, with tasks that are never trained on."""
    novel: Sequence[str] = ()
    """The same, for tasks that no recipe is chosen by either."""
    jobs: int = 2
    """Sandboxes that work at the same time."""
    repetitions: int = REPETITIONS
    isolation: str = "namespaces"
    proposer: Proposer = field(default_factory=HeuristicProposer)
    installer: Installer = field(default_factory=PipInstaller)


@dataclass(slots=True)
class Status:
    """Progress of a build."""

    sources: int
    limit: int
    doing: str = ""
    repositories: dict[str, int] = field(default_factory=dict)
    """Name -> number of stable tests, of the prepared repositories."""
    kinds: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    discarded: dict[str, str] = field(default_factory=dict)
    """Source -> reason why it yields no tasks."""

    @property
    def kept(self) -> int:
        return self.kinds.total()

    def summary(self) -> dict[str, Any]:
        """The last line of `--json`."""
        rejected = self.rejected + Counter({"repository": len(self.discarded)})
        return {
            "repositories": len(self.repositories),
            "kept": self.kept,
            "kinds": dict(sorted(self.kinds.items())),
            "rejected": {name: count for name, count in sorted(rejected.items()) if count},
        }


class BuildLog:
    """The verdicts on drafts, one line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the last line of a build that was killed
                    entry = json.loads(line)
                    self.entries[entry["task"]] = entry

    def kept_of(self, repository: str) -> int:
        """Number of tasks of this repository that were kept."""
        told = [(entry["repository"], entry["verdict"]) for entry in self.entries.values()]
        return told.count((repository, KEPT))

    def add(
        self, draft: Draft, repository: str, verdict: str, digests: Collection[str] = ()
    ) -> None:
        entry = {
            "task": draft.id,
            "repository": repository,
            "kind": draft.kind,
            "verdict": verdict,
            "like": sorted(digests),
        }
        self.entries[draft.id] = entry
        with self._path.open("a") as file:
            file.write("\n" * self._torn() + json.dumps(entry) + "\n")

    def _torn(self) -> bool:
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            return bool(size) and (file.seek(size - 1), file.read(1))[1] != b"\n"


@contextlib.asynccontextmanager
async def open_workshop(folder: Path, options: Options) -> AsyncIterator[Workshop]:
    """A folder of tasks with the sandboxes that they run in."""
    (folder / "venvs").mkdir(parents=True, exist_ok=True)
    pool = open_sandbox_pool(options.isolation, mounts=[f"{folder / 'venvs'}:{VENVS}"])
    try:
        yield Workshop(folder, pool, options.proposer, options.installer)
    finally:
        await pool.close()


async def build(
    sources: Sequence[str], folder: Path, options: Options, changed: Callable[[Status], None]
) -> Status:
    """Build tasks in a folder, or continue to. `changed` is called after every step."""
    check_kinds(options.kinds)
    sources = [*sources, *options.heldout, *options.novel]
    rows = rows_of(sources)
    sources = [each for each in sources if not each.endswith(".jsonl")] + list(rows)
    check_names(sources)
    if not sources:
        raise EtudeError(
            "give at least one source: a git URL, a folder, an sdist, or the name of a package"
        )
    status = Status(sources=len(sources), limit=options.limit or PER_SOURCE * len(sources))
    log = BuildLog(folder / "build.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    set_aside(
        folder,
        {"heldout": map(name_of, options.heldout), "novel": map(name_of, options.novel)},
        log.kept_of,
    )
    for left in (folder / "venvs").glob("*.*"):  # left by a build that was killed
        shutil.rmtree(left)
    async with open_workshop(folder, options) as workshop:
        await _Build(workshop, log, options, status, changed).run(sources, rows)
    if status.kept:
        write_rows(folder / "swe-bench.jsonl", map(read_task, task_folders(folder)))
    return status


def check_kinds(kinds: Collection[str]) -> None:
    """Refuse an unknown kind."""
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise EtudeError(f"unknown kind of tasks {unknown[0]!r}; choose from {', '.join(KINDS)}")


def rows_of(sources: Sequence[str]) -> dict[str, list[Row]]:
    """Repository -> its rows of SWE-bench in the .jsonl files among the sources."""
    found: dict[str, list[Row]] = {}
    for source in sources:
        for row in read_rows(Path(source)) if source.endswith(".jsonl") else []:
            is_slug = re.fullmatch(r"[\w.-]+/[\w.-]+", row.repo) and not Path(row.repo).exists()
            place = f"https://github.com/{row.repo}.git" if is_slug else row.repo
            found.setdefault(place, []).append(row)
    return found


@dataclass(slots=True)
class _Line:
    """A repository in the build, with the drafts that remain to be examined."""

    repository: Repository
    drafts: Iterator[Draft]
    kept: int
    tried: int = 0
    under_way: int = 0
    drawing: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Build:
    """Prepares sources while it works on those that are ready. Each source has its share of the
    tasks that earlier builds with other sources left to be made; the rest of the shares that some
    cannot fill goes to the others, once all are ready."""

    def __init__(
        self,
        workshop: Workshop,
        log: BuildLog,
        options: Options,
        status: Status,
        changed: Callable[[Status], None],
    ) -> None:
        self._workshop = workshop
        self._log = log
        self._options = options
        self._status = status
        self._tell = changed
        self._lines: list[_Line] = []
        self._waiting = status.sources
        self._share = 0
        self._moved = asyncio.Condition()
        self._seen = Seen()
        for entry in log.entries.values():
            if entry["verdict"] == KEPT:
                status.kinds[entry["kind"]] += 1
                self._seen.digests.update(entry["like"])
            else:
                status.rejected[entry["verdict"]] += 1

    async def run(self, sources: Sequence[str], rows: Mapping[str, Sequence[Row]]) -> None:
        sources = sorted(sources, key=lambda each: not is_prepared(each, self._workshop))
        own = sum(self._log.kept_of(name) for name in {*map(name_of, sources)})
        self._share = -(-(self._status.limit - self._status.kept + own) // len(sources))
        at_once = asyncio.Semaphore(self._options.jobs)
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(self._prepare(source, rows.get(source, ()), at_once))
            for _ in range(self._options.jobs):
                group.create_task(self._work())
        await asyncio.to_thread(self._refuse_late_leaks)

    async def _prepare(self, source: str, rows: Sequence[Row], at_once: asyncio.Semaphore) -> None:
        async with at_once:
            self._status.doing = f"preparing {source}"
            self._tell(self._status)
            try:
                each = await prepare(source, self._workshop)
            except (Discarded, RolloutFailure) as e:
                self._status.discarded[source] = str(e)
            else:
                venv = self._workshop.venvs / each.name / "lib"
                self._seen.installed[each.name] = await asyncio.to_thread(windows_of_folder, venv)
                clone = self._workshop.clone_of(each.name)
                known = (each.name, each.files, each.recipe, each.survey)
                drafts = Drafts(*known, clone, rows, self._options.kinds)
                self._lines.append(_Line(each, drafts.all(), self._log.kept_of(each.name)))
                self._status.repositories[each.name] = len(each.survey.seconds)
        async with self._moved:
            self._waiting -= 1
            self._moved.notify_all()
        self._tell(self._status)

    async def _work(self) -> None:
        while (found := await self._take()) is not None:
            line, draft = found
            await self._prove(line, draft)
            async with self._moved:
                line.under_way -= 1
                self._moved.notify_all()
            self._tell(self._status)

    async def _take(self) -> tuple[_Line, Draft] | None:
        """The next draft; None if there are enough tasks, or no more drafts."""
        while True:
            async with self._moved:
                while (line := self._choose()) is None:
                    busy = any(each.under_way for each in self._lines)
                    if self._status.kept >= self._status.limit or not (self._waiting or busy):
                        return None
                    await self._moved.wait()
                line.under_way += 1
                line.tried += 1
            async with line.drawing:
                draft = await asyncio.to_thread(next, _unknown(line.drafts, self._log), None)
            if draft is not None:
                self._status.doing = draft.id
                return line, draft
            async with self._moved:
                line.under_way -= 1
                if line in self._lines:
                    self._lines.remove(line)
                self._moved.notify_all()

    def _choose(self) -> _Line | None:
        """The line with the fewest attempts, of those that may have more."""
        under_way = sum(each.under_way for each in self._lines)
        if self._status.kept + under_way >= self._status.limit:
            return None
        within = [each for each in self._lines if each.kept + each.under_way < self._share]
        open_to = within or ([] if self._waiting else self._lines)
        return min(open_to, key=lambda each: each.tried, default=None)

    async def _prove(self, line: _Line, draft: Draft) -> None:
        try:
            task = await prove(
                draft,
                line.repository,
                self._seen,
                self._workshop.pool,
                self._options.repetitions,
            )
        except Rejected as e:
            self._status.rejected[str(e)] += 1
            self._log.add(draft, line.repository.name, str(e))
            return
        except RolloutFailure:  # nothing was learnt about the draft: the next build tries it again
            self._status.rejected["sandbox broke"] += 1
            return
        folder = self._workshop.folder
        await asyncio.to_thread(write_task, folder / "tasks", task, folder / "archives")
        line.kept += 1
        self._status.kinds[draft.kind] += 1
        self._log.add(draft, line.repository.name, KEPT, digests_of(task))

    def _refuse_late_leaks(self) -> None:
        """Remove tasks that a later environment leaks: every sandbox shows the virtual environments
        of all sources, also of those that were prepared after a task was proven."""
        for entry in [each for each in self._log.entries.values() if each["verdict"] == KEPT]:
            place = self._workshop.folder / "tasks" / entry["task"]
            task = read_task(place)
            try:
                self._seen.check_installed(task.opening, task.solution)
            except Rejected as e:
                shutil.rmtree(place)
                self._status.kinds[entry["kind"]] -= 1
                self._status.rejected[str(e)] += 1
                self._log.add(
                    Draft(entry["task"], entry["kind"], lambda: None), entry["repository"], str(e)
                )


def _unknown(drafts: Iterator[Draft], log: BuildLog) -> Iterator[Draft]:
    """The drafts without an entry in the log."""
    return (draft for draft in drafts if draft.id not in log.entries)
