"""Locations of runs, and the command to resume them, which must work in any folder."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from rich.console import Console

from etude.arguments import parse_arguments
from etude.cli import INTERRUPTED, main
from etude.commands.show import print_next, show
from etude.core.config import RunConfig, parse
from etude.core.events import EVENTS, Launched
from etude.dash.reader import RunView
from etude.launch import local
from etude.launch.launcher import locked
from etude.launch.place import RunPlace
from etude.launch.screen import draw
from etude.run.evaluate import Report
from etude.store.objects import Objects
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
    found = re.search("resume with: (.*)", console.export_text())
    assert found
    return found[1]


def words_of(command: str) -> list[str]:
    """The words of a command as a shell reads them, preceded by the folder that it changes to."""
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


@pytest.mark.parametrize(("versions", "first"), [([0, 2], 0), ([1, 3], 1), ([2], 0), ([], 0)])
def test_the_next_commands_stand_one_a_line(
    tmp_path: Path, versions: list[int], first: int
) -> None:
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
    title, *lines = console.export_text().splitlines()
    assert title == "next steps:"
    told = [vars(parse_arguments(shlex.split(line)[1:])) for line in lines]
    compared = [(each["before"], each["after"]) for each in told if each["command"] == "compare"]
    assert compared == ([(f"{place}@{first}", [str(place)])] if versions else [])
    evaluated = [(each["run"], each["version"]) for each in told if each["command"] == "eval"]
    assert evaluated == ([(str(place), 0)] if versions and first not in versions else [])
    (exported,) = (each for each in told if each["command"] == "weights")
    assert (exported["action"], exported["url"]) == ("export", str(place))
    assert [each["command"] for each in told][:4] == ["dash", "sessions", "show", "audit"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file; etude is started in its parent, and every run is stopped at
    once."""

    def stop(config: RunConfig, place: RunPlace, *_: object, **__: object) -> None:
        Run.open(place.store).put_config(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "execute", stop)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "run.toml").write_text(TOML)
    return tmp_path / "project"


def test_a_start_from_another_folder_names_the_run_that_is_there(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    above = project.parent
    for argv in (["project/run.toml"], ["project/run.toml"]):  # the second resumes
        assert main(["run", *argv]) == INTERRUPTED
        told = capsys.readouterr()
        assert "starts a new run" not in told.out
        assert told.err.endswith(f"\nthe run is in {above}/runs/x\n")
    monkeypatch.chdir(project)
    main(["run", "run.toml", "--dir", f"{above}/runs/x"])
    assert "starts a new run" not in capsys.readouterr().out
    main(["run", "run.toml"])
    assert capsys.readouterr().out == (
        f"starts a new run in {project}/runs/x; {above}/runs/x is another run with "
        f"this name: to resume that one, use --dir\n"
    )
    main(["run", "run.toml"])
    assert capsys.readouterr().out == "", "it goes on"
    monkeypatch.chdir("/")
    main(["run", f"{project}/run.toml", "--dir", f"{above}/new"])
    told = capsys.readouterr().out
    assert told.startswith(f"starts a new run in {above}/new; {project}/runs/x is another run")


def test_the_plan_names_the_place_and_the_other_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Run.open(f"file:{project}/runs/x").put_config(parse(TOML))
    assert main(["run", "project/run.toml", "--dry-run"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    place = project.parent / "runs" / "x"
    assert first == f"run x, seed 0, in {place}"
    assert last.startswith(
        f"  note: starts a new run in {place}; {project}/runs/x is another run with"
    )
    assert not place.exists()


@pytest.mark.parametrize("width", [80, 200])
def test_the_screen_names_the_place(width: int) -> None:
    def first_line(title: str) -> str:
        console = Console(record=True, width=width)
        console.print(draw(RunView(), title, 1, width))
        return console.export_text().splitlines()[0]

    short, long = "etude · x · /home/ada/proj/runs/x", f"etude · x · {'/folder' * 40}/runs/x"
    assert first_line(short).startswith(f"{short} ") and "Ctrl-C stops" in first_line(short)
    line = first_line(long)
    assert len(line) == width and line.startswith("etude · x · …")
    assert "/folder/runs/x " in line and line.endswith("Ctrl-C stops")
    assert first_line("etude · x").endswith("Ctrl-C stops, the same command resumes")


def test_contamination_is_asked_of_a_run_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    objects, of_disk = Objects(MemoryStore(), "s3://bucket/run"), Objects.open
    monkeypatch.setattr(
        Objects, "open",
        lambda url, create=True: objects if url.startswith("s3:") else of_disk(url, create=create),
    )  # fmt: skip
    Run(objects).put_config(parse(TOML))
    assert main(["eval", "s3://bucket/run", "--contamination"]) == 2
    assert "s3://bucket/run has no published weights yet" in capsys.readouterr().err
