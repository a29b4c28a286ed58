"""The walls that not every machine has: Landlock and cgroups. A missing one is reported, and
nothing is promised that would need it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox import cgroups, landlock, namespaces
from etude.sandbox.cgroups import find, limits
from etude.sandbox.namespaces import NamespaceSandboxPool
from tests.namespaces import need_namespaces
from tests.sandbox.test_isolation import LONG_S, descendants, until, until_gone


def need_cgroup(pool: NamespaceSandboxPool) -> None:
    if not pool.walls.cgroup:
        pytest.skip(f"no cgroup can be made here: {pool.walls.cgroup_refused}")


def left_of(zygote: int) -> list[str]:
    """The directories of cgroups that this zygote has made."""
    found = subprocess.run(
        ["find", "/sys/fs/cgroup", "-path", f"*/etude-{zygote}*", "-type", "d"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.split()


async def test_the_walls_are_told(walled: NamespaceSandboxPool) -> None:
    walls = walled.walls
    assert walls.seccomp == (os.uname().machine in ("x86_64", "aarch64"))
    assert walls.landlock == landlock.version()
    assert bool(walls.cgroup) != bool(walls.cgroup_refused)
    assert ("cpus" in walls.limits) == bool(walls.cgroup)
    assert ("Landlock" in str(walls)) and ("cgroup" in str(walls))


async def test_whoever_counts_other_processes_sweeps_no_cgroup_of_ours(
    walled: NamespaceSandboxPool,
) -> None:
    """Our cgroup is empty when no sandbox is open, and our process is invisible in that PID
    namespace."""
    need_cgroup(walled)
    async with walled.open(SandboxSpec()):
        pass
    code = "from etude.sandbox.cgroups import Cgroups; Cgroups().close()"
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    swept = subprocess.run(elsewhere, capture_output=True, text=True, check=False)
    if swept.returncode:
        pytest.skip(f"no other PID namespace can sweep here: {swept.stderr}")
    async with walled.open(SandboxSpec(files={"a": "1"})) as sandbox:
        assert await sandbox.read("a") == "1"


def test_landlock_holds_by_itself(tmp_path: Path) -> None:
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    for name in ("open", "shut"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("old")
    code = """
import ctypes, os, sys
from etude.sandbox import kernel, landlock
os.chdir(sys.argv[1])
kernel.forbid_new_privileges()
landlock.restrict(landlock.rules(["open"], "/dev"))

def tried(action):
    try: action(); return "done"
    except OSError as e: return type(e).__name__

print(open("shut/file").read(), tried(lambda: open("open/new", "w").write("x")))
print(tried(lambda: os.rename("open/new", "open/newer")), tried(lambda: open("/dev/null", "w")))
for action in (
    lambda: open("shut/file", "a"),
    lambda: open("shut/new", "w"),
    lambda: os.remove("shut/file"),
    lambda: os.symlink("x", "shut/link"),
    lambda: os.link("open/file", "shut/link"),
    lambda: os.mknod("open/device", 0o60600, os.makedev(254, 0)),
    lambda: os.kill(os.getppid(), 0),
):
    print(tried(action))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    *allowed, rename, links, device, signals = ran.stdout.splitlines()[:2] + [
        " ".join(ran.stdout.splitlines()[2:5]),
        ran.stdout.splitlines()[6],
        ran.stdout.splitlines()[7],
        ran.stdout.splitlines()[8],
    ]
    assert allowed == ["old done", "done done"]
    assert rename == "PermissionError PermissionError PermissionError"
    assert links in ("PermissionError", "OSError") and device == "PermissionError"
    assert signals == ("PermissionError" if landlock.version() >= 6 else "done")
    assert (tmp_path / "shut" / "file").read_text() == "old"


async def test_all_processes_together_hold_no_more_than_the_limit(
    walled: NamespaceSandboxPool,
) -> None:
    need_cgroup(walled)
    script = """
import os, signal, time
children = []
for _ in range(4):
    ready, told = os.pipe()
    if (pid := os.fork()) == 0:
        held = b"x" * (60 << 20)
        os.write(told, b"1")
        time.sleep(1000)
    os.close(told)
    os.read(ready, 1)
    children.append(pid)
print(sum(os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children))
"""
    limit = Limits(memory_bytes=160 << 20)
    async with walled.open(SandboxSpec(files={"s.py": script, "a": "1"}, limits=limit)) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        # either the script itself was killed, or some of its children were
        assert ran.exit_code == -signal.SIGKILL or int(ran.output) < 4
        assert await sandbox.read("a") == "1"
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_one_process_may_be_as_large_as_the_limit(walled: NamespaceSandboxPool) -> None:
    need_cgroup(walled)
    script = "held = bytes(700 << 20); print(len(held))"
    limit = Limits(memory_bytes=2 << 30)
    async with walled.open(SandboxSpec(files={"s.py": script}, limits=limit)) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        assert ran.output == f"{700 << 20}\n"


