"""The assignment of a machine's devices."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.placement_config import PlacementConfig, deal
from etude.launch import devices
from etude.launch.devices import count_gpus, described_placement, placed
from etude.launch.launcher import (
    LocalLauncher,
    Program,
    evaluator_programs,
    locked,
    server_programs,
    trainer_programs,
)

TOML = 'name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'
ON_GPUS = ["engine.device=auto", "trainer.device=cuda"]


def test_gpus_are_dealt_to_ranks_and_then_to_regions() -> None:
    assert deal(8, 4, ("east", "west")) == PlacementConfig(
        trainer=(0, 1, 2, 3), engines={"east": (4, 6), "west": (5, 7)}
    )
    assert deal(2, 1, ("east", "west")) == PlacementConfig(), "too few: all share all"
    assert deal(3, 1, ("east", "west")).engines == {"east": (1,), "west": (2,)}


def test_the_file_comes_before_what_is_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own = placed(parse(TOML, [*ON_GPUS, "placement.trainer=[3]"]))
    assert own == PlacementConfig(trainer=(3,))
    assert placed(parse(TOML, ON_GPUS)).engines == {"east": (1, 3), "west": (2,)}
    assert placed(parse(TOML)) == PlacementConfig(), "a run on the CPU has no use for them"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert placed(parse(TOML, ON_GPUS)) == PlacementConfig() and count_gpus() == 2


def test_it_is_told() -> None:
    assert described_placement(PlacementConfig()) == []
    told = described_placement(deal(3, 1, ("east", "west")))
    assert told == ["  GPUs: trainer 0; east 1; west 2"]


def test_a_gpu_of_two_is_refused() -> None:
    with pytest.raises(EtudeError, match="GPU 1 is given to both the trainer and the region east"):
        parse(TOML + "[placement]\ntrainer = [0, 1]\nengines = {east = [1]}\n")


def test_programs_see_their_own(tmp_path: Path) -> None:
    config, placement = parse(TOML), deal(4, 2, ("east", "west"))
    servers, _ = server_programs("S", config.engine, placement)
    assert [program.gpus for program in servers] == [(), (2,), (3,)]
    trainers = trainer_programs("S", 2, tmp_path / "r", placement.trainer)
    assert [program.gpus for program in trainers] == [(0, 1)] * 2
    assert evaluator_programs("S", 0, placement) == []
    (evaluator,) = evaluator_programs("S", 5, PlacementConfig(sandbox_cpus=(3,)))
    assert (evaluator.gpus, evaluator.cpus) == ((), (3,)), "all share all"
    (evaluator,) = evaluator_programs("S", 5, deal(7, 2, ("east", "west")))
    assert evaluator.gpus == (6,), "never the trainer's"


def test_a_process_is_given_its_devices_and_cores(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, pathlib; pathlib.Path('out').write_text("
        "os.environ['CUDA_VISIBLE_DEVICES'] + str(sorted(os.sched_getaffinity(0))))"
    )
    argv = (sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}")
    with locked(tmp_path) as lock:
        launcher = LocalLauncher(tmp_path, threads=1, resume="", lock=lock)
        asyncio.run(launcher.run_to_end(Program("x", argv, gpus=(2, 5), cpus=(core,))))
    assert (tmp_path / "out").read_text() == f"2,5[{core}]"
