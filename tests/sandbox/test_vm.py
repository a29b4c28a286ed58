"""Behaviour of virtual machines alone: booting, being saved, and forks of running ones."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxSpec, Service
from etude.sandbox import qemu, vm_boot
from etude.sandbox.mounts import Mount
from etude.sandbox.qemu import Engine, Files, Hardware, machine_argv
from etude.sandbox.vm import VmSandboxPool, _hardware
from etude.sandbox.vm_boot import Kernel
from tests.sandbox.conftest import need_vm

LONG_S = 300.0
COUNT = """
import itertools, time
for n in itertools.count():
    print(n, file=open("/work/count", "w"), flush=True)
    time.sleep(0.01)
"""
SERVER = """
import socket
listener = socket.create_server(("127.0.0.1", 4000))
kept = ""
while True:
    with listener.accept()[0] as client:
        kept += client.recv(100).decode()
        client.sendall(kept.encode())
"""
ASK = """
import socket, sys
with socket.create_connection(("keeper", 4000)) as it:
    it.sendall(sys.argv[1].encode())
    print(it.recv(100).decode())
"""


@pytest.fixture
async def pool() -> AsyncIterator[VmSandboxPool]:
    need_vm()
    opened = VmSandboxPool(LONG_S)
    yield opened
    await opened.close()


async def said(sandbox: Sandbox, *argv: str) -> str:
    ran = await sandbox.run(argv, timeout_s=LONG_S)
    assert ran.exit_code == 0, ran
    return ran.output.strip()


@pytest.mark.tiers
async def test_a_machine_is_forked_with_what_runs_in_it(pool: VmSandboxPool) -> None:
    service = Service(name="keeper", argv=("python", "server.py"), port=4000, ready_s=LONG_S)
    files = {"count.py": COUNT, "server.py": SERVER, "ask.py": ASK}
    async with pool.open(SandboxSpec(files=files, services=(service,))) as origin:
        assert await said(origin, "python", "ask.py", "a") == "a"
        await origin.start(["python", "count.py"])
        while await said(origin, "sh", "-c", "cat count 2> /dev/null || echo") == "":
            await asyncio.sleep(0.05)
        forks = [await origin.fork() for _ in range(2)]
        draws = set()
        for number, each in enumerate([origin, *forks]):
            # data sent to it before the fork, and nothing that was sent to another one later
            assert await said(each, "python", "ask.py", str(number)) == f"a{number}"
            before = await said(each, "cat", "count")
            while await said(each, "cat", "count") == before:
                await asyncio.sleep(0.05)
            draws.add(await said(each, "head", "-c8", "/proc/sys/kernel/random/uuid"))
            draws.add(await said(each, "sh", "-c", "od -An -tx8 -N8 /dev/urandom"))
        assert len(draws) == 6, "machines from one state draw their own random numbers"
        await forks[0].close()
        again = await forks[1].fork()
        await forks[1].close()
        assert await said(again, "python", "ask.py", "!") == "a2!"
        await again.close()


@pytest.mark.tiers
async def test_a_machine_has_the_time_the_limits_and_no_way_out(pool: VmSandboxPool) -> None:
    limits = Limits(memory_bytes=256 << 20, processes=8, cpus=2, disk_bytes=8 << 20)
    async with pool.open(SandboxSpec(limits=limits)) as sandbox:
        now = int(await said(sandbox, "date", "+%s"))
        here = int((await asyncio.to_thread(subprocess.check_output, ["date", "+%s"])).strip())
        assert abs(here - now) < LONG_S
        assert await said(sandbox, "uname", "-r") != os.uname().release or pool.engine.kernel
        # processors and memory are those of the machine, not ours
        assert await said(sandbox, "nproc") == "2"
        total = int((await said(sandbox, "grep", "MemTotal", "/proc/meminfo")).split()[1])
        assert total < 512 << 10
        assert (await said(sandbox, "cat", "/proc/net/dev")).count(":") == 1  # loopback
        many = await sandbox.run(
            ["sh", "-c", "for n in 1 2 3 4 5 6 7 8 9; do sleep 9 & done; wait"], timeout_s=LONG_S
        )
        assert many.exit_code != 0
        full = await sandbox.run(["sh", "-c", "head -c 9000000 /dev/zero > f"], timeout_s=LONG_S)
        assert full.exit_code != 0
        eats = "x = bytearray(600 << 20); print('held')"
        assert "held" not in (await sandbox.run(["python", "-c", eats], timeout_s=LONG_S)).output
        assert await said(sandbox, "echo", "alive") == "alive"


@pytest.mark.tiers
async def test_a_machine_that_ended_is_a_failure_and_not_a_verdict(pool: VmSandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        running = asyncio.ensure_future(sandbox.run(["sleep", "1000"], timeout_s=LONG_S))
        await asyncio.sleep(0)
        for machine in pool.machines._open:
            assert machine._process is not None
            machine._process.kill()
        with pytest.raises(RolloutFailure):
            await running
        with pytest.raises(RolloutFailure):
            await sandbox.diff()


OWNER = """
import asyncio, sys
from etude.core.sandbox import SandboxSpec
from etude.sandbox.vm import VmSandboxPool

