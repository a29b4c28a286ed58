"""`etude weights` on the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.cli import main
from etude.core.config import parse
from etude.core.traffic import start
from etude.store.objects import Objects
from etude.store.realtime import TrafficLog
from etude.store.runs import Run
from etude.weights.compact import compact
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher, SnapshotPolicy
from etude.weights.records import manifest_key, route_key, shard_key

BASE = torch.arange(2000, dtype=torch.float32)


def weights(version: int) -> torch.Tensor:
    return (BASE + (BASE % 100).eq(version)).bfloat16()


@pytest.fixture
def url(tmp_path: Path) -> str:
    objects = Objects.open(str(tmp_path / "run"))
    publisher = Publisher(Chain(objects), policy=SnapshotPolicy(max_chain=4))
    for version in range(1, 8):
        tensors = {"model.layers.0.up_proj.weight": weights(version), "norm.weight": torch.ones(3)}
        publisher.publish(version, tensors, stage="rl", step=version)
    publisher.close()
    objects.put_sealed("model/config.json", b"{}")
    return str(tmp_path / "run")


def test_log_and_show(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "log", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, *versions = [line for line in lines if " also " not in line]
    assert len(versions) == 7 and "whole" in versions[0] and "from 6" in versions[-1]
    (extra,) = set(lines) - {head, *versions}
    assert extra.strip().startswith("also whole, ")
    assert max(map(len, lines)) <= 80
    assert main(["weights", "show", url, "--version", "3"]) == 0
    shown = capsys.readouterr().out
    assert "from 2" in shown and "of up_proj" in shown and " 0.0000% of norm" in shown


def test_verify_finds_what_is_wrong(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "verify", url]) == 0
    assert "all weights are as published" in capsys.readouterr().out
    objects = Objects.open(url)
    manifest = Chain(objects).find(4)[1]
    objects.put(f"weights/shards/000001/000004/{manifest.route.shards[0].hash}", b"other bytes")
    assert main(["weights", "verify", url]) == 1
    told = capsys.readouterr().out
    assert "version 4: correct by 0 of 1 routes, not from 3" in told
    assert (
        "version 5: correct by 1 of 2 routes, not from 4" in told
        and "version 7: correct by 1 of 1 routes\n" in told
    )
    assert "2 versions are damaged" in told


def test_export_and_fetch(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "export", url, str(tmp_path / "out"), "--version", "5"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["model.layers.0.up_proj.weight"], weights(5))
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    assert main(["weights", "export", url, str(tmp_path / "out")]) == 2
    assert main(["weights", "export", url, str(tmp_path / "small"), "--dtype", "fp8"]) == 0
    assert b"fp8" in (tmp_path / "small" / "config.json").read_bytes()
    assert main(["weights", "fetch", url, "--cache", str(tmp_path / "cache")]) == 0
    assert "version 7" in capsys.readouterr().out
    assert [p for p in (tmp_path / "cache").iterdir() if not p.suffix]


def test_compact(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "compact", url, "--skip", "3"]) == 0
    told = capsys.readouterr().out
    assert "version 6 from 3: " in told and "1 routes added" in told
    assert main(["weights", "compact", url, "--skip", "3"]) == 0
    assert "0 routes added" in capsys.readouterr().out
    assert main(["weights", "verify", url]) == 0
    assert "version 6: correct by 2 of 2 routes" in capsys.readouterr().out


def test_gc(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["weights", "gc", url, "--keep", "2", "--grace", "0"]) == 0
    assert list(Chain(Objects.open(url)).lineage()) == [5, 6, 7]
    assert main(["weights", "verify", url]) == 0
    capsys.readouterr()
    assert main(["weights", "show", url, "--version", "2"]) == 2
    assert "was deleted by `etude weights gc`" in capsys.readouterr().err


@pytest.mark.parametrize("version", [5, 6])
def test_gc_keeps_what_a_version_is_built_from_where_an_object_is_lost(
    url: str, version: int
) -> None:
    """The snapshot of version 5; or the step from 5 to 6, where another one leads from 3 to 6."""
    objects = Objects.open(url)
    compact(Chain(objects), skip=3)
    link, manifest = Chain(objects).find(version)
    lost = manifest.route
    if version == 5:
        (lost,) = Chain(objects).extra_routes(link)
    objects.delete(shard_key(1, version, lost.shards[0].hash))
    for _ in range(2):
        assert main(["weights", "gc", url, "--keep", "2", "--grace", "0"]) == 0
    built = Follower(Chain(objects)).fetch(7)
    assert torch.equal(built["model.layers.0.up_proj.weight"], weights(7))


def test_a_manifest_that_is_lost_is_told_and_nothing_is_deleted(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = Objects.open(url)
    publisher = Publisher(Chain(objects))
    for version in (8, 9):
        publisher.publish(version, {"norm.weight": torch.ones(3)}, stage="rl", step=version)
    publisher.close()
    for lost in (manifest_key(1, 5), manifest_key(2, 8)):
        data = objects.get(lost)
        objects.delete(lost)
        there = objects.list("weights")
        assert main(["weights", "verify", url]) == 1
        assert f"its manifest is missing\n  restore {lost}\n" in capsys.readouterr().out
        for _ in range(2):
            assert main(["weights", "gc", url, "--keep", "3", "--grace", "0"]) == 2
        assert f"cannot read {lost} " in capsys.readouterr().err
        assert objects.list("weights") == there
        objects.put(lost, data)
    assert main(["weights", "verify", url]) == 0


def test_gc_keeps_what_the_pools_of_users_serve(url: str) -> None:
    objects = Objects.open(url)
    assert TrafficLog(objects).append(start(3, 0.0, heldout_share=0.1))
    for _ in range(2):
        assert main(["weights", "gc", url, "--keep", "2", "--grace", "0"]) == 0
    assert min(Chain(objects).lineage()) <= 3


def test_a_store_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run.open(f"file:{tmp_path}").put_config(
        parse('name = "x"\n[[stage]]\nkind = "rl"\nsteps = 1\n')
    )
    assert main(["weights", "log", str(tmp_path)]) == 2
    assert "holds no published weights" in capsys.readouterr().err


def damage(objects: Objects, key: str) -> None:
    objects.put(key, objects.get(key)[:-2])


def test_damaged_records_are_told_and_the_rest_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("etude.weights.manifest.FIRST_RETRY_S", 0.0)
    objects = Objects.open(url)
    whole = route_key(Chain(objects).find(5)[0], None)
    for key in (whole, manifest_key(1, 2)):
        damage(objects, key)
    objects.put("weights/leases/worker.json", b"{")
    assert main(["weights", "log", url]) == 0
    told = capsys.readouterr().out
    assert (
        whole in told
        and manifest_key(1, 2) in told
        and "delete it if that reader no longer exists" in told
    )
    assert [line.split()[0] for line in told.splitlines() if line.split()[0].isdigit()] == list(
        "1234567"
    )
    assert main(["weights", "verify", url]) == 1
    told = capsys.readouterr().out
    assert "version 1: correct by 1 of 1 routes\n" in told
    assert (
        f"  restore {manifest_key(1, 2)}\nversion 3: correct by 0 of 1 routes, not from 2\n" in told
    )
    assert f"version 5: correct by 0 of 2 routes, not from 4, {whole}\n  restore {whole}\n" in told
    assert "6 versions are damaged" in told
    assert main(["weights", "gc", url]) == 2
    assert "delete it if that reader no longer exists" in capsys.readouterr().err


def test_verify_names_each_object_to_restore(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("etude.weights.manifest.FIRST_RETRY_S", 0.0)
    objects, manifest = Objects.open(url), Chain(Objects.open(url)).find(7)[1]
    keys = [shard_key(1, 7, hash) for hash in (manifest.root, manifest.route.shards[0].hash)]
    damage(objects, keys[0])
    objects.delete(keys[1])
    objects.delete(manifest_key(1, 1))
    assert main(["weights", "verify", url]) == 1
    told = capsys.readouterr().out
    assert f"version 2: correct by 0 of 0 routes\n  restore {manifest_key(1, 1)}\n" in told
    assert (
        "version 7: correct by 0 of 1 routes, not from 6\n"
        f"  restore {keys[0]}\n  restore {keys[1]}\n" in told
    )


def test_what_strangers_wrote_neither_formats_nor_steers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = Publisher(
        Chain(Objects.open(str(tmp_path))), name="[/bold]\x1b[2J", now=lambda: 1e300
    )
    publisher.publish(1, {"w": torch.ones(3)}, stage="[/red]", step=1)
    publisher.close()
    for command in ("log", "show"):
        assert main(["weights", command, str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "[/red] 1" in told and "[/bold]?[2J@" in told


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_time_of_grace_is_a_time(
    url: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["weights", "gc", url, "--keep", "1", f"--grace={seconds}"])
    assert stopped.value.code == 2 and "--grace" in capsys.readouterr().err
    assert not Objects.open(url).list("weights/gc")


def test_nothing_of_an_export_that_was_stopped_is_in_the_next(url: str, tmp_path: Path) -> None:
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model.safetensors.index.json").write_text("{}")
    assert main(["weights", "export", url, str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_exported_files_may_be_read_by_whom_the_umask_says(url: str, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert main(["weights", "export", url, str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


def test_a_file_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["weights", "log", str(tmp_path / "file")]) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_weights_of_an_older_format_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Objects.open(str(tmp_path)).put("weights/epochs/000001.json", b"{}")
    assert main(["weights", "log", str(tmp_path)]) == 2
    assert (
        "holds weights in an older format, which this version of Etude cannot read"
        in capsys.readouterr().err
    )
