"""The trainer as a lineage: its initial model, and its events about the versions that it makes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import Event, OverlongSkipped, StageStarted
from etude.core.lineage import stage_spans
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.store.runs import Run
from etude.store.telemetry import Emit
from etude.train.distributed import World
from etude.train.stages import SupervisedStepReport
from etude.train.stats import SupervisedStats
from etude.trainer import stages
from etude.trainer import trainer as trainer_module
from etude.trainer.prepare import store_files
from etude.trainer.trainer import Trainer, rank_device
from etude.weights.manifest import read_manifest
from etude.weights.records import manifest_key
from tests.small_model import small_files

TOML = """
name = "lineage"
[[stage]]
kind = "midtrain"
steps = 3
batch_tokens = 64
seq_len = 32
[[stage]]
kind = "rl"
steps = 1
"""


def test_the_model_directory_is_needed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.trainer.documents.NUM_BUILT_IN", 8)
    files, directory = small_files(), tmp_path / "model"
    write_directory(
        directory,
        files,
        hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 1)),
    )
    whole = parse(TOML, [f"model.path={directory}"])
    config = whole.model_copy(update={"stage": whole.stage[:1]})
    run = Run.open("memory:")
    store_files(run, files)
    Trainer(run, config, emit=lambda event: None).train()
    manifest = read_manifest(run.objects, 1)
    assert (manifest.stage, manifest.step) == ("midtrain", 3)
    start = read_manifest(run.objects, 0)
    assert start.step == 0 and start.root != manifest.root, "what it was given, for its evaluation"

    (directory / "model.safetensors").unlink()
    run.objects.delete(manifest_key(1, 1))  # as if it had died before it published
    resumed = Trainer(run, config, emit=lambda event: None)
    again = read_manifest(run.objects, 1)
    assert resumed.version == 1 and (again.root, again.stage, again.step) == (
        manifest.root,
        "midtrain",
        3,
    )
    empty = Run.open("memory:")
    store_files(empty, files)
    with pytest.raises(EtudeError, match="model.safetensors missing"):
        Trainer(empty, config, emit=lambda event: None)


class Second(World):
    """A second rank, which receives the value of the first."""

    def __init__(self, heard: float) -> None:
        super().__init__(rank=1)
        self.heard = heard

    def all_reduce_sum(self, *values: float) -> list[float]:
        return [self.heard + value for value in values]


@pytest.mark.parametrize("due", [True, False])
def test_the_first_rank_decides_when_a_checkpoint_is_due(
    due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks differ: two ranks that each used their own would sometimes save after different
    steps."""
    run, files = Run.open("memory:"), small_files()
    store_files(run, files)
    own = f"trainer.checkpoint_every_s={1e9 if due else 0}"
    trainer = Trainer(run, parse(TOML, [own]), emit=lambda event: None)
    saved: list[int] = []
    monkeypatch.setattr(trainer, "save", lambda: saved.append(trainer.step))
    trainer.world = Second(float(due))
    stats = SupervisedStats(loss=1.0, grad_norm=1.0, lr=0.1, num_loss_tokens=1, metrics={})
    trainer.report_fit()(SupervisedStepReport(step=3, total=9, stats=stats))
    assert saved == ([3] if due else [])


