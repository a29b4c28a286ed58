"""Sandboxes that are made in advance."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
from collections.abc import AsyncIterator

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxSpec
from etude.sandbox import namespaces
from etude.sandbox.namespaces import NamespaceSandboxPool
from tests.namespaces import need_namespaces
from tests.sandbox.test_isolation import LONG_S, descendants, until, until_gone
from tests.sandbox.test_layers import large, told
from tests.sandbox.test_walls import left_of, need_cgroup

SPARES = 2
NS_GET_OWNER_UID = 0xB704


@pytest.fixture
async def spared() -> AsyncIterator[NamespaceSandboxPool]:
    need_namespaces()
    opened = NamespaceSandboxPool(spares=SPARES)
    yield opened
    await opened.close()


async def settled(pool: NamespaceSandboxPool, sandboxes: int = 0) -> set[int]:
    """The first processes of all sandboxes and spares, once every spare is up."""
    found: set[int] = set()

    def all_there() -> bool:
        nonlocal found
        found = descendants(pool.zygote_pid)
        return len(found) == SPARES + sandboxes and all(is_apart(pid) for pid in found)

    await until(all_there)
    return found


def is_apart(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except FileNotFoundError:
        return False


def maker_of(pid: int) -> int:
    """The user that has made its user namespace."""
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    try:
        return struct.unpack("I", fcntl.ioctl(namespace, NS_GET_OWNER_UID, bytes(4)))[0]
    finally:
        os.close(namespace)


async def works(sandbox: Sandbox) -> bool:
    return await told(sandbox, "ls; echo a > a; cat a; id -un") == "a\nuser\n"


async def test_a_spare_is_a_sandbox_once_and_another_takes_its_place(
    spared: NamespaceSandboxPool,
) -> None:
    for _ in range(2 * SPARES):
        before = await settled(spared)
        async with spared.open(SandboxSpec()) as sandbox:
            assert await works(sandbox)
            during = await settled(spared, sandboxes=1)
            assert before < during
        after = await settled(spared)
        assert len(after & before) == SPARES - 1 and after < during


async def test_nothing_is_left_of_spares_that_nobody_wanted(spared: NamespaceSandboxPool) -> None:
    spares, zygote = await settled(spared), spared.zygote_pid
    await spared.close()
    await until_gone(spares)
    assert left_of(zygote) == []


async def test_spares_end_with_a_zygote_that_is_killed(spared: NamespaceSandboxPool) -> None:
    spares = await settled(spared)
    spared._zygote.kill()
    await until_gone(spares)
    async with spared.open(SandboxSpec()) as sandbox:
        assert await works(sandbox)


async def test_a_spare_that_was_killed_is_given_to_nobody(spared: NamespaceSandboxPool) -> None:
    for pid in await settled(spared):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not descendants(spared.zygote_pid))
    async with spared.open(SandboxSpec()) as sandbox:
        assert await works(sandbox)
        await settled(spared, sandboxes=1)


@pytest.mark.parametrize("at_once", [1, 4 * SPARES])
async def test_more_are_opened_than_there_are_spares(
    spared: NamespaceSandboxPool, at_once: int
) -> None:
    async with large(spared) as origin:
        forks = await asyncio.gather(*[origin.fork() for _ in range(at_once)])
        assert [await told(fork, "echo 2 >> a; cat a") for fork in forks] == ["1\n2\n"] * at_once
        for fork in forks:
            await fork.close()
    boxes = await asyncio.gather(*[spared.start(SandboxSpec(), {}) for _ in range(at_once)])
    assert all([await works(box) for box in boxes])
    for box in boxes:
        await box.close()


async def test_limits_hold_in_what_was_a_spare(spared: NamespaceSandboxPool) -> None:
    need_cgroup(spared)
    limits = Limits(memory_bytes=64 << 20, disk_bytes=4 << 20, processes=8, cpus=1.0)
    await settled(spared)
    async with spared.open(SandboxSpec(limits=limits)) as sandbox:
        took = await told(sandbox, "head -c 5000000 /dev/zero > a; wc -c < a")
        assert int(took.split()[-1]) == 4 << 20
        assert "Max processes 9 9" in " ".join(
            (await told(sandbox, "cat /proc/self/limits")).split()
        )
        greedy = "import os; b = b'a' * (128 << 20)"
        assert (await sandbox.run(["python", "-c", greedy], timeout_s=LONG_S)).exit_code != 0
        # in each hierarchy it sees itself at the top
        paths = (await told(sandbox, "cut -d: -f3- /proc/self/cgroup")).split()
        assert set(paths) == {"/"}


async def test_what_is_used_in_a_sandbox_counts_as_nobody_elses(
    spared: NamespaceSandboxPool,
) -> None:
    """The kernel counts it for the users in a user namespace, and for the user that has made it."""
    if not spared.walls.own_users:
        pytest.skip("neither an ordinary user nor the root of a container can become others")
    async with large(spared) as origin, spared.open(SandboxSpec()):
        fork = await origin.fork()
        found = await settled(spared, sandboxes=3)
        makers = {maker_of(pid) for pid in found}
        assert len(makers) == len(found) and 0 not in makers
        users = {os.stat(f"/proc/{pid}").st_uid for pid in found}
        assert (
            len(users) == len(found) - 1 and 0 not in users
        )  # a fork has the user of the sandbox that it shares files with
        await fork.close()


async def test_a_kernel_that_refuses_is_asked_again_only_for_who_wants_a_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_namespaces()
    boot = """
import errno, itertools, os, socket, sys; sys.path.append(sys.argv[1])
from etude.sandbox import kernel, zygote
made, as_ever = itertools.count(), zygote.Zygote._make_spare
def refused(flags): raise OSError(errno.EPERM, f"unshare({flags:#x}): Operation not permitted")
def make(self):
    if next(made) == 1: kernel.unshare = refused
    as_ever(self)
zygote.Zygote._make_spare = make
zygote.main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4])
"""
    monkeypatch.setattr(namespaces, "_BOOT", boot)
    pool = NamespaceSandboxPool(spares=SPARES)
    try:
        for _ in range(2):
            with pytest.raises(RolloutFailure, match=r"unshare\(0x.*Operation not permitted"):
                await pool.start(SandboxSpec(), {})
        await until(lambda: not descendants(pool.zygote_pid))
        assert pool.owing()["zygote"] < LONG_S  # it lives
    finally:
        await pool.close()
