"""A whole rl stage without torch, web or processes: an engine, a trainer and a store that can die
at any write."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from etude.core.advantage import AdvantageEstimator
from etude.core.curriculum import Curriculum
from etude.core.errors import EtudeError
from etude.core.jumps import RewardJumps
from etude.core.ledger import Trained
from etude.core.sampling import version_spans
from etude.core.types import Group, Manifest, Route, Score, Segment, Task, Trajectory
from etude.core.window import Window
from etude.run import journal
from etude.run.loop import RolloutLoop
from etude.store.objects import Objects
from etude.store.runs import Run

FIRST = 2  # the version that rl starts from


class Mortal(Objects):
    """Shares the contents of another store, and refuses every write after a given number."""

    def __init__(self, healthy: Objects, writes: int | None) -> None:
        super().__init__(healthy._store, healthy.url)
        self.writes = writes

    def _spend(self) -> None:
        if self.writes is not None:
            if self.writes == 0:
                raise EtudeError("the store is gone")
            self.writes -= 1

    def put(self, key: str, data: bytes) -> None:
        self._spend()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._spend()
        return super().create(key, data)


@dataclass
class Versions:
    """A weight store and its trainer: publishes version n some time after batch n exists."""

    run: Run
    newest_version: int
    rng: Random
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait(self, after: int) -> Manifest:
        async with self.changed:
            await self.changed.wait_for(lambda: self.newest_version > after)
        return manifest(self.newest_version)

    async def train(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self.newest_version + 1 in self.run.batches():
                await dawdle(self.rng, 20)
                async with self.changed:
                    self.newest_version += 1
                    self.changed.notify_all()


def manifest(version: int) -> Manifest:
    return Manifest(
        version=version,
        stage="rl",
        step=version,
        epoch=1,
        parent=None,
        root="",
        bytes=0,
        route=Route(None, ()),
    )


async def dawdle(rng: Random, most: int) -> None:
    for _ in range(rng.randrange(most)):
        await asyncio.sleep(0)


TASKS = [Task(id=f"t{n}", prompt="go") for n in range(7)]


@dataclass
class Engine:
    """Answers after a while, with one token of the version at the start and one of the version at
    the end."""

    rng: Random
    version: int = FIRST
    seeds: list[tuple[str, int]] = field(default_factory=list)
    failure_rate: float = 0.1
    solve_rate: float = 0.4
    spoil: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory

    async def load(self, version: int) -> None:
        await dawdle(self.rng, 5)
        self.version = version

    async def attempt(self, task: Task, sample: str, seed: int) -> Trajectory:
        self.seeds.append((task.id, seed))
        group, first = sample.rpartition(".")[0], self.version
        await dawdle(self.rng, 40)
        if self.rng.random() < self.failure_rate:
            return Trajectory(
                id=sample,
                task=task.id,
                group=group,
                segments=(),
                score=None,
                status="failed",
                error="agent: gone",
            )
        segment = Segment(
            prompt=(1,),
            tokens=(2, 3),
            mask=(True, True),
            logprobs=(-1.0, -1.0),
            versions=version_spans([first, self.version]),
        )
        reward = float(self.rng.random() < self.solve_rate)
        whole = Trajectory(
            id=sample,
            task=task.id,
            group=group,
            segments=(segment,),
            score=Score(reward),
            status="done",
        )
        return self.spoil(whole)


async def stage(
    objects: Objects,
    *,
    seed: int,
    last: int,
    max_lag: int,
    reorder_window: int = 1,
    writes: int | None = None,
    failures: float = 0.1,
    solves: float = 0.4,
    spoil: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory,
    troubled: Callable[[], float] = lambda: -math.inf,
    fresh_frac: float = 0.5,
    jumps: RewardJumps | None = None,
) -> Engine:
    """Run the stage from the state that the store is in."""
    rng, estimator = (
        Random(seed),
        AdvantageEstimator(max_tokens=3, max_lag=max_lag, quarantine=True),
    )
    run = Run(Mortal(objects, writes))
    entries, recovered = journal.load(run, estimator)
    book = journal.Journal(run, entries, recovered.unlisted)
    await book.write(*recovered.entries, flush=True)
    newest = max([FIRST, *(entry.step for entry in entries if isinstance(entry, Trained))])
    # The trainer lives on while the controller is dead: some of the existing batches have been
    # trained on.
    newest = rng.randint(newest, max(newest, recovered.batched))
    if newest > max(book.ledger.trained_step, FIRST):
        await book.write(Trained(step=newest))
    versions = Versions(run, newest, rng)
    engine = Engine(rng, version=newest, failure_rate=failures, solve_rate=solves, spoil=spoil)
    window: Window[Group] = Window(
        per_step=2, max_lag=max_lag, reorder_window=reorder_window, live=newest
    )
    controller = RolloutLoop(
        journal=book,
        recovered=recovered,
        window=window,
        weights=versions,
        load=engine.load,
        tasks=TASKS,
        curriculum=Curriculum(
            {task.id: task.family for task in TASKS},
            seed=1,
            fresh_frac=fresh_frac,
            max_lag=max_lag,
            past=recovered.past,
        ),
        attempt=engine.attempt,
        group_size=3,
        estimator=estimator,
        stage="rl",
        seed=1,
        last=last,
        emit=lambda event: None,
        troubled=troubled,
        jumps=jumps,
        quarantine_jumps=True,
    )
    training = asyncio.create_task(versions.train())
    try:
        await controller.run()
    finally:
        training.cancel()
    return engine
