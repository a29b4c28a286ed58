"""Where a run lies: a directory, or a bucket with a folder of this machine for lock and logs."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import MemoryStore

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch.place import RunPlace
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
    assert place == RunPlace("s3://bucket/team/run", Path("runs/s3-bucket-team-run"))
    assert str(place) == "s3://bucket/team/run"


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(EtudeError, match="http://x.*is no store: give a path"):
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
    (tmp_path / "notes.txt").write_text("mine")
    place = RunPlace.of(tmp_path)
    with pytest.raises(EtudeError, match="is no run of etude: it is not removed"):
        place.check_removable()
    Run.open(place.store).put_config(parse(TOML))
    place.check_removable()
    place.remove()
    assert not tmp_path.exists()
