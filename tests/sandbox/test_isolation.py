"""Isolation by namespaces: nothing gets out, nothing stays, and nothing inside reaches its
keeper."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec
from etude.sandbox import guest, kernel, namespaces, syscalls
from etude.sandbox.limits import NICENESS
from etude.sandbox.namespace_sandbox import NamespaceSandbox
from etude.sandbox.namespaces import NamespaceSandboxPool
from tests.namespaces import need_namespaces

LONG_S = 60.0


async def result(pool: NamespaceSandboxPool, script: str) -> str:
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        return ran.output.strip()


def descendants(pid: int) -> set[int]:
    """Every process below this one. A dead one that waits to be reaped does not count."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found |= {int(stat.parent.name)} | descendants(int(stat.parent.name))
    return found


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not true():
            await asyncio.sleep(0.01)


async def until_gone(pids: set[int]) -> None:
    await until(lambda: not any(alive(pid) for pid in pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_it_is_an_ordinary_user_without_capabilities(walled: NamespaceSandboxPool) -> None:
    status = await result(walled, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["1000"] * 4
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}
    assert fields["NoNewPrivs"] == "1"


async def test_it_sees_no_process_but_its_own_and_no_descriptor_but_three(
    walled: NamespaceSandboxPool,
) -> None:
    script = (
        "import os; print([p for p in os.listdir('/proc') if p.isdigit()], "
        "sorted(os.listdir('/proc/self/fd'))[:3])\n"
    )
    script += (
        "for fd in range(3, 256):\n    try: os.fstat(fd); print('open', fd)\n    except OSError: "
        "pass"
    )
    assert await result(walled, script) == "['1'] ['0', '1', '2']"


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/new', 'w')",
        "open('/usr/new', 'w')",
        "open('/etc/passwd', 'a')",
        "open('/proc/sys/kernel/hostname', 'w')",
        "os.listdir('/sys')",
        "os.listdir('/home')",
        "open('/etc/shadow')",
        "socket.create_connection(('127.0.0.1', 22))",
        "socket.create_connection(('1.1.1.1', 53))",
        "os.setuid(0)",
        "os.mknod('/work/disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))",
        "os.chroot('/work')",
        "check(libc.unshare(0x10000000))",  # a user namespace, and capabilities with it
        "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
        "check(libc.umount2(b'/proc', 2))",
        "check(libc.setns(os.open('/proc/self/ns/mnt', os.O_RDONLY), 0))",
        "resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6))",
        "open('big', 'wb').write(bytes(20 << 20))",
        "[open(f'f{n}', 'wb').write(bytes(10 << 20)) for n in range(5)]",
        "bytes(1 << 30)",
        "[os.fork() or signal.pause() for _ in range(100)]",
        "[open(f'f{n}', 'w').close() for n in range(5000)]",
        "os.memfd_create('hidden')",
        "socket.socket(socket.AF_VSOCK)",
        "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "check(libc.shmget(0, ctypes.c_size_t(4097), 0o1600))",
        "check(libc.shmget(0, ctypes.c_size_t(1 << 32), 0o1600))",
        "check(libc.semget(0, 1, 0o1600))",
        "check(libc.msgget(0, 0o1600))",
        "check(libc.ptrace(0, 0, 0, 0))",
        "os.openpty()",
        "check(libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0))",
        "check(libc.syscall(425, 1, bytes(120)))",  # io_uring_setup, on every machine
    ],
)
async def test_what_it_may_not_do(walled: NamespaceSandboxPool, attempt: str) -> None:
    script = f"""
import ctypes, os, resource, signal, socket, stat
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    {attempt}
    print("done")
except (OSError, MemoryError, ValueError):
    print("refused")
"""
    assert await result(walled, script) == "refused"


async def test_pairs_of_sockets_are_of_the_same_families(walled: NamespaceSandboxPool) -> None:
    script = """
import socket
try:
    socket.socketpair(40)  # AF_VSOCK
except OSError as e:
    print(e.errno)
"""
    assert await result(walled, script) == str(errno.EPERM)


