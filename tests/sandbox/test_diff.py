"""Changes of a working copy, of any kind and by any program, as a diff that git can apply."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from etude.core.sandbox import Limits, SandboxPool, SandboxSpec
from etude.sandbox.diff import unified_diff
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.limits import READ_BYTES
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.tree import EXECUTABLE, FILE, LINK, Entry
from tests.sandbox.test_isolation import LONG_S


@pytest.mark.parametrize("backend", ["pool", "fake"])
async def test_edits_new_files_and_deletions(backend: str, pool: SandboxPool) -> None:
    opened = FakeSandboxPool() if backend == "fake" else pool
    lines = [f"{n}\n" for n in range(20)]
    files = {"a.py": "".join(lines), "b/c.txt": "kept\n", "bytes": b"\0\1"}
    async with opened.open(SandboxSpec(files=files)) as sandbox:
        assert await sandbox.diff() == ""
        await sandbox.write("a.py", "".join([*lines[:10], "ten\n", *lines[11:]]))
        await sandbox.write("b/new.txt", "no newline")
        await sandbox.write("bytes", b"\0\2")
        assert await sandbox.diff() == (
            "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -8,7 +8,7 @@\n"
            " 7\n 8\n 9\n-10\n+ten\n 11\n 12\n 13\n"
            "diff --git a/b/new.txt b/b/new.txt\nnew file mode 100644\n"
            "--- /dev/null\n+++ b/b/new.txt\n@@ -0,0 +1 @@\n"
            "+no newline\n\\ No newline at end of file\n"
            "diff --git a/bytes b/bytes\nBinary files a/bytes and b/bytes differ\n"
        )
        fork = await sandbox.fork()
        await fork.write("a.py", "".join(lines))
        assert "a.py" not in await fork.diff() and "b/new.txt" in await fork.diff()
        await fork.close()


async def test_modes_links_and_files_that_are_none(pool: SandboxPool) -> None:
    files = {"run.sh": "true\n", "gone": "x\n", "data": "d\n", "same": "s"}
    script = (
        "chmod +x run.sh; rm gone data; ln -s /etc/passwd secret; ln -s nowhere data; mkfifo pipe; "
        "mkdir -p empty; rm same; ln -s loop loop; printf s > same"
    )
    async with pool.open(SandboxSpec(files=files)) as sandbox:
        await sandbox.run(["sh", "-c", script], timeout_s=LONG_S)
        diff = await sandbox.diff()
    sections = {part.split(" ", 1)[0][2:]: part for part in diff.split("diff --git ")[1:]}
    assert sections.keys() == {"run.sh", "gone", "data", "secret", "pipe", "loop"}
    assert sections["run.sh"].endswith("old mode 100644\nnew mode 100755\n")
    assert sections["secret"].endswith("+/etc/passwd\n\\ No newline at end of file\n")
    assert "root:" not in diff and "new file mode 120000" in sections["secret"]
    assert sections["pipe"].endswith("Special files /dev/null and b/pipe differ\n")
    assert "deleted file mode 100644" in sections["gone"]
    assert "deleted file mode 100644\n" in diff.partition("a/data")[2]


async def test_large_files_and_many_bytes_are_named_and_not_shown(pool: SandboxPool) -> None:
    big = "x" * (READ_BYTES - 1) + "\n"
    async with pool.open(SandboxSpec(files={"big": big + big, "a": "1\n"})) as sandbox:
        script = "head -c 10000000 /dev/zero > huge; for n in $(seq 30); do cp small many$n; done"
        await sandbox.write("small", big)
        await sandbox.run(["sh", "-c", script], timeout_s=LONG_S)
        diff = await sandbox.diff()
        assert "Large files /dev/null and b/huge differ\n" in diff and "a/big" not in diff
        assert len(diff) < 5 << 20 and diff.count("Large files") > 2
        assert all(f"b/many{n}" in diff for n in range(1, 31))
        await sandbox.run(["sh", "-c", "rm many* huge small; echo more >> big"], timeout_s=LONG_S)
        assert await sandbox.diff() == (
            "diff --git a/big b/big\nLarge files a/big and b/big differ\n"
        )


async def test_names_that_are_no_text(pool: SandboxPool) -> None:
    script = r"""
