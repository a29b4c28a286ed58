"""Forks of large working copies: they share earlier content and keep later changes apart."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.core.sandbox import Limits, Sandbox, SandboxSpec
from etude.sandbox import kernel
from etude.sandbox.layers import Layers
from etude.sandbox.limits import COPY_BYTES
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.tree import EXECUTABLE, FILE, LINK
from tests.namespaces import need_namespaces
from tests.sandbox.test_isolation import LONG_S, descendants

LARGE = {f"large{n}": b"\1" * (COPY_BYTES // 3) for n in range(4)}
FILES = {"a": "1\n", "gone": "x", "d/e/f": "x", "turns/into": "x", "run.sh": "true\n"}
LIMITS = Limits(disk_bytes=8 * COPY_BYTES)
SPEC = SandboxSpec(files={**LARGE, **FILES}, limits=LIMITS)


@contextlib.asynccontextmanager
async def large(pool: NamespaceSandboxPool) -> AsyncIterator[Sandbox]:
    """A sandbox that became large by its own commands."""
    async with pool.open(SandboxSpec(files=FILES, limits=LIMITS)) as sandbox:
        size = COPY_BYTES // 3
        await told(sandbox, f"for n in 0 1 2 3; do head -c {size} /dev/zero > large$n; done")
        yield sandbox


async def told(sandbox: Sandbox, script: str) -> str:
    return (await sandbox.run(["sh", "-c", script], timeout_s=LONG_S)).output


async def layered(sandbox: Sandbox) -> bool:
    return "overlay" in await told(sandbox, "stat -f -c %T .")


def descriptors(pool: NamespaceSandboxPool) -> dict[int, int]:
    """Number of open descriptors of each process in its sandboxes."""
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in descendants(pool.zygote_pid)}


@pytest.fixture
async def shared(walled: NamespaceSandboxPool) -> NamespaceSandboxPool:
    """A pool on a kernel that has overlays for ordinary users, over files in memory."""
    async with large(walled) as sandbox:
        fork = await sandbox.fork()
        can = await layered(fork)
        await fork.close()
    if not can:
        pytest.skip("this kernel has no overlays of an ordinary user's over tmpfs")
    return walled


async def test_what_there_was_is_shared_and_what_comes_is_not(
    shared: NamespaceSandboxPool,
) -> None:
    async with shared.open(SPEC) as first:
        await told(first, "echo 2 >> a; ln -s a link; chmod +x run.sh")
        second = await first.fork()
        held = descriptors(shared)
        third = await first.fork()
        assert descriptors(shared).items() >= held.items()  # a fork leaves nothing open in another
        assert await layered(first) and await layered(second) and await layered(third)
        # a layer takes no more memory than its own content
        used = "df --output=used -B1 . | tail -1"
        assert int(await told(second, used)) < COPY_BYTES // 4
        await told(second, "rm gone; rm -r d; mkdir d; echo new > d/new; echo 3 >> a; rm large0")
        await told(third, "rm -r turns; echo file > turns; mv run.sh moved; printf y > large1")
        assert await told(first, "cat a; ls") == (
            "1\n2\na\nd\ngone\nlarge0\nlarge1\nlarge2\nlarge3\nlink\nrun.sh\nturns\n"
        )
        assert await told(first, "stat -c %s large0 large1") == f"{COPY_BYTES // 3}\n" * 2
        assert await second.patch() == {
            "a": (FILE, b"1\n2\n3\n"),
            "link": (LINK, b"a"),
            "run.sh": (EXECUTABLE, b"true\n"),
            "gone": None,
            "d/e/f": None,
            "d/new": (FILE, b"new\n"),
            "large0": None,
        }
        grandchild = await third.fork()
        await third.close()
    # both sandboxes that it comes from are gone
    assert await told(grandchild, "cat turns large1; ls; readlink link") == (
        "file\nya\nd\ngone\nlarge0\nlarge1\nlarge2\nlarge3\nlink\nmoved\nturns\na\n"
    )
    fresh = await grandchild.fork()
    await told(fresh, "cat large2 > copy; rm -rf *")
    assert await told(fresh, "ls") == "" and "moved" in await told(grandchild, "ls")
    assert set(await fresh.patch()) == set(SPEC.files)


async def test_marks_of_an_overlay_are_the_agents_doing(shared: NamespaceSandboxPool) -> None:
    """A file that the agent's own attributes make unreadable is an error of the attempt, not of the
    sandbox."""
    async with large(shared) as sandbox:
        mark = "import os; os.setxattr('a', 'user.overlay.metacopy', b'')"
        assert (await sandbox.run(["python", "-c", mark], timeout_s=LONG_S)).exit_code == 0
        await (await sandbox.fork()).close()
        with pytest.raises(ValueError, match="cannot be read"):
            await sandbox.diff()


async def test_while_something_is_at_work_files_are_copied(shared: NamespaceSandboxPool) -> None:
    async with large(shared) as sandbox:
        process = await sandbox.start(["sleep", "1000"])
        fork = await sandbox.fork()
        assert not await layered(fork) and not await layered(sandbox)
        assert await told(fork, "cat a; stat -c %s large3") == f"1\n{COPY_BYTES // 3}\n"
        await process.kill()
        assert await layered(await sandbox.fork())


async def test_small_working_copies_are_copied(shared: NamespaceSandboxPool) -> None:
    async with shared.open(SandboxSpec(files={"d/a": "1"})) as sandbox:
        fork = await sandbox.fork()
        assert not await layered(fork)
        # so that whole directories can be renamed, which an overlay leaves to `mv`
        script = "import os; os.rename('d', 'e'); print(os.listdir('e'))"
        await fork.write("s.py", script)
        assert (await fork.run(["python", "s.py"], timeout_s=LONG_S)).output == "['a']\n"


async def test_layers_cannot_be_reached_but_through_the_top(shared: NamespaceSandboxPool) -> None:
    script = """
