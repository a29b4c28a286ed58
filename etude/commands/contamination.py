"""`etude eval RUN --contamination`: tests whether a version can complete names and files of
held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.core.config import RunConfig
from etude.core.contamination import Completion, Kind, Probe, count, find_probes
from etude.core.errors import EtudeError
from etude.core.sampling import Request, SamplingParams
from etude.core.types import Task
from etude.launch.place import RunPlace
from etude.run.controller import open_environment, read_tasks
from etude.store.runs import Run
from etude.weights.manifest import find_newest, read_manifest

PER_TASK = 4
SPLITS = ("train", "heldout", "novel")
Found = dict[str, Mapping[Kind, Completion]]


def contamination(place: RunPlace, version: int | None, console: Console) -> dict[str, Any]:
    """Show a table, and return the data for `--json`."""
    run = place.open()
    config, newest = run.config(), find_newest(run.objects)
    if newest is None:
        raise EtudeError(f"{place} has no published weights yet: finish its first stage first")
    version = newest.version if version is None else read_manifest(run.objects, version).version
    found = asyncio.run(_probe(run, config, version))
    console.print(_table(found, version))
    for split, kinds in found.items():
        for kind, result in kinds.items():
            if split != "train" and result.example is not None:
                told = f"{split} {kind}, task {result.example.task}: {result.example.expected!r}"
                console.print(told, highlight=False, markup=False)
    return {"version": version, "splits": {split: _told(kinds) for split, kinds in found.items()}}


async def _probe(run: Run, config: RunConfig, version: int) -> Found:
    from etude.model.tokenizer import ChatTokenizer
    from etude.serve.worker import own_engine
    from etude.serve.worker_protocol import read_model_files
    from etude.weights.follow import Follower
    from etude.weights.manifest import Chain

    files = read_model_files(run)
    tokenizer = ChatTokenizer(files)
    fetch = Follower(Chain(run.objects), name="contamination").fetch
    async with (
        open_environment(config) as (environment, _),
        own_engine(files, fetch, config) as engine,
    ):
        await engine.load(version)

        async def answer(probe: Probe) -> tuple[Probe, str]:
            # a token has at least one letter, except in other alphabets
            max_tokens = 2 * len(probe.expected)
            room = engine.max_context - max_tokens
            request = Request(
                prompt=tuple(tokenizer.encode(probe.prefix)[-room:]),
                max_tokens=max_tokens,
                seed=0,
                params=SamplingParams(temperature=0.0),
            )
            return probe, tokenizer.decode((await engine.sample(request)).tokens)

        found: Found = {}
        for split in SPLITS:
            if wanted := getattr(config.tasks, split):
                tasks = await read_tasks(environment, config.tasks, split)
                probes = chosen_probes(tasks[: config.tasks.heldout or wanted], config.seed)
                found[split] = count(await asyncio.gather(*map(answer, probes)))
    return found


def chosen_probes(tasks: Sequence[Task], seed: int) -> list[Probe]:
    return [probe for task in tasks for probe in find_probes(task, most=PER_TASK, seed=seed)]


def _table(found: Found, version: int) -> Table:
    table = Table("tasks", "completed", "finished", "share", "95 %", title=f"version {version}")
    for split, kinds in found.items():
        for kind, result in kinds.items():
            low, high = result.interval
            share = f"{result.completed / result.total:.1%}"
            counts = f"{result.completed} of {result.total}"
            table.add_row(split, kind, counts, share, f"{low:.1%} - {high:.1%}")
    return table


def _told(kinds: Mapping[Kind, Completion]) -> dict[str, dict[str, int]]:
    return {
        kind: {"completed": result.completed, "total": result.total}
        for kind, result in kinds.items()
    }
