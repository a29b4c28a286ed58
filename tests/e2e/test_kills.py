"""The real processes, really killed: whichever dies, `etude run` goes on and the ledger
balances."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from random import Random

import pytest

from etude.core.config import parse
from etude.core.events import EVENTS, MismatchMeasured
from etude.launch.launcher import locked
from etude.store.runs import Run
from tests.e2e.runs import MODULES, ONE_REGION, TINY, Etude, check_books
from tests.slow import slow

pytestmark = pytest.mark.e2e


def check_agreement(run: Run) -> None:
    """Check that each step was compared with the engines, token by token and region by region."""
    metered = [
        event
        for event in run.events("trainer", EVENTS).records()
        if isinstance(event, MismatchMeasured)
    ]
    assert [event.step for event in metered] == run.batches()
    for event in metered:
        batch = run.batch(event.step)
        assert [len(row.logprobs) for row in run.recomputed(event.step)] == [
            sum(row.mask) for row in batch.rows
        ]
        assert sum(gap.num_tokens for gap in event.by_region.values()) == event.all.num_tokens
        assert event.by_region.keys() <= {"west", "east"} and all(
            worst.text for worst in event.worst
        )


def test_three_stages_in_two_regions_of_which_one_dies(etude: Etude) -> None:
    """The gateway dies too: both are restarted, and sessions go on."""
    etude.write(TINY.read_text())
    process = etude.start()
    etude.wait_for_groups(1, process)
    for victim in ("--region east", MODULES["gateway"]):
        (pid,) = [pid for pid, line in etude.processes().items() if victim in line]
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert re.search(r"the gateway was killed by SIGKILL.* and is being restarted", err + out)
    summary = json.loads(out.splitlines()[-1])
    check_books(etude)
    assert etude.processes() == {}
    assert summary["in_flight"] == 0 and summary["regions"] == 2 and summary["lag_bound"] == 1
    assert summary["solve_rate"].keys() == {"start", "midtrain", "sft", "rl"}
    run = Run.open(f"file:{etude.directory}", create=False)
    assert run.evals() == [
        f"{v:06d}.{split}" for v in (0, 1, 2, 6) for split in ("heldout", "novel")
    ]
    assert run.batches() == [3, 4, 5, 6]
    check_agreement(run)
    assert etude.finish() == summary, "a finished run is shown, not run again"


@pytest.mark.parametrize(
    "victims", [("controller", "launcher"), slow(("trainer", "ctrl-c"))], ids=" and ".join
)
def test_whatever_is_killed_the_next_start_goes_on(etude: Etude, victims: tuple[str, ...]) -> None:
    etude.write(ONE_REGION)
    seed = int(os.environ.get("ETUDE_SEED", Random().randrange(2**32)))
    print(f"ETUDE_SEED={seed} python -m pytest {__file__} -k whatever_is_killed")
    rng = Random(seed)
    for victim in victims:
        before = etude.groups()
        process = etude.start()
        etude.wait_for_groups(len(before) + 1, process)
        time.sleep(rng.uniform(0, 0.5))
        err = etude.strike(victim, process)
        assert etude.processes() == {}, f"left behind after the end of the {victim}"
        check_books(etude, finished=False)
        if victim in MODULES:
            assert process.returncode == 2
            assert f"the {victim} was killed by SIGKILL" in err and "Resume with: etude run" in err
        if victim == "ctrl-c":
            assert process.returncode == 130
            assert "stopped; resume with: etude run" in err and "Traceback" not in err
    finished = etude.groups()
    assert etude.finish()["in_flight"] == 0
    check_books(etude)
    assert finished <= etude.groups()


def test_one_run_has_one_launcher(etude: Etude) -> None:
    etude.write(ONE_REGION)
    with locked(etude.directory):
        process = etude.start()
        assert f"is in use by process {os.getpid()}" in process.communicate()[1]
        assert process.returncode == 2


def test_the_tiny_configs_are_configs() -> None:
    assert [stage.kind for stage in parse(ONE_REGION).stage] == ["rl"]
