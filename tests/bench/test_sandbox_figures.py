"""The benchmark of sandboxes, small: no figure is missing, and no processes or files are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.bench import _sandbox_database, _sandbox_tiers, sandboxes
from etude.cli import main
from etude.core.errors import EtudeError
from etude.core.sandbox import SandboxPool
from etude.sandbox.fake import FakeSandboxPool
from tests.namespaces import need_namespaces


async def branched(pool: SandboxPool) -> dict[str, list[float]]:
    return {"branch_postgres": [0.05, 0.06]}


def test_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    need_namespaces()
    small = {"_STARTS": 3, "_SUSTAINED_S": 0.1, "_BURST": 4, "_OTHER_STARTS": 1, "_GB": 1_000_000}
    for name, value in small.items():
        monkeypatch.setattr(sandboxes, name, value)
    monkeypatch.setattr(sandboxes, "others", lambda directory: {"plain": ["echo", "up"]})
    monkeypatch.setattr(sandboxes, "branched", branched)
    monkeypatch.setattr(sandboxes, "tiers", lambda: {"host.start_p50_ms": 1.0})
    assert main(["bench", "sandboxes", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures.keys() == {
        "load_before",
        *(f"namespaces.{name}_p{share}_ms" for name in ("start", "echo") for share in (50, 99)),
        "namespaces.close_p50_ms",
        "namespaces.starts_per_s",
        "namespaces.burst_s",
        "namespaces.burst_close_s",
        "namespaces.mib_each",
        "namespaces.kernel_mib_each",
        "namespaces.fork_1gb_p50_ms",
        "namespaces.fork_1gb_p99_ms",
        "namespaces.branch_postgres_p50_ms",
        "namespaces.branch_postgres_p99_ms",
        "host.start_p50_ms",
        "plain.echo_p50_ms",
        "plain.echo_p99_ms",
    }
    assert all(value >= 0 for value in figures.values())
    assert 0 < figures["namespaces.start_p50_ms"] < figures["namespaces.echo_p50_ms"]
    assert figures["namespaces.starts_per_s"] > 0
    assert figures["namespaces.mib_each"] > 0


def test_others_are_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: None)
    assert sandboxes.others(tmp_path) == {}
    monkeypatch.setattr(sandboxes.shutil, "which", lambda name: f"/usr/bin/{name}")
    found = sandboxes.others(tmp_path)
    assert found.keys() == {"bubblewrap", "crun", "runsc"}
    config = json.loads((tmp_path / "crun" / "config.json").read_text())
    assert config["process"]["args"] == ["/usr/bin/echo", "up"]


async def test_a_runsc_that_is_too_old_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise EtudeError("runsc cannot start a sandbox on this machine: unknown platform: systrap")

    monkeypatch.setattr(_sandbox_tiers.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(_sandbox_tiers, "TimedGvisorPool", refuse)
    assert await _sandbox_tiers.gvisor() == {}
    assert "skipping gvisor" in capsys.readouterr().err


async def test_without_postgresql_no_branch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sandbox_database, "POSTGRES", Path("/nowhere"))
    assert await _sandbox_database.branched(FakeSandboxPool()) == {}
