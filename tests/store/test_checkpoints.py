"""Checkpoints in the store are complete or absent, whoever writes them and however that ends."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from etude.commands.show import show
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.model.directory import MODEL_FILES
from etude.store import checkpoints
from etude.store.checkpoints import Checkpoint, CheckpointWriter, Origin, read, read_part
from etude.store.runs import Run

LINEAGE = (
    Origin(
        stage="midtrain",
        parent="seed 3",
        config={"steps": 5},
        data="7 documents, sha256 ab",
        code="etude 1",
    ),
    Origin(stage="sft", parent="version 1", config={"lr": 0.5}, data="9 sessions", code="etude 2"),
)
SAVED = Checkpoint(
    stage="sft", step=0, version=1, lineage=LINEAGE, cursor={"heldout_losses": [0.5, 0.25]}
)


@pytest.fixture
def run() -> Run:
    return Run.open("memory:")


def at(version: int, step: int = 0) -> Checkpoint:
    return replace(SAVED, version=version, step=step)


def test_everything_comes_back(run: Run) -> None:
    saver = CheckpointWriter(run)
    saver.save(SAVED, b"tensors")
    saver.wait()
    assert run.checkpoints() == [SAVED.name] == ["000001.000000"]
    found = read(run, SAVED.name)
    assert replace(found, parts=()) == SAVED and len(found.parts) == 1
    assert read_part(run, found, 0) == b"tensors"


def test_it_is_there_when_every_rank_has_written_its_part(run: Run) -> None:
    savers = [CheckpointWriter(run, rank, 3) for rank in range(3)]
    told: list[int] = []
    for rank in (2, 0):
        savers[rank].save(SAVED, f"part {rank}".encode(), lambda rank=rank: told.append(rank))  # type: ignore[misc]
    savers[2].wait()
    assert run.checkpoints() == [] and told == [2]
    savers[1].save(SAVED, b"part 1")
    savers[0].wait()
    assert told == [2, 0]
    found = read(run, SAVED.name)
    assert [read_part(run, found, rank) for rank in range(3)] == [b"part 0", b"part 1", b"part 2"]


def test_a_rank_that_never_writes_is_named_and_nobody_waits_for_it_at_the_end(run: Run) -> None:
    saver = CheckpointWriter(run, 0, 3)
    saver.save(SAVED, b"part 0")
    saver.close()
    with pytest.raises(
        EtudeError, match=r"is incomplete: ranks \[1, 2\] did not write their parts"
    ):
        saver.wait()
    assert run.checkpoints() == []


def test_a_rank_that_never_writes_is_not_waited_for_forever(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "PARTS_TIMEOUT_S", 0.01)
    monkeypatch.setattr(checkpoints, "POLL_S", 0.001)
    saver = CheckpointWriter(run, 0, 2)
    saver.save(SAVED, b"part 0")
    with pytest.raises(EtudeError, match=r"is incomplete: ranks \[1\] did not write"):
        saver.wait()


def test_two_trainers_on_one_store_are_told(run: Run) -> None:
    """Two parts of rank 0 are not the parts of two ranks."""
    run.put_checkpoint_part(SAVED.name, "00000.ab", b"of another trainer")
    saver = CheckpointWriter(run, 0, 2)
    saver.save(SAVED, b"part 0")
    with pytest.raises(EtudeError, match="is also being written by another trainer"):
        saver.wait()
    assert run.checkpoints() == []


def test_what_was_never_committed_is_removed_before_anybody_saves(run: Run) -> None:
    saver = CheckpointWriter(run)
    saver.save(at(1), b"one")
    saver.wait()
    run.put_checkpoint_part("000002.000000", "00001.ab", b"of a trainer that was killed")
    saver.clean()
    assert run.checkpoint_parts() == [("000001.000000", read(run, "000001.000000").parts[0])]


def test_the_last_two_are_kept_and_none_is_ever_changed(run: Run) -> None:
    saver = CheckpointWriter(run)
    for version in (1, 2, 10):
        saver.save(at(version), f"weights {version}".encode())
    saver.save(at(10), b"others")
    saver.wait()
    assert run.checkpoints() == ["000002.000000", "000010.000000"]
    assert {name for name, _ in run.checkpoint_parts()} == {"000002.000000", "000010.000000"}
    assert read_part(run, read(run, "000010.000000"), 0) == b"weights 10"


def assert_opened(gate: threading.Event) -> None:
    assert gate.wait(60)


def test_nobody_waits_for_the_writing_but_the_next_one(run: Run) -> None:
    saver, gate = CheckpointWriter(run), threading.Event()
    saver.save(at(1), b"one", lambda: assert_opened(gate))
    assert not gate.is_set(), "save returned while the first was under way"
    gate.set()
    saver.save(at(2), b"two")
    saver.wait()
    assert run.checkpoints() == ["000001.000000", "000002.000000"]


def test_what_goes_wrong_in_the_background_is_raised(run: Run) -> None:
    def fail() -> None:
        raise EtudeError("no more paper")

    saver = CheckpointWriter(run)
    saver.save(at(1), b"one", fail)
    with pytest.raises(EtudeError, match="no more paper"):
        saver.save(at(2), b"two")


def test_a_damaged_part_is_named(run: Run) -> None:
    saver = CheckpointWriter(run)
    saver.save(SAVED, b"tensors")
    saver.wait()
    found = read(run, SAVED.name)
    run.put_checkpoint_part(SAVED.name, found.parts[0], b"tensorz")
    why = (
        rf"the part of rank 0, checkpoints/{SAVED.name}/00000.\w+, is damaged: "
        rf"remove"
    )
    with pytest.raises(EtudeError, match=rf"checkpoint 000001\.000000 of memory:: {why}"):
        read_part(run, found, 0)
    run.objects.delete(f"checkpoints/{SAVED.name}/{found.parts[0]}")
    with pytest.raises(EtudeError, match="the part of rank 0, .* is gone: remove that checkpoint"):
        read_part(run, found, 0)


def test_a_damaged_manifest_costs_its_checkpoint_alone(run: Run) -> None:
    saver = CheckpointWriter(run)
    saver.save(SAVED, b"tensors")
    saver.wait()
    key = f"checkpoints/{SAVED.name}/manifest.json"
    run.objects.put(key, b"")
    with pytest.raises(EtudeError, match=f"{key} is damaged: remove that checkpoint, and"):
        read(run, SAVED.name)


def test_the_lineage_is_shown(tmp_path: Path) -> None:
    run, console = Run.open(f"file:{tmp_path}"), Console(record=True, width=200)
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    saver = CheckpointWriter(run)
    saver.save(SAVED, b"x" * 2_000_000)
    saver.wait()
    for name in MODEL_FILES:
        run.put_model_file(name, b"{}")
    show(f"{tmp_path}/checkpoints/{SAVED.name}", console)
    show(str(tmp_path), console)
    assert console.export_text(clear=False).count("its lineage:") == 1, "a run is short by default"
    show(str(tmp_path), console, everything=True)
    text = console.export_text()
    assert text.count("checkpoint 000001.000000: version 1, by 1 rank, 2.0 MB; its lineage:") == 2
    assert (
        "midtrain from seed 3\n    data    7 documents, sha256 ab\n    config  steps 5\n    code   "
        " etude 1" in text
    )
    assert "sft from version 1" in text
    with pytest.raises(
        EtudeError, match=r"000009\.000000 is not a checkpoint: the run has 000001\.000000"
    ):
        show(f"{tmp_path}/checkpoints/000009.000000", console)


def test_what_was_half_written_is_removed_before_anybody_saves(tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}")
    saver = CheckpointWriter(run)
    saver.save(at(1), b"one")
    saver.wait()
    folder = tmp_path / "checkpoints"
    before = {path for path in folder.rglob("*") if path.is_file()}
    (folder / "000002.000000#7").write_bytes(b"half")
    saver.clean()
    assert {path for path in folder.rglob("*") if path.is_file()} == before
