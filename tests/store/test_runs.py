from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, StageStarted, WeightsLive
from etude.core.ledger import Issued, Trained
from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Group, RecomputedRow, Row, Score, Segment, Trajectory
from etude.store import telemetry
from etude.store.codec import Damaged, from_json, pack, to_json
from etude.store.experts import get_experts, put_experts
from etude.store.objects import Missing
from etude.store.runs import Run
from etude.store.telemetry import (
    EventLog,
    EventReader,
    event_writer,
    store_used,
    sync_event_writer,
)

TOML = 'name = "r"\n[[stage]]\nkind = "rl"\nsteps = 3\n'

SEGMENT = Segment(
    prompt=(1, 2),
    tokens=(3, 4, 5),
    mask=(True, False, True),
    logprobs=(-0.1, 0.0, -1e-30),
    versions=(VersionSpan(1, 1), VersionSpan(2, 1)),
    experts="00ff",
)
DONE = Trajectory(
    id="g000007.0",
    task="t",
    group="g000007",
    segments=(SEGMENT,),
    score=Score(1.0),
    status="done",
    messages=[{"role": "user", "content": "fix it"}],
)
FAILED = Trajectory(
    id="g000007.1",
    task="t",
    group="g000007",
    segments=(),
    score=None,
    status="failed",
    error="score: broken",
)
GROUP = Group(id="g000007", task="t", slot=7, admitted=1, trajectories=(DONE, FAILED))
ROW = Row(
    sample="g000007.0",
    tokens=(1, 2, 3),
    mask=(False, False, True),
    logprobs=(0.0, 0.0, -0.123456789012345),
    advantages=(0.0, 0.0, 0.5),
    versions=(VersionSpan(1, 1),),
)
BATCH = Batch(step=2, rows=(ROW,), oldest=1)


@pytest.fixture
def run() -> Run:
    return Run.open("memory:")


def test_groups_and_batches_come_back_as_they_went_in(run: Run) -> None:
    run.put_group(GROUP)
    run.put_batch(BATCH)
    assert run.group("g000007") == GROUP and run.groups() == ["g000007"]
    assert run.batch(2) == BATCH and run.batches() == [2]
    with pytest.raises(Missing):
        run.batch(3)
    run.objects.put("batches/000003", run.objects.get("batches/000002"))
    with pytest.raises(EtudeError, match="batches/000003 contains the batch of step 2"):
        run.batch(3)


def test_a_batch_is_made_once(run: Run) -> None:
    run.put_batch(BATCH)
    run.put_batch(BATCH)
    with pytest.raises(EtudeError, match="a different batches/000002 already exists"):
        run.put_batch(replace(BATCH, oldest=0))
    assert run.batch(2) == BATCH


def test_the_trainer_gets_its_batch_when_it_comes(run: Run) -> None:
    got: list[tuple[Batch, bytes]] = []
    trainer = threading.Thread(target=lambda: got.append(run.wait_batch(2)))
    trainer.start()
    run.put_batch(BATCH)
    trainer.join()
    data = run.objects.get_sealed("batches/000002")
    assert got == [(BATCH, hashlib.sha256(data).digest())]


def test_a_damaged_object_is_named(run: Run) -> None:
    run.objects.put_sealed("groups/g000007", b"\x93\x01")
    with pytest.raises(EtudeError, match="groups/g000007 is not a valid Group"):
        run.group("g000007")
    run.objects.put_sealed("groups/g000008", pack(GROUP))
    with pytest.raises(EtudeError, match="groups/g000008 contains group g000007"):
        run.group("g000008")


