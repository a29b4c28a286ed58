"""Directories of the host in a sandbox: visible, read-only, with their programs on the path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, Sandbox, SandboxSpec
from etude.sandbox import mounts
from etude.sandbox.mounts import Mount, check_walled, find_mounts
from etude.sandbox.pool import open_sandbox_pool
from tests.namespaces import need_namespaces

LONG_S = 60.0


@asynccontextmanager
async def sandbox_with(
    isolation: str, *given: str, files: dict[str, str] | None = None
) -> AsyncIterator[Sandbox]:
    if isolation == "namespaces":
        need_namespaces()
    pool = open_sandbox_pool(isolation, mounts=given)
    try:
        async with pool.open(SandboxSpec(files=files or {})) as sandbox:
            yield sandbox
    finally:
        await pool.close()


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package and a program of its own."""
    place = tmp_path / "project" / ".venv"
    argv = [sys.executable, "-m", "venv", "--symlinks", "--without-pip", str(place)]
    subprocess.run(argv, check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependency.py").write_text("answer = 42\n")
    program = place / "bin/ask"
    program.write_text(f"#!{place}/bin/python\nimport dependency\nprint(dependency.answer)\n")
    program.chmod(0o755)
    return place


@pytest.mark.parametrize("isolation", ["namespaces", "process"])
async def test_the_packages_and_programs_of_an_environment_are_there(
    isolation: str, environment: Path
) -> None:
    files = {"a.py": "import sys, dependency\nprint(sys.prefix)\n", "b.py": ""}
    async with sandbox_with(isolation, str(environment), files=files) as sandbox:
        for argv in (["ask"], ["sh", "-c", "ask"]):
            assert await output(sandbox, *argv) == "42\n"
        for python in ("python", "python3"):
            assert await output(sandbox, python, "a.py") == f"{environment}\n"
        await output(sandbox, "python", "-c", "import b")
        assert await sandbox.diff() == ""  # no __pycache__
        process = await sandbox.start(["ask"])
        assert await process.read() == b"42\n" and await process.wait() == 0


async def output(sandbox: Sandbox, *argv: str) -> str:
    ran = await sandbox.run(argv, timeout_s=LONG_S)
    assert ran.exit_code == 0, ran.output
    return ran.output


async def test_nothing_can_be_written_there(environment: Path) -> None:
    before = sorted(environment.rglob("*"))
    async with sandbox_with("namespaces", str(environment), f"{environment}:/opt/it") as sandbox:
        for place in (environment, "/opt/it"):
            for script in ("touch {}/new", "rm {}/bin/ask", "mv {} /tmp/elsewhere"):
                ran = await sandbox.run(["sh", "-c", script.format(place)], timeout_s=LONG_S)
                assert ran.exit_code not in (0, None)
        assert await output(sandbox, "ls", f"{environment.parent}") == ""  # nothing next to it
    assert sorted(environment.rglob("*")) == before


async def test_a_place_of_its_own_and_a_fork(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "list.txt").write_text("one\n")
    async with sandbox_with("namespaces", f"{tmp_path / 'data'}:/data") as sandbox:
        fork = await sandbox.fork()
        for each in (sandbox, fork):
            assert await output(each, "cat", "/data/list.txt") == "one\n"
        # no programs in it: `python` is still the one without packages, which starts at once
        await sandbox.write("a.py", "import sys; print('site' in sys.modules, sys.argv)")
        assert await output(sandbox, "python", "a.py", "b") == "True ['a.py', 'b']\n"
        await fork.close()


def test_the_python_below_an_environment_comes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link, place = (tmp_path / name for name in ("cpython-3.11.9", "cpython-3.11", "venv"))
    for each in (real, place):
        (each / "bin").mkdir(parents=True)
    (real / "bin/python3.11").write_text("")
    link.symlink_to(real)
    (place / "bin/python").symlink_to("python3")
    (place / "bin/python3").symlink_to(link / "bin/python3.11")
    (real / "bin/python3.11").rename(real / "bin/python3.11.9")
    (real / "bin/python3.11").symlink_to(real / "bin/python3.11.9")
    found = find_mounts([str(place)])
    assert found == tuple(Mount(str(each), str(each)) for each in (place, link, real))
    monkeypatch.setattr(sys, "base_prefix", str(real))
    assert Mount(str(real), str(real)) not in find_mounts([str(place)])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}/nothing", "does not exist"),
        ("{}:elsewhere", "must begin with /"),
        ("{}:/", "/ is in use"),
        ("{}:/work/deps", "/work/deps is in use"),
        ("{}:/app/deps", "/app/deps is in use"),
        ("{}:/usr/lib/x", "/usr/lib/x is in use"),
        ("{}:/opt/../proc", "/proc is in use"),
    ],
)
def test_what_cannot_be_shown_is_told(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match=f"sandbox.mounts: .*{why}"):
        check_walled(find_mounts([text.format(tmp_path)]))


def test_what_an_ordinary_user_may_not_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts.os, "geteuid", lambda: 0)
    (tmp_path / "closed").mkdir(mode=0o700)
    with pytest.raises(EtudeError, match=r"chmod -R o\+rX"):
        check_walled(find_mounts([str(tmp_path / "closed")]))


def test_without_walls_nothing_is_moved() -> None:
    with pytest.raises(EtudeError, match="remove :/opt/x"):
        open_sandbox_pool("process", mounts=["/usr/lib:/opt/x"])


async def test_limits_of_a_run_hold_where_a_task_says_nothing() -> None:
    need_namespaces()
    limits = Limits(memory_bytes=2 << 30, disk_bytes=64 << 20, processes=9)
    pool = open_sandbox_pool("namespaces", limits=limits)
    own = SandboxSpec(limits=Limits(memory_bytes=1 << 30))
    for spec, kib in ((SandboxSpec(), 2 << 20), (own, 1 << 20)):
        async with pool.open(spec) as sandbox:
            script = "ulimit -v; ulimit -u; df -k --output=size /work | tail -1"
            told = (await output(sandbox, "bash", "-c", script)).split()
            assert told == [str(kib), "10", str(64 << 10)]
    await pool.close()
    with pytest.raises(EtudeError, match=r"do not support.*: limits.processes\. "):
        open_sandbox_pool("process", limits=Limits(processes=9))


def test_the_keys_of_a_run() -> None:
    text = 'name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n[sandbox]\nmounts = [".venv", "/d:/e"]\n'
    config = parse(text + "memory_mib = 2048\ndisk_mib = 128\nmax_processes = 64\ncpus = 1.5")
    assert config.sandbox.seen_from(Path("/home/me")).mounts == ("/home/me/.venv", "/d:/e")
    assert config.sandbox.limits == Limits(
        cpus=1.5, memory_bytes=2 << 30, disk_bytes=128 << 20, processes=64
    )
