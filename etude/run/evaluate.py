"""Evaluation: the solve rate of a version on a split, with a confidence interval.

Every task once, through the same gateway and harness as in training. The version must not change
under an evaluation: whoever runs one holds the weights still, and every token is checked to come
from the version that is evaluated. A session that fails in infrastructure is tried again: it is no
zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etude.core.errors import EtudeError
from etude.core.events import EvalDone, EvalProgress, Event
from etude.core.seeds import derive
from etude.core.types import Json, Task, Trajectory
from etude.run.loop import RunAttempt, attempt_done
from etude.store.runs import Run

TRIES = 3
REPORT_EVERY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of an evaluation, stored under `evals/`."""

    stage: str
    split: str
    version: int
    solved: int
    total: int
    low: float
    high: float
    """Wilson interval, 95 %."""
    rewards: dict[str, float]
    """By task."""
    example: list[Json]
    """The messages of the longest session that solved its task; empty if none did."""

    @property
    def name(self) -> str:
        return report_name(self.version, self.split)

    @property
    def rate(self) -> float:
        return self.solved / self.total


def wilson(solved: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """A 95 % interval for a share; unlike the textbook one it holds near 0 and 1, and for few
    tries."""
    share, spread = solved / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def report_name(version: int, split: str) -> str:
    return f"{version:06d}.{split}"


def reports(run: Run) -> list[Report]:
    """All that the run has, in the order of versions."""
    return [run.eval(name, Report) for name in run.evals()]


async def evaluate(
    tasks: Sequence[Task],
    attempt: RunAttempt,
    *,
    stage: str,
    split: str,
    version: int,
    seed: int,
    emit: Callable[[Event], None] = lambda event: None,
    keep: Callable[[Trajectory], object] = lambda trajectory: None,
) -> Report:
    """`keep` is handed every attempt that counts."""
    outcomes: list[Trajectory] = []
    telling = _telling(attempt, split, emit)

    async def solve(number: int, task: Task) -> None:
        # a number, and not the task's id: the name is a part of the session's URL
        sample = f"eval-{version}-{split}.{number}"
        outcomes.append(await _persistent(telling, task, sample, derive(seed, "eval", task.id)))
        _check_version(outcomes[-1], version)
        keep(outcomes[-1])
        if len(outcomes) % REPORT_EVERY == 0:
            emit(progress())

    def progress() -> EvalProgress:
        done, solved = len(outcomes), _solved(outcomes)
        return EvalProgress(stage=stage, split=split, done=done, total=len(tasks), solved=solved)

    emit(progress())
    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            group.create_task(solve(number, task))
    solved, total = _solved(outcomes), len(tasks)
    low, high = wilson(solved, total)
    emit(
        EvalDone(
            stage=stage,
            split=split,
            version=version,
            solved=solved,
            total=total,
            low=low,
            high=high,
        )
    )
    return Report(
        stage=stage,
        split=split,
        version=version,
        solved=solved,
        total=total,
        low=low,
        high=high,
        rewards={
            t.task: t.reward for t in sorted(outcomes, key=lambda t: t.task) if t.reward is not None
        },
        example=max((t.messages for t in outcomes if t.reward == 1.0), key=len, default=[]),
    )


def _telling(attempt: RunAttempt, split: str, emit: Callable[[Event], None]) -> RunAttempt:
    async def run_attempt(task: Task, sample: str, seed: int) -> Trajectory:
        trajectory = await attempt(task, sample, seed)
        emit(attempt_done(trajectory, split))
        return trajectory

    return run_attempt


async def _persistent(attempt: RunAttempt, task: Task, sample: str, seed: int) -> Trajectory:
    for _ in range(TRIES):
        trajectory = await attempt(task, sample, seed)
        if trajectory.reward is not None:
            return trajectory
    raise EtudeError(
        f"evaluation: task {task.id} failed {TRIES} times, the last time with: {trajectory.error}"
    )


def _solved(outcomes: Sequence[Trajectory]) -> int:
    return sum(t.reward == 1.0 for t in outcomes)


def _check_version(trajectory: Trajectory, version: int) -> None:
    seen = {span.version for segment in trajectory.segments for span in segment.versions}
    if seen - {version}:
        raise EtudeError(
            f"{trajectory.id}: evaluated version {version}, but tokens come from {sorted(seen)}; "
            f"nothing may load other weights while an evaluation runs"
        )