import os
for name in (b"\xff\xfe", b'quo"te', b"new\nline", "\u00fc b".encode(), b"\xfe/f"):
    os.makedirs(os.path.dirname(name) or b".", exist_ok=True)
    with open(name, "w") as file: file.write("x\n")
"""
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        diff = await sandbox.diff()
        diff.encode()
        for name in (
            r'"b/\377\376"',
            r'"b/quo\042te"',
            r'"b/new\012line"',
            "b/ü b\t\n",
            r'"b/\376/f"',
        ):
            assert f"+++ {name}" in diff
        fork = await sandbox.fork()
        assert await fork.diff() == diff
        await fork.close()


async def test_directories_without_end(pool: SandboxPool) -> None:
    script = """
import os
try:
    for _ in range(3000):
        os.mkdir("d" * 20); os.chdir("d" * 20)
except OSError: pass
"""
    async with pool.open(SandboxSpec(files={"s.py": script})) as sandbox:
        await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        # a fork with memory walks through no directory
        forks = pool.tier not in ("gvisor", "vm")
        for work in (sandbox.diff, *([sandbox.fork] if forks else [])):
            with pytest.raises(ValueError, match="nested too deep"):
                await work()
        await sandbox.run(["rm", "-rf", "d" * 20], timeout_s=LONG_S)
        assert await sandbox.diff() == ""


async def test_holes_stay_holes_in_a_fork(pool: SandboxPool) -> None:
    if pool.tier == "gvisor":
        pytest.skip("its files in memory tell of no holes")
    script = """
import os
for n in range(400):
    with open(f"hole{n}", "wb") as file: file.truncate(15 << 20)
with open("hole0", "r+b") as file: file.seek(9 << 20); file.write(b"data")
"""
    look = """