def test_a_device_without_enough_memory_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(trainer: Trainer) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of"
        )

    monkeypatch.setattr(Trainer, "train", too_much)
    run = Run.open("memory:")
    store_files(run, small_files())
    with pytest.raises(
        EtudeError,
        match=r"ran out of memory at the start \(CUDA out of memory\): continue with "
        r"trainer\.gradient_checkpointing = true, a smaller microbatch_tokens",
    ):
        trainer_module.train(run, parse(TOML), World(), torch.device("cpu"))


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(trainer_module, "select_device", torch.device)
    assert rank_device("cpu", 7) == torch.device("cpu") and current == []
    assert rank_device("cuda", 1) == torch.device("cuda", 1) and current == [1]
    with pytest.raises(EtudeError, match="rank 2 has no CUDA device of its own: .* has 2"):
        rank_device("cuda", 2)
    assert current == [1]


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_program_trains_as_the_rank_that_it_is(
    torchrun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, happened = f"file:{tmp_path}", []
    run = Run.open(store)
    config = parse(TOML, ["trainer.timeout_s=77.0", "trainer.device=cpu"])
    run.put_config(config)
    devices: list[int] = []

    def device_of(asked: str, number: int) -> torch.device:
        devices.append(number)
        return torch.device(asked)

    def train(run: Run, config: RunConfig, world: object, device: torch.device) -> None:
        happened.append((config, world, device))

    monkeypatch.setattr(trainer_module, "rank_device", device_of)
    monkeypatch.setattr(trainer_module, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(trainer_module, "train", train)
    monkeypatch.setattr(World, "on_one_machine", lambda *told: told)
    monkeypatch.setattr(World, "from_torchrun", lambda *told: told)
    meeting = tmp_path / "meeting"
    asked = ["--rank", "3", "--ranks", "4", "--rendezvous", str(meeting)]
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr("sys.argv", ["trainer", "--store", store, *([] if torchrun else asked)])
    assert trainer_module.main() == 0
    world = (77.0, "cpu") if torchrun else (3, 4, meeting, 77.0, "cpu")
    assert happened == [(config, world, torch.device("cpu"))]
    assert devices == [5 if torchrun else 3]


class Told:
    """A stand-in for a trainer, in the middle of its third step."""

    def __init__(self, toml: str) -> None:
        self.config = parse(toml)
        self.events: list[Event] = []
        self.stage = self.config.stage[0].name
        self.step = 3
        self.tokenizer = self.learner = self.heldout_losses = object()
        self.context = 64
        self.data: list[str] = []
        self.finished: list[tuple[int, int]] = []
        self.emit = self.events.append
        self.record_data = self.data.append

    def report_fit(self) -> str:
        return "reported"

    def finish_version(self, version: int, *, step: int) -> None:
        self.finished.append((version, step))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("demonstrations = 2", (["made"], ["made, held out"])),
        ('path = "x"', (["read"], ["read, held out"])),
        (
            'demonstrations = 2\npath = "x"',
            (["made", "read"], ["made, held out", "read, held out"]),
        ),
    ],
)
def test_sft_imitates_what_there_is_and_tells_what_is_left_out(
    shown: str, expected: tuple[list[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(train=["made"], heldout=["made, held out"])
    read = SimpleNamespace(train=["read"], heldout=["read, held out"], skipped=["x:1", "x:7"])
    asked: list[tuple[object, ...]] = []
    learnt: list[tuple[object, ...]] = []
    monkeypatch.setattr(stages.data, "built_in_sessions", lambda *told: made)
    monkeypatch.setattr(stages.data, "read_sessions", lambda *told: asked.append(told) or read)
    monkeypatch.setattr(stages.learning, "sft", lambda *told, **more: learnt.append((*told, more)))
    trainer: Any = Told(f'name = "a"\n[[stage]]\nkind = "sft"\noverlong = "drop"\n{shown}')
    (span,) = stage_spans(trainer.config.stage)
    stages.sft(trainer, span)
    skipped = [OverlongSkipped(stage="sft", count=2, where=("x:1", "x:7"))]
    by_path = 'path = "x"' in shown
    assert trainer.events == [
        StageStarted(stage="sft", steps=0, done=3),
        *(skipped if by_path else []),
    ]
    assert asked == ([("x", trainer.tokenizer, 64, "drop")] if by_path else [])
    assert learnt == [
        (
            *(trainer.learner, span.stage, *expected),
            {
                "seed": trainer.config.seed,
                "start_step": 3,
                "heldout_losses": trainer.heldout_losses,
                "on_step": "reported",
            },
        )
    ]
    assert trainer.finished == [(1, 3)] and len(trainer.data) == 1


def test_nothing_is_said_of_nothing_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.data, "read_preferences", lambda *told: (["a pair"], []))
    monkeypatch.setattr(stages.learning, "dpo", lambda *told, **more: None)
    trainer: Any = Told('name = "a"\n[[stage]]\nkind = "dpo"\npath = "x"')
    (span,) = stage_spans(trainer.config.stage)
    stages.dpo(trainer, span)
    assert trainer.events == [StageStarted(stage="dpo", steps=0, done=3)]
    assert trainer.finished == [(1, 3)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("broken", [False, True])
def test_a_trainer_is_closed_however_it_ends_and_the_first_rank_speaks(
    rank: int, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Watched:
        def __init__(self, run: Run, config: object, emit: Emit, *others: object) -> None:
            self.emit = emit

        def train(self) -> None:
            happened.append("train")
            self.emit(StageStarted(stage="rl", steps=1, done=0))
            if broken:
                raise EtudeError("the store is gone")

        def close(self) -> None:
            happened.append("close")

    class Ranks(World):
        def close(self) -> None:
            happened.append("world closes")

    monkeypatch.setattr(trainer_module, "Trainer", Watched)
    run = Run.open("memory:")
    with pytest.raises(EtudeError) if broken else contextlib.nullcontext():
        trainer_module.train(run, parse(TOML), Ranks(rank=rank), torch.device("cpu"))
    assert happened == ["train", "close", *([] if broken else ["world closes"])]
    assert run.processes() == (["trainer"] if rank == 0 else [])
