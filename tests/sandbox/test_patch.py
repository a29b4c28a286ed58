"""All changes of an agent, complete, from one sandbox to another."""

from __future__ import annotations

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Patch, Sandbox, SandboxPool, SandboxSpec
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.limits import PATCH_BYTES
from etude.sandbox.tree import EXECUTABLE, FILE, LINK
from tests.sandbox.test_isolation import LONG_S

FILES = {
    "same": "s\n",
    "edited": "1\n",
    "gone": "x",
    "d/gone": "x",
    "d/e/f": "x",
    "turns/into/file": "x",
    "becomes": "x",
    "linked": "x",
    "run.sh": "true\n",
    "bytes": b"\0\1",
}
CHANGES = r"""
echo 2 >> edited; rm gone; rm -r d; rm -r turns; printf file > turns; rm becomes; mkdir becomes
printf x > becomes/directory; rm linked; ln -s /etc/passwd linked; ln -s nowhere dangling
chmod +x run.sh; printf '\000\377\001' > bytes; touch empty; mkdir none; mkfifo pipe
mkdir shut; printf x > shut/in; chmod 000 shut; ln -s same loop; head -c 400000 /dev/zero > large
printf x > "$(printf '\377')"
"""
EXPECTED: Patch = {
    "edited": (FILE, b"1\n2\n"),
    "gone": None,
    "d/gone": None,
    "d/e/f": None,
    "turns/into/file": None,
    "turns": (FILE, b"file"),
    "becomes": None,
    "becomes/directory": (FILE, b"x"),
    "linked": (LINK, b"/etc/passwd"),
    "dangling": (LINK, b"nowhere"),
    "run.sh": (EXECUTABLE, b"true\n"),
    "bytes": (FILE, b"\0\xff\1"),
    "empty": (FILE, b""),
    "shut/in": (FILE, b"x"),
    "loop": (LINK, b"same"),
    "large": (FILE, bytes(400_000)),
    "\udcff": (FILE, b"x"),
}


async def changed(sandbox: Sandbox, script: str) -> Patch:
    await sandbox.run(["sh", "-c", script], timeout_s=LONG_S)
    return await sandbox.patch()


async def test_a_patch_has_all_of_it_and_goes_into_another(pool: SandboxPool) -> None:
    spec = SandboxSpec(files=FILES)
    async with pool.open(spec) as sandbox, pool.open(spec) as fresh:
        patch = await changed(sandbox, CHANGES)
        assert patch == EXPECTED
        await fresh.apply(patch)
        assert await fresh.patch() == EXPECTED
        await fresh.apply(dict.fromkeys(("linked", "loop", "d/e/f", "new/deep"), (FILE, b"")))
        assert (await fresh.read("linked"), await fresh.read("same")) == ("", "s\n")


async def test_nothing_that_was_running_is_left(pool: SandboxPool) -> None:
    script = "while true; do echo x >> grown; done"
    async with pool.open(SandboxSpec(files={"grown": ""})) as sandbox:
        process = await sandbox.start(["sh", "-c", script])
        await sandbox.run(["sh", "-c", "while [ ! -s grown ]; do sleep 0.01; done"], timeout_s=60)
        patch = await sandbox.patch()
        assert patch == await sandbox.patch()
        with pytest.raises(RolloutFailure):
            await process.wait()
        assert (await sandbox.run(["echo", "alive"], timeout_s=LONG_S)).output == "alive\n"


async def test_a_thousand_nested_directories_are_taken_over(pool: SandboxPool) -> None:
    deep = "/".join("d" * 1500)
    async with pool.open(SandboxSpec()) as sandbox, pool.open(SandboxSpec()) as fresh:
        await sandbox.write(f"{deep}/f", "1")
        patch = await sandbox.patch()
        await fresh.apply(patch)
        assert await fresh.read(f"{deep}/f") == "1"
        # its directories stay, and a file in their place must replace them
        await fresh.apply(dict.fromkeys(patch))
        await fresh.apply({"d": (FILE, b"now a file")})
        assert await fresh.read("d") == "now a file"


