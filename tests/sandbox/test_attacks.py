"""Attacks by which one sandbox could take resources from the machine, and so from all others: each
was possible once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.process import ProcessSandboxPool
from tests.sandbox.test_isolation import LONG_S, descendants, result

HOLD = """
import fcntl, socket
ENOUGH = 512 << 20

def filled(sockets):
    held = 0
    for each in sockets:
        each.setblocking(False)
        try:
            while held < ENOUGH: held += each.send(bytes(1 << 16))
        except BlockingIOError: pass
    return held

held, kept = 0, []
try:
    while held < ENOUGH:
        kept += (pair := make())
        for each in pair: each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        held += filled(pair)
except OSError: pass
print(held < ENOUGH // 4, len(kept) > 100)
"""
CONNECTED = """
import socket
def make():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]
"""


@pytest.mark.parametrize("make", ["import socket; make = socket.socketpair", CONNECTED])
async def test_sockets_hold_little_memory_of_the_kernel(
    walled: NamespaceSandboxPool, make: str
) -> None:
    assert await result(walled, make + HOLD) == "True True"


async def test_commands_stay_first_in_line_when_memory_runs_out(
    walled: NamespaceSandboxPool,
) -> None:
    script = """
import os, subprocess
for name in ("oom_score_adj", "oom_adj"):
    try: open(f"/proc/self/{name}", "w").write("0")
    except OSError as e: print(e.strerror)
subprocess.run(["sh", "-c", "echo 0 > /proc/self/oom_score_adj"], stderr=subprocess.DEVNULL)
print(open("/proc/self/oom_score_adj").read().strip(), flush=True)
print("through", file=open("/dev/fd/1", "w"))
"""
    assert (await result(walled, script)).splitlines() == [
        *["Read-only file system"] * 2,
        "1000",
        "through",
    ]


TAKE_WATCHES = """
import ctypes, time
libc, taken = ctypes.CDLL(None), 0
while taken < 1000 and libc.inotify_init() >= 0: taken += 1
print(taken, flush=True)
time.sleep(1000)
"""


async def test_one_sandbox_does_not_take_the_watches_of_all(walled: NamespaceSandboxPool) -> None:
    files = {"take.py": TAKE_WATCHES}
    async with (
        walled.open(SandboxSpec(files=files)) as greedy,
        walled.open(SandboxSpec(files=files)) as other,
    ):
        process = await greedy.start(["python", "take.py"])
        assert int(await process.read()) == 8
        # a second process of the same sandbox gets none, another sandbox gets its own
        for sandbox, expected in ((greedy, 0), (other, 8)):
            again = await sandbox.start(["python", "take.py"])
            assert int(await again.read()) == expected


async def test_as_root_every_sandbox_is_a_user_of_its_own(walled: NamespaceSandboxPool) -> None:
    if not walled.walls.own_users:
        pytest.skip("neither an ordinary user nor the root of a container can become others")
    async with walled.open(SandboxSpec()) as one, walled.open(SandboxSpec()) as other:
        for sandbox in (one, other):
            ran = await sandbox.run(["id"], timeout_s=LONG_S)
            assert ran.output == "uid=1000(user) gid=1000(user) groups=1000(user)\n"
        found = [
            {line.split()[1] for line in text.splitlines() if line.startswith(("Uid", "Gid"))}
            for pid in descendants(walled._zygote.pid)
            if (text := Path(f"/proc/{pid}/status").read_text())
        ]
    users = {user for (user,) in found}
    assert len(users) == len(found) == 2 and not users & {"0", "1000", "65534"}


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user is one user")
async def test_the_zygote_keeps_few_rights_and_its_sandboxes_none(
    walled: NamespaceSandboxPool,
) -> None:
    status = Path(f"/proc/{walled._zygote.pid}/status").read_text()
    held = {
        line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm"))
    }
    kept = 1 << 6 | 1 << 7 | (1 << 1 if walled.walls.cgroup else 0)
    assert {int(each, 16) for each in held} == {kept}


async def test_pipes_stay_small(walled: NamespaceSandboxPool) -> None:
    script = """
import fcntl, os
taken = 0
try:
    while True:
        _, end = os.pipe()
        os.set_blocking(end, False)
        try: fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)
        except PermissionError: pass
        try:
            while True: taken += os.write(end, bytes(4096))
        except BlockingIOError: pass
except OSError: pass
print(1 << 20 < taken <= 8 << 20)
"""
    assert await result(walled, script) == "True"


# For example, the finder of an editable installation loads `re` and `types` in every Python of its
# environment, including that of process sandboxes.
LOADED_AT_START = subprocess.run(
    [sys.executable, "-s", "-c", "import sys; print(*sys.modules)"],
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
NAMES = ("copy", "token", "signal", "glob", "json", "re", "select", "struct", "socket", "types")
# A module built into the interpreter (`select` on some systems) is not a file, and found first.
SHADOWS = [name for name in NAMES if name not in sys.builtin_module_names]


@pytest.mark.parametrize("name", SHADOWS)
async def test_a_file_beside_the_script_is_what_its_name_means(
    pool: SandboxPool, name: str
) -> None:
    """As in a Python that has just started, which a command with variables of its own gets."""
    if isinstance(pool, ProcessSandboxPool) and name in LOADED_AT_START:
        pytest.skip("this environment's Python loads it before any script")
    script = f"import {name}; print({name}.WHO)\nimport tarfile"
    async with pool.open(SandboxSpec(files={f"{name}.py": "WHO = 'mine'", "s.py": script})) as box:
        warm = await box.run(["python", "s.py"], timeout_s=LONG_S)
        cold = await box.run(["python", "s.py"], timeout_s=LONG_S, env={"A": "1"})
        for ran in (warm, cold):
            assert "mine\n" in ran.output
        assert warm.exit_code == cold.exit_code


async def test_output_beyond_any_file_is_read_to_its_end(walled: NamespaceSandboxPool) -> None:
    script = "import sys\nfor _ in range(40): print('x' * (1 << 20))\nprint('the end'); sys.exit(3)"
    async with walled.open(SandboxSpec(files={"s.py": script})) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        assert (ran.exit_code, ran.output[-10:]) == (3, "x\nthe end\n")
        endless = await sandbox.run(["yes"], timeout_s=0.3)
        assert endless.exit_code is None and endless.output.endswith("y\ny\n")