import ctypes, glob, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.umount2(b"/work", flag) for flag in (0, 2, 8)], os.listdir("/work") == os.listdir("."))
for path in ("upper", "work", "../upper"): print(os.path.exists(path))
for fd in range(3, 99):
    try: print("open", os.readlink(f"/proc/self/fd/{fd}"))
    except OSError: pass
"""
    async with large(shared) as sandbox:
        fork = await sandbox.fork()
        await fork.write("s.py", script)
        ran = await fork.run(["python", "s.py"], timeout_s=LONG_S)
        assert ran.output == "[-1, -1, -1] True\nFalse\nFalse\nFalse\n"


async def test_a_long_line_of_forks(shared: NamespaceSandboxPool) -> None:
    async with large(shared) as sandbox:
        last: Sandbox = sandbox
        seen = set()
        for n in range(66):
            following = await last.fork()
            await following.write(f"n{n}", "x")
            if last is not sandbox:
                await last.close()
            last = following
            seen.add(await layered(last))
        # at some point the layers are merged again, and nothing is lost
        assert seen == {True, False}
        assert await told(last, "ls n* | wc -l; cat a") == "66\n1\n"


async def test_a_fork_by_another_zygote_is_a_copy() -> None:
    """The zygotes' sandboxes have different users, if there are several."""
    need_namespaces()
    pool = NamespaceSandboxPool()
    try:
        async with large(pool) as sandbox:
            pool._zygote.kill()
            pool._zygote.wait()
            fork = await sandbox.fork()
            assert not await layered(fork)
            assert await told(fork, "echo 2 >> a; cat a") == "1\n2\n"
    finally:
        await pool.close()


class Mounts:
    """A model of a kernel with overlays, made of directories: a mount hides the content below it,
    which stays open."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.refuses = False
        self.hidden = 0
        for name in ("mount", "unmount", "clone_mount"):
            monkeypatch.setattr(kernel, name, getattr(self, name))

    def mount(self, source: str, place: str, kind: str, flags: int, options: str) -> None:
        if kind == "overlay" and self.refuses:
            raise OSError(errno.EPERM, "no overlays here")
        if kind == "tmpfs":
            self.hidden += 1
            self.root.rename(f"{self.root}-{self.hidden}")
            self.root.mkdir()

    def unmount(self, place: str) -> None: ...

    def clone_mount(self, path: str) -> int:
        return os.open(path, os.O_PATH | os.O_DIRECTORY)


def files_of(layer: int) -> list[str]:
    try:
        return sorted(os.listdir(f"/proc/self/fd/{layer}"))
    finally:
        os.close(layer)


def test_layers_are_what_there_was_and_what_came_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    (root / "a").touch()
    Mounts(root, monkeypatch)
    layers = Layers(str(root))
    assert [files_of(layer) for layer in layers.freeze("")] == [["a"]]
    (root / "upper" / "b").touch()  # where an overlay puts written files
    assert [files_of(layer) for layer in layers.freeze("")] == [["a"], ["b"]]
    assert len(layers) == 2


def test_a_kernel_without_overlays_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "work"
    root.mkdir()
    mounts, layers = Mounts(root, monkeypatch), Layers(str(root))
    mounts.refuses = True
    with pytest.raises(OSError, match="no overlays here"):
        layers.freeze("")
    assert len(layers) == 0 and mounts.hidden == 1
