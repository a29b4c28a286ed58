"""After SIGKILL at a step, the next process ends with the SHA-256 of a run that was never killed.

Every step of every stage, which takes some minutes:

    ETUDE_KILLS=all python -m pytest tests/trainer/test_exactness.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from etude.store.checkpoints import read
from etude.trainer.stages import STAGE
from tests.slow import slow_but
from tests.trainer.lives import STAGES, STEPS, fingerprint, prepared, spawn, spawn_ranks

EVERY_STEP = os.environ.get("ETUDE_KILLS") == "all"
PLACES = ("told", "uncommitted", "committed")


def deaths() -> list[tuple[int, str]]:
    if EVERY_STEP:
        return [(step, PLACES[step % 3]) for step in range(1, STEPS + 1)]
    return [(3, "told"), (10, "uncommitted"), (STEPS - 1, "committed")]


def test_every_stage_is_killed_here() -> None:
    assert STAGES.keys() == STAGE.keys()


@pytest.mark.parametrize("kind", slow_but({"rl", "sft"}, STAGES))
def test_a_killed_trainer_comes_to_the_very_same(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    straight = prepared(tmp_path / "straight", kind)
    assert spawn(straight, apart=True) == 0
    expected = fingerprint(straight)
    if EVERY_STEP:
        for step, place in deaths():
            run = prepared(tmp_path / f"{step}", kind)
            assert spawn(run, step, place) == -signal.SIGKILL
            assert spawn(run) == 0
            assert fingerprint(run) == expected, (step, place)
    else:
        run = prepared(tmp_path / "killed", kind)
        for step, place in deaths():
            assert spawn(run, step, place) == -signal.SIGKILL, (step, place)
        assert spawn(run) == 0
        assert fingerprint(run) == expected
    lineage = read(straight, straight.checkpoints()[-1]).lineage
    assert [origin.stage for origin in lineage] == [kind]
    assert "sha256" in lineage[0].data and "etude" in lineage[0].code


def test_a_rank_is_killed_in_mid_step_and_the_run_goes_on(tmp_path: Path) -> None:
    straight, killed = prepared(tmp_path / "straight", "rl"), prepared(tmp_path / "killed", "rl")
    assert spawn_ranks(straight, tmp_path / "a", 2, apart=True) == [0, 0]
    assert len(read(straight, straight.checkpoints()[-1]).parts) == 2
    assert spawn_ranks(killed, tmp_path / "b", 2, die_at=7) == [2, -signal.SIGKILL]
    said = killed.objects.get("last words/0").decode()
    assert "rank 1 of 2 cannot be reached, so rank 0 stops at step 7 of rl" in said
    assert killed.checkpoints()[-1] in ("000005.000000", "000006.000000")
    assert spawn_ranks(killed, tmp_path / "c", 2) == [0, 0]
    assert fingerprint(killed) == fingerprint(straight)
