"""A commit of a git repository as a tree of files, without its history.

The repository need not be trusted. Its objects are read by two git commands that only read objects,
with a git directory of our own: the repository's configuration, hooks, filters, attributes and
replacements have no effect, nothing is fetched, and no program but git runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.core.errors import EtudeError
from etude.core.sandbox import Repository
from etude.sandbox.files import inside
from etude.sandbox.tree import EXECUTABLE, FILE, LINK, Entry

_SUBMODULE = 0o160000


def repository_at(path: str | Path, ref: str = "HEAD") -> Repository:
    """The git repository that contains a path of this machine, at the commit that a branch, a tag
    or an abbreviated id currently refers to."""
    if not Path(path).is_dir():
        raise EtudeError(
            f"repository {path}: the folder does not exist: give one with a git repository"
        )
    asked = {
        "directory": ("--path-format=absolute", "--git-common-dir"),
        "commit": ("--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"),
    }
    told: dict[str, str] = {}
    for what, arguments in asked.items():
        try:
            ran = subprocess.run(
                ["git", "-C", str(path), "rev-parse", *arguments],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as e:
            raise EtudeError(f"repository {path}: git is not installed on this machine") from e
        if ran.returncode:
            why = ran.stderr.strip() or f"no commit, branch or tag is named {ref!r}"
            raise EtudeError(f"repository {path}: {why}")
        told[what] = ran.stdout.splitlines()[-1]
    return Repository(url=told["directory"], commit=told["commit"])


def read_texts(repository: Repository) -> dict[str, str]:
    """The text files of a commit: path -> content, sorted. It blocks, and may be called with or
    without an event loop running, as in `Environment.tasks`."""
    texts: dict[str, str] = {}
    for path, (mode, content) in sorted(read_whole(repository).items()):
        with contextlib.suppress(UnicodeDecodeError):
            if mode != LINK:
                texts[path] = (content or b"").decode()
    return texts


def read_whole(repository: Repository) -> dict[str, Entry]:
    """Blocking form of `read_commit`."""
    with ThreadPoolExecutor(1) as thread:
        reading = read_commit(repository, max_bytes=1 << 30, max_entries=100_000)
        return thread.submit(asyncio.run, reading).result()


async def read_commit(
    repository: Repository, *, max_bytes: int, max_entries: int
) -> dict[str, Entry]:
    """Its files and links; the directories of submodules stay empty. EtudeError if there is no such
    commit, or if it is too large for a working copy."""
    name = f"repository {repository.url} at {repository.commit}"
    if not re.fullmatch(r"[0-9a-f]{40}", repository.commit):
        raise EtudeError(f"{name}: the commit must be a full id of 40 lower-case hex digits")
    if shutil.which("git") is None:
        raise EtudeError(f"{name}: git is not installed on this machine")
    objects = _objects(repository.url)
    with tempfile.TemporaryDirectory(prefix="etude-git-") as scratch:
        git = _Git(Path(scratch), objects, name)
        await git.run("init", "--quiet", "--bare", "--template=", scratch)
        listed = _parse_listing(
            await git.run("ls-tree", "-r", "-z", "-l", "--full-tree", repository.commit), name
        )
        size = sum(each[2] for each in listed.values())
        if len(listed) > max_entries or size > max_bytes:
            raise EtudeError(
                f"{name}: {len(listed)} files with {size} bytes are too many for a working "
                f"copy, which may have {max_entries} and {max_bytes}; raise limits.disk_bytes "
                f"of the task's SandboxSpec"
            )
        wanted = "".join(f"{blob}\n" for _, blob, _ in listed.values())
        answer = await git.run("cat-file", "--batch", stdin=wanted.encode())
    contents = _parse_blobs(answer, name)
    return {
        path: Entry(mode, content)
        for (path, (mode, _, _)), content in zip(listed.items(), contents, strict=True)
    }


def _objects(url: str) -> Path:
    """Directory with the objects of a local repository."""
    parts = urlsplit(url)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise EtudeError(
            f"repository {url}: only a path or a file:// URL on this machine is supported; "
            f"clone it first"
        )
    place = Path(unquote(parts.path) if parts.scheme else url)
    for objects in (place / "objects", place / ".git" / "objects"):
        if objects.is_dir():
            return objects.resolve()
    raise EtudeError(f"repository {url}: not a git repository")


class _Git:
    def __init__(self, directory: Path, objects: Path, name: str) -> None:
        self._name = name
        self._directory = directory
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(directory),
            "GIT_DIR": str(directory),
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": _quoted(objects),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_SYSTEM": os.devnull,
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_TERMINAL_PROMPT": "0",
        }

    async def run(self, *argv: str, stdin: bytes = b"") -> bytes:
        process = await asyncio.create_subprocess_exec(
            "git",
            *argv,
            cwd=self._directory,
            env=self._env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate(stdin)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                process.kill()
            await process.wait()
            raise
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise EtudeError(f"{self._name}: git {argv[0]}: {lines[-1]}")
        return out


def _quoted(path: Path) -> str:
    """A path, quoted for a colon-separated list of directories."""
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _parse_listing(listing: bytes, name: str) -> dict[str, tuple[int, str, int]]:
    """Path -> mode, blob and size. The author of a tree can write any path into it, so paths that
    git itself would refuse are refused here."""
    found: dict[str, tuple[int, str, int]] = {}
    for line in listing.split(b"\0")[:-1]:
        described, _, raw = line.partition(b"\t")
        mode, _, blob, size = described.decode().split()
        path = os.fsdecode(raw)
        kind = int(mode, 8)
        if kind == _SUBMODULE:
            continue
        try:
            plain = inside(path)
        except ValueError:
            plain = ""
        if plain != path or ".git" in path.lower().split("/"):
            raise EtudeError(f"{name}: {path!r} is not a valid path in a working copy")
        if not size.isdecimal():
            raise EtudeError(f"{name}: the object of {path!r} is missing or broken")
        if kind != LINK:
            kind = EXECUTABLE if kind & 0o100 else FILE
        found[path] = (kind, blob, int(size))
    return found


def _parse_blobs(answer: bytes, name: str) -> list[bytes]:
    """Contents in the output of `cat-file --batch`: per object, a line with id, kind and size, the
    content, and a newline."""
    blobs: list[bytes] = []
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        kind, _, size = answer[at:end].decode().partition(" ")[2].partition(" ")
        if kind != "blob":
            raise EtudeError(f"{name}: object {answer[at:end].decode()} is missing or broken")
        blobs.append(answer[end + 1 : end + 1 + int(size)])
        at = end + 1 + int(size) + 1
    return blobs
