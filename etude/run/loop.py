"""The rollout loop: tasks become groups, groups become batches, versions become live.

Three short loops run under one TaskGroup, over one pure window. `when` waits for the window to
allow something, `update` changes the window and wakes all waiters. An exception in any of them
cancels the others, surfaces, and ends the process; the data on disk is enough to resume.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import isfinite
from statistics import fmean
from typing import TypeVar

from etude.core.advantage import (
    AdvantageEstimator,
    GroupOutcome,
    counted_rewards,
    oldest_version,
    to_rows,
)
from etude.core.alarms import signal_advice, what_was_earned
from etude.core.curriculum import Curriculum
from etude.core.errors import EtudeError
from etude.core.events import AttemptDone, BatchReady, Event, GroupDone, WeightsLive
from etude.core.jumps import RewardJumps, flag_jump
from etude.core.ledger import Batched, Dropped, Issued, Trained
from etude.core.protocols import WeightStore
from etude.core.seeds import derive
from etude.core.types import Batch, Group, Task, Trajectory
from etude.core.window import Window
from etude.run.journal import Journal, Recovered, asked_task, drops, group_id, sample_ids

V = TypeVar("V")

RunAttempt = Callable[[Task, str, int], Awaitable[Trajectory]]
"""(task, sample id, seed) -> its trajectory. A failure inside the session never raises."""


class RolloutLoop:
    """Keeps the engines busy and the trainer fed, and never lets data grow too stale."""

    def __init__(
        self,
        *,
        journal: Journal,
        recovered: Recovered,
        window: Window[Group],
        weights: WeightStore,
        load: Callable[[int], Awaitable[None]],
        tasks: Sequence[Task],
        curriculum: Curriculum,
        jumps: RewardJumps | None = None,
        quarantine_jumps: bool = False,
        attempt: RunAttempt,
        group_size: int,
        estimator: AdvantageEstimator,
        stage: str,
        seed: int,
        last: int,
        emit: Callable[[Event], None],
        troubled: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`troubled`: the last time a process was known to be silent, by `time.monotonic`."""
        self.journal = journal
        self.window = window
        self.weights = weights
        self.load = load
        self.tasks = {task.id: task for task in tasks}
        self.curriculum = curriculum
        self.jumps = jumps
        self.quarantine_jumps = quarantine_jumps
        self.attempt = attempt
        self.group_size = group_size
        self.estimator = estimator
        self.stage = stage
        self.seed = seed
        self.last = last
        self.emit = emit
        self.troubled = troubled
        self.health = FailureMonitor()
        self.signal = SignalMonitor(window.per_step)
        self.changed = asyncio.Condition()
        window.restore(
            step=max(recovered.batched, window.live) + 1,
            slots=recovered.slots,
            finished=[(group.slot, group.admitted, group) for group in recovered.waiting],
        )

    async def run(self) -> None:
        """Return when the weights of the last step are live."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.follow())
            feeding = loops.create_task(self.feed())
            await self.pack()
            # the last batch is full: attempts that are still running are not needed
            feeding.cancel()
        unneeded = tuple(self.journal.ledger.open_samples())
        await self.journal.write(
            *[Dropped(samples=unneeded, reason="cancelled")] if unneeded else [], flush=True
        )

    async def feed(self) -> None:
        """task -> slot -> group"""
        async with asyncio.TaskGroup() as groups:
            while True:
                slot = await self.when(self.window.admit)
                admitted = self.window.live
                task, epoch = self.curriculum.choose(admitted)
                groups.create_task(self.explore(self.tasks[task], epoch, slot, admitted))

    async def explore(self, task: Task, epoch: int, slot: int, admitted: int) -> None:
        """attempts -> group in the store -> window"""
        group, began = group_id(slot), time.monotonic()
        samples = sample_ids(group, self.group_size)
        issued = Issued(group=group, task=task.id, samples=samples, version=admitted, epoch=epoch)
        await self.journal.write(issued)
        async with asyncio.TaskGroup() as attempts:
            running = [
                # Attempts are numbered across epochs, so that no two at a task share their
                # randomness.
                attempts.create_task(
                    self.checked_attempt(task, sample, derive(self.seed, task.id, number))
                )
                for number, sample in enumerate(samples, epoch * self.group_size)
            ]
        whole = Group(
            id=group,
            task=task.id,
            slot=slot,
            admitted=admitted,
            stage=self.stage,
            trajectories=tuple(t.result() for t in running),
        )
        outcome = self.estimator.estimate(whole)
        asked = asked_task(issued, whole, outcome)
        if jump := self.jumps.look(asked) if self.jumps else None:
            whole = flag_jump(whole, jump, quarantine=self.quarantine_jumps)
            outcome = self.estimator.estimate(whole)
            asked = asked_task(issued, whole, outcome)
        await self.journal.write(*drops(outcome), group=whole)
        self.emit(_done(whole, outcome, time.monotonic() - began, jump or ""))
        kept = bool(outcome.advantages)
        self.curriculum.learn(asked)
        if self.jumps:
            self.jumps.learn(asked)
        self.signal.add(whole, outcome)
        await self.update(
            lambda: self.window.finish(slot, whole) if kept else self.window.drop(slot)
        )

    async def checked_attempt(self, task: Task, sample: str, seed: int) -> Trajectory:
        began = time.monotonic()
        trajectory = await self.attempt(task, sample, seed)
        self.emit(attempt_done(trajectory, "train"))
        # Otherwise the failure has a cause that is already reported, and that will pass.
        if self.troubled() < began:
            self.health.add(trajectory)
        return trajectory

    async def pack(self) -> None:
        """groups -> batch -> trainer"""
        for step in range(self.window.step, self.last + 1):
            groups = [await self.when(self.window.take) for _ in range(self.window.per_step)]
            batch, samples = assemble_batch(step, groups, self.estimator)
            await self.journal.write(Batched(step=step, samples=samples), batch=batch)
            self.emit(BatchReady(step=step, lag=batch.lag))

    async def follow(self) -> None:
        """weight version -> engines -> free slots"""
        while self.window.live < self.last:
            newest = (await self.weights.wait(after=self.window.live)).version
            version = min(newest, self.last)  # the next stage may have published too
            await self.load(version)
            await self.journal.write(Trained(step=version))
            self.emit(WeightsLive(version=version))
            await self.update(lambda: self.window.advance(version))  # noqa: B023 (called before the next round)

    async def when(self, poll: Callable[[], V | None]) -> V:
        """Wait until `poll` returns a value; every change to the window wakes it."""
        async with self.changed:
            while (value := poll()) is None:
                await self.changed.wait()
            return value

    async def update(self, change: Callable[[], object]) -> None:
        async with self.changed:
            change()
            self.changed.notify_all()


class FailureMonitor:
    """Stops a run if half of its recent rollouts fail: failed rollouts are data, but they must not
    be able to hide."""

    def __init__(self, *, recent: int = 40, limit: float = 0.5) -> None:
        self._recent: deque[str | None] = deque(maxlen=recent)
        self._limit = limit

    def add(self, trajectory: Trajectory) -> None:
        self._recent.append(trajectory.error)
        failed = [error for error in self._recent if error is not None]
        if len(self._recent) == self._recent.maxlen and len(failed) >= self._limit * len(
            self._recent
        ):
            raise EtudeError(
                f"{len(failed)} of the last {len(self._recent)} sessions failed, most recently "
                f"with: {failed[-1]}. This is too many: fix the cause, then resume the run"
            )


class SignalMonitor:
    """Stops a run that finds no group with signal: one group without is normal, but if all are, no
    batch would ever fill."""

    def __init__(self, groups_per_step: int) -> None:
        self._limit = max(100, 20 * groups_per_step)
        self._in_vain = 0
        self._rewards: set[float] = set()
        self._had_signal = False

    def add(self, group: Group, outcome: GroupOutcome) -> None:
        if outcome.advantages:
            self._had_signal = True
            self._in_vain = 0
            self._rewards.clear()
            return
        self._in_vain += 1
        self._rewards |= set(counted_rewards(group, outcome))
        all_suspected = len(outcome.quarantined) == len(group.trajectories)
        if self._in_vain >= self._limit and outcome.quarantined and all_suspected:
            raise EtudeError(
                f"{self._in_vain} groups in a row have nothing to learn from, and all attempts "
                f"of the newest are suspected of {next(iter(outcome.quarantined.values()))}: "
                "review them in etude dash. If they are honest, start over with rewards.detector "
                '= "flag"'
            )
        if self._in_vain >= self._limit and outcome.untrainable:
            raise EtudeError(
                f"{self._in_vain} groups in a row have nothing to learn from: their attempts are "
                f"sampled with {next(iter(outcome.untrainable.values()))}, which the trainer "
                "cannot recompute. Have the harness set no sampling parameter except "
                "temperature, and keep it above 0, then resume the run"
            )
        if self._in_vain >= self._limit:
            advice = signal_advice(self._rewards, self._had_signal)
            raise EtudeError(
                f"{self._in_vain} groups in a row have nothing to learn from: all attempts at a "
                f"task earn the same reward ({what_was_earned(self._rewards)}: {advice}). Such "
                "settings cannot change within a run: start over with --fresh, or in another "
                "--dir"
            )


def assemble_batch(
    step: int, groups: Sequence[Group], estimator: AdvantageEstimator
) -> tuple[Batch, tuple[str, ...]]:
    """Assemble the batch of a step, and return it with the ids of its samples. Its rows are in the
    order of slots, then attempts."""
    ordered = sorted(groups, key=lambda group: group.slot)
    outcomes = [estimator.estimate(group) for group in ordered]
    scale = estimator.batch_scale(
        [advantage for outcome in outcomes for advantage in outcome.distinct_advantages()]
    )
    kept = [
        (t, outcome)
        for group, outcome in zip(ordered, outcomes, strict=True)
        for t in group.trajectories
        if t.id in outcome.advantages
    ]
    rows = tuple(
        row
        for t, outcome in kept
        for row in to_rows(
            t,
            outcome.advantages[t.id],
            outcome.credit.get(t.id, ()),
            scale=scale,
            train_summaries=estimator.train_summaries,
        )
    )
    rewards = [counted_rewards(*each) for each in zip(ordered, outcomes, strict=True)]
    reward = fmean(itertools.chain.from_iterable(rewards))
    batch = Batch(step=step, rows=rows, oldest=oldest_version(rows), reward=reward)
    return batch, tuple(t.id for t, _ in kept)


def attempt_done(trajectory: Trajectory, split: str) -> AttemptDone:
    reward = trajectory.reward
    return AttemptDone(
        id=trajectory.id,
        task=trajectory.task,
        split=split,
        status=trajectory.status,
        reward=reward if reward is not None and isfinite(reward) else None,
        error=trajectory.error,
        seconds=trajectory.cost.seconds,
    )


def _done(group: Group, outcome: GroupOutcome, seconds: float, jump: str = "") -> GroupDone:
    return GroupDone(
        group=group.id,
        task=group.task,
        admitted=group.admitted,
        rewards=counted_rewards(group, outcome),
        failed=sum(t.reward is None for t in group.trajectories),
        kept=bool(outcome.advantages),
        seconds=seconds,
        malformed=outcome.malformed,
        untrainable=outcome.untrainable,
        quarantined=outcome.quarantined,
        jump=jump,
    )
