"""Evaluation: the solve rate of a version on a split, with a confidence interval.

Every task is attempted once, or several times for pass@k, through the same gateway and harness as
in training. The version must not change during an evaluation: the caller holds the weights, and
every token is checked to come from the version that is evaluated. A session that fails in
infrastructure is repeated: it does not count as a zero.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from etude.core.advantage import suspected_tricks
from etude.core.errors import EtudeError
from etude.core.events import EvalDone, EvalProgress, Event
from etude.core.seeds import derive
from etude.core.statistics import clustered_wilson, pass_at_k, wilson
from etude.core.types import Cost, Json, Task, Trajectory
from etude.run.loop import RunAttempt, attempt_done
from etude.store.rollouts import RolloutLog
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
    """`low` and `high` are the 95 % Wilson interval."""
    rewards: dict[str, float]
    """The mean over the attempts at each task."""
    example: list[Json]
    """The messages of the longest session that solved its task; empty if none did."""
    samples: int = 1
    """Attempts at each task; `solved` and `total` count attempts."""
    solved_by_task: dict[str, int] = field(default_factory=dict)
    honest_by_task: dict[str, int] = field(default_factory=dict)
    """The attempts at each task in which the cheat detector found nothing."""
    cost: Cost = field(default_factory=Cost)
    """The sum over all attempts."""

    def __post_init__(self) -> None:
        # Reports of older runs contain only the rewards.
        if not self.solved_by_task and self.samples == 1:
            solved = {task: int(reward == 1.0) for task, reward in self.rewards.items()}
            object.__setattr__(self, "solved_by_task", solved)

    @property
    def name(self) -> str:
        return report_name(self.version, self.split, self.samples)

    @property
    def rate(self) -> float:
        return self.solved / self.total

    def pass_at(self, k: int) -> float:
        """The chance that at least one of k attempts solves a task, over all tasks."""
        counts = self.solved_by_task.values()
        return sum(pass_at_k(self.samples, count, k) for count in counts) / len(counts)


def report_name(version: int, split: str, samples: int = 1) -> str:
    return f"{version:06d}.{_times(split, samples)}"


def _times(split: str, samples: int) -> str:
    return f"{split}_x{samples}" if samples > 1 else split


def pass_ks(samples: int) -> list[int]:
    """The values of k for which pass@k is reported: powers of two, and the number of attempts."""
    return sorted({1 << n for n in range(samples.bit_length())} | {samples})


def reports(run: Run) -> list[Report]:
    """All reports of the run, in the order of versions."""
    return [run.eval(name, Report) for name in run.evals()]


async def evaluate(
    tasks: Sequence[Task],
    attempt: RunAttempt,
    *,
    stage: str,
    split: str,
    version: int,
    seed: int,
    samples: int = 1,
    emit: Callable[[Event], None] = lambda event: None,
    keep: Callable[[Trajectory], object] = lambda trajectory: None,
) -> Report:
    """Attempt every task `samples` times. `keep` receives every attempt that counts."""
    outcomes: list[Trajectory] = []
    telling = _telling(attempt, split, emit)

    async def solve(number: int, task: Task, *again: int) -> None:
        # a number rather than the task's id: the name is a part of the session's URL
        sample = f"eval-{version}-{_times(split, samples)}.{number}"
        own_seed = derive(seed, "eval", task.id, *again)
        outcomes.append(await _persistent(telling, task, sample, own_seed))
        _check_version(outcomes[-1], version)
        keep(outcomes[-1])
        if len(outcomes) % REPORT_EVERY == 0:
            emit(progress())

    def progress() -> EvalProgress:
        done, solved = len(outcomes), _solved(outcomes)
        return EvalProgress(stage=stage, split=split, done=done, total=total, solved=solved)

    total = len(tasks) * samples
    emit(progress())
    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tuple(tasks) * samples):
            again = (number // len(tasks),) if samples > 1 else ()
            group.create_task(solve(number, task, *again))
    report = _report(outcomes, samples, stage=stage, split=split, version=version)
    emit(
        EvalDone(
            stage=stage,
            split=split,
            version=version,
            solved=report.solved,
            total=total,
            low=report.low,
            high=report.high,
            samples=samples,
        )
    )
    return report


async def evaluate_and_keep(
    run: Run, tasks: Sequence[Task], attempt: RunAttempt, *, stage: str, split: str, version: int,
    seed: int, samples: int = 1, emit: Callable[[Event], None] = lambda event: None,
) -> None:  # fmt: skip
    """Evaluate, and store the sessions, their rows and the report with the run."""
    attempts: list[Trajectory] = []
    report = await evaluate(
        tasks,
        attempt,
        stage=stage,
        split=split,
        version=version,
        seed=seed,
        samples=samples,
        emit=emit,
        keep=attempts.append,
    )
    kept = run.put_eval_sessions(report.name, attempts)
    rows = RolloutLog(run.objects)
    rows.put_evaluation(report.name, attempts, stage=stage, split=split, object=kept)
    run.put_eval(report.name, report)


def _report(
    outcomes: Sequence[Trajectory], samples: int, *, stage: str, split: str, version: int
) -> Report:
    solved, total = _solved(outcomes), len(outcomes)
    by_task = Counter({t.task: 0 for t in outcomes})
    by_task.update(t.task for t in outcomes if t.reward == 1.0)
    low, high = _interval(by_task, total, samples)
    return Report(
        stage=stage,
        split=split,
        version=version,
        solved=solved,
        total=total,
        low=low,
        high=high,
        rewards=_mean_rewards(outcomes),
        example=max((t.messages for t in outcomes if t.reward == 1.0), key=len, default=[]),
        samples=samples,
        solved_by_task=dict(sorted(by_task.items())),
        honest_by_task=_honest(outcomes),
        cost=_total_cost(outcomes),
    )


def cut_after(report: Report, attempts: Sequence[Trajectory], answers: int) -> Report:
    """The report with attempts of more than `answers` answers counted as not solved: a lower bound
    for an agent that stops there. Rewards, cost and example remain those of whole attempts."""
    by_task = Counter(dict.fromkeys(report.solved_by_task, 0))
    by_task.update(t.task for t in attempts if t.reward == 1.0 and 0 < t.cost.calls <= answers)
    low, high = _interval(by_task, report.total, report.samples)
    solved = dict(sorted(by_task.items()))
    return replace(report, solved=by_task.total(), low=low, high=high, solved_by_task=solved)


def _interval(by_task: Counter[str], total: int, samples: int) -> tuple[float, float]:
    if samples == 1:
        return wilson(by_task.total(), total)
    return clustered_wilson([*by_task.values()], samples)


def _honest(outcomes: Sequence[Trajectory]) -> dict[str, int]:
    found = Counter({t.task: 0 for t in outcomes})
    found.update(t.task for t in outcomes if suspected_tricks(t) is None)
    return dict(sorted(found.items()))


def _mean_rewards(outcomes: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    for trajectory in sorted(outcomes, key=lambda t: t.task):
        if trajectory.reward is not None:
            rewards.setdefault(trajectory.task, []).append(trajectory.reward)
    return {task: sum(each) / len(each) for task, each in rewards.items()}


def _total_cost(outcomes: Sequence[Trajectory]) -> Cost:
    return Cost(
        prompt_tokens=sum(t.cost.prompt_tokens for t in outcomes),
        sampled_tokens=sum(t.cost.sampled_tokens for t in outcomes),
        seconds=sum(t.cost.seconds for t in outcomes),
        calls=sum(t.cost.calls for t in outcomes),
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
        f"evaluation: task {task.id} failed {TRIES} times, most recently with: {trajectory.error}"
    )


def _solved(outcomes: Sequence[Trajectory]) -> int:
    return sum(t.reward == 1.0 for t in outcomes)


def _check_version(trajectory: Trajectory, version: int) -> None:
    seen = {span.version for segment in trajectory.segments for span in segment.versions}
    if seen - {version}:
        raise EtudeError(
            f"{trajectory.id}: evaluated version {version}, but tokens come from {sorted(seen)}; "
            "nothing else may load weights while an evaluation runs"
        )
