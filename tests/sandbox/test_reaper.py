"""Leftovers of sandboxes with a killed owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.sandbox import reaper
from etude.sandbox.zygote import OWN_IDS
from tests.namespaces import need_namespaces

OWNER = """
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.namespaces import NamespaceSandboxPool

async def main():
    pool = NamespaceSandboxPool()
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.start(["sleep", "1000"])
        print("up", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
KINDS = ("processes", "namespaces", "mounts", "cgroups", "files", "loop_devices")


def test_processes_that_were_stopped_when_their_owner_died_are_reaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_namespaces()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    footprint = reaper.Footprint(tmp_path)
    before = footprint.left()
    nothing = dict.fromkeys(KINDS, 0)
    # others of this machine may have mounted namespaces
    assert before == {**nothing, "mounts": before["mounts"]}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        _reap_what_it_left(owner, footprint)
    finally:
        owner.kill()
        owner.wait()
    left = footprint.left()
    assert left == {**before, "cgroups": left["cgroups"]}  # which the next pool sweeps


def _reap_what_it_left(owner: subprocess.Popen[bytes], footprint: reaper.Footprint) -> None:
    assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
    seen: list[int] = []
    # zygote, first process, keeper, and its command, which has become another program
    while len(seen) != 2 or footprint.left()["processes"] != 4:
        seen = footprint.look({owner.pid})
        time.sleep(0.02)
    users = {os.stat(f"/proc/{pid}").st_uid for pid in seen}
    assert footprint.own_users == {user for user in users if user in OWN_IDS}
    for pid in (*seen, *footprint.zygotes):
        os.kill(pid, signal.SIGSTOP)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    (footprint.directory / f"etude-{owner.pid}-{namespace}-x").mkdir()
    owner.kill()
    owner.wait()
    left = footprint.left()
    # The kernel kills the zygote with its owner, stopped or not, and then the processes in its
    # namespace: how many remain for the sweep is a matter of timing.
    assert left["processes"] <= 4 and left["files"] == 1
    assert reaper.sweep() >= 1
    while footprint.left()["processes"]:  # the kernel takes its time
        time.sleep(0.02)


def test_a_sweep_leaves_alone_what_has_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = tmp_path / f"{reaper.mountpoint_prefix()}x"
    namespace = os.stat("/proc/self/ns/pid").st_ino
    full = tmp_path / f"etude-999999999-{namespace}-x"
    gone = tmp_path / f"etude-999999999-{namespace}-y"
    # a container counts its own processes, and may share this directory
    elsewhere = tmp_path / f"etude-999999999-{namespace + 1}-x"
    for place in (mine, full / "inner", gone, elsewhere, tmp_path / "etude-git-x"):
        place.mkdir(parents=True)
    monkeypatch.setattr(reaper, "_pids", list)
    assert reaper.sweep() == 1
    assert mine.is_dir() and full.is_dir() and (tmp_path / "etude-git-x").is_dir()
    assert elsewhere.is_dir() and not gone.exists()


def test_a_process_of_a_container_is_not_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace = os.stat("/proc/self/ns/pid").st_ino
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(1000)", "etude.sandbox.zygote"]
    ours, theirs = [
        subprocess.Popen([*argv, f"/etude-999999999-{number}-x"])
        for number in (namespace, namespace + 1)
    ]
    monkeypatch.setattr(reaper, "_pids", lambda: [ours.pid, theirs.pid])
    try:
        reaper.sweep()  # or that of a test in parallel, which sees all processes
        assert ours.wait(timeout=60) == -signal.SIGKILL and theirs.poll() is None
    finally:
        for each in (ours, theirs):
            each.kill()
            each.wait()
