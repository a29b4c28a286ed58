"""Sources of repositories: a git URL, a folder, an sdist, or the name of a package.

Fetched files are kept in memory, without caches, build output and history. A bare clone of each git
source stays next to the tasks, for those made from commits.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import io
import os
import re
import subprocess
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

from etude.core.errors import EtudeError
from etude.core.sandbox import Repository
from etude.factory.task import Files
from etude.sandbox import repository as repositories
from etude.sandbox.tree import LINK

_GIT_URL = re.compile(r"^(https?|ssh|git|file)://|^git@|\.git/?$")
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(==[\w.]+)?$")
_SDIST = (".tar.gz", ".tgz", ".zip", ".tar.bz2")
_UNWANTED = re.compile(
    r"(^|/)(\.git|\.hg|\.tox|\.nox|\.venv|venv|build|dist|node_modules|__pycache__|\.eggs|"
    r"\.(pytest|mypy|ruff|hypothesis)(_cache)?)/|\.egg-info/|\.py[co]$|\.(so|pyd|orig|rej)$"
)
"""Copies and caches, which may contain the answer to a task."""
_MAX_BYTES = 48 << 20
_MAX_FILES = 10_000
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A repository as files."""

    name: str
    origin: str
    files: Files
    git: Path | None = None
    """Its history: a bare clone."""


def fetch(source: str, clones: Path) -> Checkout:
    """Fetch a source. EtudeError if it is not one, or cannot be fetched."""
    path = Path(source)
    if path.is_file() and source.endswith(_SDIST):
        return _from_archive(path.read_bytes(), path.name, path.name)
    if _GIT_URL.search(source) or _is_git(path):
        return _from_git(source, clones)
    if path.is_dir():
        return Checkout(name=name_of(source), origin=name_of(source), files=_folder(path))
    if _PACKAGE.match(source) and os.sep not in source:
        return _from_index(source)
    raise EtudeError(
        f"{source}: not a folder, an archive, a git URL or the name of a package; check the path"
    )


def name_of(source: str) -> str:
    """A short name of a source, before it is fetched."""
    path = Path(source)
    last = (str(path.resolve()) if path.exists() else source).rstrip("/").rpartition("/")[2]
    for ending in (*_SDIST, ".git"):
        last = last.removesuffix(ending)
    return _plain(re.sub(r"(==|-)\d[\w.]*$", "", last))


def git(directory: Path, *argv: str, stdin: bytes | None = None) -> bytes:
    """Run git without this user's configuration. EtudeError if it fails."""
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }
    try:
        ran = subprocess.run(
            ["git", "-C", str(directory), "-c", "safe.directory=*", *argv],
            input=stdin,
            capture_output=True,
            env=env,
            check=False,
        )
    except FileNotFoundError as e:
        raise EtudeError("git is not installed on this machine: install it") from e
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip().splitlines() or ["it failed"]
        raise EtudeError(f"git {argv[0]} in {directory}: {said[-1]}")
    return ran.stdout


def read_commit(directory: Path, commit: str) -> Files:
    """The files of a commit; links and submodules are left out. Blocks; not for threads with an
    event loop."""
    repository = Repository(url=str(directory.absolute()), commit=commit)
    entries = asyncio.run(
        repositories.read_commit(repository, max_bytes=_MAX_BYTES, max_entries=_MAX_FILES)
    )
    found = {path: entry.content for path, entry in entries.items() if entry.mode != LINK}
    return _wanted({path: content for path, content in found.items() if content is not None})


def _is_git(path: Path) -> bool:
    return (path / ".git").exists() or ((path / "objects").is_dir() and (path / "HEAD").is_file())


def _from_git(source: str, clones: Path) -> Checkout:
    name = name_of(source)
    place = clones / f"{name}.git"
    if not place.is_dir():
        clones.mkdir(parents=True, exist_ok=True)
        half = clones / f".{name}.part"
        subprocess.run(["rm", "-rf", str(half)], check=False)
        where = str(Path(source).absolute()) if Path(source).exists() else source
        git(clones, "clone", "--quiet", "--bare", where, str(half.absolute()))
        half.rename(place)
    commit = git(place, "rev-parse", "HEAD").decode().strip()
    told = name if Path(source).exists() else source  # no paths of this machine
    return Checkout(
        name=name, origin=f"{told}@{commit}", files=read_commit(place, commit), git=place
    )


def _folder(path: Path) -> Files:
    found = {
        each.relative_to(path).as_posix(): each.read_bytes()
        for each in sorted(path.rglob("*"))
        if each.is_file() and not each.is_symlink()
    }
    return _wanted(found)


def _from_archive(packed: bytes, filename: str, origin: str) -> Checkout:
    if filename.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            found = {
                _below_top(each.filename): archive.read(each)
                for each in archive.infolist()
                if not each.is_dir() and each.file_size <= _MAX_BYTES
            }
    else:
        found = _untarred(io.BytesIO(packed), strip=True)
    return Checkout(name=name_of(filename), origin=origin, files=_wanted(found))


def _untarred(packed: io.BytesIO, *, strip: bool) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=packed) as archive:
        for member in archive:
            if member.isfile() and member.size <= _MAX_BYTES:
                content = archive.extractfile(member)
                assert content is not None
                found[_below_top(member.name) if strip else member.name] = content.read()
    return found


def _below_top(path: str) -> str:
    return path.partition("/")[2] or path


def _wanted(files: Files) -> dict[str, bytes]:
    kept = {
        path: content
        for path, content in sorted(files.items())
        if not _UNWANTED.search(path)
        and not PurePosixPath(path).is_absolute()
        and ".." not in path.split("/")
    }
    if (size := sum(map(len, kept.values()))) > _MAX_BYTES:
        raise EtudeError(f"{size >> 20} MiB of files are too large for a working copy")
    return kept


def _from_index(wanted: str) -> Checkout:
    """The newest sdist of a package, or that of a version, on the index that pip would use."""
    name, _, version = wanted.partition("==")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    normal = re.sub(r"[-_.]+", "-", name).lower()
    page = _download(f"{index}/{normal}/").decode(errors="replace")
    links = [html.unescape(each) for each in re.findall(r'href="([^"]+)"', page)]
    sdists = [link for link in links if urlsplit(link).path.endswith((".tar.gz", ".zip"))]
    versions = [(_version(link, normal), link) for link in sdists]
    usable = [
        (found, link)
        for found, link in versions
        if (found == version if version else re.fullmatch(r"[\d.]+(\.?post\d+)?", found))
    ]
    if not usable:
        raise EtudeError(f"{wanted}: the package index has no source distribution")
    found, link = max(usable, key=lambda each: [int(n) for n in re.findall(r"\d+", each[0])])
    url = urljoin(f"{index}/{normal}/", link)
    packed = _download(url.partition("#")[0])
    digest = re.search(r"#sha256=([0-9a-f]{64})", url)
    if digest and hashlib.sha256(packed).hexdigest() != digest[1]:
        raise EtudeError(f"{wanted}: the digest of the download differs from the package index")
    filename = PurePosixPath(urlsplit(url).path).name
    return _from_archive(packed, filename, f"{normal}=={found}")


def _version(link: str, name: str) -> str:
    filename = PurePosixPath(urlsplit(link).path).name
    stem = filename.removesuffix(".zip").removesuffix(".tar.gz")
    return re.sub(r"^" + name.replace("-", "[-_.]") + "-", "", stem, flags=re.IGNORECASE)


def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError) as e:
        raise EtudeError(f"{url} cannot be fetched: {e}") from e


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "repository"
