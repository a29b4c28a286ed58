"""`etude plan` and `etude simulate` on the command line."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from etude.cli import main
from etude.commands.terminal import say

TOML = """
name = "x"
[harness]
max_turns = 8
max_tokens = 256
[model]
max_context = 8192
[[stage]]
kind = "rl"
steps = 3
groups_per_step = 4
group_size = 4
max_lag = 1
"""
SIZE = ["--parameters", "8e9", "--kv-bytes", "147e3"]


@pytest.fixture
def toml(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(TOML)
    return str(tmp_path / "run.toml")


def test_plan(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", toml, "--gpus", "16", "--json", *SIZE]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert found["trainer_gpus"] + found["engines"] * found["engine_gpus"] == 16
    for word in ("8 B parameters", "placement  16 H200", "memory", "ratio", "wanted: 0.33"):
        assert word in said.err


def test_the_model_of_the_file_is_measured(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", toml, "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "1.02 kB of keys and values a token" in said
    assert "1 engine of 1\n" in said and " 0 s" not in said
    assert "GB more for the activations of a pass" in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "1"], "too few"),
        (["--gpus", "16", "--parameters", "8e9"], "pass both"),
    ],
)
def test_a_plan_that_cannot_be(
    toml: str, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    size = SIZE if "--parameters" not in more else []
    assert main(["plan", toml, *more, *size, "--gpu", "a100"]) == 2
    assert said in capsys.readouterr().err


def test_simulate(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", toml, "--gpus", "64", "--regions", "2", "--seeds", "3", "--steps", "4"]
    assert main([*argv, "--json", *SIZE]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert list(found) == [
        *("seeds", "violations", "steps_per_hour", "trainer_busy", "engine_busy", "lag_max")
    ]
    assert found["seeds"] == 3 and found["violations"] == 0 and found["lag_max"] <= 1
    assert found["steps_per_hour"] > 0 and 0 < found["trainer_busy"] <= 1
    assert "3 fault schedules" in said.err and "`etude plan` predicts" in said.err


def test_simulating_a_small_model(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", toml, "--gpus", "2", "--seeds", "0", "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "1 region of 1 engine of 1 GPU;" in said and "0.00 h" not in said


def test_a_terminal_has_its_lines_wrapped() -> None:
    line = "memory     48 GB a GPU of the trainer, for /a/path/that/does/not/fit/at/all anyway"
    narrow = Console(width=30, force_terminal=True, color_system=None, file=StringIO())
    say(narrow, f"{line}\n\n  end", indent=11)
    *wrapped, blank, end = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (blank, end) == ("", "  end")
    assert all(each.startswith(" " * 11) for each in wrapped[1:])
    assert all(len(each) <= 30 for each in wrapped if "/" not in each)
    assert " ".join(" ".join(wrapped).split()) == " ".join(line.split())

    pipe = Console(width=30, file=StringIO())
    say(pipe, line, indent=11)
    assert pipe.file.getvalue() == f"{line}\n"  # type: ignore[attr-defined]


def test_too_few_engines_for_the_regions(toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", toml, "--gpus", "3", "--regions", "8", *SIZE]) == 2
    assert "too few for 8 regions" in capsys.readouterr().err