async def test_small_shared_memory_is_its_own_and_there_are_few(
    walled: NamespaceSandboxPool,
) -> None:
    script = """
import ctypes
libc = ctypes.CDLL(None)
made = sum(libc.shmget(key, ctypes.c_size_t(4096), 0o1600) >= 0 for key in range(1, 6000))
print(made, libc.shmget(7, ctypes.c_size_t(4096), 0) >= 0)
"""
    assert await result(walled, script) == "4096 True"
    look = "import ctypes; print(ctypes.CDLL(None).shmget(7, ctypes.c_size_t(4096), 0))"
    assert await result(walled, look) == "-1"


def refused(
    machine: str,
    number: int,
    argument: int = 0,
    arch: int | None = None,
    second: int = 0,
    third: int = 0,
    upper: int = 0,
) -> str:
    """The filter's verdict on a call, by a small interpreter of its instructions."""
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine] if arch is None else arch
    read = {0: number, 4: arch, 16: argument, 24: second, 28: upper, 32: third}
    steps, at, value = list(struct.iter_unpack("=HBBI", syscalls.program(machine) or b"")), 0, 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                value = read[operand]
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x06:
                return {
                    0x7FFF0000: "allowed",
                    0x00050000: "ignored",
                    0x00050001: "refused",
                    0x80000000: "killed",
                }[operand]


@pytest.mark.parametrize(
    ("machine", "sockets", "keyctl", "read", "ioctl", "fcntl", "setsockopt", "io_setup", "shmget"),
    [
        ("x86_64", 41, 250, 0, 16, 72, 54, 206, 29),
        ("aarch64", 198, 219, 63, 29, 25, 208, 0, 194),
    ],
)
def test_the_filter_on_both_machines(
    machine: str,
    sockets: int,
    keyctl: int,
    read: int,
    ioctl: int,
    fcntl: int,
    setsockopt: int,
    io_setup: int,
    shmget: int,
) -> None:
    assert refused(machine, read) == "allowed"
    assert refused(machine, keyctl) == refused(machine, io_setup) == "refused"
    sizes = ((0, 0), (4096, 0), (4097, 0), (0, 1))  # of a segment: the lower and the upper half
    said = [refused(machine, shmget, second=size, upper=more) for size, more in sizes]
    assert said == ["allowed", "allowed", "refused", "refused"]
    assert [n for n in range(1024, 1040) if refused(machine, fcntl, second=n) == "refused"] == [
        1031  # F_SETPIPE_SZ
    ]
    options = {n: refused(machine, setsockopt, second=socket.SOL_SOCKET, third=n) for n in range(9)}
    assert {n for n, said in options.items() if said == "ignored"} == {7, 8}
    assert refused(machine, setsockopt, second=6, third=7) == "allowed"  # of TCP, another option
    ioctls = {request: refused(machine, ioctl, second=request) for request in range(0x5400, 0x5460)}
    assert [request for request, said in ioctls.items() if said != "allowed"] == [
        termios.TIOCSTI,
        termios.TIOCLINUX,
        termios.TIOCSETD,
    ]
    assert [f for f in range(64) if refused(machine, sockets, f) == "allowed"] == [1, 2, 10, 16]
    assert (
        refused(machine, read, arch=0x40000003) == refused(machine, 0x40000000 | read) == "killed"
    )
    assert syscalls.program("riscv64") is None and syscalls.number_of_keyctl("riscv64") is None
    assert syscalls.number_of_keyctl(machine) == keyctl


