"""The build: prepares every source, then proves drafts of all of them in turn until there are enough
tasks.

`build.jsonl` has a line for each draft that was looked at. A build that was interrupted, or is asked
for more, goes on after them: drafts come in the same order every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError
from etude.core.sandbox import VENVS
from etude.factory.candidates import Draft, Drafts
from etude.factory.check import task_folders
from etude.factory.harbor import read_task, write_task
from etude.factory.install import Installer, PipInstaller
from etude.factory.leaks import windows_of_folder
from etude.factory.prepare import Discarded, Workshop, check_names, prepare
from etude.factory.prove import REPETITIONS, Rejected, Repository, Seen, digests_of, prove
from etude.factory.recipe import HeuristicProposer, Proposer
from etude.factory.sources import name_of
from etude.factory.swebench import Row, read_rows, write_rows
from etude.sandbox.pool import open_sandbox_pool

PER_SOURCE = 50
"""Tasks of a source, where no limit is given."""
KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a build is done."""

    limit: int | None = None
    """Tasks in the folder, all together."""
    jobs: int = 2
    """Sandboxes at work at once."""
    repetitions: int = REPETITIONS
    isolation: str = "namespaces"
    proposer: Proposer = field(default_factory=HeuristicProposer)
    installer: Installer = field(default_factory=PipInstaller)


@dataclass(slots=True)
class Status:
    """How far a build is."""

    sources: int
    limit: int
    doing: str = ""
    repositories: dict[str, int] = field(default_factory=dict)
    """Name -> stable tests, of those that are prepared."""
    kinds: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    discarded: dict[str, str] = field(default_factory=dict)
    """Source -> why it gives nothing."""

    @property
    def kept(self) -> int:
        return self.kinds.total()

    def summary(self) -> dict[str, Any]:
        """What `--json` ends with."""
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

    def add(self, draft: Draft, verdict: str, digests: Sequence[str] = ()) -> None:
        entry = {"task": draft.id, "kind": draft.kind, "verdict": verdict, "like": sorted(digests)}
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
    """Build tasks in a folder, or go on with it. `changed` is told of every step."""
    rows = rows_of(sources)
    sources = [each for each in sources if not each.endswith(".jsonl")] + list(rows)
    check_names(sources)
    if not sources:
        raise EtudeError("give a source: a git URL, a folder, an sdist, or the name of a package")
    status = Status(sources=len(sources), limit=options.limit or PER_SOURCE * len(sources))
    async with open_workshop(folder, options) as workshop:
        repositories = await _prepare_all(sources, workshop, options.jobs, status, changed)
        log = BuildLog(folder / "build.jsonl")
        stream = _in_turn(repositories, workshop, {name_of(each): rows[each] for each in rows})
        await _prove_all(stream, workshop, log, options, status, changed)
    if status.kept:
        write_rows(folder / "swe-bench.jsonl", map(read_task, task_folders(folder)))
    return status


def rows_of(sources: Sequence[str]) -> dict[str, list[Row]]:
    """Repository -> the rows of SWE-bench that the .jsonl files among the sources have of it."""
    found: dict[str, list[Row]] = {}
    for source in sources:
        for row in read_rows(Path(source)) if source.endswith(".jsonl") else []:
            is_slug = re.fullmatch(r"[\w.-]+/[\w.-]+", row.repo) and not Path(row.repo).exists()
            place = f"https://github.com/{row.repo}.git" if is_slug else row.repo
            found.setdefault(place, []).append(row)
    return found


async def _prepare_all(
    sources: Sequence[str],
    workshop: Workshop,
    jobs: int,
    status: Status,
    changed: Callable[[Status], None],
) -> list[Repository]:
    at_once = asyncio.Semaphore(jobs)
    prepared: dict[str, Repository] = {}

    async def one(source: str) -> None:
        async with at_once:
            status.doing = f"preparing {source}"
            changed(status)
            try:
                repository = await prepare(source, workshop)
            except Discarded as e:
                status.discarded[source] = str(e)
            else:
                prepared[source] = repository
                status.repositories[repository.name] = len(repository.survey.seconds)
            changed(status)

    async with asyncio.TaskGroup() as group:
        for source in sources:
            group.create_task(one(source))
    return [prepared[source] for source in sources if source in prepared]


async def _prove_all(
    stream: Iterator[tuple[Repository, Draft]],
    workshop: Workshop,
    log: BuildLog,
    options: Options,
    status: Status,
    changed: Callable[[Status], None],
) -> None:
    seen = Seen()
    for entry in log.entries.values():
        if entry["verdict"] == KEPT:
            status.kinds[entry["kind"]] += 1
            seen.digests.update(entry["like"])
        else:
            status.rejected[entry["verdict"]] += 1
    for venv in sorted(workshop.venvs.iterdir()):
        seen.installed[venv.name] = await asyncio.to_thread(windows_of_folder, venv / "lib")
    taking = asyncio.Lock()
    under_way = 0

    async def take() -> tuple[Repository, Draft] | None:
        async with taking:
            while True:
                found = await asyncio.to_thread(next, stream, None)
                if found is None or found[1].id not in log.entries:
                    return found

    async def work() -> None:
        nonlocal under_way
        while status.kept + under_way < status.limit and (found := await take()) is not None:
            repository, draft = found
            status.doing = draft.id
            under_way += 1
            try:
                task = await prove(draft, repository, seen, workshop.pool, options.repetitions)
            except Rejected as e:
                status.rejected[str(e)] += 1
                log.add(draft, str(e))
            else:
                write_task(workshop.folder / "tasks", task, workshop.folder / "archives")
                status.kinds[draft.kind] += 1
                log.add(draft, KEPT, digests_of(task))
            finally:
                under_way -= 1
            changed(status)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.jobs):
            group.create_task(work())


def _in_turn(
    repositories: Sequence[Repository], workshop: Workshop, rows: Mapping[str, Sequence[Row]]
) -> Iterator[tuple[Repository, Draft]]:
    """A draft of each repository, then another of each."""
    streams = [
        (
            each,
            Drafts(
                each.name,
                each.files,
                each.recipe,
                each.survey,
                workshop.clone_of(each.name),
                rows.get(each.name, ()),
            ).all(),
        )
        for each in repositories
    ]
    while streams:
        for pair in list(streams):
            if (draft := next(pair[1], None)) is None:
                streams.remove(pair)
            else:
                yield pair[0], draft
