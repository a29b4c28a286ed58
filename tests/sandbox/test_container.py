"""Behaviour of containers alone: limits and images of an engine, and ending with their owner."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Limits, Sandbox, SandboxSpec, Service
from etude.core.sandbox_config import SandboxConfig
from etude.sandbox import container
from etude.sandbox.container import ContainerSandboxPool, find_engine
from etude.sandbox.mounts import Mount
from tests.sandbox.conftest import need_container

LONG_S = 120.0


@pytest.fixture
async def pool() -> AsyncIterator[ContainerSandboxPool]:
    need_container()
    opened = ContainerSandboxPool()
    yield opened
    await opened.close()


async def said(sandbox: Sandbox, *argv: str) -> str:
    ran = await sandbox.run(argv, timeout_s=LONG_S)
    assert ran.exit_code == 0, ran
    return ran.output.strip()


def containers(client: str) -> set[str]:
    """The containers of our pools, in any state."""
    argv = [client, "ps", "--all", "--filter=label=etude.owner", "--format", "{{.Names}}"]
    return set(subprocess.check_output(argv, text=True).split())


@pytest.mark.tiers
async def test_limits_hold_and_each_has_a_user_of_its_own(
    pool: ContainerSandboxPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = Limits(memory_bytes=256 << 20, processes=8, cpus=0.5, disk_bytes=8 << 20)
    if not pool._bounded:
        pytest.skip("this engine holds no memory limit")
    async with pool.open(SandboxSpec(limits=limits)) as one, pool.open(SandboxSpec()) as two:
        eats = "x = bytearray(450 << 20)\nfor n in range(0, len(x), 4096): x[n] = 1\nprint('held')"
        assert "held" not in (await one.run(["python", "-c", eats], timeout_s=LONG_S)).output
        assert await said(two, "python", "-c", eats) == "held", "it is the limit, not the program"
        full = await one.run(["sh", "-c", "head -c 9000000 /dev/zero > f"], timeout_s=LONG_S)
        assert full.exit_code != 0
        many = "for n in 1 2 3 4 5 6 7 8 9; do sleep 9 & done; wait"
        assert (await one.run(["sh", "-c", many], timeout_s=LONG_S)).exit_code != 0
        assert await said(one, "echo", "alive") == "alive"
        users = {await said(each, "cat", "/proc/self/uid_map") for each in (one, two)}
        if os.geteuid() == 0:
            assert len(users) == 2 and not any(re.search(r"\s0\s", each) for each in users)
    assert not list(tmp_path.iterdir()), "podman's monitor notes there that memory ran out"


@pytest.mark.tiers
async def test_a_fork_has_services_of_its_own_and_leaves_its_origin_alone(
    pool: ContainerSandboxPool,
) -> None:
    serve = ("python", "-m", "http.server", "--bind", "127.0.0.1", "4000")
    service = Service(name="files", argv=serve, port=4000, ready_s=LONG_S)
    fetch = "import urllib.request as u; print(u.urlopen('http://files:4000/a').read().decode())"
    async with pool.open(SandboxSpec(files={"a": "1"}, services=(service,))) as origin:
        await origin.write("deep/er/b", b"\0" * 3_000_000)
        fork = await origin.fork()
        await fork.write("a", "2")
        assert await said(origin, "python", "-c", fetch) == "1"
        assert await said(fork, "python", "-c", fetch) == "2"
        assert await said(fork, "stat", "-c%s", "deep/er/b") == "3000000"
        assert "deep/er/b" in await fork.diff()
        await origin.close()
        again = await fork.fork()
        assert await again.read("a") == "2"
    await pool.close()
    with pytest.raises(RolloutFailure):
        await again.read("a")
    assert not list(pool.machines.home.parent.glob(pool.machines.home.name))


@pytest.mark.tiers
async def test_what_is_mounted_is_there_and_read_only(tmp_path: Path) -> None:
    need_container()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/greet").write_text("#!/bin/sh\necho hello from $0\n")
    (tmp_path / "bin/greet").chmod(0o755)
    tmp_path.chmod(0o755)
    pool = ContainerSandboxPool(mounts=[Mount(str(tmp_path), "/opt/x")])
    async with pool.open(SandboxSpec()) as sandbox:
        assert await said(sandbox, "greet") == "hello from /opt/x/bin/greet"
        assert (await sandbox.run(["touch", "/opt/x/new"], timeout_s=LONG_S)).exit_code != 0
    await pool.close()
    assert not (tmp_path / "new").exists()


OWNER = """
import asyncio
from etude.core.sandbox import SandboxSpec
from etude.sandbox.container import ContainerSandboxPool