def test_where_the_numbers_of_calls_are_unknown_the_other_walls_stand_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def filters() -> list[str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return [line for line in lines if line.startswith("Seccomp")]

    before = filters()
    monkeypatch.setattr(kernel, "_filter", None)
    kernel.filter_calls()
    assert filters() == before


async def test_what_ordinary_programs_need_still_works(walled: NamespaceSandboxPool) -> None:
    script = """
import multiprocessing, socket, subprocess, sys, threading
thread = threading.Thread(target=print, args=["thread"]); thread.start(); thread.join()
print(subprocess.run([sys.executable, "-c", "print('child')"], capture_output=True, text=True).stdout, end="")
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(abs, [-1, -2]))
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6): socket.socket(family).close()
a, b = socket.socketpair(); a.send(b"pair"); print(b.recv(9).decode())
"""  # noqa: E501
    assert (await result(walled, script)).splitlines() == ["thread", "child", "[1, 2]", "pair"]


async def test_nothing_that_is_installed_can_be_imported(walled: NamespaceSandboxPool) -> None:
    script = """
import glob, sys
for prefix in ("/usr", "/usr/local", sys.base_prefix):
    for place in glob.glob(f"{prefix}/lib*/python*/*-packages"):
        sys.path.append(place)
        print(*glob.glob(f"{place}/*"), end="")
for name in ("etude", "pip", "setuptools", "numpy"):
    try: __import__(name); print(name)
    except ImportError: pass
"""
    assert await result(walled, script) == ""
    async with walled.open(SandboxSpec()) as sandbox:
        assert (
            await sandbox.run(["python", "-m", "pip", "--version"], timeout_s=LONG_S)
        ).exit_code == 1


async def test_commands_give_way_to_the_controller(walled: NamespaceSandboxPool) -> None:
    assert int(await result(walled, "import os; print(os.nice(0))")) == min(
        19, os.nice(0) + NICENESS
    )


def test_the_session_keyring_is_left_behind() -> None:
    script = """
import ctypes, os
from etude.sandbox import kernel, syscalls
number = syscalls.number_of_keyctl(os.uname().machine)
session = lambda: ctypes.CDLL(None).syscall(number, 0, -3, 1) if number else -1
before = session()
kernel.leave_keyring()
print(before, session())
"""
    before, after = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    if before == "-1":
        pytest.skip("no keyrings here")
    assert before != after


def test_every_sandbox_leaves_the_session_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in the first process of the trial sandbox, before the filter that would refuse the
    call."""
    need_namespaces()
    boot = """
import ctypes, os, socket, sys; sys.path.append(sys.argv[1])
from etude.sandbox import kernel, spares, syscalls, zygote
number, left, leave = syscalls.number_of_keyctl(os.uname().machine), [], kernel.leave_keyring
session = lambda: ctypes.CDLL(None).syscall(number, 0, -3, 1) if number else -1
before = session()
kernel.leave_keyring = lambda: left.append(leave())
spares.serve = lambda link: spares.Link(link).send({"error": ["", f"keyring {len(left)} {before} {session()}"]})
zygote.main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4])
"""  # noqa: E501
    monkeypatch.setattr(namespaces, "_BOOT", boot)
    with pytest.raises(EtudeError) as caught:
        NamespaceSandboxPool()
    found = re.search(r"keyring (\d+) (-?\d+) (-?\d+)", str(caught.value))
    assert found, str(caught.value)
    left, before, after = found.groups()
    assert left == "1"
    assert before == "-1" or before != after  # -1: no keyrings here; the call must suffice


async def test_nothing_of_the_hosts_environment_is_in_sight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork keeps the block of memory that its first ancestor started with, and /proc shows it."""
    need_namespaces()
    monkeypatch.setenv("ETUDE_TOKEN", "hunter2")
    script = """
import os, subprocess
print(sorted(os.environ))
told = open("/proc/self/environ").read() + subprocess.check_output(["cat", "/proc/self/environ"], text=True)
print("hunter2" in told or "ETUDE" in told)
"""  # noqa: E501
    walled = NamespaceSandboxPool()
    try:
        assert (await result(walled, script)).splitlines() == ["['HOME', 'LANG', 'PATH']", "False"]
    finally:
        await walled.close()


