"""The place of a run: a directory, or a bucket with a folder on this machine for lock and logs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from rich.console import Console

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch import local
from etude.launch.launcher import is_stopped
from etude.launch.place import RunPlace
from etude.store import runs
from etude.store.objects import Objects
from etude.store.runs import Run

TOML = 'name = "x"\n[[stage]]\nkind = "rl"\nsteps = 3\n'


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}"])
def test_a_directory_in_every_form(tmp_path: Path, form: str) -> None:
    place = RunPlace.of(form.format(tmp_path / "r"))
    assert place == RunPlace(f"file:{tmp_path}/r", tmp_path / "r")
    assert str(place) == f"{tmp_path}/r" and place.find() is None
    assert not place.directory.exists()


def test_a_bucket_has_a_folder_for_lock_and_logs() -> None:
    place = RunPlace.of("s3://bucket/team/run/")
    assert place == RunPlace("s3://bucket/team/run", Path("runs/s3-bucket-team-run-537e79d8"))
    assert str(place) == "s3://bucket/team/run"
    assert RunPlace.of("s3://bucket/team-run").directory != place.directory


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(EtudeError, match="http://x.*is not a store: give a path"):
        RunPlace.of("http://x/y")


@pytest.mark.parametrize("url", ["s3://bucket", "gs://b/run", "az://c/a/b", "file:/tmp/x"])
def test_the_store_of_a_run_file(url: str) -> None:
    assert parse(f'store = "{url}"\n{TOML}').store == url


@pytest.mark.parametrize("url", ["s3:/bucket", "runs/x", "file:x", "http://h/x", "s3:// b"])
def test_a_store_that_cannot_be_is_named(url: str) -> None:
    with pytest.raises(EtudeError, match="store"):
        parse(f'store = "{url}"\n{TOML}')


def test_a_run_may_move_to_another_store() -> None:
    run = Run(Objects(MemoryStore(), "s3://there"))
    run.put_config(parse(f'store = "s3://here/x"\n{TOML}'))
    run.put_checkpoint("000001.000000", b"")
    run.put_config(parse(f'store = "s3://there"\n{TOML}'))
    assert run.config().store == "s3://there"


def test_only_a_run_is_removed(tmp_path: Path) -> None:
    place = RunPlace.of(tmp_path)
    (tmp_path / "lock").touch()
    place.check_removable()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(EtudeError, match="is not an Etude run, so it was not deleted"):
        place.check_removable()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EtudeError, match="is not an Etude run, so it was not deleted"):
        place.check_removable()


def in_memory(monkeypatch: pytest.MonkeyPatch) -> Objects:
    """The contents of every bucket."""
    objects = Objects(MemoryStore(), "s3://bucket/run")
    monkeypatch.setattr(Objects, "open", lambda url, create=True: objects)
    return objects


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


@pytest.mark.parametrize("in_bucket", [False, True])
def test_of_a_run_nothing_is_left_and_what_lies_beside_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bucket: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = in_memory(monkeypatch) if in_bucket else Objects.open("here")
    place = RunPlace.of(objects.url)
    for name in runs.FOLDERS:
        objects.put(f"{name}/a/b", b"")
    objects.put("notes.txt", b"mine")
    objects.put("other-run/config.json", b"")
    Run(objects).put_config(parse(TOML))
    (place.directory / "logs").mkdir(parents=True)
    later(monkeypatch, 60.0)
    place.check_removable()
    place.remove()
    assert objects.list("") == ["notes.txt", "other-run/config.json"]
    beside = [] if in_bucket else ["notes.txt", "other-run"]
    assert sorted(path.name for path in place.directory.iterdir()) == beside


def test_all_folders_of_the_layout_are_known() -> None:
    told = re.findall(r"^    ([a-z-]+)/", runs.__doc__ or "", re.M)
    assert list(dict.fromkeys(told)) == list(runs.FOLDERS)


@pytest.mark.parametrize("has_config", [True, False])
def test_a_run_that_is_run_from_another_machine_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_config: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = in_memory(monkeypatch)
    place = RunPlace.of(objects.url)
    if has_config:
        Run(objects).put_config(parse(f"heartbeat_timeout_s = 100\n{TOML}"))
    place.directory.joinpath("logs").mkdir(parents=True)
    place.directory.joinpath("lock").touch()
    objects.put("events/controller/0000000000.jsonl", b"")
    for attempt in (place.check_removable, place.remove):
        with pytest.raises(
            EtudeError, match="is probably running, perhaps on another machine: stop it"
        ):
            attempt()
    later(monkeypatch, 60.0)
    if has_config:
        with pytest.raises(EtudeError, match="60 s ago.*after 102 s without writes"):
            place.remove()
        later(monkeypatch, 60.0)
    place.remove()
    assert objects.list("") == []


def test_a_run_is_removed_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Removing(Exception):
        pass

    def remove(place: RunPlace) -> None:
        assert (place.directory / "lock").exists() and not is_stopped(place.directory)
        raise Removing

    monkeypatch.setattr(local, "check_start", lambda *told, **more: None)
    monkeypatch.setattr(RunPlace, "remove", remove)
    with pytest.raises(Removing):
        place = RunPlace.of(tmp_path / "r")
        local.execute(parse(TOML), place, Console(), resume="", fresh=True)