def test_a_config_can_be_corrected_until_there_is_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Missing, match="memory: has no run"):
        run.config()
    run.put_config(parse(TOML))
    run.objects.put("model/config.json", b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(run.objects, "put_sealed", None)
        run.put_config(parse(TOML))  # unchanged: nothing is written
    assert run.objects.exists("model/config.json")
    run.put_config(parse(TOML, ["model.num_layers=2"]))
    assert run.config().model.num_layers == 2
    assert not run.objects.exists("model/config.json"), "a model of the old shape"


@pytest.mark.parametrize("work", ["checkpoint", "ledger"])
def test_the_config_of_a_run_with_work_in_it_is_kept(run: Run, work: str) -> None:
    run.put_config(parse(TOML))
    if work == "checkpoint":
        run.put_checkpoint("000001.000000", b"")
    else:
        run.ledger.append(Trained(step=1))
    with pytest.raises(
        EtudeError, match=r"run:\n  stage.rl.lr: 0.0003 -> 0.1\ncontinue .* --fresh"
    ):
        run.put_config(parse(TOML, ["stage.rl.lr=0.1", "engine.threads=2"]))
    assert run.config() == parse(TOML)


@pytest.mark.parametrize("work", ["checkpoint", "ledger"])
def test_a_run_that_lost_its_config_does_not_go_on(run: Run, work: str) -> None:
    """Its original settings are unknown, and the next ones may differ."""
    if work == "checkpoint":
        run.put_checkpoint("000001.000000", b"")
    else:
        run.ledger.append(Trained(step=1))
    with pytest.raises(EtudeError, match=r"without its config.json.* restore the file"):
        run.put_config(parse(TOML))
    assert not run.objects.exists("config.json")


def test_steps_may_be_added_up_to_those_that_are_taken(run: Run) -> None:
    run.put_config(parse(TOML))
    run.put_checkpoint("000001.000000", b"")
    run.put_config(parse(TOML, ["stage.rl.steps=4"]))
    run.put_batch(BATCH)
    with pytest.raises(EtudeError, match=r"stage.rl.steps: 4 -> 1"):
        run.put_config(parse(TOML, ["stage.rl.steps=1"]))
    run.put_config(parse(TOML, ["stage.rl.steps=2"]))
    assert run.config() == parse(TOML, ["stage.rl.steps=2"])


def test_how_a_machine_does_the_work_may_change_at_any_time(run: Run) -> None:
    run.put_config(parse(TOML))
    run.put_checkpoint("000001.000000", b"")
    run.objects.put("model/config.json", b"{}")
    engine = ["engine.port=8100", "engine.threads=2", "engine.max_num_seqs=4"]
    others = ["harness.concurrency=3", "sandbox.isolation=process", "stage.rl.threads=2"]
    run.put_config(parse(TOML, engine + others))
    assert run.config() == parse(TOML, engine + others)
    assert run.objects.exists("model/config.json")


def test_ledger_survives_reopening(tmp_path: Path) -> None:
    Run.open(str(tmp_path)).ledger.append(
        Issued(group="g000007", task="t", samples=("g000007.0",), version=0)
    )
    Run.open(f"file:{tmp_path}").ledger.append(Trained(step=1))
    assert [type(entry) for entry in Run.open(str(tmp_path), create=False).ledger.records()] == [
        Issued,
        Trained,
    ]


@dataclass(frozen=True)
class Beat:
    n: int


def test_events_of_each_process(run: Run) -> None:
    for process in ("trainer", "worker-east"):
        log = run.events(process, [Beat])
        log.append(Beat(1))
        log.flush()
    assert run.processes() == ["trainer", "worker-east"]
    assert run.events("trainer", [Beat]).records() == [Beat(1)]


def test_a_reader_sees_each_event_once_in_the_order_of_time(run: Run) -> None:
    now = 0.0
    logs = {name: run.events(name, [StageStarted]) for name in ("trainer", "controller")}
    for log in logs.values():
        log._now = lambda: now

    def tell(process: str, done: int) -> None:
        nonlocal now
        now += 1.0
        logs[process].append(StageStarted(stage="rl", steps=9, done=done))
        logs[process].flush()

    reader = EventReader(run)
    assert reader.new() == []
    for done, process in enumerate(("trainer", "controller", "trainer")):
        tell(process, done)
    assert [stamped.record.done for stamped in reader.new()] == [0, 1, 2]  # type: ignore[union-attr]
    assert reader.new() == []
    tell("controller", 3)
    assert [stamped.record.done for stamped in reader.new()] == [3]  # type: ignore[union-attr]
    assert len(EventReader(run).new()) == 4


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff", b'{"n": "1"}', b"null"])
def test_json_that_is_something_else_is_named(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"^there: "):
        from_json(data, Beat, "there: the beat")
    assert from_json(to_json(Beat(3)), Beat, "there") == Beat(3)


def test_a_checkpoint_is_there_when_its_manifest_is(run: Run) -> None:
    for name in ("000002.000000", "000010.000000"):
        run.put_checkpoint_part(name, "00000.ab", name.encode())
    assert run.checkpoints() == [] and run.checkpoint_parts() == [
        ("000002.000000", "00000.ab"), ("000010.000000", "00000.ab")
    ]  # fmt: skip
    for name in ("000010.000000", "000002.000000"):
        run.put_checkpoint(name, b"manifest")
    assert (
        run.checkpoints() == ["000002.000000", "000010.000000"]
        and run.checkpoint("000002.000000") == b"manifest"
    )
    assert run.checkpoint_part("000010.000000", "00000.ab") == b"000010.000000"
    run.delete_checkpoint("000002.000000")
    assert run.checkpoints() == ["000010.000000"] and len(run.checkpoint_parts()) == 1


def test_a_checkpoint_that_is_half_deleted_does_not_look_like_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.put_checkpoint_part("000002.000000", "00000.ab", b"")
    run.put_checkpoint("000002.000000", b"manifest")
    delete = run.objects.delete

    def killed(key: str) -> None:
        raise KeyboardInterrupt

    def once(key: str) -> None:
        delete(key)
        monkeypatch.setattr(run.objects, "delete", killed)

    monkeypatch.setattr(run.objects, "delete", once)
    with pytest.raises(KeyboardInterrupt):
        run.delete_checkpoint("000002.000000")
    assert run.checkpoints() == [] and not run.has_checkpoint("000002.000000")
    assert len(run.checkpoint_parts()) == 1


async def test_what_a_process_emits_is_stored_soon_and_at_its_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> list[int]:
        return [stamped.record.version for stamped in EventReader(run).new()]  # type: ignore[union-attr]

    async with event_writer(run, "controller") as emit:
        emit(WeightsLive(version=1))
        assert told() == []
    assert told() == [1]
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.0)
    async with asyncio.timeout(30), event_writer(run, "controller") as emit:
        emit(WeightsLive(version=2))
        while told() != [1, 2]:
            await asyncio.sleep(0.001)


