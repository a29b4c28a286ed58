"""A trainer, an evaluation and rollouts without weights, to try out the loop of real-time RL.

A version consists of the list of its samples, in `fake-versions/{version:06d}.json`. So the samples
that were trained on, and how often, can be read from the versions.
"""

from __future__ import annotations

from collections.abc import Callable

from etude.core.advantage import AdvantageEstimator
from etude.core.sampling import VersionSpan
from etude.core.statistics import wilson
from etude.core.types import Group, Score, Segment, Trajectory
from etude.core.updates import simulated_group
from etude.run.evaluate import Report
from etude.run.journal import group_of, sample_ids
from etude.run.realtime_simulated import Simulated
from etude.store.codec import from_json, seal, to_json
from etude.store.log import first_free
from etude.store.runs import Run

FOLDER = "fake-versions"


class FakeTrainer:
    """Publishes version n when batch n exists, once. The first version exists from the start."""

    def __init__(self, run: Run, first: int) -> None:
        self._run = run
        self._first = first

    def published(self) -> int:
        return first_free(self._run.objects, FOLDER, _key, self._first + 1) - 1

    def train(self) -> bool:
        """One step; False if there is no batch for it."""
        step = self.published() + 1
        if step not in self._run.batches():
            return False
        samples = [row.sample for row in self._run.batch(step).rows]
        assert self._run.objects.create(_key(step), seal(to_json(samples))), "trained twice"
        return True

    def samples(self, version: int) -> list[str]:
        """The samples that a version was trained on."""
        key = _key(version)
        return from_json(self._run.objects.get_sealed(key), list[str], key)


class FakeEvaluation:
    """Reports a given number of solved tasks out of 400."""

    def __init__(self, run: Run, solves: Callable[[int], int], stage: str = "rl") -> None:
        self._run = run
        self._solves = solves
        self._stage = stage

    async def __call__(self, version: int, split: str, samples: int = 1) -> None:
        solved = self._solves(version)
        total = 400
        low, high = wilson(solved, total)
        rewards = {f"t{n:03d}": float(n < solved) for n in range(total)}
        report = Report(
            stage=self._stage,
            split=split,
            version=version,
            solved=solved,
            total=total,
            low=low,
            high=high,
            rewards=rewards,
            example=[],
        )
        self._run.put_eval(report.name, report)


async def fake_rollouts(version: int, step: int) -> Simulated:
    """Two groups of two attempts: one is worth a step, the other teaches nothing."""
    groups = tuple(
        Group(
            id=(id := simulated_group(step, slot)),
            task=f"t{slot}",
            slot=slot,
            admitted=version,
            trajectories=tuple(
                _attempt(sample, f"t{slot}", reward, version)
                for sample, reward in zip(sample_ids(id, 2), (1.0, float(slot)), strict=True)
            ),
        )
        for slot in range(2)
    )
    return Simulated.of(step, groups, AdvantageEstimator())


def _attempt(id: str, task: str, reward: float, version: int) -> Trajectory:
    segment = Segment(
        prompt=(1,),
        tokens=(2, 3, 4),
        mask=(True,) * 3,
        logprobs=(-1.0,) * 3,
        versions=(VersionSpan(version, 3),),
    )
    return Trajectory(
        id=id,
        task=task,
        group=group_of(id),
        segments=(segment,),
        score=Score(reward),
        status="done",
    )


def _key(version: int) -> str:
    return f"{FOLDER}/{version:06d}.json"
