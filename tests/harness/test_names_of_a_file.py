"""Tools that change files, on files with several names."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.core.sandbox import SandboxSpec
from etude.sandbox.pool import open_sandbox_pool
from tests.harness.test_code_tools import Session


@pytest.fixture
async def call() -> AsyncIterator[Session]:
    pool = open_sandbox_pool("process")
    async with pool.open(SandboxSpec(files={"d/f.txt": "one\ntwo\n"})) as opened:
        yield Session(opened)
    await pool.close()


@pytest.mark.parametrize(
    "second",
    [
        "*** Update File: link.txt\n-two\n+2\n",
        "*** Update File: hard.txt\n-two\n+2\n",
        "*** Update File: linked/f.txt\n-two\n+2\n",
        "*** Update File: link.txt\n*** Move to: new.txt\n-two\n+2\n",
        "*** Update File: link.txt\n-two\n+2\n*** Delete File: d/f.txt\n",
        "*** Add File: linked/new.txt\n+2\n*** Add File: d/new.txt\n+1\n",
    ],
)
async def test_a_patch_with_two_names_of_one_file_changes_nothing(
    call: Session, second: str
) -> None:
    """Each change is computed from the file's original content, so one of them would be lost."""
    await call("terminal", command="ln -s d linked; ln -s d/f.txt link.txt; ln d/f.txt hard.txt")
    await call("write", path="a.py", content="x = 1\n")
    first = "*** Begin Patch\n*** Update File: d/f.txt\n-one\n+1\n"
    said = await call("apply_patch", patch=first + second)
    assert said.startswith("error: nothing was changed: ") and "a link" in said
    for name in ("d/f.txt", "link.txt", "hard.txt"):
        assert await call.sandbox.read(name) == "one\ntwo\n"
    assert await call("terminal", command="ls d; test ! -e new.txt") == "f.txt"
    assert await call("undo") == "ok: a.py as before that change"


async def test_a_change_under_two_names_of_one_file_is_undone(call: Session) -> None:
    """If both changes are the same, nothing is lost."""
    await call("terminal", command="ln -s d/f.txt link.txt")
    patch = "".join(f"*** Update File: {name}\n-one\n+1\n" for name in ("d/f.txt", "link.txt"))
    said = await call("apply_patch", patch=f"*** Begin Patch\n{patch}")
    assert said == "ok\nchanged d/f.txt\nchanged link.txt"
    assert await call("undo") == "ok: d/f.txt, link.txt as before that change"
    assert await call.sandbox.read("d/f.txt") == "one\ntwo\n"


async def test_files_behind_a_link_are_removed_as_they_are_written(call: Session) -> None:
    await call("terminal", command="ln -s d linked")
    await call("write", path="linked/new.txt", content="1\n")
    assert await call("undo") == "ok: linked/new.txt as before that change"
    patch = "*** Begin Patch\n*** Add File: a.txt\n+1\n*** Delete File: linked/f.txt\n"
    assert await call("apply_patch", patch=patch) == "ok\nadded a.txt\ndeleted linked/f.txt"
    assert await call("terminal", command="ls -A d linked; readlink linked") == "d:\n\nlinked:\nd"
