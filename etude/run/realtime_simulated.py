"""Rollouts of tasks that complement users' sessions in the same batch (`[realtime]
simulated_share`).

The version that a step starts from attempts tasks in groups, as in any run; the fate of each
attempt is recorded in the store and in the ledger, as in any run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from etude.core.advantage import AdvantageEstimator
from etude.core.config import RunConfig
from etude.core.ledger import Dropped, Issued
from etude.core.lineage import estimator_of, stage_of
from etude.core.seeds import derive
from etude.core.stages import RlConfig
from etude.core.types import Batch, Group, Task
from etude.core.updates import simulated_group
from etude.run.controller import build_runner, read_tasks
from etude.run.journal import drops, sample_ids, with_fate
from etude.run.loop import RunAttempt, assemble_batch
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The groups of a step, and the batch that is made from them."""

    groups: tuple[Group, ...]
    batch: Batch | None
    """The batch; None if no attempt teaches anything."""
    dropped: tuple[Dropped, ...]

    @classmethod
    def of(cls, step: int, groups: tuple[Group, ...], estimator: AdvantageEstimator) -> Simulated:
        outcomes = {group.id: estimator.estimate(group) for group in groups}
        taught = [group for group in groups if outcomes[group.id].advantages]
        return cls(
            groups=groups,
            batch=assemble_batch(step, taught, estimator)[0] if taught else None,
            dropped=tuple(drop for group in groups for drop in drops(outcomes[group.id])),
        )


def issued(group: Group) -> Issued:
    return Issued(
        group=group.id,
        task=group.task,
        samples=tuple(trajectory.id for trajectory in group.trajectories),
        version=group.admitted,
    )


def list_rollouts(run: Run, step: int, groups: Sequence[Group], dropped: Sequence[Dropped]) -> None:
    """Store the rows of the groups of a step, with the fate of each attempt; only once, however
    often this is called."""
    log = RolloutLog(run.objects)
    listed = log.groups()
    fates = {sample: drop.label for drop in dropped for sample in drop.samples}
    log.append(
        [
            with_fate(row, fates.get(row.id, step))
            for group in groups
            if group.id not in listed
            for row in group_rows(group)
        ]
    )


async def simulate(run: Run, config: RunConfig, version: int, step: int) -> Simulated:
    """Have a version attempt as many groups as the stage has in a step."""
    # import the engine, and torch with it, only when there is something to attempt
    from etude.run.evaluator import own_sessions

    stage = config.stage[-1]
    assert isinstance(stage, RlConfig)
    async with own_sessions(run, config) as own:
        tasks = await read_tasks(own.environment, config.tasks, "train")
        await own.engine.load(version)
        runner = build_runner(
            config,
            own.environment,
            own.sessions,
            own.http,
            desk=None,
            temperature=stage.temperature,
            is_training=True,
        )
        draw = Random(derive(config.seed, "simulated", step))
        chosen = draw.sample(tasks, min(stage.groups_per_step, len(tasks)))
        groups = await asyncio.gather(
            *(
                _attempt_group(
                    runner.attempt,
                    task,
                    step=step,
                    slot=number,
                    size=stage.group_size,
                    version=version,
                    stage=stage_of(version, config.stage),
                    seed=config.seed,
                )
                for number, task in enumerate(chosen)
            )
        )
    quarantine = config.rewards.quarantines
    estimator = estimator_of(stage, config.model.max_context, quarantine=quarantine)
    return Simulated.of(step, tuple(groups), estimator)


async def _attempt_group(
    attempt: RunAttempt, task: Task, *, step: int, slot: int, size: int, version: int, stage: str,
    seed: int,
) -> Group:  # fmt: skip
    id = simulated_group(step, slot)
    trajectories = await asyncio.gather(
        *(
            attempt(task, sample, derive(seed, "simulated", step, task.id, number))
            for number, sample in enumerate(sample_ids(id, size))
        )
    )
    return Group(
        id=id,
        task=task.id,
        slot=slot,
        admitted=version,
        stage=stage,
        trajectories=tuple(trajectories),
    )
