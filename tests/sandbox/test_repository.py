"""A commit as a working copy: its files, and nothing else of a repository that is not trusted."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, Repository, SandboxPool, SandboxSpec
from etude.sandbox.fake import FakeSandboxPool
from etude.sandbox.repository import read_commit, read_texts, repository_at
from etude.sandbox.tree import EXECUTABLE, FILE, LINK, Entry
from tests.sandbox.test_isolation import LONG_S


def git(place: Path, *argv: str, stdin: bytes = b"") -> str:
    names = ("AUTHOR", "COMMITTER")
    env = {f"GIT_{name}_{what}": "x@x" for name in names for what in ("NAME", "EMAIL")}
    env |= {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "HOME": str(place)}
    ran = subprocess.run(
        ["git", *argv], cwd=place, env=env, input=stdin, capture_output=True, check=True
    )
    return ran.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    place = tmp_path / "some:re po"
    (place / "src").mkdir(parents=True)
    git(place, "init", "-q")
    (place / "src/a.py").write_text("old\n")
    git(place, "add", ".")
    git(place, "commit", "-qm", "the answer is in the history")
    (place / "src/a.py").write_text("new\r\n")
    (place / "run").write_bytes(b"#!/bin/sh\necho ran\n")
    (place / "run").chmod(0o755)
    (place / "link").symlink_to("src/a.py")
    (place / b"\xff".decode(errors="surrogateescape")).write_bytes(b"\0")
    git(place, "add", ".")
    git(place, "commit", "-qm", "second")
    commit = git(place, "rev-parse", "HEAD")
    (place / "src/a.py").write_text("not committed\n")
    return place, commit


async def test_a_commit_is_the_working_copy(
    pool: SandboxPool, repository: tuple[Path, str]
) -> None:
    place, commit = repository
    spec = SandboxSpec(
        repository=Repository(url=f"file://{str(place).replace(' ', '%20')}", commit=commit),
        files={"src/extra.py": "extra\n"},
    )
    async with pool.open(spec) as sandbox:
        assert await sandbox.read("src/a.py") == "new\r\n" == await sandbox.read("link")
        assert await sandbox.read("src/extra.py") == "extra\n"
        assert (await sandbox.run(["./run"], timeout_s=LONG_S)).output == "ran\n"
        listed = await sandbox.run(["ls", "-A"], timeout_s=LONG_S)
        assert ".git" not in listed.output and len(listed.output.splitlines()) == 4
        assert await sandbox.diff() == ""
        await sandbox.write("src/a.py", "newer\n")
        assert await sandbox.diff() == (
            "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n"
            "@@ -1 +1 @@\n-new\r\n+newer\n"
        )
    async with FakeSandboxPool().open(spec) as fake:
        assert await fake.read("src/a.py") == "new\r\n" and await fake.diff() == ""


async def read(place: Path | str, commit: str, **limits: int) -> dict[str, Entry]:
    spec = Repository(url=str(place), commit=commit)
    return await read_commit(spec, **{"max_bytes": 1 << 20, "max_entries": 100, **limits})


async def test_nothing_of_the_repository_is_executed(repository: tuple[Path, str]) -> None:
    place, commit = repository
    blob = git(place, "rev-parse", f"{commit}:run")
    trap, sprung = place / "trap", place / "sprung"
    trap.write_text(f"#!/bin/sh\necho $0 $@ >> '{sprung}'\ncat\n")
    trap.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "core.sshCommand",
        "core.pager",
        "core.alternateRefsCommand",
        "filter.x.smudge",
        "filter.x.process",
        "tar.tar.command",
        "uploadpack.packObjectsHook",
        "diff.external",
        "alias.ls-tree",
        "alias.cat-file",
    ):
        git(place, "config", key, f"!{trap}" if key.startswith("alias") else str(trap))
    git(place, "config", "extensions.partialClone", "origin")
    git(place, "config", "remote.origin.url", f"ext::{trap}")
    git(place, "config", "remote.origin.promisor", "true")
    git(place, "config", "protocol.ext.allow", "always")
    (place / ".git/info").mkdir(exist_ok=True)
    (place / ".git/info/attributes").write_text("* filter=x eol=lf\n")
    for name in ("post-checkout", "reference-transaction", "pre-commit"):
        (place / ".git/hooks").mkdir(exist_ok=True)
        (place / ".git/hooks" / name).symlink_to(trap)
    tree = await read(place, commit)
    assert tree == {
        "link": Entry(LINK, b"src/a.py"),
        "run": Entry(EXECUTABLE, b"#!/bin/sh\necho ran\n"),
        "src/a.py": Entry(FILE, b"new\r\n"),
        "\udcff": Entry(FILE, b"\0"),
    }
    (place / f".git/objects/{blob[:2]}/{blob[2:]}").unlink()
    with pytest.raises(EtudeError, match="missing or broken"):
        await read(place, commit)  # a promised object is not fetched
    assert not sprung.exists()


@pytest.mark.parametrize("path", ["../out", "a/../../out", ".git/hooks/x", "/etc/x", "a//b"])
async def test_a_tree_that_leaves_the_working_copy_is_refused(tmp_path: Path, path: str) -> None:
    git(tmp_path, "init", "-q", "--bare")
    blob = git(tmp_path, "hash-object", "-w", "--stdin", stdin=b"x")
    # as git itself would never write it: one entry with a path as its name
    entry = b"100644 " + path.encode() + b"\0" + bytes.fromhex(blob)
    tree = git(tmp_path, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=entry)
    text = f"tree {tree}\nauthor x <x> 0 +0000\ncommitter x <x> 0 +0000\n\nx\n".encode()
    commit = git(tmp_path, "hash-object", "-w", "-t", "commit", "--stdin", stdin=text)
    with pytest.raises(EtudeError, match="not a valid path in a working copy"):
        await read(tmp_path, commit)


async def test_what_is_wrong_is_said(repository: tuple[Path, str]) -> None:
    place, commit = repository
    for url, name, words in (
        (place, "main", "full id"),
        (place, "0" * 40, "git ls-tree"),
        (place.parent, commit, "not a git repository"),
        ("https://example.com/x", commit, "file:// URL"),
        ("ssh://example.com/x", commit, "file:// URL"),
        ("ext::sh -c touch% /tmp/x", commit, "file:// URL"),
        ("file://example.com/x", commit, "file:// URL"),
    ):
        with pytest.raises(EtudeError, match=words):
            await read(url, name)
    for limit in ({"max_bytes": 5}, {"max_entries": 2}):
        with pytest.raises(EtudeError, match="are too many"):
            await read(place, commit, **limit)


async def test_the_place_of_a_submodule_stays_empty_and_a_lost_object_is_named(
    repository: tuple[Path, str],
) -> None:
    place, commit = repository
    git(place, "update-index", "--add", "--cacheinfo", f"160000,{commit},vendor")
    git(place, "commit", "-qm", "third")
    third = git(place, "rev-parse", "HEAD")
    assert (await read(place, third)).keys() == (await read(place, commit)).keys()
    blob = git(place, "rev-parse", "HEAD:src/a.py")
    (place / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(EtudeError, match="missing or broken|git "):
        await read(place, third)


async def test_where_there_is_no_git_that_is_said(
    repository: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, commit = repository
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(EtudeError, match="git is not installed"):
        await read(place, commit)


async def test_a_commit_that_does_not_fit_is_refused_before_a_sandbox_is_made(
    repository: tuple[Path, str],
) -> None:
    place, commit = repository
    spec = SandboxSpec(
        repository=Repository(url=str(place), commit=commit), limits=Limits(disk_bytes=5)
    )
    with pytest.raises(EtudeError, match=r"limits\.disk_bytes"):
        async with FakeSandboxPool().open(spec):
            pass


def test_a_path_and_a_name_become_one_commit(repository: tuple[Path, str]) -> None:
    place, commit = repository
    git(place, "tag", "-a", "-m", "first", "v1", "HEAD~1")
    tagged = repository_at(place / "src", "v1")
    assert tagged.commit == git(place, "rev-parse", "HEAD~1") and repository_at(place) == (
        Repository(url=str(place / ".git"), commit=commit)
    )
    assert read_texts(tagged) == {"src/a.py": "old\n"}
    git(place, "worktree", "add", "-q", "../other", "v1")
    assert repository_at(place.parent / "other") == tagged
    for ref in ("v2", "--all"):
        with pytest.raises(EtudeError, match=f"no commit, branch or tag is named '{ref}'"):
            repository_at(place, ref)
    with pytest.raises(EtudeError, match="not a git repository"):
        repository_at(place.parent)
    with pytest.raises(EtudeError, match="nowhere: the folder does not exist"):
        repository_at(place / "nowhere")


async def test_its_texts_can_be_read_from_within_a_loop(repository: tuple[Path, str]) -> None:
    texts = read_texts(repository_at(repository[0]))
    assert texts["src/a.py"] == "new\r\n" and "link" not in texts


async def test_where_we_are_does_not_matter(
    repository: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "run" in await read(*repository)


async def test_a_git_that_has_ended_needs_no_killing(
    repository: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends_too_late(self: asyncio.subprocess.Process, data: bytes) -> tuple[bytes, bytes]:
        assert self.stdin is not None
        self.stdin.close()
        await self.wait()
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio.subprocess.Process, "communicate", ends_too_late)
    with pytest.raises(asyncio.CancelledError):
        await read(*repository)
