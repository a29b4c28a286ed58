"""`etude weights`, as a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from etude.cli import main
from etude.store.objects import Objects
from etude.weights.manifest import Chain
from etude.weights.publish import Policy, Publisher

BASE = torch.arange(2000, dtype=torch.float32)


def weights(version: int) -> torch.Tensor:
    return (BASE + (BASE % 100).eq(version)).bfloat16()


@pytest.fixture
def url(tmp_path: Path) -> str:
    objects = Objects.open(str(tmp_path / "run"))
    publisher = Publisher(Chain(objects), policy=Policy(max_chain=4))
    for version in range(1, 8):
        tensors = {"model.layers.0.up_proj.weight": weights(version), "norm.weight": torch.ones(3)}
        publisher.publish(version, tensors, stage="rl", step=version)
    publisher.close()
    objects.put("model/config.json", b"{}")
    return str(tmp_path / "run")


def test_log_and_show(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "log", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "whole" in lines[1] and "from 6" in lines[7]
    assert main(["weights", "show", url, "--version", "3"]) == 0
    shown = capsys.readouterr().out
    assert "from 2" in shown and "of up_proj" in shown and " 0.0000% of norm" in shown


def test_verify_finds_what_is_wrong(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "verify", url]) == 0
    assert "all is as it was published" in capsys.readouterr().out
    objects = Objects.open(url)
    manifest = Chain(objects).find(4)[1]
    objects.put(f"weights/shards/000001/000004/{manifest.route.shards[0].hash}", b"other bytes")
    assert main(["weights", "verify", url]) == 1
    told = capsys.readouterr().out
    assert "version 4: right by 0 of 1 ways, not from 3" in told
    assert "version 5: right by 1 of 2 ways, not from 4" in told and "version 7: right by 1 of 1 ways\n" in told
    assert "2 versions are damaged" in told


def test_export_and_fetch(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "export", url, str(tmp_path / "out"), "--version", "5"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["model.layers.0.up_proj.weight"], weights(5))
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    assert main(["weights", "export", url, str(tmp_path / "out")]) == 2
    assert main(["weights", "fetch", url, "--cache", str(tmp_path / "cache")]) == 0
    assert "version 7" in capsys.readouterr().out
    assert [p for p in (tmp_path / "cache").iterdir() if not p.suffix]


def test_compact(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "compact", url, "--skip", "3"]) == 0
    told = capsys.readouterr().out
    assert "version 6 from 3: " in told and "1 ways added" in told
    assert main(["weights", "compact", url, "--skip", "3"]) == 0
    assert "0 ways added" in capsys.readouterr().out
    assert main(["weights", "verify", url]) == 0
    assert "version 6: right by 2 of 2 ways" in capsys.readouterr().out


def test_gc(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["weights", "gc", url, "--keep", "2", "--grace", "0"]) == 0
    assert list(Chain(Objects.open(url)).lineage()) == [5, 6, 7]
    assert main(["weights", "verify", url]) == 0
    capsys.readouterr()
    assert main(["weights", "show", url, "--version", "2"]) == 2
    assert "was deleted by `etude weights gc`" in capsys.readouterr().err


def test_a_store_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "log", str(tmp_path)]) == 2
    assert "holds no published weights" in capsys.readouterr().err
