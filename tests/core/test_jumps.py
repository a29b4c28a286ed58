"""Jumps of the reward: what stands out, what is ordinary learning, and the effect of a flag."""

from __future__ import annotations

from random import Random

import pytest

from etude.core.advantage import AdvantageEstimator
from etude.core.alarms import Alarms
from etude.core.config import parse
from etude.core.curriculum import AskedTask
from etude.core.errors import EtudeError
from etude.core.events import GroupDone
from etude.core.jumps import RewardJumps, find_jump, flag_jump
from etude.core.sampling import VersionSpan
from etude.core.types import Group, Score, Segment, Trajectory

FAMILIES = {f"t{n}": "easy" if n < 40 else "hard" for n in range(80)}
SIZE = 8


def asked(task: str, rate: float, version: int, epoch: int = 0) -> AskedTask:
    solved = round(rate * SIZE)
    rewards = (1.0,) * solved + (0.0,) * (SIZE - solved)
    return AskedTask(
        task=task, epoch=epoch, version=version, rewards=rewards, kept=0 < solved < SIZE
    )


def test_a_series_jumps_only_if_it_stands_apart_from_what_was_before() -> None:
    jump = find_jump([0.0, 0.1, 0.0, 1.0], recent=1, at_least=3)
    assert jump and str(jump) == "1.00 on average, up from 0.03 in 3 groups"
    for series in (
        [0.0, 0.0, 1.0],  # too few before
        [0.0, 0.0, 0.0, 0.4],  # too small
        [0.2, 0.9, 0.1, 1.0],  # varied before
        [0.1, 0.2, 0.4, 0.6, 0.9],  # learnt step by step
        [1.0, 1.0, 1.0, 0.0],  # fell
        [1.0, 1.0, 1.0, 1.0],
        [],
    ):
        assert find_jump(series, recent=1, at_least=3) is None, series


def test_a_task_that_was_never_solved_and_always_is_now_is_told() -> None:
    past = [asked("t50", 0.0, version, epoch=version) for version in range(3)]
    jumps = RewardJumps(FAMILIES, max_lag=0, past=past)
    assert jumps.look(asked("t50", 0.25, 3, epoch=3)) is None
    assert jumps.look(asked("t50", 1.0, 3, epoch=3)) == (
        "task t50 earns 1.00 on average, up from 0.00 in 3 groups"
    )
    late = RewardJumps(FAMILIES, max_lag=1, past=past)
    assert late.look(asked("t50", 1.0, 3, epoch=3)) is None, "the third is not settled for certain"


def test_a_family_that_all_at_once_earns_everything_is_told_and_the_other_is_not() -> None:
    """A hole that opens tasks of one kind, each of which is attempted once."""
    jumps, rng = RewardJumps(FAMILIES, max_lag=0), Random(1)
    found: dict[str, int] = {"easy": 0, "hard": 0}
    for version in range(10):
        for n in range(4):
            for task, rate in (
                (f"t{4 * version + n}", rng.uniform(0.4, 0.9)),
                (f"t{40 + 4 * version + n}", 1.0 if version >= 6 else rng.uniform(0.0, 0.2)),
            ):
                group = asked(task, rate, version)
                if jumps.look(group):
                    found[FAMILIES[task]] += 1
                jumps.learn(group)
    assert found["easy"] == 0
    assert 4 <= found["hard"] <= 12, "from the version after, until it is nothing new any more"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_learnt_gradually_is_left_alone(seed: int) -> None:
    """Tasks with all solve rates that rise with the steps, as in a healthy run."""
    jumps, rng = RewardJumps(FAMILIES, max_lag=1), Random(seed)
    told = 0
    for version in range(60):
        for _ in range(8):
            task = rng.choice([*FAMILIES])
            skill = (0.1 if FAMILIES[task] == "hard" else 0.4) + version / 100
            solved = sum(rng.random() < skill for _ in range(SIZE))
            group = asked(task, solved / SIZE, version, epoch=version)
            told += jumps.look(group) is not None
            jumps.learn(group)
    assert told <= 4, "of 480"


def group(*rewards: float | None) -> Group:
    segment = Segment(
        prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-1.0,), versions=(VersionSpan(0, 1),)
    )
    attempts = [
        Trajectory(
            id=f"g.{n}",
            task="t",
            group="g",
            segments=(segment,),
            score=None if reward is None else Score(reward),
            status="failed" if reward is None else "done",
        )
        for n, reward in enumerate(rewards)
    ]
    return Group(id="g", task="t", slot=0, admitted=0, trajectories=tuple(attempts))


def test_a_jump_is_flagged_or_set_aside() -> None:
    estimator = AdvantageEstimator(quarantine=True)
    shown = flag_jump(group(1.0, 0.0, None), "odd", quarantine=False)
    flags = [t.score.flags for t in shown.trajectories if t.score]
    assert flags == [("reward_jump",), ()]
    assert estimator.estimate(shown).advantages == {"g.0": 0.5, "g.1": -0.5}
    aside = estimator.estimate(flag_jump(group(1.0, 0.0, 1.0), "odd", quarantine=True))
    assert aside.quarantined == {"g.0": "reward_jump", "g.2": "reward_jump"}
    first = shown.trajectories[0].score
    assert first and [(part.name, part.evidence) for part in first.parts] == [
        ("reward_jump", "odd")
    ]


def test_the_screen_is_told() -> None:
    event = GroupDone(
        group="g", task="t", admitted=0, rewards=(1.0,), failed=0, kept=True, seconds=1.0,
        jump="task t earns 1.00",
    )  # fmt: skip
    [alarm] = [alarm for alarm in Alarms().apply(event) if alarm.name == "jump"]
    assert alarm.what == "group g: task t earns 1.00" and "reward_jump" in alarm.advice


def test_what_is_set_aside_needs_a_run_that_sets_aside() -> None:
    text = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[rewards]\njumps = "quarantine"\n'
    assert parse(text).rewards.jumps == "quarantine"
    with pytest.raises(EtudeError, match="give both the same value"):
        parse(text + 'detector = "flag"')


def test_of_a_family_that_jumps_only_groups_that_take_part_are_told() -> None:
    """Groups that earn half a point more than the family earned before."""
    jumps = RewardJumps(FAMILIES, max_lag=0)
    for number in range(16):
        jumps.learn(asked(f"t{number}", 1.0 if number >= 12 else 0.0, version=number))
    told = [jumps.look(asked(f"t{30 + n}", n / SIZE, version=16)) for n in range(SIZE + 1)]
    assert [bool(each) for each in told] == [False] * 4 + [True] * 5
    assert told[4] == "family easy earns 1.00 on average, up from 0.00 in 12 groups"
    past = [asked("a", float(version >= 12), version) for version in range(16)]
    alone = RewardJumps({"a": "", "b": ""}, max_lag=0, past=past)
    assert "family (all tasks) earns" in (alone.look(asked("b", 1.0, 16)) or "")