async def test_a_limit_that_no_sandbox_fits_into(walled: NamespaceSandboxPool) -> None:
    with pytest.raises(EtudeError, match="limits.memory_bytes is 1000, .* at least 16777216"):
        async with walled.open(SandboxSpec(limits=Limits(memory_bytes=1000))):
            pass
    need_cgroup(walled)
    async with walled.open(SandboxSpec(limits=Limits(memory_bytes=16 << 20))) as sandbox:
        assert (await sandbox.run(["echo", "hi"], timeout_s=LONG_S)).output == "hi\n"


async def test_a_share_of_a_processor(walled: NamespaceSandboxPool) -> None:
    need_cgroup(walled)
    script = """
import os, time
children = []
for _ in range(4):
    if os.fork() == 0:
        start = time.monotonic()
        while time.monotonic() - start < 1.0: pass
        os._exit(0)
for _ in range(4): os.wait()
used = os.times()
print(used.children_user + used.children_system)
"""
    spec = SandboxSpec(files={"s.py": script}, limits=Limits(cpus=0.2))
    async with walled.open(spec) as sandbox:
        ran = await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        # however many processors there are, and however busy: alone, it would be at least 1
        assert 0.0 < float(ran.output) < 0.7


async def test_no_cgroup_is_left(walled: NamespaceSandboxPool) -> None:
    need_cgroup(walled)
    zygote = walled._zygote.pid
    before = left_of(zygote)
    async with walled.open(SandboxSpec(limits=Limits(cpus=1.0))):
        opened = left_of(zygote)
        assert len(opened) > len(before)

    def tidied() -> bool:
        return not set(opened) - set(before) & set(left_of(zygote))

    await until(tidied)
    await walled.close()
    assert left_of(zygote) == []


async def test_no_cgroup_is_left_by_a_controller_that_was_killed() -> None:
    need_namespaces()
    controller = """
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.namespaces import NamespaceSandboxPool
async def main():
    pool = NamespaceSandboxPool()
    boxes = [await pool.start(SandboxSpec(), {}) for _ in range(3)]
    print(pool._zygote.pid, flush=True)
    await boxes[0].run(["sleep", "1000"], timeout_s=1000)
asyncio.run(main())
"""
    argv = [sys.executable, "-c", controller]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        zygote = int(process.stdout.readline())
        process.kill()
    await until(lambda: left_of(zygote) == [])


async def test_the_cgroups_of_a_zygote_that_was_killed_are_swept_by_the_next() -> None:
    need_namespaces()
    first = NamespaceSandboxPool()
    zygote = first._zygote.pid
    async with first.open(SandboxSpec()):
        first._zygote.kill()
        first._zygote.wait()
    await first.close()

    async def swept() -> bool:
        second = NamespaceSandboxPool()
        await second.close()
        return left_of(zygote) == []

    for _ in range(50):
        if await swept():
            return
    pytest.fail(f"left: {left_of(zygote)}")


async def test_a_pool_whose_zygote_was_replaced_leaves_no_cgroup() -> None:
    need_namespaces()
    pool = NamespaceSandboxPool()
    zygotes = [pool.zygote_pid]
    async with pool.open(SandboxSpec()):
        processes = descendants(pool.zygote_pid)
        pool._zygote.kill()
        pool._zygote.wait()
        async with pool.open(SandboxSpec()):
            zygotes.append(pool.zygote_pid)
    await until_gone(processes)
    await pool.close()
    assert [left_of(zygote) for zygote in zygotes] == [[], []]


async def test_without_a_cgroup_what_needs_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need_namespaces()
    boot = """
import errno, socket, sys; sys.path.append(sys.argv[1])
from etude.sandbox import zygote
def refused(): raise OSError(errno.EACCES, "/sys/fs/cgroup: Permission denied")
zygote.Cgroups = refused
zygote.main(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4])
"""
    monkeypatch.setattr(namespaces, "_BOOT", boot)
    pool = NamespaceSandboxPool()
    try:
        assert (pool.walls.cgroup, pool.walls.cgroup_refused) == (
            "",
            "/sys/fs/cgroup: Permission denied",
        )
        assert "no cgroup (/sys/fs/cgroup: Permission denied)" in str(pool.walls)
        async with pool.open(SandboxSpec()) as sandbox:
            assert (await sandbox.run(["echo", "hi"], timeout_s=LONG_S)).output == "hi\n"
        told = r"^namespaces sandboxes do not support.*: limits.cpus\. "
        with pytest.raises(EtudeError, match=told):
            limit = Limits(cpus=1.0, memory_bytes=1 << 30, processes=1)
            async with pool.open(SandboxSpec(limits=limit)):
                pass
    finally:
        await pool.close()


