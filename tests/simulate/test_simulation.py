"""Whole runs under virtual time: no fault breaks anything, and deliberate defects are detected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from etude.core.fleet import Fleet
from etude.core.window import Window
from etude.simulate.faults import play
from etude.simulate.scenario import SMALL, Faults
from etude.simulate.simulation import Simulation
from etude.simulate.state import Outcome

SCHEDULES = 25
"""Schedules in CI; `etude simulate RUN.toml --gpus 8 --seeds 10000` plays any number."""
QUIET = replace(SMALL, faults=Faults(), spread=0.0, with_signal=1.0)


def violations(seeds: int) -> Iterator[str]:
    for seed in range(seeds):
        yield from play(SMALL, seed).violations


def test_no_schedule_of_faults_breaks_a_promise() -> None:
    met: Counter[str] = Counter()
    lags = set()
    for seed in range(SCHEDULES):
        outcome = play(SMALL, seed)
        assert not outcome.violations and not outcome.stuck, (seed, outcome)
        assert outcome.steps >= SMALL.steps and outcome.lag_max <= SMALL.max_lag
        met += outcome.faults
        lags.add(outcome.lag_max)
    assert min(met.values()) >= 5 and len(met) == 10, f"every kind of fault was met: {met}"
    assert SMALL.max_lag in lags, "a bound that is never reached proves little"


def test_a_schedule_is_given_by_its_seed() -> None:
    assert play(SMALL, 3) == play(SMALL, 3)
    assert play(SMALL, 3) != play(SMALL, 4)


def test_without_faults_the_slower_side_is_always_busy() -> None:
    training = play(replace(QUIET, train_s=100.0, max_lag=2), 0)
    assert training.trainer_busy_s / training.seconds > 0.9
    sampling = play(replace(QUIET, train_s=0.1, turn_s=20.0, concurrency=16, max_lag=2), 0)
    assert sampling.engine_busy_s / sampling.engine_s > 0.6
    assert sampling.trainer_busy_s / sampling.seconds < 0.05


def test_the_slowest_session_of_a_group_counts_unless_its_task_makes_all_slow() -> None:
    one_by_one = replace(
        QUIET, steps=400, groups_per_step=1, group_size=1, max_lag=0, reorder_window=1,
        max_num_seqs=16, tool_s=0.0, train_s=0.1,
    )  # fmt: skip

    def longer_in_groups(**spread: float) -> float:
        alone = replace(one_by_one, **spread)
        return play(replace(alone, group_size=8), 0).seconds / play(alone, 0).seconds

    assert longer_in_groups(spread=0.6) > 1.2
    assert longer_in_groups(task_spread=0.6) == pytest.approx(1.0, abs=0.1)


def test_a_stopped_worker_does_not_stop_the_run() -> None:
    def hung_forever() -> Outcome:
        simulation = Simulation(QUIET, 0)
        simulation.processes[0].hung_until = 1e9
        return simulation.run()

    whole, short = play(QUIET, 0), hung_forever()
    assert not short.stuck and not short.violations
    assert short.seconds < 1.5 * whole.seconds + 6 * QUIET.heartbeat_timeout_s


def test_relays_read_a_version_once_for_each_region() -> None:
    """1,000 workers in 4 regions."""
    large = replace(
        QUIET, steps=2, workers_per_region=250, heartbeat_s=5.0, heartbeat_timeout_s=30.0
    )
    outcome = play(large, 0)
    wanted = large.regions * large.delta_bytes * outcome.versions_read
    assert outcome.store_bytes <= 1.1 * wanted and outcome.versions_read >= 2
    assert play(replace(large, relays=False), 0).store_bytes > 100 * wanted


class Forgetful(Simulation):
    """Its gateway accepts any weights after a restart, as it once did."""

    def new_fleet(self) -> Fleet:
        return Fleet(heartbeat_timeout_s=self.s.heartbeat_timeout_s)


class Overfull(Simulation):
    """Its window has two slots too many."""

    def _resume_window(self, version: int) -> None:
        super()._resume_window(version)
        assert isinstance(self.window, Window)
        self.window.capacity += 2 * self.s.groups_per_step


class Unchecked(Simulation):
    """Its workers serve their downloads without checking them."""

    def publish(self, version: int) -> None:
        self.published = max(self.published, version)


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (Forgetful, "steps old"),
        (Overfull, "steps? (late|old)|too old"),
        (Unchecked, "which nobody has verified"),
    ],
)
def test_what_is_broken_is_found_out(
    broken: type[Simulation], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.simulate.faults.Simulation", broken)
    assert any(re.search(what, each) for each in violations(seeds=60))