async def main():
    pool = ContainerSandboxPool()
    async with pool.open(SandboxSpec()) as one, pool.open(SandboxSpec()) as two:
        for each in (one, two):
            await each.start(["sleep", "1000"])
        print(pool.machines.home, *[each._caller._name for each in (one, two)], flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.tiers
def test_nothing_is_left_of_an_owner_that_was_killed() -> None:
    """Containers end with their input. A paused one cannot: the next pool removes it."""
    need_container()
    client, _ = find_engine()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        home, ends, paused = owner.stdout.readline().split()
        assert {ends, paused} <= containers(client)
        subprocess.run([client, "pause", paused], check=True, stdout=subprocess.DEVNULL)
        owner.send_signal(signal.SIGKILL)
    while ends in containers(client):
        os.sched_yield()
    assert paused in containers(client)

    async def open_another() -> None:
        await ContainerSandboxPool().close()

    asyncio.run(open_another())
    assert paused not in containers(client) and not Path(home).exists()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """A system with a shell, a Python, and a file in its working directory."""
    need_container()
    client, _ = find_engine()
    name = f"localhost/etude-test:{os.getpid()}"
    programs = ["/bin/sh", "/bin/cat", "/bin/ls", sys.executable]
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for program in programs:
            at = "usr/bin/python3" if program == sys.executable else f"usr{program}"
            archive.add(os.path.realpath(program), at)
        needing = [*programs, *Path(sysconfig.get_path("stdlib")).glob("lib-dynload/*.so")]
        linked = subprocess.check_output(["ldd", *map(os.path.realpath, needing)], text=True)
        for library in sorted(set(re.findall(r"(/\S+\.so\S*) ", linked))):
            loader = library.startswith("/lib64/")
            at = f"usr{library}" if loader else f"usr/lib/{Path(library).name}"
            archive.add(os.path.realpath(library), at)
        for link in ("bin", "lib", "lib64"):
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
            archive.addfile(entry)
        library = sysconfig.get_path("stdlib")
        skipped = ("site-packages", "test", "__pycache__", "idlelib", "ensurepip", "lib2to3")
        archive.add(
            library,
            f"usr/lib/{Path(library).name}",
            filter=lambda entry: None if Path(entry.name).name in skipped else entry,
        )
        packages = f"usr/lib/{Path(library).name}/site-packages"
        for path, text in (
            ("srv/shop/cart.py", "total = 3\n"),
            ("opt/tool/version", "7\n"),
            (f"{packages}/dependency.py", "answer = 42\n"),
        ):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(text), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
        for path in ("tmp", "mnt"):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
    changes = ("ENV STAGE=test", "WORKDIR /srv/shop")
    words = [word for each in changes for word in ("--change", each)]
    subprocess.run([client, "import", *words, "-", name], input=data.getvalue(), check=True)
    yield name
    subprocess.run([client, "rmi", name], stdout=subprocess.DEVNULL)


@pytest.mark.tiers
async def test_an_image_of_the_engine(pool: ContainerSandboxPool, image: str) -> None:
    async with pool.open(SandboxSpec(image=image, files={"new": "1"})) as sandbox:
        assert (await said(sandbox, "ls")).split() == ["cart.py", "new"]
        assert await said(sandbox, "cat", "/opt/tool/version") == "7"
        assert await said(sandbox, "sh", "-c", "echo $STAGE") == "test"
        assert (await sandbox.run(["ls", "/mnt/etude"], timeout_s=LONG_S)).exit_code != 0
        await sandbox.write("cart.py", "total = 4\n")
        assert "+total = 4" in await sandbox.diff() and "new" not in await sandbox.diff()
        fork = await sandbox.fork()
        script = "import cart, dependency; print(cart.total, dependency.answer)"
        assert await said(fork, "python3", "-c", script) == "4 42"
        assert await fork.diff() == await sandbox.diff()


@pytest.mark.tiers
async def test_an_image_that_cannot_be_had_is_refused(pool: ContainerSandboxPool) -> None:
    with pytest.raises(EtudeError, match="has no image 'nowhere/at-all:1'"):
        pool.check(SandboxSpec(image="nowhere/at-all:1"))
    with pytest.raises(EtudeError, match="has no Python 3.11 or newer"):
        pool.check(SandboxSpec(image=pool._root.name))
    with pytest.raises(EtudeError, match="container sandboxes do not support.*: network"):
        pool.check(SandboxSpec(network=("pypi.org",)))


@pytest.mark.tiers
async def test_the_client_of_docker_takes_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against podman's service, which speaks Docker's API. It ignores Docker's option for masked
    paths, so it gets podman's own."""
    docker = shutil.which("docker")
    if not (docker and shutil.which("podman")):
        pytest.skip("apt install podman docker-cli")
    (tmp_path / "docker").write_text(
        f'#!/bin/bash\nexec {docker} "${{@/systempaths=unconfined/unmask=ALL}}"\n'
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
    service = ["podman", "system", "service", "--time=0", f"unix://{tmp_path}/socket"]
    with subprocess.Popen(service, stderr=subprocess.DEVNULL) as serving:
        try:
            while not (tmp_path / "socket").exists():
                assert serving.poll() is None
                await asyncio.sleep(0.05)
            pool = ContainerSandboxPool(clients=("docker",))
            async with pool.open(SandboxSpec(files={"a": "1"})) as sandbox:
                assert await said(sandbox, "cat", "a") == "1"
                fork = await sandbox.fork()
                assert await fork.read("a") == "1"
            await pool.close()
        finally:
            serving.terminate()


def test_an_engine_is_told_to_leave_nothing_open() -> None:
    pool = object.__new__(ContainerSandboxPool)
    pool.client = "podman"
    pool.machines = object.__new__(container.Machines)
    pool.machines.home = Path("/tmp/x")
    pool._users, pool._mounts, pool._bounded = iter([7]), [Mount("/", "/opt/x")], True
    pool._root = container._Image("root", "/usr/bin/python3", {})
    argv = pool.argv("name", SandboxSpec(limits=Limits(cpus=0.5)))
    for word in ("--network=none", "--read-only", "--cap-drop=all", "--rm", "--user=7:7",
                 "--security-opt=no-new-privileges", "--cpus=0.500", "--pull=never"):  # fmt: skip
        assert word in argv
    binds = [word for word in argv if word.startswith("type=bind")]
    assert binds and all(word.endswith(",ro") for word in binds)
    assert not any("privileged" in word for word in argv if "no-new" not in word)
    assert json.loads(argv[-1])["mounts"] == [["/opt/x", "/opt/x"]]


def test_what_an_engine_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine that answers is taken; a rootless one has no users to give."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, script in (("podman", "echo broken >&2; exit 1"), ("docker", "echo name=rootless")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    assert find_engine() == ("docker", "name=rootless")
    assert next(container._users("name=rootless")) == 1000
    assert next(container._users('"rootless": false')) in container.OWN_IDS
    with pytest.raises(EtudeError, match="podman: broken"):
        find_engine(["podman"])


def test_a_container_holds_what_namespaces_hold() -> None:
    SandboxConfig(isolation="container", min_isolation="namespaces")
    with pytest.raises(ValueError, match='isolation "container" is weaker'):
        SandboxConfig(isolation="container", min_isolation="gvisor")