import glob, os
found = [os.stat(name) for name in glob.glob("hole*")]
data = open("hole0", "rb").read().strip(bytes(1))
print(len(found), sum(s.st_size for s in found), sum(s.st_blocks for s in found) < 1000, data)
"""
    async with pool.open(SandboxSpec(files={"s.py": script, "look.py": look})) as sandbox:
        await sandbox.run(["python", "s.py"], timeout_s=LONG_S)
        fork = await sandbox.fork()
        looked = await fork.run(["python", "look.py"], timeout_s=LONG_S)
        assert looked.output == f"400 {400 * (15 << 20)} True b'data'\n"
        assert (await fork.diff()).count("Large files") == 400
        await fork.close()


async def test_a_fork_has_the_modes_times_links_and_pipes(pool: SandboxPool) -> None:
    script = (
        "mkdir -p shut/in; echo x > shut/in/f; ln -s ../nowhere shut/l; mkfifo p; chmod 751 p; "
        "touch -d @1000000000 shut/in/f; chmod 640 shut/in/f; chmod 555 shut/in; "
        "touch -d @1100000000 shut"
    )
    look = "stat -c '%n %a %Y' shut shut/in shut/in/f | sort; stat -c '%F %a' p; readlink shut/l"
    async with pool.open(SandboxSpec()) as sandbox:
        await sandbox.run(["sh", "-c", script], timeout_s=LONG_S)
        fork = await sandbox.fork()
        told = [
            (await each.run(["sh", "-c", look], timeout_s=LONG_S)).output
            for each in (sandbox, fork)
        ]
        assert told[0] == told[1] and "shut 755 1100000000\n" in told[0] and "../nowhere" in told[0]
        await fork.close()


async def test_a_copy_does_not_pass_through_the_controller(walled: NamespaceSandboxPool) -> None:
    limits = Limits(disk_bytes=256 << 20)
    async with walled.open(SandboxSpec(limits=limits)) as sandbox:
        fill = "for n in $(seq 12); do head -c 15000000 /dev/urandom > f$n; done; sha256sum f*"
        filled = await sandbox.run(["sh", "-c", fill], timeout_s=LONG_S)
        tracemalloc.start()
        try:
            fork = await sandbox.fork()
            assert tracemalloc.get_traced_memory()[1] < 10 << 20
        finally:
            tracemalloc.stop()
        summed = await fork.run(["sh", "-c", "sha256sum f*"], timeout_s=LONG_S)
        assert summed.output == filled.output and summed.output.count("\n") == 12
        await fork.close()


async def test_a_thousand_nested_directories(pool: SandboxPool) -> None:
    deep = "/".join("d" * 1500)
    async with pool.open(SandboxSpec(files={f"{deep}/a": "1\n"})) as sandbox:
        await sandbox.write(f"{deep}/b", "2\n")
        fork = await sandbox.fork()
        assert await fork.read(f"{deep}/b") == "2\n"
        assert "+2\n" in await fork.diff()
        await fork.close()
        with pytest.raises(ValueError, match="cannot be written"):
            await sandbox.write("/".join("d" * 3000), "")


def test_git_takes_it_back(tmp_path: Path) -> None:
    before = {
        "a": Entry(FILE, b"1\n2\n3\n" * 30),
        "b c": Entry(FILE, b"x\r\ny\x0cz"),
        "gone": Entry(FILE, b"x"),
        "link": Entry(LINK, b"a"),
        "d/run": Entry(FILE, b"#!\n"),
        "turns": Entry(FILE, b"file\n"),
        "empty": Entry(FILE, b""),
    }
    after = {
        "a": Entry(FILE, b"1\n2\n3\n" * 10 + b"new\n" + b"1\n2\n3\n" * 21),
        "b c": Entry(FILE, b"x\r\ny\x0cz\n"),
        "gone": None,
        "link": Entry(LINK, b"elsewhere"),
        "d/run": Entry(EXECUTABLE, b"#!/bin/sh\n"),
        "turns": Entry(LINK, b"a"),
        "empty": Entry(FILE, b"not any more"),
        "new\tname": Entry(FILE, b""),
        "ü\udcff": Entry(EXECUTABLE, b"x\n"),
    }
    for path, (mode, content) in before.items():
        place = tmp_path / path
        place.parent.mkdir(exist_ok=True)
        assert content is not None
        place.symlink_to(content.decode()) if mode == LINK else place.write_bytes(content)
    diff = unified_diff(before, after)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=diff.encode(), check=True)
    found = {}
    for place in [path for path in tmp_path.rglob("*") if path.is_symlink() or path.is_file()]:
        path = str(place.relative_to(tmp_path))
        if place.is_symlink():
            found[path] = Entry(LINK, os.fsencode(os.readlink(place)))
        else:
            mode = EXECUTABLE if place.stat().st_mode & 0o100 else FILE
            found[path] = Entry(mode, place.read_bytes())
    assert found == {path: entry for path, entry in after.items() if entry}


def test_texts_made_to_be_compared_slowly_are_shown_as_replaced() -> None:
    old = "".join(f"{n % 211}\n" for n in range(40_000)).encode()
    new = "".join(f"{n % 199}\n" for n in range(40_000)).encode()
    diff = unified_diff({"a": Entry(FILE, old)}, {"a": Entry(FILE, new)})
    # one region: a search line by line would have split it, after hours
    assert diff.count("\n@@ ") == 1
    assert diff.count("\n-") + diff.count("\n+") >= 79_000


def test_all_files_of_a_diff_share_the_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandbox.diff._LINE_PAIRS", 250)
    # 10 lines on each side; every other one is in both, and both ends differ
    old = "".join(f"{n}\n" if n % 2 else f"old {n}\n" for n in range(10)) + "old\n"
    new = "".join(f"{n}\n" if n % 2 else f"new {n}\n" for n in range(10)) + "new\n"
    before = {name: Entry(FILE, old.encode()) for name in "abc"}
    parts = unified_diff(before, {name: Entry(FILE, new.encode()) for name in "abc"})
    found = [part.count("\n-") - 1 for part in parts.split("diff --git")[1:]]
    assert found == [6, 6, 11], "two are searched for what is alike, and then nothing is left"


async def test_a_pool_is_not_held_up_while_a_diff_is_made(pool: SandboxPool) -> None:
    async with pool.open(SandboxSpec(files={"a": "1\n"})) as sandbox:
        await sandbox.write("a", "2\n")
        diffs = await asyncio.gather(*[sandbox.diff() for _ in range(5)])
        assert len(set(diffs)) == 1 and "+2\n" in diffs[0]
