"""Checks of a finished folder of tasks: reading, grading, counting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxPool
from etude.factory.harbor import is_ours, read_task
from etude.factory.prove import Rejected, check_both_ends

SETS_ASIDE = ("heldout", "novel")
"""Splits that can consist of whole repositories. The folder lists their names in SPLIT.txt."""


def task_folders(folder: Path) -> list[Path]:
    """The directories of a folder's tasks. EtudeError if there are none."""
    place = folder / "tasks" if (folder / "tasks").is_dir() else folder
    found = sorted(path.parent for path in place.glob("[!.]*/task.toml"))
    if not found:
        raise EtudeError(
            f"{folder} has no tasks: give a folder that `etude tasks build` made, or a "
            f"directory of Harbor tasks"
        )
    return found


def set_aside(
    folder: Path,
    repositories: Mapping[str, Iterable[str]],
    used: Callable[[str], int] = lambda name: 0,
) -> None:
    """Note in a folder which repositories belong to which of `SETS_ASIDE`. EtudeError if one would
    belong to two, or has tasks of the other splits (their number is `used`), which a model may have
    been trained on."""
    known = {split: repositories_of(folder, split) for split in SETS_ASIDE}
    lists = {split: known[split] | set(repositories[split]) for split in SETS_ASIDE}
    if both := sorted(lists["heldout"] & lists["novel"]):
        raise EtudeError(f"{both[0]} cannot be both held out and novel in {folder}")
    for name in sorted(name for split in SETS_ASIDE for name in lists[split] - known[split]):
        if used(name):
            raise EtudeError(
                f"{name} cannot be set aside: {folder} already has tasks of it, which a model may "
                "have been trained on; build in another folder"
            )
    for split, names in lists.items():
        if names:
            (folder / f"{split}.txt").write_text("".join(f"{name}\n" for name in sorted(names)))


def repositories_of(folder: Path, split: str) -> frozenset[str]:
    """The repositories that belong entirely to a split."""
    place = folder / f"{split}.txt"
    return frozenset(place.read_text().split()) if place.is_file() else frozenset()


@dataclass(slots=True)
class Checked:
    """Result of a check."""

    tasks: int = 0
    ok: int = 0
    flaky: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    """Task -> reason why it is broken."""


async def check(
    folder: Path,
    pool: SandboxPool,
    *,
    repetitions: int,
    jobs: int,
    changed: Callable[[Checked], None],
) -> Checked:
    """Grade every task again, with no change and with its solution."""
    found = Checked()
    waiting = iter(task_folders(folder))

    async def work() -> None:
        for place in waiting:
            try:
                await check_both_ends(read_task(place), pool, repetitions)
            except (Rejected, EtudeError, RolloutFailure) as e:
                found.flaky += str(e) == "flaky"
                found.broken[place.name] = str(e)
            else:
                found.ok += 1
            found.tasks += 1
            changed(found)

    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(work())
    return found


@dataclass(slots=True)
class Stats:
    """Counts of the tasks in a folder."""

    kinds: Counter[str] = field(default_factory=Counter)
    repositories: dict[str, Counter[str]] = field(default_factory=dict)
    mutations: Counter[str] = field(default_factory=Counter)
    failing: list[int] = field(default_factory=list)
    """Number of tests that must pass again, for each task."""
    solve_rates: list[float] = field(default_factory=list)


def stats(folder: Path) -> Stats:
    """Count the tasks of a folder."""
    found = Stats()
    for place in task_folders(folder):
        if not is_ours(place):
            found.kinds["harbor"] += 1
            found.repositories.setdefault("others", Counter())["harbor"] += 1
            continue
        task = read_task(place)
        found.kinds[task.kind] += 1
        found.repositories.setdefault(task.repository, Counter())[task.kind] += 1
        found.mutations.update(each for each in task.facts.get("mutations", "").split(", ") if each)
        found.failing.append(len(task.fail_to_pass))
        if task.solve_rate is not None:
            found.solve_rates.append(task.solve_rate)
    return found
