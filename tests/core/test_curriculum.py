"""The curriculum: turns, repetitions, and identical choices after a stop."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from etude.core.curriculum import HALF_LIFE, AskedTask, Curriculum, weighted_shuffle

TASKS = [f"t{n}" for n in range(300)]
FAMILIES = {task: f"f{n % 6}" for n, task in enumerate(TASKS)}
SIZE = 8


def asked(task: str, solved: int, *, epoch: int = 0, version: int = 0) -> AskedTask:
    rewards = (1.0,) * solved + (0.0,) * (SIZE - solved)
    return AskedTask(
        task=task, epoch=epoch, version=version, rewards=rewards, kept=0 < solved < SIZE
    )


def plan(fresh_frac: float = 0.5, *past: AskedTask, max_lag: int = 0) -> Curriculum:
    return Curriculum(FAMILIES, seed=1, fresh_frac=fresh_frac, max_lag=max_lag, past=past)


def test_without_second_chances_every_task_has_its_turn_before_any_has_two() -> None:
    curriculum = plan(1.0)
    choices = [curriculum.choose(version // 50) for version in range(3 * len(TASKS))]
    epochs = [choices[n : n + len(TASKS)] for n in range(0, len(choices), len(TASKS))]
    assert [{number for _, number in epoch} for epoch in epochs] == [{0}, {1}, {2}]
    assert all(sorted(task for task, _ in epoch) == sorted(TASKS) for epoch in epochs)
    assert len({tuple(task for task, _ in epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize(
    ("solved", "again"), [(0, False), (1, True), (5, True), (7, False), (8, False)]
)
def test_a_task_comes_back_before_its_turn_only_if_its_attempts_differed_and_will_again(
    solved: int, again: bool
) -> None:
    """Seven successes of eight count as eight after the group was trained on."""
    curriculum = plan(0.5, asked("t7", solved))
    early = [curriculum.choose(1) for _ in range(len(TASKS) // 2)]
    assert (("t7", 1) in early) == again


def test_an_even_chance_is_enough() -> None:
    """After so many versions only its family determines a task's chance, and every second group of
    the family differed."""
    curriculum = plan(0.5, asked("t0", 4), asked("t6", 0))
    assert FAMILIES["t0"] == FAMILIES["t6"]
    early = [curriculum.choose(64 * HALF_LIFE) for _ in range(len(TASKS) // 2)]
    assert ("t0", 1) in early and ("t6", 1) not in early


def test_what_is_under_way_or_not_settled_for_certain_says_nothing() -> None:
    """With a lag of 1, groups that were admitted at version 3 are settled when version 5 is
    live."""
    past = [asked(task, 4, version=3) for task in TASKS[:20]]
    at = {version: plan(0.5, *past, max_lag=1) for version in (4, 5)}
    early = {v: [curriculum.choose(v)[0] for _ in range(40)] for v, curriculum in at.items()}
    assert not set(early[4]) & set(TASKS[:20]), "and none is asked again meanwhile"
    assert 10 <= len(set(early[5]) & set(TASKS[:20])) <= 20


def test_families_whose_groups_tend_to_differ_are_explored_first() -> None:
    past = [asked(task, 3 if FAMILIES[task] == "f2" else 0) for task in TASKS[:60]]
    curriculum = plan(0.5, *past)
    new = [task for task, epoch in (curriculum.choose(1) for _ in range(60)) if epoch == 0]
    found = Counter(FAMILIES[task] for task in new)
    assert found["f2"] > len(new) / 2, found


def test_what_a_group_earned_counts_by_its_own_scale() -> None:
    """Rewards of any range, and differences that are not in the reward at all."""
    wide = AskedTask(task="t", epoch=0, version=0, rewards=(9.0, 7.0, -3.0, -2.0), kept=True)
    narrow = AskedTask(task="t", epoch=0, version=0, rewards=(0.2, 0.1, 0.1, 0.2), kept=True)
    assert wide.chance == narrow.chance > 0.6
    by_credit = AskedTask(task="t", epoch=0, version=0, rewards=(1.0, 1.0), kept=True)
    assert by_credit.chance == 1.0
    assert asked("t", 0).chance == asked("t", 8).chance < asked("t", 7).chance
    assert asked("t", 7).chance < asked("t", 5).chance < asked("t", 1).chance


@pytest.mark.parametrize("stop", range(0, 24, 5))
def test_a_run_that_was_stopped_makes_the_same_choices(stop: int) -> None:
    """At lag 0, in whichever order groups end: the groups of the version that were cut short are
    chosen again, and all others follow as if nothing had happened."""

    def played(stop: int | None, order: int) -> list[set[tuple[str, int]]]:
        rng, past, versions = Random(order), list[AskedTask](), []
        curriculum, count = plan(0.5), 0
        for version in range(6):
            done: set[tuple[str, int]] = set()
            under_way: list[tuple[str, int]] = []
            while len(done) < 10:
                while len(done) + len(under_way) < 10:
                    under_way.append(curriculum.choose(version))
                task, epoch = under_way.pop(rng.randrange(len(under_way)))
                done.add((task, epoch))
                solved = hash_of(task, epoch) % (SIZE + 1)
                past.append(asked(task, solved, epoch=epoch, version=version))
                curriculum.learn(past[-1])
                count += 1
                if count == stop:
                    curriculum, under_way = plan(0.5, *past), []
            versions.append(done)
        return versions

    assert played(stop, order=1) == played(None, order=2)


def hash_of(task: str, epoch: int) -> int:
    return int(task[1:]) * 7 + epoch * 3


def test_fewer_tasks_than_one_step_needs_are_asked_several_times() -> None:
    curriculum = Curriculum({"a": "", "b": ""}, seed=0, fresh_frac=0.5, max_lag=0)
    choices = [curriculum.choose(0) for _ in range(6)]
    assert sorted(choices) == [(task, epoch) for task in "ab" for epoch in range(3)]


def test_most_groups_teach_something_where_few_would_in_a_uniform_order() -> None:
    """A policy that always or never solves most of its tasks."""

    def dropped(fresh_frac: float) -> float:
        rng = Random(5)
        rates = {task: rng.choice((0.0, 0.0, 0.02, 0.3, 0.6, 1.0)) for task in TASKS}
        curriculum, lost, count = plan(fresh_frac, max_lag=1), 0, 0
        for version in range(40):
            for _ in range(12):
                task, epoch = curriculum.choose(version)
                solved = sum(rng.random() < rates[task] for _ in range(SIZE))
                curriculum.learn(asked(task, solved, epoch=epoch, version=version))
                lost, count = lost + (solved in (0, SIZE)), count + 1
        return lost / count

    assert dropped(1.0) > 0.5
    assert dropped(0.5) < 0.45
    assert dropped(0.25) < 1 / 3


def test_a_weighted_shuffle_is_by_weight_and_leaves_nothing_out() -> None:
    weights = {"heavy": 1.0, "light": 0.1, "none": 0.0}
    first = Counter(weighted_shuffle(weights, Random(n))[0] for n in range(300))
    assert first["heavy"] > 250
    assert sorted(weighted_shuffle(weights, Random(0))) == sorted(weights)
