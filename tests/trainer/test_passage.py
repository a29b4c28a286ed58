"""Transitions from one stage of a run to the next: checks, reset state, and events."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import Event, FitStep, StageDone, StageStarted
from etude.core.lineage import StageSpan, stage_spans
from etude.store.runs import Run
from etude.train.distributed import World
from etude.train.stages import SupervisedStepReport
from etude.train.stats import SupervisedStats
from etude.trainer import stages, state
from etude.trainer import trainer as trainer_module
from etude.trainer.prepare import check_stage_files, store_files
from etude.trainer.trainer import Trainer
from tests.small_model import small_files

TOML = """
name = "passage"
[[stage]]
kind = "midtrain"
steps = 3
threads = 1
[[stage]]
kind = "rl"
steps = 4
threads = 2
"""


@pytest.fixture
def run() -> Run:
    run = Run.open("memory:")
    store_files(run, small_files())
    return run


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def started(run: Run, events: list[Event] | None = None) -> Trainer:
    return Trainer(run, parse(TOML), emit=(events if events is not None else []).append)


def test_a_run_in_fp8_trains_in_fp8(run: Run) -> None:
    config = parse('quantization = "fp8"\n' + TOML)
    model = Trainer(run, config, emit=lambda event: None).learner.model
    assert model.quantised_layers() and not model.invariant
    config = config.model_copy(update={"batch_invariant": True})
    model = Trainer(run, config, emit=lambda event: None).learner.model
    assert model.quantised_layers() and model.invariant


@pytest.mark.parametrize("invariant", [False, True])
def test_a_run_with_its_kv_cache_in_fp8_trains_with_keys_and_values_in_fp8(
    run: Run, invariant: bool
) -> None:
    config = parse('kv_cache_dtype = "fp8"\n' + TOML)
    config = config.model_copy(update={"batch_invariant": invariant})
    model = Trainer(run, config, emit=lambda event: None).learner.model
    assert model.arithmetic.fp8_kv and model.invariant == invariant
    assert not model.quantised_layers()


def test_a_new_stage_takes_nothing_but_the_weights_and_a_resumed_one_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = started(run)
    first, second = stage_spans(trainer.config.stage)
    fresh = trainer.batches_digest
    resets: list[str] = []
    monkeypatch.setattr(trainer.learner, "begin_stage", lambda: resets.append(trainer.stage))

    trainer.enter_stage(first)
    trainer.step, trainer.heldout_losses, trainer.batches_digest = 7, (0.5,), "of midtrain"
    trainer.enter_stage(first)
    assert (trainer.step, trainer.heldout_losses, trainer.batches_digest) == (
        7,
        (0.5,),
        "of midtrain",
    )
    trainer.enter_stage(second)
    assert (trainer.step, trainer.heldout_losses, trainer.batches_digest) == (0, (), fresh)
    assert resets == ["midtrain", "rl"]
    assert [(origin.stage, origin.parent) for origin in trainer.lineage] == [
        ("midtrain", "seed 0"),
        ("rl", "version 1"),
    ]


def test_each_stage_runs_once_with_its_threads_and_says_what_it_took(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def stage(trainer: Trainer, span: StageSpan) -> None:
        ran.append((span.name, torch.get_num_threads()))
        trainer.version = span.end

    clock = itertools.count(1000.0, 5.0)
    monkeypatch.setattr(trainer_module, "STAGE", {"midtrain": stage, "rl": stage})
    monkeypatch.setattr(trainer_module.time, "monotonic", lambda: next(clock))
    events: list[Event] = []
    trainer = started(run, events)
    trainer.train()
    assert ran == [("midtrain", 1), ("rl", 2)]
    assert events == [
        StageDone(stage="midtrain", version=1, seconds=5.0),
        StageDone(stage="rl", version=5, seconds=5.0),
    ]
    trainer.train()
    assert len(ran) == len(events) == 2, "what is done is not done again"


def test_a_loop_says_how_far_it_was(run: Run) -> None:
    events: list[Event] = []
    trainer = started(run, events)
    _, span = stage_spans(trainer.config.stage)
    trainer.version = span.end
    stages.STAGE["rl"](trainer, span)
    needs = trainer.config.stage[1].groups_per_step  # type: ignore[union-attr]
    assert events == [StageStarted(stage="rl", steps=4, done=4, groups_per_step=needs)]


class AtTheBarrier(Exception):
    """Raised before any rank continues."""


class Watched(World):
    def barrier(self) -> None:
        raise AtTheBarrier


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_sweeps_what_was_never_committed(run: Run, rank: int) -> None:
    run.put_checkpoint_part("000003.000003", "00000.ab", b"half of it")
    assert run.checkpoint_parts() and not run.checkpoints()
    with pytest.raises(AtTheBarrier):
        Trainer(run, parse(TOML), emit=lambda event: None, world=Watched(rank=rank))
    assert bool(run.checkpoint_parts()) == (rank != 0)


@pytest.mark.parametrize(
    ("kl_coef", "done", "expected"), [(0.1, 0, True), (0.1, 1, False), (0.0, 0, False)]
)
def test_the_reference_is_what_the_stage_began_with(
    run: Run, monkeypatch: pytest.MonkeyPatch, kl_coef: float, done: int, expected: bool
) -> None:
    trainer = started(run)
    trainer.config = parse(TOML, [f"stage.rl.kl_coef={kl_coef}"])
    _, span = stage_spans(trainer.config.stage)
    if done:
        trainer.enter_stage(span)
    trainer.version = span.start + done
    taken: list[int] = []
    ran: list[float] = []

    def run_steps(trainer: Trainer, span: StageSpan, stage: object, *, objective: Any) -> None:
        ran.append(objective.kl_coef)

    monkeypatch.setattr(trainer.learner, "snapshot", lambda: taken.append(trainer.version))
    monkeypatch.setattr(stages, "run_steps", run_steps)
    trainer.enter_stage(span)
    stages.rl(trainer, span)
    assert bool(taken) == expected and ran == [kl_coef]


@pytest.mark.parametrize(
    "stage",
    [
        'kind = "midtrain"\nsteps = 1\nheldout_path = "NONE"',
        'kind = "midtrain"\nsteps = 1\n[[stage.sources]]\npath = "NONE"',
        'kind = "sft"\npath = "NONE"',
        'kind = "dpo"\npath = "NONE"',
        'kind = "distill"\nsteps = 1\nteacher = "NONE"',
        'kind = "rl"\nsteps = 1\nloss = "NONE.py:loss"',
    ],
)
def test_a_file_that_is_missing_in_any_stage_is_found_before_the_first(
    tmp_path: Path, stage: str
) -> None:
    text = 'name = "a"\n[[stage]]\nkind = "midtrain"\nsteps = 1\nname = "before"\n[[stage]]\n'
    missing = str(tmp_path / "none")
    config: RunConfig = parse(text + stage.replace("NONE", missing))
    with pytest.raises(EtudeError, match=missing):
        check_stage_files(config)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_file_that_is_no_json_lines_is_found_before_the_first_stage(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "data.jsonl"
    config = parse(
        f'name = "a"\n[[stage]]\nkind = "midtrain"\nsteps = 1\n'
        f'[[stage]]\nkind = "{kind}"\npath = "{file}"\n'
    )
    file.write_text("{}\n")
    check_stage_files(config)
    file.write_text("name,text\n")
    with pytest.raises(EtudeError, match=f"{file}:1: the line is not valid JSON"):
        check_stage_files(config)


def test_an_empty_path_is_refused_too() -> None:
    text = 'name = "a"\n[[stage]]\nkind = "sft"\ndemonstrations = 2\npath = ""\n'
    with pytest.raises(EtudeError, match="no such file"):
        check_stage_files(parse(text))


def test_no_file_is_asked_for_where_none_is_needed() -> None:
    kinds: dict[str, Any] = {
        "midtrain": "steps = 1",
        "sft": "demonstrations = 2",
        "rl": "steps = 1",
    }
    text = "".join(f'[[stage]]\nkind = "{kind}"\n{more}\n' for kind, more in kinds.items())
    check_stage_files(parse(f'name = "a"\n{text}'))


def test_a_supervised_step_is_reported_with_its_speed_and_saved_now_and_then(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    now = 1000.0
    saved: list[int] = []
    monkeypatch.setattr(state.time, "monotonic", lambda: now)
    trainer = started(run, events)
    trainer.stage = "midtrain"
    monkeypatch.setattr(trainer.saver, "save", lambda *checkpoint: saved.append(trainer.step))
    every_s = trainer.config.trainer.checkpoint_every_s
    report = trainer.report_fit()
    stats = SupervisedStats(loss=1.5, grad_norm=1.0, lr=0.1, num_loss_tokens=60, metrics={})
    for step, seconds in ((1, 2.0), (2, 3.0), (3, every_s), (4, 10.0)):
        now += seconds
        report(SupervisedStepReport(step=step, total=9, stats=stats, heldout_losses=(0.5,) * step))
    told = [(e.stage, e.step, e.steps, e.loss) for e in events if isinstance(e, FitStep)]
    assert told == [("midtrain", step, 9, 1.5) for step in (1, 2, 3, 4)]
    speeds = [event.tokens_per_s for event in events if isinstance(event, FitStep)]
    assert speeds == pytest.approx([30.0, 20.0, 60 / every_s, 6.0])
    assert saved == [3] and (trainer.step, trainer.heldout_losses) == (4, (0.5,) * 4)
    assert trainer.world.activity == "step 5 of midtrain"


def test_the_program_says_in_one_line_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(trainer_module.os, "_exit", ended.append)
    monkeypatch.setattr(trainer_module.heartbeat, "send_heartbeats_from_thread", lambda: None)
    monkeypatch.setattr("sys.argv", ["trainer", "--store", f"file:{tmp_path / 'none'}"])
    trainer_module.main()
    said = capsys.readouterr().err
    assert ended == [2] and said.startswith("error: ") and said.count("\n") == 1