async def test_all_that_is_shown_of_the_host_is_read_only(walled: NamespaceSandboxPool) -> None:
    """Checked by the mounts themselves: that an ordinary user may not write to /usr proves nothing
    about them."""
    mounts = [
        line.split()
        for line in (await result(walled, "print(open('/proc/self/mounts').read())")).splitlines()
    ]
    options = {place: set(flags.split(",")) for _, place, _, flags, *_ in mounts}
    devices = {place for place in options if place.startswith("/dev/")}
    assert {place for place, flags in options.items() if "ro" not in flags} - devices == {
        "/work",
        "/tmp",
    }
    assert {place for place, flags in options.items() if "nosuid" not in flags} <= devices
    assert {place for place, flags in options.items() if "nodev" not in flags} <= devices
    shown = {place for place in options if place in ("/usr", sys.base_prefix)}
    assert shown and all(place == f"/dev/{Path(place).name}" for place in devices)


async def test_a_full_disk_is_the_working_copys_problem(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        await sandbox.run(
            ["sh", "-c", "for n in 1 2 3; do head -c 15000000 /dev/zero > f$n; done"],
            timeout_s=LONG_S,
        )
        with pytest.raises(ValueError, match="No space left"):
            await sandbox.write("new/file", "x" * 100_000)
        assert await sandbox.read("a") == "1"


async def test_commands_leave_no_descriptor_in_their_keeper(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec()) as sandbox:
        await sandbox.run(["true"], timeout_s=LONG_S)
        (keeper,) = descendants(walled._zygote.pid)

        def held() -> int:
            return len(os.listdir(f"/proc/{keeper}/fd"))

        before = held()
        for _ in range(3):
            await sandbox.run(["true"], timeout_s=LONG_S)
            await sandbox.run(["sleep", "1000"], timeout_s=0.01)
        assert held() == before


async def test_nothing_of_the_hosts_terminal_reaches_a_sandbox() -> None:
    need_namespaces()
    ours, theirs = os.pipe()
    kept = [os.dup(descriptor) for descriptor in (0, 1)]
    os.dup2(ours, 0)
    os.dup2(theirs, 1)
    try:
        pool = NamespaceSandboxPool()
    finally:
        for descriptor, before in enumerate(kept):
            os.dup2(before, descriptor)
        for descriptor in (ours, theirs, *kept):
            os.close(descriptor)
    for descriptor in (0, 1):
        assert os.readlink(f"/proc/{pool._zygote.pid}/fd/{descriptor}") == "/dev/null"
    assert os.getsid(pool._zygote.pid) == pool._zygote.pid
    await pool.close()


async def test_nothing_is_left_running_after_a_command(walled: NamespaceSandboxPool) -> None:
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"
    async with walled.open(SandboxSpec(files={"daemon.py": daemon})) as sandbox:
        await sandbox.run(["python", "daemon.py"], timeout_s=LONG_S)
        await until(lambda: len(descendants(walled._zygote.pid)) == 1)  # the keeper


async def test_a_command_cannot_hurt_its_keeper(walled: NamespaceSandboxPool) -> None:
    hostile = """
import os, resource, signal
for pid in (0, -1, 1, os.getppid(), 2, 3, 4):
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
        if pid > 1:
            try: os.kill(pid, number)
            except OSError: pass
    try: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0))
    except (OSError, ValueError): pass
"""
    async with walled.open(SandboxSpec(files={"hostile.py": hostile, "a": "1"})) as sandbox:
        for _ in range(2):
            await sandbox.run(["python", "hostile.py"], timeout_s=LONG_S)
            await sandbox.run(
                ["sh", "-c", "kill -9 -1; kill -9 1; kill -9 $PPID"], timeout_s=LONG_S
            )
        assert await sandbox.read("a") == "1"
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_a_fork_bomb_is_bounded_and_the_next_sandbox_does_not_feel_it(
    walled: NamespaceSandboxPool,
) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with (
        walled.open(SandboxSpec(files={"bomb.py": bomb})) as sandbox,
        walled.open(SandboxSpec(files={"s.py": "print('fine')"})) as other,
    ):
        running = asyncio.create_task(sandbox.run(["python", "bomb.py"], timeout_s=1.0))
        await asyncio.sleep(0.3)
        assert len(descendants(walled._zygote.pid)) < 50
        assert (await other.run(["python", "s.py"], timeout_s=LONG_S)).output == "fine\n"
        assert (await running).exit_code is None
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_closing_leaves_no_process_mount_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = Path("/proc/self/mounts").read_text()
    pool = NamespaceSandboxPool()
    async with pool.open(SandboxSpec(files={"s.py": "import time; time.sleep(1000)"})) as sandbox:
        fork = await sandbox.fork()  # left open: the pool closes it
        running = asyncio.create_task(fork.run(["python", "s.py"], timeout_s=1000))
        await asyncio.sleep(0.05)
    processes = descendants(pool._zygote.pid) | {pool._zygote.pid}
    await pool.close()
    with pytest.raises(RolloutFailure):
        await running
    await until_gone(processes)
    assert Path("/proc/self/mounts").read_text() == before
    assert list(tmp_path.iterdir()) == []


async def test_a_closed_sandbox_says_so(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        await sandbox.close()
        with pytest.raises(RolloutFailure, match="closed"):
            await sandbox.read("a")


async def test_a_sandbox_that_is_killed_is_a_failed_rollout(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        for pid in descendants(walled._zygote.pid):
            with contextlib.suppress(ProcessLookupError):  # the trial sandbox may be ending
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(RolloutFailure):
            await sandbox.read("a")


async def test_a_killed_launcher_is_started_again(walled: NamespaceSandboxPool) -> None:
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        walled._zygote.kill()
        walled._zygote.wait()
        assert await sandbox.read("a") == "1"
        async with walled.open(SandboxSpec(files={"a": "2"})) as other:
            assert await other.read("a") == "2"
        second = walled._zygote
        async with walled.open(SandboxSpec()):
            assert walled._zygote is second  # it lives, and makes one after the other


async def test_launchers_are_not_tried_for_ever(
    walled: NamespaceSandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def silent(*spec: object) -> None:
        asked.append(walled._zygote.pid)

    monkeypatch.setattr(walled, "_ask_for_one", silent)
    monkeypatch.setattr(namespaces, "_ZYGOTES", 2)
    with pytest.raises(RolloutFailure, match="2 zygotes did not start one"):
        async with walled.open(SandboxSpec()):
            pass
    assert len(set(asked)) == len(asked) == 2


async def test_a_fork_that_fails_or_is_given_up_leaves_no_sandbox_open(
    walled: NamespaceSandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = NamespaceSandbox._ask

    async def fails(self: NamespaceSandbox, *, op: str, **more: object) -> object:
        if op == "receive":
            raise RolloutFailure("sandbox: no room")
        return await ask(self, op=op, **more)

    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        with monkeypatch.context() as patch:
            patch.setattr(NamespaceSandbox, "_ask", fails)
            with pytest.raises(RolloutFailure, match="no room"):
                await sandbox.fork()
        assert walled._sandboxes == {sandbox}
        os.kill(walled._zygote.pid, signal.SIGSTOP)
        forking = asyncio.create_task(sandbox.fork())
        await until(lambda: len(walled._sandboxes) == 2)
        forking.cancel()
        os.kill(walled._zygote.pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert walled._sandboxes == {sandbox}


async def test_a_launcher_that_is_stopped_is_replaced_and_leaves_nothing_behind() -> None:
    need_namespaces()
    walled = NamespaceSandboxPool(reply_timeout_s=1.0)
    stopped = walled._zygote
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        assert walled.owing().keys() == {"zygote"}
        stopped.send_signal(signal.SIGSTOP)
        opening = [asyncio.create_task(walled.start(SandboxSpec(), {})) for _ in range(3)]
        boxes = [await each for each in opening]
        assert walled._zygote is not stopped
        assert walled.owing()["zygote"] >= 1.0, "its silence is told, although it is over"
        assert walled.owing()["zygote"] < 1.0
        assert await sandbox.read("a") == "1"
        for box in boxes:
            await box.write("a", "2")
            assert await box.read("a") == "2"
        stopped.send_signal(signal.SIGCONT)
        stopped.wait()  # it ends by itself
        now = walled._zygote
        now.send_signal(signal.SIGSTOP)
    await walled.close()
    assert now.returncode == -signal.SIGKILL


async def test_a_launcher_that_has_much_to_tidy_up_is_waited_for() -> None:
    need_namespaces()
    walled = NamespaceSandboxPool()
    try:
        walled._zygote.send_signal(signal.SIGSTOP)
        with pytest.raises(BlockingIOError):
            while True:
                walled._control.send(b"-0\n")  # as if a thousand sandboxes had ended
        opening = asyncio.create_task(walled.start(SandboxSpec(), {}))
        await asyncio.sleep(0.05)
        walled._zygote.send_signal(signal.SIGCONT)
        sandbox = await opening
        await sandbox.write("a", "1")
        assert await sandbox.read("a") == "1"
    finally:
        await walled.close()


async def test_a_launcher_that_is_stopped_owes_an_answer_also_if_nobody_needs_it() -> None:
    need_namespaces()
    walled = NamespaceSandboxPool()
    try:
        await until(lambda: walled.owing()["zygote"] == 0.0)
        walled._zygote.send_signal(signal.SIGSTOP)
        await until(lambda: walled.owing()["zygote"] > 0.05)
        walled._zygote.send_signal(signal.SIGCONT)
        await until(lambda: walled.owing()["zygote"] == 0.0)
    finally:
        await walled.close()


@pytest.mark.parametrize("when", ["before", "under way"])
async def test_what_a_sandbox_says_that_was_stopped_is_a_failed_rollout(when: str) -> None:
    """A command that was killed for its time, in a sandbox that was stopped, has not used its
    time."""
    need_namespaces()
    walled = NamespaceSandboxPool(reply_timeout_s=1.0)
    try:
        async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
            # the trial sandbox has gone
            await until(lambda: len(descendants(walled._zygote.pid)) == 1)
            (keeper,) = descendants(walled._zygote.pid)
            if when == "before":
                os.kill(keeper, signal.SIGSTOP)
            asked = asyncio.create_task(sandbox.run(["sleep", "0.1"], timeout_s=0.2))
            await asyncio.sleep(0.05)
            os.kill(keeper, signal.SIGSTOP)
            await until(
                lambda: max(walled.owing().get(f"sandbox {sandbox.number}", 0.0), 0.0) > 1.0
            )
            os.kill(keeper, signal.SIGCONT)
            for each in (asked, sandbox.read("a")):
                with pytest.raises(RolloutFailure, match="sandbox: its answer came [0-9]+ s late"):
                    await each
    finally:
        await walled.close()


def test_a_launcher_whose_host_was_killed_ends_without_a_word(tmp_path: Path) -> None:
    need_namespaces()
    code = """
import os, socket, sys
from etude.sandbox.root import Shown
from etude.sandbox.zygote import Zygote

host, own = socket.socketpair()
zygote = Zygote(own, sys.argv[1], Shown([], [], False, "localhost", ""), None, 'not tried')
host.send(b"?\\n?\\n")
assert zygote.serve_one()
host.close()  # with an answer unread
assert zygote.serve_one() is False
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("does", ["link.receive()", "link.send({})"])
def test_a_sandbox_whose_host_was_killed_ends_without_a_word(does: str) -> None:
    code = f"""
import socket
from etude.sandbox.guest import Link

host, own = socket.socketpair()
link = Link(own)
link.send({{}})
host.close()  # with an answer unread, which is a reset and not an end
{does}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_all_vanish_with_a_killed_controller() -> None:
    controller = """
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.namespace_sandbox import NamespaceSandbox
from etude.sandbox.namespaces import NamespaceSandboxPool
async def main():
    pool = NamespaceSandboxPool()
    boxes = [await pool.start(SandboxSpec(), {}) for _ in range(3)]
    argv = ["sh", "-c", "trap '' TERM HUP; sleep 1000"]
    runs = [asyncio.create_task(box.run(argv, timeout_s=1000)) for box in boxes[:2]]
    await asyncio.sleep(0.3)
    print("up", flush=True)
    await asyncio.gather(*runs)
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", controller], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        below = descendants(process.pid)
        assert len(below) >= 4  # the zygote and three keepers at least
        process.kill()
        await until_gone(below)


def test_a_kernel_that_refuses_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse = (
        "import errno, os, socket, sys; sys.path.append(sys.argv[1]); from etude.sandbox import "
        "kernel, zygote\n"
        "def refused(flags): raise OSError(errno.EPERM, 'unshare(0x20000): Operation not "
        "permitted')\n"
        "kernel.unshare = refused\n"
        "zygote.main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4])"
    )
    monkeypatch.setattr(namespaces, "_BOOT", refuse)
    with pytest.raises(
        EtudeError, match=r"unshare\(0x20000\): Operation not permitted.*isolation = \"process\""
    ):
        NamespaceSandboxPool()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(
    os.geteuid() != 0,
    reason="only root can become someone else; others run the whole suite as themselves",
)
def test_an_ordinary_user_can_do_it_too() -> None:
    python = Path("/usr/bin/python3")
    if (
        not python.exists()
        or subprocess.run(
            [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        ).returncode
    ):
        pytest.skip("needs a Python that every user can read")
    script = """
import os, sys
root = os.path.dirname(os.path.dirname(sys.argv[1]))
sys.path.insert(0, root)
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.namespace_sandbox import NamespaceSandbox
from etude.sandbox.namespaces import NamespaceSandboxPool
async def main():
    pool = NamespaceSandboxPool()
    script = "import os; print(os.getuid(), os.listdir('/work'))"
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        print((await sandbox.run(["python", "s.py"], timeout_s=60)).output, end="")
        for pty in (False, True):
            process = await sandbox.start(["sh", "-c", "tty; exit 3"], pty=pty)
            print((await process.read()).decode().strip(), await process.wait())
    await pool.close()
os.setgroups([]); os.setgid(12345); os.setuid(12345)
asyncio.run(main())
"""
    # The checkout may be readable by root only.
    source = Path(namespaces.__file__).parents[2]
    copy = Path("/tmp") / f"etude-user-{os.getpid()}"
    copy.mkdir()
    try:
        shutil.copytree(source / "etude", copy / "etude")
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        ran = subprocess.run(
            [python, "-c", script, str(copy / "etude")], capture_output=True, text=True
        )
        assert (ran.stdout, ran.stderr) == (
            "1000 ['s.py']\nnot a tty 3\n/dev/pts/0 3\n",
            "",
        )
    finally:
        shutil.rmtree(copy)


def test_what_goes_wrong_inside_is_told_and_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Breaking:
        def __init__(self, link: object) -> None: ...

        def op_break(self, kind: str) -> None:
            raise {"os": OSError(5, "broken"), "value": ValueError("wrong")}.get(
                kind, FileNotFoundError("not there")
            )

        def op_work(self) -> str:
            return "done"

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(guest, "Guest", Breaking)
    if (pid := os.fork()) == 0:
        ours.close()
        guest.serve(theirs)
    theirs.close()
    with ours, ours.makefile("rw") as wire:

        def ask(**request: str) -> dict[str, Any]:
            wire.write(json.dumps(request) + "\n")
            wire.flush()
            return dict(json.loads(wire.readline()))

        assert json.loads(wire.readline()) == {"ok": None}
        told = ask(op="break", kind="os")["error"]
        assert told == ["RolloutFailure", "sandbox: [Errno 5] broken"]
        assert ask(op="break", kind="value") == {"error": ["ValueError", "wrong"]}
        assert ask(op="break", kind="") == {"error": ["FileNotFoundError", "not there"]}
        assert ask(op="work") == {"ok": "done"}
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