def test_what_was_made_before_something_was_refused_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    places = {"memory": str(tmp_path / "memory"), "cpu": str(tmp_path / "nowhere")}
    monkeypatch.setattr(cgroups, "find", lambda own, mounts: ("v1", places))
    with pytest.raises(OSError, match="nowhere"):
        cgroups.Cgroups()
    assert list((tmp_path / "memory").iterdir()) == []


FIRST = """\
9:name=systemd:/
4:memory:/jobs/7
2:cpu,cpuacct:/
0::/
"""
FIRST_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct
36 30 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
"""


def test_where_our_own_cgroup_is() -> None:
    assert find(FIRST, FIRST_MOUNTS) == (
        "v1",
        {"memory": "/sys/fs/cgroup/memory/jobs/7", "cpu": "/sys/fs/cgroup/cpu,cpuacct"},
    )
    second = "0::/user.slice/app.scope\n"
    mounts = "29 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    place = "/sys/fs/cgroup/user.slice/app.scope"
    assert find(second, mounts) == ("v2", {"memory": place, "cpu": place})
    # a container that sees only its own part, under the name that the host gave it
    inside = "5:memory:/docker/abc/x\n6:cpu:/docker/abc\n"
    shown = (
        "1 2 0:1 /docker/abc /cg/memory ro - cgroup cgroup rw,memory\n"
        "1 2 0:2 /docker/abc /cg/cpu ro - cgroup cgroup rw,cpu\n"
    )
    assert find(inside, shown) == ("v1", {"memory": "/cg/memory/x", "cpu": "/cg/cpu"})
    with pytest.raises(OSError, match="no cgroup file system"):
        find("0::/\n", "")


def test_what_counts_is_switched_on_here_or_above_or_it_is_said_why_not(tmp_path: Path) -> None:
    own, above = tmp_path / "above" / "own", tmp_path / "above"
    own.mkdir(parents=True)
    with pytest.raises(OSError, match=f"{above}: it cannot count memory"):
        cgroups._enable("memory", str(own))
    for place in (above, own):
        (place / "cgroup.subtree_control").touch()
        assert cgroups._enable("memory", str(own)) == str(place)
        assert (place / "cgroup.subtree_control").read_text() == "+memory"
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").mkdir()
    with pytest.raises(OSError, match=f"{own}: Is a directory"):  # the parent is not tried then
        cgroups._enable("memory", str(own))


def test_what_is_written_to_a_cgroup() -> None:
    assert limits("v1", 1 << 20, None) == {
        "memory.limit_in_bytes": "1048576",
        "memory.memsw.limit_in_bytes": "1048576",
    }
    assert limits("v2", 1 << 20, None) == {"memory.max": "1048576", "memory.swap.max": "0"}
    assert limits("v1", None, 0.5) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}
    assert limits("v2", None, 2.0) == {"cpu.max": "200000 100000"}


SECOND = """
import os, sys
from etude.sandbox import cgroups
place = sys.argv[1]
cgroups._write(f"{place}/main", "cgroup.procs", "0")
cgroups.find = lambda own, mounts: ("v2", {"hugetlb": f"{place}/main"})
made = cgroups.Cgroups()
made._bases["memory"] = made._bases["hugetlb"]
made.expect("1")
if os.fork() == 0:
    made._make("memory", "1")
    made._limit("memory", "1", {"hugetlb.2MB.max": "0", "hugetlb.no.swap": "0"})
    made.enter("1")
    print(open("/proc/self/cgroup").read().splitlines()[-1].removeprefix("0::"), flush=True)
    os._exit(0)
os.wait()
made.close()
print(sorted(each.name for each in os.scandir(place) if each.is_dir()))
"""


def test_the_second_generation_with_a_controller_that_nobody_else_has() -> None:
    """The memory controller may belong to the first version here; cgroups are made in the same
    way."""
    root = next(
        (
            line.split()[1]
            for line in Path("/proc/self/mounts").read_text().splitlines()
            if line.split()[2] == "cgroup2"
        ),
        "",
    )
    top, enabled = Path(root, f"etude-test-{os.getpid()}"), Path(root, "cgroup.subtree_control")
    before = enabled.read_text().split() if root else []
    try:
        top.joinpath("main").mkdir(parents=True)
        enabled.write_text("+hugetlb")
    except OSError as e:
        pytest.skip(f"no cgroups of the second generation can be made: {e}")
    try:
        argv = [sys.executable, "-c", SECOND, top]
        ran = subprocess.run(argv, capture_output=True, text=True, check=True)
        entered, left = ran.stdout.splitlines()
        assert entered.startswith(f"/{top.name}/etude-") and entered.endswith("/1")
        assert left == "['main']"
    finally:
        for each in (top / "main", top):
            each.rmdir()
        if "hugetlb" not in before:
            enabled.write_text("-hugetlb")