def test_events_of_a_synchronous_process_do_not_wait_for_the_next_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.001)
    with sync_event_writer(run, "trainer") as emit:
        for version in (1, 2):
            emit(WeightsLive(version=version))
        while len(EventReader(run).new()) < 2:
            time.sleep(0.001)


def test_the_last_events_of_a_synchronous_process_are_stored(run: Run) -> None:
    with pytest.raises(ZeroDivisionError), sync_event_writer(run, "trainer") as emit:
        emit(WeightsLive(version=1))
        1 / 0  # noqa: B018
    assert len(EventReader(run).new()) == 1


def test_a_second_writer_of_events_is_told_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.001)
    with (
        pytest.raises(EtudeError, match="another process has written"),
        sync_event_writer(run, "trainer") as emit,
    ):
        emit(WeightsLive(version=1))
        while not EventReader(run).new():
            time.sleep(0.001)
        other = run.events("trainer", EVENTS)
        other.append(WeightsLive(version=2))
        other.flush()
        while True:
            emit(WeightsLive(version=3))
            time.sleep(0.001)


async def test_events_that_cannot_be_stored_end_an_asyncio_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would continue, and look as if it had stopped."""
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.0)
    monkeypatch.setattr(run.objects, "create", lambda *_: (_ for _ in ()).throw(EtudeError("full")))
    is_told = False
    with pytest.raises(EtudeError, match="full"):
        async with event_writer(run, "controller") as emit:
            with pytest.raises(EtudeError, match="full"):
                while True:
                    emit(WeightsLive(version=1))
                    await asyncio.sleep(0.001)
            is_told = True
    assert is_told


def test_evals(run: Run) -> None:
    run.put_eval("000001.heldout", {"solve_rate": 0.5})
    assert run.evals() == ["000001.heldout"] and run.eval("000001.heldout", dict[str, float]) == {
        "solve_rate": 0.5
    }


RECOMPUTED = (RecomputedRow(logprobs=(-0.5, -0.25)),)


def everything(run: Run) -> dict[str, Callable[[], object]]:
    """One object of each kind, and the function that reads it."""
    run.put_config(parse(TOML))
    run.put_model_file("tokenizer.json", b'{"version": "1.0"}')
    run.ledger.append(Trained(step=1))
    run.put_group(GROUP)
    run.put_batch(BATCH)
    run.put_recomputed(2, RECOMPUTED)
    run.put_checkpoint("000001.000000", b"manifest")
    run.put_eval("000001.heldout", {"solve_rate": 0.5})
    experts = put_experts(run.objects, b"\x01\x02")
    return {
        "config.json": run.config,
        "model/tokenizer.json": lambda: run.objects.get_sealed("model/tokenizer.json"),
        "ledger/0000000000.jsonl": run.ledger.records,
        "groups/g000007": lambda: run.group("g000007"),
        "batches/000002": lambda: run.batch(2),
        "recomputed/000002": lambda: run.recomputed(2),
        "checkpoints/000001.000000/manifest.json": lambda: run.checkpoint("000001.000000"),
        "evals/000001.heldout.json": lambda: run.eval("000001.heldout", dict[str, float]),
        f"experts/{experts}": lambda: get_experts(run.objects, experts),
    }


def test_every_flipped_bit_is_an_error_that_names_the_object(run: Run) -> None:
    for key, read in everything(run).items():
        before, data = read(), run.objects.get(key)
        for bit in range(8 * len(data)):
            wrong = bytearray(data)
            wrong[bit // 8] ^= 1 << bit % 8
            run.objects.put(key, bytes(wrong))
            with pytest.raises(EtudeError, match=re.escape(key)):
                read()
        run.objects.put(key, data)
        assert read() == before


def test_experts_that_are_gone_are_named_with_the_way_out(run: Run) -> None:
    with pytest.raises(Missing, match="experts/none .*router_replay = false to train without it"):
        get_experts(run.objects, "none")


def test_a_run_of_an_older_format_is_told(run: Run) -> None:
    run.put_config(parse(TOML))
    run.objects.put("config.json", run.objects.get_sealed("config.json"))
    with pytest.raises(
        EtudeError,
        match=r"config.json does not end with its digest: .* an older version of etude wrote it",
    ):
        run.config()


def test_a_config_of_another_version_is_told(run: Run) -> None:
    run.objects.put_sealed("config.json", b'{"name": "r", "unheard_of": 1}')
    with pytest.raises(
        EtudeError,
        match=r"config.json cannot be read; another version of etude .*: (?s:.*)unheard_of",
    ):
        run.config()


@pytest.mark.parametrize(
    "name", [".DS_Store", "foo.tmp", "._000002", "000002.bak", "sub/000002", "000003 (copy)"]
)
def test_files_of_others_are_seen_nowhere(run: Run, name: str) -> None:
    everything(run)
    run.put_checkpoint_part("000001.000000", "00000.ab", b"part")
    log = run.events("trainer", [Beat])
    log.append(Beat(1))
    log.flush()
    folders = [
        "ledger",
        "groups",
        "batches",
        "recomputed",
        "checkpoints",
        "checkpoints/000001.000000",
        "evals",
    ]
    for folder in (*folders, "events", "events/trainer", "model", "experts"):
        run.objects.put(f"{folder}/{name}", b"?")
    assert run.ledger.records() == [Trained(step=1)] and run.processes() == ["trainer"]
    assert run.events("trainer", [Beat]).records() == [Beat(1)]
    assert (
        run.groups() == ["g000007"] and run.batches() == [2] and run.evals() == ["000001.heldout"]
    )
    assert run.checkpoints() == ["000001.000000"] and run.checkpoint_parts() == [
        ("000001.000000", "00000.ab")
    ]


def test_a_file_of_others_is_no_work(run: Run) -> None:
    run.put_config(parse(TOML))
    run.objects.put("ledger/.DS_Store", b"?")
    run.put_config(parse(TOML, ["stage.rl.lr=0.1"]))
    assert run.config() == parse(TOML, ["stage.rl.lr=0.1"])


async def test_events_wait_for_each_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush is a request; here the interval is an hour."""
    monkeypatch.setattr(telemetry, "FLUSH_S", 3600.0)
    async with event_writer(run, "controller") as emit:
        emit(WeightsLive(version=1))
        for _ in range(50):  # turns of the loop, and of the threads that would flush
            await asyncio.to_thread(int)
        assert EventReader(run).new() == []
    assert len(EventReader(run).new()) == 1


def test_a_bucket_is_written_less_often_and_tells_what_it_was_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert telemetry.flush_s(run) == telemetry.FLUSH_S and store_used(run.objects, "x") == []
    monkeypatch.setattr(type(run.objects), "is_bucket", True)
    assert telemetry.flush_s(run) == telemetry.BUCKET_FLUSH_S > telemetry.FLUSH_S
    (used,) = store_used(run.objects, "trainer")
    assert used.process == "trainer"
    log = EventLog(run, "trainer")
    log.flush()
    assert EventReader(run).new() == [], "not yet"
    monkeypatch.setattr(telemetry, "USAGE_S", 0.0)
    log.flush()
    log.flush()
    monkeypatch.undo()
    log.flush(last=True)
    assert len(EventReader(run).new()) == 2, "of a directory there is nothing to tell"


def test_a_run_is_named_as_people_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Run.open(f"file:{tmp_path}/runs/mine").place == "runs/mine"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert Run.open(f"file:{tmp_path}/runs/mine").place == f"{tmp_path}/runs/mine"
    assert Run.open("memory:").place == "memory:"
