"""Environment of a command in a sandbox: its limits, its files, its names, a fresh Python."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox.limits import files_in, largest_file
from etude.sandbox.namespaces import NamespaceSandboxPool

MIB = 1 << 20
LOOK = """
import json, os, resource, signal, socket, sys
def read(path):
    with open(path) as file:
        return file.read()
def room(path):
    seen = os.statvfs(path)
    return [seen.f_blocks * seen.f_frsize, seen.f_files]
names = ("AS", "FSIZE", "NPROC", "NOFILE", "CORE", "CPU")
print(json.dumps({
    "limits": {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in names},
    "env": dict(os.environ),
    "room": [room("/work"), room("/tmp")],
    "cwd": os.getcwd(),
    "host": socket.gethostname(),
    "oom": read("/proc/self/oom_score_adj").strip(),
    "namespaces": read("/proc/sys/user/max_user_namespaces").strip(),
    "proc": [line.split()[3] for line in read("/proc/self/mounts").splitlines()
             if line.split()[1] == "/proc"][-1],
    "etc": {name: read("/etc/" + name) for name in ("passwd", "group", "hosts", "nsswitch.conf")},
    "dev": sorted(os.listdir("/dev")),
    "links": [os.readlink("/dev/" + name) for name in ("fd", "shm", "ptmx")],
    "python": [sys.dont_write_bytecode, hasattr(__builtins__, "quit"), sys.argv, sys.path[0],
               __name__, sorted(name for name in sys.modules if name.startswith("etude"))],
    "signals": [signal.getsignal(number) is expected for number, expected in (
        (signal.SIGPIPE, signal.SIG_IGN), (signal.SIGXFSZ, signal.SIG_IGN),
        (signal.SIGINT, signal.default_int_handler), (signal.SIGCHLD, signal.SIG_DFL))],
}))
"""


async def seen(
    pool: NamespaceSandboxPool, spec: SandboxSpec | None = None, *, timeout_s: float = 99.5
) -> dict[str, Any]:
    spec = spec or SandboxSpec()
    async with pool.open(spec) as sandbox:
        await sandbox.write("sub/look.py", LOOK)
        run = await sandbox.run(["python", "sub/look.py", "an argument"], timeout_s=timeout_s)
        assert run.exit_code == 0, run.output
        found: dict[str, Any] = json.loads(run.output)
        return found


async def test_its_limits_are_both_those_in_force_and_the_highest_it_may_set(
    walled: NamespaceSandboxPool,
) -> None:
    found = await seen(walled)
    expected = {
        "AS": 512 * MIB,
        "FSIZE": 16 * MIB,
        "NPROC": 16,
        "NOFILE": 256,
        "CORE": 1,
        "CPU": 101,  # its time in whole seconds, and one more
    }
    assert found["limits"] == {name: [value, value] for name, value in expected.items()}
    assert found["room"] == [[32 * MIB, 4096]] * 2
    assert found["oom"] == "1000" and found["namespaces"] == "0"


async def test_other_limits_are_those_that_were_asked_for(walled: NamespaceSandboxPool) -> None:
    spec = SandboxSpec(limits=Limits(disk_bytes=64 * MIB, processes=5))
    found = await seen(walled, spec)
    assert found["limits"]["NPROC"] == [6, 6]  # the sandbox's first process counts
    assert found["limits"]["FSIZE"] == [32 * MIB] * 2
    assert found["room"] == [[64 * MIB, 8192]] * 2


def test_larger_copies_have_room_for_more_files_and_small_ones_for_no_fewer() -> None:
    sizes = (1, 32 * MIB, 48 * MIB, 320 * MIB)
    assert [files_in(size) for size in sizes] == [4096, 4096, 6144, 40960]


def test_a_file_may_have_half_of_a_large_copy_and_no_less_of_a_small_one() -> None:
    sizes = (1, 32 * MIB, 48 * MIB, 320 * MIB)
    assert [largest_file(size) // MIB for size in sizes] == [16, 16, 24, 160]


async def test_its_names_and_places(walled: NamespaceSandboxPool) -> None:
    found = await seen(walled)
    places = (f"{sys.base_prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin")
    path = ":".join(dict.fromkeys(places))  # Python may be the system's own
    assert found["env"] == {"PATH": path, "HOME": "/tmp", "LANG": "C.UTF-8"}
    assert (found["cwd"], found["host"]) == ("/work", "localhost")
    assert found["etc"] == {
        "passwd": "user:x:1000:1000::/tmp:/bin/sh\n",
        "group": "user:x:1000:\n",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n",
        "nsswitch.conf": "hosts: files\n",
    }
    devices = ["full", "null", "random", "urandom", "zero"]
    assert found["dev"] == sorted([*devices, "fd", "ptmx", "pts", "shm"])
    assert found["links"] == ["/proc/self/fd", "/tmp", "pts/ptmx"]
    assert {"nosuid", "nodev", "noexec"} <= set(found["proc"].split(","))


async def test_a_script_finds_a_python_that_has_just_started(walled: NamespaceSandboxPool) -> None:
    found = await seen(walled)
    own = ["sub/look.py", "an argument"]
    assert found["python"] == [True, True, own, "/work/sub", "__main__", []]
    assert found["signals"] == [True] * 4


@pytest.mark.parametrize("size", [0, 1, 1 << 14, (1 << 14) + 1])
async def test_the_end_of_what_it_says_is_kept(walled: NamespaceSandboxPool, size: int) -> None:
    async with walled.open(SandboxSpec()) as sandbox:
        script = f"import sys; sys.stdout.write('x' * {size} + 'end')"
        run = await sandbox.run(["python", "-c", script], timeout_s=60.0)
    assert run.output == "x" * min(size, (1 << 14) - 3) + "end"


async def test_a_file_that_grows_too_large_is_an_error_of_the_script(
    walled: NamespaceSandboxPool,
) -> None:
    script = "try: open('big', 'wb').write(bytes(17 << 20))\nexcept OSError as e: print(e.strerror)"
    async with walled.open(SandboxSpec(files={"a.py": script})) as sandbox:
        run = await sandbox.run(["python", "a.py"], timeout_s=60.0)
    assert (run.exit_code, run.output) == (0, "File too large\n")


async def test_the_working_copy_has_other_names(walled: NamespaceSandboxPool) -> None:
    for workdir in ("/app", "/workspace", "/testbed", "/repo"):
        spec = SandboxSpec(files={"a/b.txt": "x"}, workdir=workdir)
        async with walled.open(spec) as sandbox:
            script = f"cat {workdir}/a/b.txt && echo y > {workdir}/c.txt && cat /work/c.txt"
            ran = await sandbox.run(["sh", "-c", script], timeout_s=60)
            assert ran.output == "xy\n"
            assert list(await sandbox.patch()) == ["c.txt"]
    with pytest.raises(EtudeError, match="workdir"):
        walled.check(SandboxSpec(workdir="/srv"))
