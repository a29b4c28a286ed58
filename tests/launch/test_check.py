"""Mistakes that a start refuses are refused by `--dry-run` too, before anything is created."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.commands.run_file import read_run_file
from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.ledger import Issued
from etude.core.types import Task
from etude.launch import check
from etude.launch.check import Findings, check_start, examine
from etude.launch.place import RunPlace
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.run.task_record import TaskRecord, keep_record
from etude.store.runs import Run
from etude.trainer.prepare import check_stage_files
from tests.small_model import small_files

TOML = """
name = "a"
[tasks]
train = 3
heldout = 2
novel = 0
[sandbox]
isolation = "process"
[engine]
regions = ["east"]
[[stage]]
kind = "midtrain"
steps = 2
[[stage]]
kind = "rl"
steps = 2
"""

CODE = """
from etude.core.sandbox import SandboxSpec
from etude.core.types import Task

class Fine:
    def __init__(self, pool, *, counts, seed): ...
    def tasks(self, split):
        return [Task(id=f"{split}{n}", prompt="do it") for n in range(2)]

class Narrow:
    def __init__(self, pool): ...

class Empty(Fine):
    def tasks(self, split): return []

class Greedy(Fine):
    def tasks(self, split):
        return [Task(id="g", prompt="do it", sandbox=SandboxSpec(network=("pypi.org",)))]

