"""Where a run lies, and how to go on with it: told so that it holds in any folder."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from etude.arguments import parse_arguments
from etude.commands.show import print_next, show
from etude.core.config import parse
from etude.core.events import EVENTS, Launched
from etude.launch.launcher import locked
from etude.launch.place import RunPlace
from etude.run.evaluate import Report
from etude.store.runs import Run

TOML = 'name = "x"\n[tasks]\nnovel = 0\n[[stage]]\nkind = "rl"\nsteps = 3\n'


def stopped_run(directory: Path, command: str, folder: Path) -> Run:
    run = Run.open(f"file:{directory}")
    run.put_config(parse(TOML))
    with locked(directory):
        events = run.events("launcher", EVENTS)
        launched = Launched(
            resumed=False, command=command, folder=str(folder), store=run.objects.url
        )
        events.append(launched)
        events.flush()
    return run


def command_shown(directory: Path) -> str:
    console = Console(record=True, width=400)
    show(str(directory), console)
    found = re.search("go on with: (.*)", console.export_text())
    assert found
    return found[1]


def words_of(command: str) -> list[str]:
    """As a shell reads them, with the folder that it goes to first."""
    told = command.replace("etude run", 'printf "%s\\n" "$PWD"', 1)
    done = subprocess.run(told, shell=True, capture_output=True, text=True, check=True, cwd="/")
    return done.stdout.splitlines()


def test_the_command_that_goes_on_holds_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my projects"
    stopped_run(folder / "runs" / "x", "etude run new/run.toml", folder)
    assert words_of(command_shown(folder / "runs" / "x")) == [str(folder), "new/run.toml"]


def test_a_run_that_was_moved_is_gone_on_with_where_it_is(tmp_path: Path) -> None:
    stopped_run(tmp_path / "runs" / "x", "etude run run.toml", tmp_path)
    moved = tmp_path / "a copy"
    (tmp_path / "runs" / "x").rename(moved)
    words = words_of(command_shown(moved))
    assert words == [str(tmp_path), "run.toml", "--dir", str(moved)]


@pytest.mark.parametrize("versions", [[0, 2], [2], []])
def test_the_next_commands_stand_one_a_line(tmp_path: Path, versions: list[int]) -> None:
    place = RunPlace.of(tmp_path / ("a long name " * 8).strip() / "x")
    run = Run.open(place.store)
    run.put_config(parse(TOML))
    for version in versions:
        report = Report(
            stage="rl", split="heldout", version=version, solved=0, total=1, low=0.0, high=1.0,
            rewards={}, example=[],
        )  # fmt: skip
        run.put_eval(report.name, report)
    console = Console(record=True, width=80)
    print_next(run, place, console)
    first, *lines = console.export_text().splitlines()
    assert first == "inspect it:"
    told = [vars(parse_arguments(shlex.split(line)[1:])) for line in lines]
    compared = {"before": f"{place}@0", "after": str(place)}
    assert any(each.items() >= compared.items() for each in told) == (versions == [0, 2])
    (exported,) = (each for each in told if each["command"] == "weights")
    assert (exported["action"], exported["url"]) == ("export", str(place))
    rest = [each["command"] for each in told if each["command"] not in ("weights", "compare")]
    assert rest == ["dash", "sessions", "show", "audit"]
