"""Sandboxes of images: the parts that they show, share and keep apart."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.sandbox import kernel, tells
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.image import Image, ImageStore
from etude.sandbox.imaged import ImagedPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.root import _others
from tests.namespaces import need_namespaces

LONG_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.fixture
async def pool(store: ImageStore) -> AsyncIterator[SandboxPool]:
    need_namespaces()
    opened = ImagedPool(FakeSandboxPool(), store, lambda image: NamespaceSandboxPool(image=image))
    yield opened
    await opened.close()


def keep(store: ImageStore, name: str, files: dict[str, str]) -> str:
    with store.scratch() as scratch:
        made = scratch / "layer"
        for path, content in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(content)
        return store.keep(name, made)


def working_copy(store: ImageStore, name: str = "shop", **more: object) -> Image:
    work = keep(store, f"work-{name}", {"cart.py": "TOTAL = 1\n", "big/data": "x" * 5000})
    image = Image(name=name, layers=(), system=False, work=work, **more)  # type: ignore[arg-type]
    store.save(image)
    return image


async def test_all_start_from_one_working_copy_and_none_changes_it(
    store: ImageStore, pool: SandboxPool
) -> None:
    image = working_copy(store, env={"A": "1", "B": "1"})
    spec = SandboxSpec(image="shop", files={"new.py": "N = 1\n"}, env={"B": "2"})
    async with pool.open(spec) as one, pool.open(spec) as other:
        ran = await one.run(
            ["sh", "-c", "echo $A $B; echo 2 > cart.py; rm -r big"], timeout_s=LONG_S
        )
        assert ran.output == "1 2\n"
        assert await other.diff() == ""
        assert await other.read("cart.py") == "TOTAL = 1\n"
        assert await other.read("new.py") == "N = 1\n"
        patch = await one.patch()
        assert set(patch) == {"cart.py", "big/data"} and patch["big/data"] is None
        await other.apply(patch)
        assert await other.read("cart.py") == "2\n"
    assert (store.layer(image.work) / "cart.py").read_text() == "TOTAL = 1\n"


async def test_forks_add_no_layer_while_nothing_changes(
    store: ImageStore, pool: SandboxPool
) -> None:
    """A mount has room for the names of 64, and an image has more sandboxes than that."""
    working_copy(store)
    async with pool.open(SandboxSpec(image="shop")) as sandbox:
        for _ in range(3):
            fork = await sandbox.fork()
            mounts = (
                await fork.run(["grep", "overlay /work", "/proc/mounts"], timeout_s=LONG_S)
            ).output
            assert len(re.search(r"lowerdir=([^,]*)", mounts)[1].split(":")) <= 2  # type: ignore[index]
            await fork.close()


async def test_a_task_may_not_name_what_is_not_there(store: ImageStore, pool: SandboxPool) -> None:
    image = working_copy(store)
    pool.check(SandboxSpec(image=image.reference))
    with pytest.raises(EtudeError, match="available: shop"):
        pool.check(SandboxSpec(image="shopp"))
    with pytest.raises(EtudeError, match="the task needs sha256"):
        pool.check(SandboxSpec(image="shop@sha256:00"))


async def test_many_at_once_open_one_zygote(store: ImageStore, pool: SandboxPool) -> None:
    working_copy(store)

    async def total() -> str:
        async with pool.open(SandboxSpec(image="shop")) as sandbox:
            return await sandbox.read("cart.py")

    assert set(await asyncio.gather(*[total() for _ in range(12)])) == {"TOTAL = 1\n"}
    assert sum("zygote" in name for name in pool.owing()) == 1


def small_system(place: Path) -> None:
    """A system of a few programs of this one, with the libraries that they are linked with."""
    for name in ("sh", "cat", "id", "ls", "env"):
        program = shutil.which(name)
        assert program
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        for path in [program, *re.findall(r"(/\S+) \(", linked.stdout)]:
            (place / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(path), place / path[1:])
    if not (place / "bin/sh").exists():
        (place / "bin").symlink_to("usr/bin")
    (place / "etc").mkdir()
    (place / "etc" / "release").write_text("small\n")
    (place / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")


async def test_a_system_of_its_own_hides_that_of_the_machine(
    store: ImageStore, pool: SandboxPool
) -> None:
    with store.scratch() as scratch:
        made = scratch / "layer"
        made.mkdir()
        small_system(made)
        base = store.keep("base", made)
    upper = keep(store, "upper", {"opt/tool": "from above\n", "etc/release": "newer\n"})
    store.save(Image(name="small", layers=(base, upper), system=True))
    async with pool.open(SandboxSpec(image="small", files={"a": "1"})) as sandbox:
        ran = await sandbox.run(
            ["sh", "-c", "cat a /etc/release /opt/tool /etc/passwd; id -un; echo x > /opt/tool"],
            timeout_s=LONG_S,
        )
        assert ran.output.startswith("1newer\nfrom above\nroot:x:0:0::/root:/bin/sh\nuser:x:1000")
        assert "user\n" in ran.output and "Read-only" in ran.output
        missing = await sandbox.run(["python", "-c", "1"], timeout_s=LONG_S)
        assert missing.exit_code == 127
        fork = await sandbox.fork()
        assert await fork.read("a") == "1"
        await fork.close()


def test_the_accounts_of_an_image_are_no_files_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "group").write_text("secret\n")
    base, upper, top = (tmp_path / name for name in ("base", "upper", "top"))
    (base / "etc").mkdir(parents=True)
    (base / "etc" / "group").write_text("daemon:x:1:\nuser:x:1000:\n")
    (upper / "etc").mkdir(parents=True)
    (upper / "etc" / "group").symlink_to(tmp_path / "secret")
    top.mkdir()
    (top / "etc").symlink_to(tmp_path / "host")
    layers = [str(each) for each in (base, upper, top)]
    assert _others(layers, "group") == "daemon:x:1:\n"
    (upper / "etc" / "group").unlink()
    (upper / "etc" / "group").write_bytes(b"caf\xe9:x:2:\n")
    kept = tmp_path / "kept"
    kernel.put(str(kept), _others(layers, "group"))
    assert kept.read_bytes() == b"caf\xe9:x:2:\n"
    assert _others(layers, "passwd") == ""


async def test_a_lived_in_image_has_fewer_tells(store: ImageStore, pool: SandboxPool) -> None:
    skel = {f"etc/skel/{name}": "x\n" * 20 for name in (".bashrc", ".profile", ".bash_history")}
    layer = keep(store, "lived", {**skel, "etc/machine-id": "0123456789abcdef" * 2})
    working_copy(store, "plain")
    plain = store.find("plain")
    store.save(
        Image(
            name="lived",
            layers=(layer,),
            system=False,
            work=plain.work,
            hostname="thinkpad",
            user="maria",
        )
    )
    found = {}
    for name in ("plain", "lived"):
        async with pool.open(SandboxSpec(image=name)) as sandbox:
            found[name] = await tells.look(sandbox)
            if name == "lived":
                ran = await sandbox.run(
                    [
                        "sh",
                        "-c",
                        "id -un; echo $HOME $USER; cat /proc/sys/kernel/hostname; "
                        "echo y >> ~/.bashrc; tail -n 1 ~/.bashrc",
                    ],
                    timeout_s=LONG_S,
                )
                assert ran.output == "maria\n/home/maria maria\nthinkpad\ny\n"
    left = {each.name for each in found["lived"].tells}
    assert left <= {"squashed git", "mounts"}
    assert {each.name for each in found["plain"].tells} > left
    assert found["lived"].score > found["plain"].score


def test_tells_are_found_in_what_is_seen() -> None:
    fine = {
        "hostname": "thinkpad", "uptime": "999999", "user": "maria", "uid": "1000",
        "home": "/home/maria", "history": "20", "dotfiles": "4", "machine_id": "a" * 32,
        "months": "5", "files": "30", "mounts": "/ ext4", "options": "0",
        "environment": "PATH,HOME", "markers": "", "paths": "", "commits": "40",
    }  # fmt: skip
    assert tells.judge(fine).score == 1.0
    for change, name in (
        ({"hostname": "0123456789ab"}, "hostname"),
        ({"uptime": "4"}, "uptime"),
        ({"uid": "0"}, "user"),
        ({"history": "0"}, "history"),
        ({"months": "1"}, "mtimes"),
        ({"mounts": "/ 9p"}, "mounts"),
        ({"environment": "PATH,IS_SANDBOX"}, "environment"),
        ({"markers": "/.dockerenv"}, "container files"),
        ({"paths": "/testbed"}, "harness paths"),
        ({"commits": "1"}, "squashed git"),
    ):
        assert [each.name for each in tells.judge({**fine, **change}).tells] == [name]
    seen = tells.parse("paths\t/tests,/logs,\ncommits\t\n")
    told = {each.name: each.seen for each in tells.judge({**fine, **seen}).tells}
    assert told == {"harness paths": "/tests,/logs", "squashed git": "no commits"}


def test_images_that_look_the_same_are_the_same() -> None:
    env = {"A": "1", "B": "2"}
    one = Image(name="one", layers=("a",), system=True, env=env, size_bytes=1)
    other = Image(
        name="other", layers=("a",), system=True, env=dict(reversed(env.items())), size_bytes=2
    )
    assert one.digest == other.digest
    for more in ({"env": {"A": "1"}}, {"user": "maria"}, {"system": False}, {"work": "w"}):
        assert replace(one, **more).digest != one.digest