def loss(inputs): raise ZeroDivisionError("no")
"""


def model(path: Path) -> dict[str, bytes]:
    files = small_files()
    tensors = hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0))
    write_directory(path, files, tensors)
    return files


def other_family(path: Path) -> None:
    said = json.loads(model(path)["config.json"]) | {"model_type": "mamba"}
    (path / "config.json").write_text(json.dumps(said))


def half_a_download(path: Path) -> None:
    model(path)
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def other_vocabulary(path: Path) -> None:
    model(path)
    write_directory(path / "teacher", small_files(vocab_size=290), {})


def nothing(path: Path) -> None: ...


TEACHER = '[[stage]]\nkind = "distill"\nsteps = 1\nteacher = "model/teacher"\n'


@pytest.mark.parametrize(
    ("override", "told", "made"),
    [
        ("harness.agent=code.py:Nobody", "code.py does not define 'Nobody'", nothing),
        ("harness.agent=code.py:Narrow", "code.py:Narrow' takes \\(pool\\)", nothing),
        ("tasks.environment=code.py:Nobody", "code.py does not define 'Nobody'", nothing),
        ("tasks.environment=code.py:Narrow", "code.py:Narrow' takes \\(pool\\)", nothing),
        ("tasks.environment=code.py:Empty", "returns no tasks for the split 'train'", nothing),
        ("tasks.environment=code.py:Greedy", "task 'g' of the split 'train': .*network", nothing),
        ("stage.rl.loss=code.py:loss", "code.py:loss' is a function: it must be", nothing),
        ("engine.device=cuda", "torch sees no CUDA device", nothing),
        ("trainer.device=cuda", "torch sees no CUDA device", nothing),
        ("model.path=model", "model_type 'mamba' is not supported", other_family),
        ("model.path=model", "model.safetensors cannot be read", half_a_download),
        ("model.path=model", "stage.distill.teacher = .* a different vocabulary", other_vocabulary),
    ],
)
async def test_what_a_child_process_would_refuse(
    override: str,
    told: str,
    made: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("code.py").write_text(CODE)
    made(Path("model"))
    config = parse(TOML + (TEACHER if made is other_vocabulary else ""), [override])
    with pytest.raises(EtudeError, match=told):
        await examine(config, resumed=False, look=True)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.path=nowhere", "is not a complete model"),
        ("stage.midtrain.heldout_path=nowhere.txt", "no such file"),
        (
            'engine.vllm_urls={east = "http://127.0.0.1:9"}',
            "no answer from the vLLM server for the region east",
        ),
        ("stage.midtrain.lr=1.0", "stage.midtrain.lr: 0.003 -> 1.0"),
    ],
)
def test_what_the_launcher_would_refuse(
    override: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check, "_ask", None)  # must not get that far
    if "lr" in override:
        run = Run.open(f"file:{tmp_path}/r")
        run.put_config(parse(TOML))
        run.put_checkpoint("000001.000000", b"")
    with pytest.raises(EtudeError, match=told):
        check_start(parse(TOML, [override]), RunPlace.of(tmp_path / "r"))


def test_a_tracker_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtudeError, match="needs the package wandb"):
        check_start(parse('trackers = ["wandb"]\n' + TOML), RunPlace.of(tmp_path / "r"))


def test_a_place_where_nothing_can_lie(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EtudeError, match="cannot create a run in .*file/r .*is not a directory"):
        check_start(parse(TOML), RunPlace.of(tmp_path / "file" / "r"))


@pytest.mark.parametrize("look", [False, True])  # a start, and --dry-run
async def test_tasks_of_a_run_that_moved_meanwhile(
    look: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text(CODE)
    config = parse(TOML, ["tasks.environment=code.py:Fine"])
    run = Run.open(f"file:{tmp_path}/r")
    run.put_config(config)
    began_with = [Task(id=f"train{n}", prompt="do it") for n in range(3)]
    keep_record(run, "train", began_with)
    told: dict[str, Any] = {"resumed": True, "look": look, "store": f"file:{tmp_path}/r"}
    await examine(config, **told)  # nothing was attempted yet
    run.ledger.append(Issued(group="g", task="train0", samples=("g.0",), version=0, epoch=0))
    with pytest.raises(EtudeError, match=r"the split 'train' differ .*: 1 gone \(train2\)"):
        await examine(config, **told)
    assert run.tasks("train", TaskRecord) == TaskRecord.of(began_with)


@pytest.mark.parametrize("finished", [False, True])
def test_tasks_are_compared_unless_nothing_is_left_to_do(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(check, "_ask", lambda config, *, store, **told: asked.append(store))
    monkeypatch.setattr(check, "is_finished", lambda run, config: finished)
    Run.open(f"file:{tmp_path}/r").put_config(parse(TOML))
    place = RunPlace.of(tmp_path / "r")
    check_start(parse(TOML), place)
    assert asked == [None if finished else place.store]


def test_paths_start_at_the_folder_of_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "code.py").write_text(CODE)
    (tmp_path / "loss.py").write_text("")
    text = TOML.replace("[tasks]", '[tasks]\nenvironment = "code.py:Fine"')
    (mine / "run.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = read_run_file(Path("mine/run.toml"), ["stage.rl.loss=../loss.py:A"])
    assert config.folder == str(mine)
    assert config.tasks.environment == f"{mine}/code.py:Fine"
    assert config.as_written(config.tasks.environment) == "code.py:Fine"
    check_stage_files(config)

    assert main(["run", "mine/run.toml", "--set", "stage.rl.loss=loss.py:A"]) == 2
    told = capsys.readouterr().err
    assert "stage.rl.loss = 'loss.py:A': relative paths start at the folder of the run" in told
    assert (
        f"{mine}/loss.py does not exist, but {tmp_path}/loss.py does: write '../loss.py:A'" in told
    )
    assert main(["run", "mine/run.toml", "--set", "harness.agent=nowhere.py:A"]) == 2
    told = capsys.readouterr().err
    assert (
        f"{mine}/nowhere.py does not exist; " in told
        and f"not where etude is started ({tmp_path})" in told
    )

    above = read_run_file(Path("mine/run.toml"), ["folder=..", "tasks.environment=loss.py:A"])
    assert (above.folder, above.tasks.environment) == (str(tmp_path), f"{tmp_path}/loss.py:A")


async def test_what_there_is_and_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text(CODE)
    model(Path("model"))
    overrides = ["tasks.environment=code.py:Fine", "model.path=model", "model.max_context=64"]
    found = await examine(parse(TOML, overrides), resumed=False, look=True)
    assert found is not None and found.tasks == {"train": 2, "heldout": 2}
    assert found.model_context == 256
    files = small_files()
    whole = init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)
    assert found.parameters == sum(p.numel() for p in whole.parameters())
    assert found.seconds.keys() == {"midtrain", "rl", "evaluations"}
    assert min(found.seconds.values()) > 0 and found.disk_bytes > 12 * found.parameters


def test_the_dry_run_asks_the_same_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one test that starts the real process of the check."""
    monkeypatch.chdir(tmp_path)
    Path("code.py").write_text(CODE)
    Path("run.toml").write_text(TOML)
    before = sorted(tmp_path.rglob("*"))
    argv = ["run", "run.toml", "--dry-run", "--set", "tasks.environment=code.py:Fine"]
    assert main([*argv, "--set", "harness.agent=code.py:Nobody"]) == 2
    assert f"error: harness.agent = '{tmp_path}/code.py:Nobody'" in capsys.readouterr().err
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "tasks: 2 for training (3 asked for), 2 held out" in told
    assert "expected time: about" in told and "expected disk: about" in told
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)
    ] == before


def test_fresh_also_removes_a_run_that_lost_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(config: RunConfig, **told: bool) -> Findings | None:
        asked.append(told)
        return None

    monkeypatch.setattr(check, "_ask", ask)
    place = tmp_path / "r"
    Run.open(f"file:{place}").put_checkpoint("000001.000000", b"")
    with pytest.raises(EtudeError, match="without its config.json"):
        check_start(parse(TOML), RunPlace.of(place))
    with pytest.raises(EtudeError, match="is not an Etude run"):
        check_start(parse(TOML), RunPlace.of(place), fresh=True)
    (place / "logs").mkdir()
    (place / "lock").touch()
    check_start(parse(TOML), RunPlace.of(place), fresh=True)
    assert asked == [{"resumed": False, "look": False, "store": None}], "nothing is there then"
