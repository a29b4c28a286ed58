"""The small decisions of a run on this machine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from etude.commands.terminal import PipeConsole
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import Event, Launched, WeightsLive
from etude.core.ledger import Dropped, Issued
from etude.core.stages import RopeScalingConfig
from etude.launch import check, local, screen
from etude.launch.launcher import Program
from etude.launch.local import seconds_at_work
from etude.launch.place import RunPlace
from etude.model.directory import MODEL_FILES, cut_context
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.run.evaluate import Report, report_name
from etude.store import telemetry
from etude.store.codec import Stamped
from etude.store.runs import Run
from etude.store.telemetry import EventReader
from etude.train.start import initial_model
from etude.trainer import prepare
from etude.trainer.data import check_fits
from etude.trainer.prepare import pretrained_files
from tests.small_model import small_files


def test_pauses_do_not_count() -> None:
    times = [
        (10.0, True),
        (15.0, False),
        (18.0, False),
        (500.0, True),
        (501.0, False),
        (900.0, True),
    ]
    events: list[Stamped[Event]] = [
        Stamped(t, Launched(resumed=False) if launch else WeightsLive(version=1))
        for t, launch in times
    ]
    assert seconds_at_work(events) == 9.0
    assert seconds_at_work([]) == 0.0


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    files, other = small_files(), small_files(vocab_size=310)
    write_directory(
        tmp_path,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)),
    )
    with pytest.raises(EtudeError, match="cannot be read"):
        initial_model(tmp_path, other["config.json"], 0)


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_model_without_a_shape_is_named(tmp_path: Path, text: str) -> None:
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EtudeError, match=r"config\.json does not describe a model"):
        pretrained_files(str(tmp_path))


def test_a_demonstration_must_fit() -> None:
    check_fits([([1] * 8, [True] * 8)], 8)
    with pytest.raises(
        EtudeError, match="a demonstration has 9 tokens, .* set model.max_context to 9 or more"
    ):
        check_fits([([1], [True]), ([1] * 9, [True] * 9)], 8)


def test_a_model_is_stretched_for_more_context(tmp_path: Path) -> None:
    files = small_files(context=128)
    write_directory(
        tmp_path,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)),
    )
    yarn = RopeScalingConfig(type="yarn", factor=4.0)

    def shape(max_context: int, stretch: RopeScalingConfig | None) -> ModelConfig:
        files = cut_context(pretrained_files(str(tmp_path), stretch), max_context)
        return ModelConfig.from_json(files["config.json"])

    assert shape(512, None).max_position_embeddings == 128
    assert [shape(context, yarn).max_position_embeddings for context in (300, 512, 9999)] == [
        300,
        512,
        512,
    ]
    scaling = shape(300, yarn).rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 128
    assert (scaling.rope_type, scaling.factor) == ("yarn", 4.0)
    stretched = pretrained_files(str(tmp_path), yarn)["config.json"]
    assert initial_model(tmp_path, stretched, 0).rope.shape[0] == 512
    # under the name that every version of transformers reads, unless the model has the newer one
    told = json.loads(stretched)
    assert told["rope_scaling"]["rope_type"] == "yarn" and "rope_parameters" not in told
    newer = json.loads(files["config.json"]) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
    }
    (tmp_path / "config.json").write_text(json.dumps(newer))
    told = json.loads(pretrained_files(str(tmp_path), yarn)["config.json"])
    assert not told.get("rope_scaling") and told["rope_parameters"]["rope_theta"] == 500.0
    assert told["rope_parameters"]["rope_type"] == "yarn"

    (tmp_path / "config.json").write_bytes(stretched)
    with pytest.raises(EtudeError, match="already has a scaling"):
        pretrained_files(str(tmp_path), yarn)


class Started:
    """A launcher that starts nothing, and records what it should have started."""

    def __init__(self, directory: Path, **told: Any) -> None:
        self.told = told
        self.resume = told["resume"]
        self.happened: list[tuple[list[Program], str]] = []
        self.watched = False

    async def run_to_end(self, program: Program) -> None:
        self.happened.append(([program], program.name))

    async def run_all(self, programs: Sequence[Program], *, until: str) -> None:
        self.happened.append((list(programs), until))

    async def watch(self, tell: Callable[[Event], None]) -> None:
        self.watched = True
        await asyncio.Event().wait()

    @property
    def names(self) -> list[tuple[list[str], str]]:
        return [([program.name for program in group], until) for group, until in self.happened]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    made: list[Started] = []

    def launcher(directory: Path, **told: Any) -> Started:
        made.append(Started(directory, **told))
        return made[-1]

    monkeypatch.setattr(local, "LocalLauncher", launcher)
    monkeypatch.setattr(check, "_ask", lambda config, **told: None)
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.0)
    return made


TOML = """
name = "a"
heartbeat_timeout_s = 33.0
[[stage]]
kind = "midtrain"
steps = 1
[[stage]]
kind = "rl"
steps = 1
max_lag = 3
[engine]
regions = ["here", "there"]
threads = 2
"""
NO_WARMUP = ["stage.midtrain.warmup_steps=0", "stage.rl.warmup_steps=0"]


def launches(run: Run) -> list[bool]:
    return [
        stamped.record.resumed
        for stamped in EventReader(run).new()
        if isinstance(stamped.record, Launched)
    ]


def test_a_run_is_prepared_once_and_lasts_as_long_as_its_controller(
    tmp_path: Path, started: list[Started]
) -> None:
    place, config = RunPlace.of(tmp_path / "r"), parse(TOML)
    said = io.StringIO()
    console = Console(file=said, width=80)
    local.execute(config, place, console, resume="etude run a.toml")
    (launcher,) = started
    everybody = ["gateway", "worker-here", "worker-there", "trainer", "controller"]
    assert launcher.names == [(["preparation"], "preparation"), (everybody, "controller")]
    assert launcher.watched
    assert launcher.told.pop("lock") > 0
    launcher.told.pop("say")("stopping")
    assert said.getvalue().endswith("stopping\n")
    assert launcher.told == {
        "threads": 2,
        "heartbeat_timeout_s": 33.0,
        "resume": "etude run a.toml",
    }
    run = place.open()
    assert run.config() == config and launches(run) == [False]

    for name in MODEL_FILES:
        run.put_model_file(name, b"{}")
    run.put_checkpoint("000001.000000", b"")
    local.execute(config, place, Console(quiet=True), resume="")
    assert started[1].names == [(everybody, "controller")]
    assert launches(run) == [False, True]


def test_a_run_that_is_at_its_end_starts_nothing(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, config = RunPlace.of(tmp_path / "r"), parse(TOML)
    monkeypatch.setattr(local, "is_finished", lambda run, config: True)
    local.execute(config, place, Console(quiet=True), resume="")
    assert started == [] and launches(place.open()) == []


def test_what_cannot_run_is_refused_before_anything_is_made(
    tmp_path: Path, started: list[Started]
) -> None:
    place = RunPlace.of(tmp_path / "r")

    def refused(*overrides: str) -> str:
        with pytest.raises(EtudeError) as caught:
            local.execute(parse(TOML, overrides), place, Console(quiet=True), resume="")
        assert started == [] and not place.directory.exists()
        return str(caught.value)

    assert "is not a complete model" in refused(f"model.path={tmp_path}")
    assert "tasks.environment" in refused(f"tasks.environment={tmp_path}/none.py:A")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"engine.port = {port} cannot be used" in refused(f"engine.port={port}")


def test_an_evaluation_starts_what_it_needs(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, config = RunPlace.of(tmp_path / "r"), parse(TOML, ["tasks.novel=0"])
    run = Run.open(place.store)
    run.put_config(config)
    with pytest.raises(EtudeError, match="has no published weights yet"):
        local.evaluate(place, Console(quiet=True), version=None, split="heldout")

    monkeypatch.setattr(local, "find_newest", lambda objects: SimpleNamespace(version=2))
    with pytest.raises(EtudeError, match="has no novel tasks"):
        local.evaluate(place, Console(quiet=True), version=None, split="novel")
    assert started == []
    with pytest.raises(EtudeError):  # nothing was started that could have written a report
        local.evaluate(place, Console(quiet=True), version=None, split="heldout")
    (launcher,) = started
    needed = ["gateway", "worker-here", "worker-there", "evaluation"]
    assert launcher.names == [(needed, "evaluation")]
    ((*_, evaluation), _) = launcher.happened[0]
    assert evaluation.argv[-6:] == ("--version", "2", "--split", "heldout", "--samples", "1")
    assert launcher.told["resume"].endswith("--version 2 --split heldout --samples 1")
    assert launches(run) == [False]


async def test_what_runs_beside_a_block_ends_with_it_and_its_failure_is_told() -> None:
    ended = []

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("beside")

    async def broken() -> None:
        raise EtudeError("the sink is full")

    async with local.in_background(beside()):
        await asyncio.sleep(0)
        assert ended == []
    assert ended == ["beside"]
    with pytest.raises(EtudeError, match="the sink is full"):
        async with local.in_background(broken()):
            await asyncio.sleep(0)
            ended.append("block")
    assert ended == ["beside", "block"]


def test_a_run_that_is_told_to_stop_ends_as_by_a_key(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(self: Started, programs: Sequence[Program], *, until: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    monkeypatch.setattr(Started, "run_all", stopped)
    with pytest.raises(KeyboardInterrupt):
        place = RunPlace.of(tmp_path / "r")
        local.execute(parse(TOML), place, Console(quiet=True), resume="")


def test_a_run_whose_lines_nobody_reads_any_more_is_stopped(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    async def working(self: Started, programs: Sequence[Program], *, until: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.told["say"]("stopping")  # which nobody reads, and which must not break anything
            stopped.append(until)

    monkeypatch.setattr(Started, "run_all", working)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, pytest.raises(BrokenPipeError):
        place, console = RunPlace.of(tmp_path / "r"), PipeConsole(file=pipe)
        try:
            local.execute(parse(TOML), place, console, resume="")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for data not flushed yet
    assert stopped == ["controller"]


def test_a_model_is_made_or_taken_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "scratch_files", lambda config: {"new": config.name.encode()})
    monkeypatch.setattr(prepare, "pretrained_files", lambda *told: told)
    stretched = "[stage.rope_scaling]\ntype = 'yarn'\nfactor = 2.0\n"
    text = TOML.replace('[[stage]]\nkind = "rl"', stretched + '[[stage]]\nkind = "rl"')
    assert prepare.model_files(parse(TOML)) == {"new": b"a"}
    scaling = RopeScalingConfig(type="yarn", factor=2.0)
    told = prepare.model_files(parse(text, ["model.path=there", "model.max_context=256"]))
    assert told == ("there", scaling)
    told = prepare.model_files(parse(TOML, ["model.path=there", "model.max_context=256"]))
    assert told == ("there", None)


def test_the_preparation_puts_the_shape_last_and_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = RunPlace.of(tmp_path / "r")
    run = Run.open(place.store)
    monkeypatch.setattr("sys.argv", ["prepare", "--store", place.store])
    assert prepare.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
    run.put_config(parse(TOML))
    put: list[str] = []
    monkeypatch.setattr(Run, "put_model_file", lambda self, name, data: put.append(name))
    files = {"config.json": b"{}", "tokenizer.json": b"", "vocab.json": b""}
    monkeypatch.setattr(prepare, "model_files", lambda config: files)
    assert prepare.main() == 0
    assert sorted(put) == sorted(files) and put[-1] == "config.json"


def test_a_run_without_a_loop_has_no_lag(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[int] = []

    async def watch(run: Run, console: Console, *, title: str, lag_bound: int) -> None:
        assert title == f"etude · a · {tmp_path / str(len(bounds))}"
        bounds.append(lag_bound)

    monkeypatch.setattr(local.screen, "watch", watch)
    alone = TOML.replace('[[stage]]\nkind = "rl"\nsteps = 1\nmax_lag = 3\n', "")
    for number, text in enumerate((alone, TOML)):
        place = RunPlace.of(tmp_path / str(number))
        local.execute(parse(text), place, Console(quiet=True), resume="")
    assert bounds == [0, 3]


def test_scores_within_a_stage_are_not_said_to_be_those_after_it() -> None:
    report = Report(
        stage="rl", split="heldout", version=20, solved=1, total=4, low=0.0, high=1.0,
        rewards={}, example=[],
    )  # fmt: skip
    out = io.StringIO()
    table = screen.results([report, replace(report, version=40)], ends=[40])
    Console(file=out, width=80).print(table)
    assert "within rl" in out.getvalue() and "after rl" in out.getvalue()


def test_a_summary_says_what_became_of_a_run(tmp_path: Path) -> None:
    place, config = RunPlace.of(tmp_path / "r"), parse(TOML)
    run = Run.open(place.store)
    run.put_config(config)
    samples = ("g000000.0", "g000000.1")
    run.ledger.append(Issued(group="g000000", task="t", samples=samples, version=1))
    run.ledger.append(Dropped(samples=samples[:1], reason="failed"))
    report = Report(
        stage="midtrain", split="heldout", version=1, solved=1, total=4, low=0.0, high=1.0,
        rewards={}, example=[],
    )  # fmt: skip
    run.put_eval(report_name(1, "heldout"), report)
    run.put_eval(report_name(1, "novel"), replace(report, split="novel", solved=4))
    told = local.summary(run, config)
    assert told == {
        "solve_rate": {"midtrain": 0.25},
        "lag_max": 0,
        "lag_bound": 3,
        "issued": 2,
        "trained": 0,
        "dropped": {"failed": 1},
        "in_flight": 1,
        "regions": 2,
        "seconds": 0.0,
    }


def test_what_was_evaluated_before_is_not_evaluated_again(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunPlace.of(tmp_path / "r")
    run = Run.open(place.store)
    run.put_config(parse(TOML))
    report = Report(
        stage="rl", split="heldout", version=2, solved=1, total=4, low=0.0, high=1.0, rewards={},
        example=[],
    )  # fmt: skip
    run.put_eval(report_name(2, "heldout"), report)
    monkeypatch.setattr(local, "find_newest", lambda objects: SimpleNamespace(version=2))
    found = local.evaluate(place, Console(quiet=True), version=None, split="heldout")
    assert found == report and started == []
