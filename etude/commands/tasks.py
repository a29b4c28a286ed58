"""`etude tasks`: build tasks from repositories, check them, and show them."""

from __future__ import annotations

import asyncio
import json as json_format
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from etude.commands.terminal import counted, say, showing_progress
from etude.core.errors import EtudeError
from etude.factory import check as checking
from etude.factory.build import Options, Status, open_workshop
from etude.factory.build import build as build_tasks
from etude.factory.candidates import KINDS
from etude.factory.harbor import is_ours, read_task
from etude.factory.harbor_task import read_harbor_task, read_provided
from etude.factory.swebench import diff
from etude.run.task_folder import split_ids


def build(
    *,
    sources: Sequence[str],
    out: Path,
    limit: int | None,
    kinds: Sequence[str] | None,
    heldout: Sequence[str],
    novel: Sequence[str],
    jobs: int | None,
    json: bool,
    console: Console,
) -> int:
    options = Options(
        limit=limit,
        kinds=kinds or KINDS,
        heldout=heldout,
        novel=novel,
        jobs=jobs or len(os.sched_getaffinity(0)),
    )
    with showing_progress(console) as tell:
        told: set[str] = set()

        def changed(status: Status) -> None:
            for source, why in status.discarded.items():
                if source not in told:
                    told.add(source)
                    say(console, f"{source}: discarded: {why}")
            tell(status.kept, status.limit, status.doing)

        status = asyncio.run(build_tasks(sources, out, options, changed))
    print_build(status, out, console)
    if json:
        print(json_format.dumps(status.summary()), flush=True)
    return 0 if status.kept else 1


def print_build(status: Status, out: Path, console: Console) -> None:
    found = status.summary()
    console.print(
        f"{counted(found['kept'], 'task')} of {counted(len(found['kinds']), 'kind')} from "
        f"{counted(found['repositories'], 'repository', 'repositories')} in {out}",
        highlight=False,
        soft_wrap=True,
    )
    for title, counts in (("kept", found["kinds"]), ("rejected", found["rejected"])):
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        console.print(f"{title}: {told or 'none'}", highlight=False, soft_wrap=True)
    if status.repositories and status.kept < status.limit:
        console.print(
            f"{status.kept} of {status.limit}: all drafts are used up; add more sources",
            highlight=False,
        )
    if status.kept:
        _print_splits(_splits(out), console)
    console.print(f"to view them: etude tasks show {out}", highlight=False, soft_wrap=True)


def _splits(folder: Path) -> dict[str, int]:
    """Number of tasks per split, of those that `etude.run.task_folder:TaskFolder` reads."""
    found = [read_task(place) for place in checking.task_folders(folder) if is_ours(place)]
    return {split: len(ids) for split, ids in split_ids(found, folder).items()}


def _print_splits(splits: dict[str, int], console: Console) -> None:
    novel = f", {splits['novel']} novel" if splits["novel"] else ""
    console.print(
        f"{splits['train']} for training, {splits['heldout']} held out{novel}", highlight=False
    )
    if sum(splits.values()) == 1:
        console.print("a single task cannot be split: set tasks.heldout = 0", highlight=False)


def check(*, dir: Path, repeat: int, jobs: int | None, json: bool, console: Console) -> int:
    total = len(checking.task_folders(dir))
    jobs = jobs or len(os.sched_getaffinity(0))

    async def run() -> checking.Checked:
        async with open_workshop(dir, Options(jobs=jobs)) as workshop:
            return await checking.check(
                dir,
                workshop.pool,
                repetitions=repeat,
                jobs=jobs,
                changed=lambda found: tell(found.tasks, total, "checking"),
            )

    with showing_progress(console) as tell:
        found = asyncio.run(run())
    for name, why in found.broken.items():
        console.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)
    flaky = counted(found.flaky, "is flaky", "are flaky")
    console.print(f"{found.ok} of {found.tasks} tasks pass; {flaky}", highlight=False)
    if json:
        told = {name: getattr(found, name) for name in ("tasks", "ok", "flaky", "broken")}
        print(json_format.dumps(told), flush=True)
    return 0 if found.ok == found.tasks else 1


