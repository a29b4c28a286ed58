"""The command line on bad input: one clear message, an exit code that is not 0, no traceback,
nothing left behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from etude import __version__
from etude.bench_arguments import BENCHMARKS
from etude.cli import main
from etude.core.config import parse
from etude.core.ledger import MEANINGS, Dropped, Issued, Reason
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.store.runs import Run
from etude.trainer.prepare import is_prepared, pretrained_files, store_files
from tests.small_model import small_files

TINY = Path(__file__).parent / "e2e" / "tiny.toml"
Etude = Callable[..., tuple[int, str, str]]


@pytest.fixture
def etude(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Etude:
    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


# Under a limit on file sizes Python would leave truncated bytecode behind, which breaks later runs.
NO_BYTECODE = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


def refused(answer: tuple[int, str, str], *said: str) -> None:
    code, out, err = answer
    assert code == 2
    assert err.startswith("error: ") and "Traceback" not in err
    for words in said:
        assert words in err


@pytest.mark.parametrize("command", ["run", "weights log"])
def test_an_unknown_option_is_told_with_those_that_there_are(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "here", "--stes=3"])
    told = capsys.readouterr().err
    assert told.startswith(f"usage: etude {command} [-h]")
    assert told.endswith(f"etude {command}: error: unrecognized arguments: --stes=3\n")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["runn", "a.toml"], "etude: error: unknown command runn: did you mean run? `etude --"),
        (["x"], "etude: error: unknown command x: `etude --help` lists all"),
        (["export", "runs/work", "there"], "use `etude weights export RUN DIR`"),
    ],
)
def test_a_command_that_is_not_there(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "there"), [([], "weights"), (["weights"], "export")])
def test_a_command_that_is_not_named_is_answered_by_the_list(
    argv: list[str], there: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "") and f"\n    {there} " in said.err


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_a_count_that_is_none(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "r.toml", "--workers", count])
    assert f"{count!r} is not a whole number of at least 1" in capsys.readouterr().err


def test_what_cannot_go_on_is_not_said_to(etude: Etude, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("etude.commands.run_file.read_run_file", stopped)
    assert etude("plan", "r.toml", "--gpus", "2") == (130, "", "stopped\n")
    assert etude("run", "r.toml", "--fresh", "--dry-run") == (130, "", "stopped\n")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    again = "stopped; resume with: etude run r.toml --set 'name=[x]'\n"  # whole, on any terminal
    assert etude("run", "r.toml", "--fresh", "--set", "name=[x]") == (130, "", again)


def test_a_place_that_cannot_be_written(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    build = etude("tasks", "build", tmp_path, "--out", "file/tasks")
    assert build == (2, "", "error: cannot use file/tasks: Not a directory\n")


def test_an_error_is_wrapped_between_words(etude: Etude, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    _, _, err = etude("run", TINY, "--set", "engine.max_num_seq=3")
    assert "did you mean" in " ".join(err.split()) and len(err.splitlines()) > 2
    assert all(len(line) <= 40 or " " not in line.strip() for line in err.splitlines())


def test_a_config_that_is_not_there(etude: Etude) -> None:
    refused(etude("run", "no.toml"), "cannot read no.toml", "No such file")


def test_a_broken_config(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('name = "x"\n[model\n')
    refused(etude("run", "bad.toml"), "bad.toml: not valid TOML", "line 2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml"]


def test_an_unknown_key(etude: Etude, tmp_path: Path) -> None:
    refused(
        etude("run", TINY, "--set", "engine.max_num_seq=3"),
        "unknown key engine.max_num_seq",
        "did you mean max_num_seqs?",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there(etude: Etude, tmp_path: Path) -> None:
    refused(
        etude("run", TINY, "--set", "model.path=nowhere"),
        f"model.path = '{Path(TINY).parent / 'nowhere'}'",  # relative to the run's file
        "model.safetensors missing",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use(etude: Etude, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(
            etude("run", TINY, "--set", f"engine.port={port}"),
            f"engine.port = {port} cannot be used",
            "in use",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_model_to_serve_that_is_not_there(
    etude: Etude, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        etude("serve", "runs/wrok", "--port", "0")
    assert "error: runs/wrok does not exist: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "audit {}",
        "show {}",
        "eval {}",
        "sessions {}",
        "doctor {}",
        "mismatch {}",
        "gateway {}",
        "compare {} x",
        "realtime status {}",
        "weights log {}",
        "weights export {} trained",
    ],
)
def test_a_run_that_is_not_there(etude: Etude, tmp_path: Path, command: str) -> None:
    """Also a project's folder, or its folder of runs, instead of one of the runs."""
    config = parse(TINY.read_text())
    Run.open(f"file:{tmp_path}/x").put_config(config)

    def call(path: str) -> tuple[int, str, str]:
        return etude(*command.format(path).split())

    refused(call("runs/none"), "runs/none", "does not exist")
    (tmp_path / "project").mkdir()
    refused(call("project"), "project has no run: check the path, or")
    Run.open(f"file:{tmp_path}/project/runs/mine").put_config(config)
    for folder in ("project", "project/runs"):
        named = f"{folder} has no run: check the path (there is project/runs/mine), or"
        refused(call(folder), named)