async def main():
    pool = VmSandboxPool(300)
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.start(["sleep", "1000"])
        print(pool.machines.home, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.tiers
def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    need_vm()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        home = owner.stdout.readline().decode().strip()
        assert _processes_of(home)
        owner.send_signal(signal.SIGKILL)
    while _processes_of(home):
        os.sched_yield()

    async def open_another() -> None:
        await VmSandboxPool().close()

    asyncio.run(open_another())
    assert not Path(home).exists()


def _processes_of(home: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if home.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.tiers
async def test_what_is_mounted_is_in_the_machine(tmp_path: Path) -> None:
    need_vm()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/greet").write_text("#!/bin/sh\necho hello from $0\n")
    (tmp_path / "bin/greet").chmod(0o755)
    tmp_path.chmod(0o755)
    pool = VmSandboxPool(LONG_S, [Mount(str(tmp_path), "/opt/x")])
    async with pool.open(SandboxSpec()) as sandbox:
        assert await said(sandbox, "greet") == "hello from /opt/x/bin/greet"
        shut = await sandbox.run(["touch", "/opt/x/new"], timeout_s=LONG_S)
        assert shut.exit_code != 0
    await pool.close()
    assert not (tmp_path / "new").exists()


async def test_a_task_that_asks_for_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = object.__new__(VmSandboxPool)
    for spec, part in (
        (SandboxSpec(image="x"), "image"),
        (SandboxSpec(network=("pypi.org",)), "network"),
        (SandboxSpec(user="root"), "user"),
    ):
        with pytest.raises(EtudeError, match=f"vm sandboxes do not support.*: {part}"):
            pool.check(spec)
    pool.check(SandboxSpec(limits=Limits(cpus=0.5, memory_bytes=1 << 30, processes=3)))


def test_a_machine_has_room_for_what_the_sandbox_may_hold() -> None:
    hardware = _hardware(Limits(cpus=1.5, memory_bytes=512 << 20))
    assert hardware.processors == 2 and hardware.memory_mib > 512
    assert _hardware(Limits(disk_bytes=1 << 30)).memory_mib > 2 * 1024
    assert _hardware(Limits()) == _hardware(Limits(processes=3)), "one template for both"


ENGINE = Engine("qemu", Kernel("/boot/k", "/lib/modules/k"), "tcg")
SIZE = Hardware(memory_mib=512, processors=2)


def test_a_machine_has_no_network_and_writes_to_nothing_of_the_host(tmp_path: Path) -> None:
    files = Files({"system": 7}, tmp_path / "initramfs", tmp_path / "console")
    memory = tmp_path / "memory"
    booted, restored, forked = (
        machine_argv(ENGINE, SIZE, files, port=8, monitor=9, memory=file, boots=boots)
        for file, boots in ((memory, True), (memory, False), (None, False))
    )
    for argv in (booted, restored, forked):
        words = " ".join(argv)
        assert "-nodefaults" in argv and "readonly=on" in words and "-sandbox on," in words
        assert not any(word in words for word in ("netdev", "-nic", "virtfs", "9p", "hostfwd"))
        assert argv[:4] == ["setpriv", "--pdeathsig", "KILL", "--no-new-privs"]
    devices = [[argv[n + 1] for n, word in enumerate(argv) if word == "-device"]
               for argv in (booted, restored, forked)]  # fmt: skip
    assert devices[0] == devices[1] == devices[2], "a state fits the machine that it is of"
    assert "share=on" in " ".join(booted) and "share=off" in " ".join(restored)
    assert "defer" in restored and "memory-backend-ram" in " ".join(forked)


def test_kvm_is_used_only_where_a_guest_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A QEMU that boots by emulation alone, as on machines where KVM can be called but guests
    hang."""
    program = tmp_path / "qemu"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *"-accel kvm"*) exec sleep 1000;; *) echo {vm_boot.UP};; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(qemu, "_KVM", str(program))
    monkeypatch.setattr(qemu, "_BOOT_S", {"kvm": 0.5, "tcg": LONG_S})
    monkeypatch.setattr(qemu, "write_initramfs", lambda path, *_: path.write_bytes(b""))
    kernel = Kernel("/boot/k", "/lib/modules/k")
    assert qemu._probe(str(program), kernel) == "tcg"
    program.write_text(f"#!/bin/sh\necho {vm_boot.UP}\n")
    assert qemu._probe(str(program), kernel) == "kvm"
    program.write_text("#!/bin/sh\necho no such machine >&2; exit 1\n")
    with pytest.raises(EtudeError, match="virtual machines do not boot here: no such machine"):
        qemu._probe(str(program), kernel)


def test_modules_are_loaded_after_those_that_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.builtin").write_text("kernel/fs/squashfs/squashfs.ko\n")
    (tmp_path / "modules.dep").write_text(
        "k/virtio.ko.xz:\nk/virtio_ring.ko.xz: k/virtio.ko.xz\n"
        "k/virtio_mmio.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\n"
        "k/virtio-blk.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\n"
        "k/virtio_console.ko.xz: k/virtio_ring.ko.xz k/virtio.ko.xz\nk/overlay.ko.xz:\n"
    )
    kernel = Kernel("/boot/k", str(tmp_path))
    names = [Path(file).name.partition(".")[0] for file in kernel.module_files()]
    assert names == ["virtio", "virtio_ring", "virtio_mmio", "virtio-blk", "virtio_console",
                     "overlay"]  # fmt: skip
    (tmp_path / "modules.builtin").write_text("")
    with pytest.raises(FileNotFoundError, match="squashfs"):
        kernel.module_files()


def test_the_same_installation_boots_the_same(tmp_path: Path) -> None:
    """Otherwise no saved machine would be found again."""
    need_vm()
    kernel = vm_boot.find_kernel()
    assert kernel is not None
    for name in ("one", "other"):
        vm_boot.write_initramfs(tmp_path / name, kernel, [Mount("/opt", "/opt/x")])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_an_entry_is_as_the_kernel_reads_it(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    with archive.open("wb") as file:
        vm_boot._add(file, "d", stat.S_IFDIR | 0o755)
        vm_boot._add(file, "d/a", stat.S_IFREG | 0o640, b"12345")
        vm_boot._add(file, "d/l", stat.S_IFLNK | 0o777, b"a")
        vm_boot._add(file, "TRAILER!!!", 0)
    if (cpio := vm_boot.shutil.which("cpio")) is None:
        pytest.skip("apt install cpio")
    with archive.open("rb") as source:
        subprocess.run([cpio, "-id", "--quiet"], stdin=source, cwd=tmp_path, check=True)
    assert (tmp_path / "d/l").readlink() == Path("a")
    assert (tmp_path / "d/a").read_bytes() == b"12345"
    assert stat.S_IMODE((tmp_path / "d/a").stat().st_mode) == 0o640