def stats(*, dir: Path, json: bool, console: Console) -> int:
    found = checking.stats(dir)
    kinds = sorted(found.kinds)
    table = Table("repository", *kinds, "tasks", box=None)
    for name, counts in sorted(found.repositories.items()):
        table.add_row(name, *(str(counts[kind]) for kind in kinds), str(counts.total()))
    table.add_row("all", *(str(found.kinds[kind]) for kind in kinds), str(found.kinds.total()))
    console.print(table)
    splits = _splits(dir)
    if any(splits.values()):
        _print_splits(splits, console)
    mutations = ", ".join(f"{name} {count}" for name, count in found.mutations.most_common())
    console.print(f"mutations: {mutations or 'none'}", highlight=False, soft_wrap=True)
    failing = statistics.median(found.failing or [0])
    console.print(f"tests fixed by a solution: {failing:g} (median)", highlight=False)
    rates = found.solve_rates
    console.print(
        f"solve rate: {statistics.mean(rates):.2f} over {len(rates)} tasks"
        if rates
        else "solve rate: not measured",
        highlight=False,
    )
    if json:
        told = {
            "tasks": found.kinds.total(),
            "splits": splits,
            "kinds": found.kinds,
            "repositories": found.repositories,
            "mutations": found.mutations,
            "solve_rates": found.solve_rates,
        }
        print(json_format.dumps(told), flush=True)
    return 0


def show(*, dir: Path, task: str | None, json: bool, console: Console) -> int:
    folders = [dir] if (dir / "task.toml").is_file() else checking.task_folders(dir)
    if task is None and folders != [dir]:
        asked = {folder.name: (folder / "instruction.md").read_text() for folder in folders}
        for name, text in asked.items():
            first = text.strip().partition("\n")[0]
            say(console, f"{name}  {first[:70]}", indent=4)
        if json:
            listed = [{"id": name, "instruction": text} for name, text in asked.items()]
            print(json_format.dumps(listed), flush=True)
        return 0
    chosen = [folder for folder in folders if task in (None, folder.name)]
    if not chosen:
        raise EtudeError(f"{dir} has no task {task}: `etude tasks show {dir}` lists them")
    if not is_ours(chosen[0]):
        return _show_harbor(chosen[0], json, console)
    found = read_task(chosen[0])
    console.print(f"{found.id}: {found.kind} in {found.origin}", highlight=False, markup=False)
    console.print(f"\n{found.instruction}", highlight=False, markup=False)
    console.print(Syntax(diff(found.opening, found.solution), "diff", background_color="default"))
    for title, names in (("fails", found.fail_to_pass), ("passes", found.pass_to_pass)):
        for name in names[:20]:
            say(console, f"{title}: {name}", indent=4)
        if len(names) > 20:
            console.print(f"{title}: and {len(names) - 20} more", highlight=False)
    if json:
        told_fields = ("id", "kind", "repository", "origin", "instruction", "fail_to_pass")
        told_json = {name: getattr(found, name) for name in told_fields}
        print(json_format.dumps(told_json), flush=True)
    return 0


def _show_harbor(folder: Path, json: bool, console: Console) -> int:
    """Show a task in Harbor's format, and whether it can be run here."""
    instruction = (folder / "instruction.md").read_text()
    refused = ""
    places = (folder.parent, folder.parent.parent)  # the folder of the tasks, or its parent
    try:
        read_harbor_task(folder, [line for each in places for line in read_provided(each)])
    except EtudeError as e:
        refused = str(e)
    runs = "runs with etude.run.harbor_tasks:HarborTasks"
    console.print(instruction, highlight=False, markup=False)
    say(console, f"cannot be run here: {refused}" if refused else runs)
    if json:
        told = {"id": folder.absolute().name, "instruction": instruction, "refused": refused}
        print(json_format.dumps(told), flush=True)
    return 0