async def test_too_much_is_refused(pool: SandboxPool) -> None:
    script = f"for n in 1 2 3; do head -c {PATCH_BYTES // 2} /dev/zero > f$n; done"
    async with pool.open(SandboxSpec()) as sandbox:
        with pytest.raises(ValueError, match="cannot be taken over"):
            await changed(sandbox, script)


async def test_what_is_not_asked_for_is_not_too_much(pool: SandboxPool) -> None:
    script = (
        f"mkdir -p .venv shop/deep; head -c {PATCH_BYTES + 1} /dev/zero > .venv/lib; rm gone; "
        "rm old.py; echo 2 | tee a.py shop/a.py shop/deep/a.py shop/deep/a.pyc shop/deep/test.py"
    )
    async with pool.open(
        SandboxSpec(files={"shop/gone": "x", "gone": "x", "old.py": ""})
    ) as sandbox:
        await sandbox.run(["sh", "-c", f"{script}; rm shop/gone"], timeout_s=LONG_S)
        found = await sandbox.patch(only=("shop/*", "old.py"), without=("*.pyc", "*/test.py"))
        two = (FILE, b"2\n")
        expected = {"shop/gone": None, "old.py": None, "shop/a.py": two, "shop/deep/a.py": two}
        assert found == expected


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        ({"a/b": (FILE, b"")}, "a/b cannot be written: Not a directory"),
        ({"l/b": (FILE, b"")}, "l/b cannot be written: "),
        ({"d": (FILE, b"")}, "d cannot be written: Directory not empty"),
        ({"../out": (FILE, b"")}, "leaves the working copy"),
        ({"/out": (FILE, b"")}, "leaves the working copy"),
    ],
)
async def test_a_patch_that_does_not_fit(pool: SandboxPool, patch: Patch, told: str) -> None:
    async with pool.open(SandboxSpec(files={"a": "1", "d/x": "1"})) as sandbox:
        await sandbox.run(["ln", "-s", "/tmp", "l"], timeout_s=LONG_S)
        with pytest.raises(ValueError, match=told):
            await sandbox.apply(patch)
        assert await sandbox.read("a") == "1"


async def test_the_fake_does_the_same_with_plain_files() -> None:
    spec = SandboxSpec(files={"a": "1", "gone": "x"})
    pool = FakeSandboxPool()
    async with pool.open(spec) as sandbox, pool.open(spec) as fresh:
        await sandbox.write("a", b"\xff")
        sandbox.files.pop("gone")
        patch = await sandbox.patch()
        assert patch == {"a": (FILE, b"\xff"), "gone": None}
        assert await sandbox.patch(only=("g*",)) == {"gone": None}
        assert await sandbox.patch(without=("g*",)) == {"a": (FILE, b"\xff")}
        await fresh.apply(patch)
        assert fresh.files == sandbox.files


async def test_a_report_is_apart_from_the_output(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec()) as sandbox:
        script = "echo out; echo told > $ETUDE_REPORT; echo more >> $ETUDE_REPORT; exit 3"
        ran = await sandbox.run(["sh", "-c", script], timeout_s=LONG_S, report=True)
        assert (ran.exit_code, ran.output) == (3, "out\n")
        assert ran.report.endswith(b"told\nmore\n")
        ran = await sandbox.run(["sh", "-c", "echo ${ETUDE_REPORT-none}"], timeout_s=LONG_S)
        assert (ran.output, ran.report) == ("none\n", b"")
        large = "head -c 3000000 /dev/zero | tr '\\0' x > $ETUDE_REPORT; echo done"
        ran = await sandbox.run(["sh", "-c", large], timeout_s=LONG_S, report=True)
        assert (ran.output, ran.report) == ("done\n", b"x" * (1 << 20))
