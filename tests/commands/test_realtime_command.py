"""The commands by which a person controls the loop of real-time RL."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from etude.cli import INTERRUPTED, main
from etude.commands import realtime
from etude.commands.run_file import read_run_file
from etude.core import traffic
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.ledger import Dropped, Issued
from etude.core.traffic import Change
from etude.launch import realtime as launching
from etude.launch.launcher import RESTARTS
from etude.launch.local import in_background
from etude.launch.place import RunPlace
from etude.launch.realtime import check_realtime, realtime_programs, show_changes
from etude.serve.tokens import SECRET_VARIABLE
from etude.store.realtime import TrafficLog
from etude.store.runs import Run


@pytest.fixture
def run() -> Run:
    return Run.open("memory:")


def told(run: Run, *changes: Change) -> TrafficLog:
    log = TrafficLog(run.objects)
    for change in changes:
        assert log.append(change)
    return log


FIRST = traffic.start(0, 0.0, 0.0)
TRYING = traffic.canary(FIRST, 1, 1.0, 0.5)
LIVE = traffic.promote(TRYING, 2.0, "", 0.1)


def newest(log: TrafficLog) -> tuple[str, int, bool]:
    change = log.newest()
    assert change is not None
    return change.action, change.traffic.version, change.held


def test_one_command_each(run: Run) -> None:
    log, console = told(run, FIRST, TRYING, LIVE), Console(quiet=True)
    realtime.rollback(run, console)
    assert newest(log) == ("roll_back", 0, True)
    realtime.resume(run, console)
    assert newest(log) == ("resume", 0, False)
    realtime.pin(run, console, None)
    assert newest(log) == ("hold", 0, True)
    realtime.stop(run, console)
    assert newest(log) == ("hold", 0, True)


def test_what_cannot_be_is_said(run: Run) -> None:
    console = Console(quiet=True)
    with pytest.raises(EtudeError, match="no version has been given to users yet"):
        realtime.stop(run, console)
    with pytest.raises(EtudeError, match="no version has been given to users yet"):
        realtime.compare(run, console)
    told(run, FIRST)
    with pytest.raises(EtudeError, match="no pool has an earlier version to go back to"):
        realtime.rollback(run, console)
    with pytest.raises(EtudeError, match="version 9 is neither live nor the previous version"):
        realtime.pin(run, console, 9)


def test_of_two_who_decide_at_once_the_second_sees_what_the_first_did(run: Run) -> None:
    """The loop rolls a version back while somebody stops it."""
    log = told(run, FIRST, TRYING)
    calls = []

    def make(last: Change) -> Change:
        calls.append(last.action)
        if len(calls) == 1:
            assert log.append(traffic.roll_back(last, 2.0, "worse"))
        return traffic.hold(last, 3.0, "stopped")

    realtime.decide(run, make, Console(quiet=True))
    assert calls == ["canary", "roll_back"] and newest(log) == ("hold", 0, True)


def test_a_file_without_the_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n')
    assert main(["realtime", str(tmp_path / "run.toml")]) == 2
    assert "has no table [realtime]" in capsys.readouterr().err


TOML = """
name = "shop"
[model]
hidden_size = 32
num_layers = 1
[tasks]
heldout = 2
novel = 0
[sandbox]
isolation = "process"
[realtime]
production = "production.toml"
[realtime.gate]
safety = 0
cheats = 0
[[stage]]
kind = "rl"
steps = 1
"""

FOLDER = 'environment = "etude.run.task_folder:TaskFolder"\npath = "none"'


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the two files; everything that is started there is stopped at once."""

    def stop(program: Coroutine[Any, Any, None]) -> None:
        program.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("etude.launch.realtime.run_until_told", stop)
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 64)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "production.toml").write_text('user_key_file = "user.key"\n')
    return tmp_path


def test_start_and_stop_say_where_the_run_lies(
    product: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["realtime", "run.toml"]) == INTERRUPTED
    told = capsys.readouterr()
    place = product / "runs" / "shop"
    assert told.out == f"run shop in {place}; logs in {place / 'logs'}\n"
    assert told.err.startswith("stopped; resume with: etude ")
    assert told.err.endswith(f"\nthe run is in {place}\n")


def test_a_start_from_another_folder_names_the_run_that_is_there(
    product: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["realtime", "run.toml"])
    (product / "elsewhere").mkdir()
    monkeypatch.chdir(product / "elsewhere")
    capsys.readouterr()
    main(["realtime", "../run.toml"])
    assert capsys.readouterr().out.startswith(
        f"starts a new run in {product}/elsewhere/runs/shop; "
    )