def test_a_project_to_serve_names_its_runs(
    etude: Etude, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run.open(f"file:{tmp_path}/project/runs/mine").put_config(parse(TINY.read_text()))
    with pytest.raises(SystemExit):
        etude("serve", "project", "--port", "0")
    assert "or a run (there is project/runs/mine)" in capsys.readouterr().err


def test_a_version_that_is_not_there(etude: Etude, tmp_path: Path) -> None:
    Run.open(f"file:{tmp_path}/r").put_config(parse(TINY.read_text()))
    refused(etude("eval", "r"), "has no published weights yet")


def test_another_config_for_the_same_run(etude: Etude, tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/r")
    run.put_config(parse(TINY.read_text()))
    run.put_checkpoint("000000.000001", b"")
    refused(
        etude("run", TINY, "--dir", "r", "--set", "stage.rl.lr=0.5"),
        "stage.rl.lr: 1e-05 -> 0.5",
    )


def test_a_place_that_is_a_file(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused(etude("run", TINY, "--dir", "file"), "cannot create a run in file")
    assert (tmp_path / "file").read_text() == "mine"


def test_fresh_removes_nothing_but_a_run(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").write_text("years of work")
    refused(
        etude("demo", "--dir", "papers", "--fresh"),
        "papers is not an Etude run, so it was not deleted",
    )
    assert (tmp_path / "papers" / "thesis").exists()


def test_an_unknown_benchmark(etude: Etude) -> None:
    refused(etude("bench", "speed"), "there is no benchmark speed", "loop")


def test_the_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "etude" / "bench"
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(BENCHMARKS)
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said and text in said for name, text in BENCHMARKS.items())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"etude {__version__}\n")


def test_a_full_disk_leaves_nothing_that_a_later_run_trips_over(tmp_path: Path) -> None:
    """A limit on file sizes simulates the full disk: the operating system refuses the write at the
    same point."""
    model, place = tmp_path / "model", tmp_path / "r"
    files = small_files()
    files["tokenizer.json"] += b" " * 20_000
    shape = ModelConfig.from_json(files["config.json"])
    write_directory(model, files, hf_state_dict(init_from_scratch(shape, 0)))
    argv = [
        sys.executable,
        "-m",
        "etude",
        "run",
        str(TINY),
        "--dir",
        str(place),
        "--set",
        f"model.path={model}",
    ]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # noqa: E731
    ended = subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=limit, check=False, env=NO_BYTECODE
    )
    assert ended.returncode == 2
    assert "cannot write model/" in ended.stderr and "free some space" in ended.stderr
    assert "Traceback" not in ended.stderr
    run = Run.open(f"file:{place}", create=False)
    assert run.objects.list("model") == [] and not is_prepared(run)
    store_files(run, pretrained_files(str(model)))
    assert is_prepared(run) and run.model_files()["tokenizer.json"] == files["tokenizer.json"]


def test_a_disk_without_any_room(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "etude", "run", str(TINY), "--dir", str(tmp_path / "r")]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # noqa: E731
    ended = subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=limit, check=False, env=NO_BYTECODE
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and "full disk" in ended.stderr
    assert "Traceback" not in ended.stderr and not (tmp_path / "r").exists()


def test_a_lock_that_cannot_be_written(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from etude.launch.launcher import locked\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "with locked(Path(sys.argv[1])): ..."
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "r")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert f"EtudeError: cannot write {tmp_path / 'r' / 'lock'}" in ended.stderr


@pytest.mark.parametrize("module", ["etude.trainer.prepare", "etude.trainer.trainer"])
def test_a_process_whose_store_is_gone(tmp_path: Path, module: str) -> None:
    argv = [sys.executable, "-m", module, "--store", f"file:{tmp_path / 'none'}"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (
        ended.returncode == 2
        and ended.stderr.startswith("error: ")
        and "does not exist" in ended.stderr
    )


def test_the_plan_is_printed_and_nothing_is_made(etude: Etude, tmp_path: Path) -> None:
    code, out, _ = etude("run", TINY, "--dry-run", "--set", "stage.rl.steps=7")
    assert code == 0
    assert (
        "midtrain: version 0 -> 1" in out
        and "sft: version 1 -> 2" in out
        and "rl: version 2 -> 9" in out
    )
    assert list(tmp_path.iterdir()) == []


def test_the_audit_of_a_run_that_has_just_begun(etude: Etude, tmp_path: Path) -> None:
    Run.open(f"file:{tmp_path}/r").put_config(parse(TINY.read_text()))
    code, out, _ = etude("audit", "r")
    assert code == 0
    assert out.startswith("0 issued = 0 trained + 0 dropped + 0 in flight")


def test_the_audit_says_what_the_reasons_of_a_drop_stand_for(etude: Etude, tmp_path: Path) -> None:
    run = Run.open(f"file:{tmp_path}/r")
    run.put_config(parse(TINY.read_text()))
    samples = ("g000000.0", "g000000.1")
    run.ledger.append(Issued(group="g000000", task="t", samples=samples, version=0))
    run.ledger.append(Dropped(samples=samples[:1], reason="cancelled"))
    run.ledger.append(Dropped(samples=samples[1:], reason="sampling", detail="temperature 0"))
    _, out, _ = etude("audit", "r")
    reasons: tuple[Reason, ...] = ("cancelled", "sampling")
    for reason in reasons:
        assert f"\n  {reason}: {MEANINGS[reason]}\n" in out
    assert "no_signal: " not in out, "of those that there are"
    assert get_args(Reason) == tuple(MEANINGS)


@pytest.mark.parametrize("option", ["--markdown", "stage.rl"])
def test_a_reader_that_has_read_enough_is_no_error(option: str) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "etude", "keys", option]
    try:
        ended = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_help_loads_neither_torch_nor_anything_slow() -> None:
    code = (
        "import sys, etude.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: "
        "pass\nprint(sorted(sys.modules))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    modules = json.loads(said.splitlines()[-1].replace("'", '"'))
    assert not {"torch", "numpy", "pydantic", "rich", "aiohttp", "obstore"} & set(modules)