def test_what_is_next_is_told_in_words(
    product: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Other tests cover this check, which takes seconds.
    found = SimpleNamespace(tasks={"heldout": 2})
    monkeypatch.setattr("etude.commands.realtime.check_start", lambda *_, **__: found)
    assert main(["realtime", "run.toml", "--dry-run"]) == 0
    place = product / "runs" / "shop"
    assert capsys.readouterr().out.startswith(f"{place}: no version has been given to users yet\n")
    main(["realtime", "run.toml"])
    log = told(Run.open(f"file:{place}"), FIRST)
    capsys.readouterr()
    assert main(["realtime", "run.toml", "--dry-run"]) == 0
    collects, settled, *_ = capsys.readouterr().out.splitlines()
    assert collects == "next: sessions are being collected for version 1, based on version 0"
    assert settled == "0 sessions are settled, of 256 needed for a batch; 0 pending"
    assert log.append(traffic.hold(FIRST, 1.0, "stopped by hand"))
    assert main(["realtime", "run.toml", "--dry-run"]) == 0
    assert "next: nothing, until `etude realtime resume`: stopped" in capsys.readouterr().out


def test_status_says_what_is_next_in_lines_that_stay_whole(
    product: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["realtime", "run.toml"])
    run = Run.open(f"file:{product}/runs/shop")
    told(run, FIRST)
    samples = tuple(f"{'0' * 32}.{n:013d}-{'0' * 32}" for n in range(5))
    run.ledger.append(
        Issued(group="0" * 32, task="", samples=samples, version=0),
        *(
            Dropped(samples=samples[n : n + 1], reason=reason)
            for n, reason in enumerate(("censored", "stale", "heldout", "deleted"))
        ),
    )
    capsys.readouterr()
    assert main(["realtime", "status", "runs/shop"]) == 0
    started, following, sessions = capsys.readouterr().out.splitlines()
    assert "start 0 (live 0)" in started
    assert following.startswith("next: sessions are being collected for version 1")
    assert sessions == (
        "5 sessions = 0 trained + 4 dropped (1 censored, 1 deleted, 1 heldout, 1 stale) + 1 pending"
    )


def test_status_of_a_run_without_users_is_refused(run: Run) -> None:
    run.put_config(parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    with pytest.raises(EtudeError, match="has no table"):
        realtime.status(run, Console(quiet=True))


async def test_a_start_shows_the_change_that_holds_and_those_that_come(run: Run) -> None:
    log, console = told(run, FIRST, TRYING), Console(record=True, file=StringIO(), width=200)
    async with in_background(show_changes(run, console)):
        async with asyncio.timeout(60):
            while "canary 1" not in console.export_text(clear=False):
                await asyncio.sleep(0.01)
            assert log.append(LIVE)
            while "promote 1" not in console.export_text(clear=False):
                await asyncio.sleep(0.01)
    assert len(console.export_text().splitlines()) == 2


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"production.toml": None}, "production.toml: No such file"),
        ({SECRET_VARIABLE: None}, f"set {SECRET_VARIABLE}"),
        ({"safety = 0": "safety = 8"}, "add a table [harness.code]"),
        ({"safety = 0": 'safety = 8\nprobes = "none.jsonl"'}, "none.jsonl"),
        ({"[tasks]": f"[tasks]\n{FOLDER}"}, "none"),
        ({"hidden_size = 32\nnum_layers = 1": 'path = "none"'}, "is not a complete model"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    product: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    change: dict[str, str | None],
    said: str,
) -> None:
    """Otherwise the first update would notice some of them, hours later."""
    for old, new in change.items():
        if old == SECRET_VARIABLE:
            monkeypatch.delenv(old)
        elif new is None:
            (product / old).unlink()
        else:
            (product / "run.toml").write_text(TOML.replace(old, new))
    assert main(["realtime", "run.toml", *more]) == 2
    assert said in capsys.readouterr().err
    assert not (product / "runs").exists()


def test_a_run_that_users_teach_is_not_gone_on_with_by_etude_run(
    product: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "run.toml", "--dry-run"]) == 2
    assert "start it with `etude realtime run.toml`" in capsys.readouterr().err
    main(["realtime", "run.toml"])
    capsys.readouterr()
    main(["show", "runs/shop"])
    assert "resume with: etude realtime FILE" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["stpo", "runs/shop"], ["run.toml", "runs/shop"]])
def test_a_misspelt_action_is_told_the_actions(
    product: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(["realtime", *argv]) == 2
    assert "give an action (status, compare, stop, " in capsys.readouterr().err


def test_who_is_killed_is_started_again_so_that_users_do_not_notice(
    product: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_run_file(product / "run.toml")
    engines = dict.fromkeys(config.engine.regions, (3,))
    placement = launching.placed(config).model_copy(update={"engines": engines})
    monkeypatch.setattr(launching, "placed", lambda config: placement)
    programs, _ = realtime_programs(
        config, config.realtime, RunPlace.of(product / "runs" / "shop"), once=False
    )
    assert {each.name.partition("-")[0] for each in programs} == {
        "gateway", "worker", "trainer", "loop",
    }  # fmt: skip
    assert all(each.restarts == RESTARTS for each in programs)
    workers = [each for each in programs if each.name.startswith("worker-")]
    assert workers and all(each.gpus == (3,) for each in workers)
    # A permanent mistake would only be repeated by a restart, and of two loops one must end.
    assert {each.name for each in programs if each.final == (2,)} == {"trainer", "loop"}


def test_the_files_of_the_page_are_those_of_runs_that_users_teach(product: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "realtime.md").read_text()
    for text in re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (product / "run.toml").write_text(text)
        config = read_run_file(product / "run.toml")
        assert config.realtime is not None
        check_realtime(config, config.realtime)
