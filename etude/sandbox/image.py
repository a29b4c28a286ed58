"""Images: file systems that sandboxes show in place of, or in addition to, the programs of this
machine.

An image is a list of layers: directories that are named after the digest of their content and that
all sandboxes of a machine share, read-only. The store is a directory with `layers/DIGEST/`, one
record per image, and one record per finished step of a build with the layer that it made, so that
an interrupted build resumes there. Records are written last: a layer or an image exists once its
record does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from etude.core.errors import EtudeError
from etude.sandbox.tree import EXECUTABLE, FILE, LINK, Entry, Tree

VENV = "/opt/venv"
"""Path of the Python packages of an image over the programs of this machine."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The file system, variables and names that a sandbox is opened with."""

    name: str
    layers: tuple[str, ...]
    """Digests, from the lowest on."""
    system: bool
    """True if the layers are a complete system; otherwise they lie over the programs of this
    machine."""
    work: str = ""
    """Digest of the layer that becomes the working copy; empty: none."""
    env: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    hostname: str = "localhost"
    user: str = ""
    """The name of the user that runs commands, with a home of that name made of /etc/skel; empty:
    `user`, without one."""

    @property
    def digest(self) -> str:
        """Digest of everything that a sandbox can see of the image, which excludes its name and
        size."""
        seen = {
            key: value for key, value in asdict(self).items() if key not in ("name", "size_bytes")
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    @property
    def reference(self) -> str:
        """Name and digest, with which a task refers to exactly this image."""
        return f"{self.name}@sha256:{self.digest}"


def default_store() -> ImageStore:
    """The store of this user: $ETUDE_IMAGES, or below the directory for caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return ImageStore(Path(os.environ.get("ETUDE_IMAGES") or Path(caches, "etude", "images")))


class ImageStore:
    """The images of one machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, reference: str) -> Image:
        """Find an image by name, or by name and digest."""
        name, _, digest = reference.partition("@sha256:")
        if not _NAME.fullmatch(name) or not (path := self._record(name)).is_file():
            known = ", ".join(each.name for each in self.list()) or "none"
            raise EtudeError(
                f"no image {name!r} in {self.root} (available: {known}): build it with `etude "
                f"images build SPEC.toml`"
            )
        image = _read(path)
        if digest and digest != image.digest:
            raise EtudeError(
                f"the image {name} of this machine is {image.reference}, but the task needs "
                f"sha256:{digest}: build that one, or name the image without a digest"
            )
        return image

    def list(self) -> list[Image]:
        return [_read(path) for path in sorted((self.root / "images").glob("*.json"))]

    def save(self, image: Image) -> None:
        if not _NAME.fullmatch(image.name):
            raise EtudeError(
                f"invalid image name {image.name!r}: use lower-case letters, digits, '.', '_' "
                f"and '-' only"
            )
        _write(self._record(image.name), json.dumps(asdict(image), indent=1))

    def remove(self, name: str) -> int:
        """Remove an image. Return the bytes that were freed. Layers of other images stay; those of
        earlier builds, which belong to no image any more, go as well. Waits for running builds."""
        with self._locked("all", fcntl.LOCK_EX):
            return self._remove(name)

    def _remove(self, name: str) -> int:
        self._record(self.find(name).name).unlink()
        kept = {digest for each in self.list() for digest in (*each.layers, each.work)}
        gone = {path.name for path in (self.root / "layers").glob("*")} - kept
        for step in (self.root / "steps").glob("*"):
            if step.read_text() in gone:
                step.unlink()
        freed = sum(tree_bytes(self.layer(digest)) for digest in gone)
        for digest in gone:
            shutil.rmtree(self.layer(digest))
        return freed

    def layer(self, digest: str) -> Path:
        return self.root / "layers" / digest

    def made_by(self, step: str) -> str | None:
        """The layer that a step with this key has made; None if there is none."""
        path = self.root / "steps" / step
        digest = path.read_text() if path.is_file() else ""
        return digest if digest and self.layer(digest).is_dir() else None

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Keep all layers from being removed while the block runs."""
        return self._locked("all", fcntl.LOCK_SH)

    def one_at_a_time(self, step: str) -> contextlib.AbstractContextManager[None]:
        """Let only one build of this machine, of whatever process, make this step at a time."""
        return self._locked(step, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        """Hold a lock. The kernel releases it if the process dies."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("w") as lock:
            fcntl.flock(lock, kind)
            yield

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary directory on the layers' file system, for a layer in the making. Directories
        of killed builds are removed first."""
        place = self.root / "scratch"
        place.mkdir(parents=True, exist_ok=True)
        with self._locked("scratch", fcntl.LOCK_EX):
            for left in place.iterdir():
                if not _is_held(left / "lock"):
                    shutil.rmtree(left, ignore_errors=True)
            directory = Path(tempfile.mkdtemp(dir=place))
            lock = (directory / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with lock:
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def keep(self, step: str, made: Path) -> str:
        """Take a directory over as the layer that a step has made. Return its digest."""
        made.chmod(0o755)  # commands in a sandbox run as an ordinary user
        digest = tree_digest(made)
        place = self.layer(digest)
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            made.rename(place)
        _write(self.root / "steps" / step, digest)
        return digest

    def _record(self, name: str) -> Path:
        return self.root / "images" / f"{name}.json"


def tree_digest(directory: Path) -> str:
    """SHA-256 of names, modes and contents, regardless of owners and times."""
    total = hashlib.sha256()
    for path, status in walk(directory):
        mode = status.st_mode
        said = hashlib.sha256()
        if stat.S_ISLNK(mode):
            said.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(mode):
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    said.update(chunk)
        name = os.fsencode(os.path.relpath(path, directory))
        total.update(b"%o %s %s\0" % (mode, said.hexdigest().encode(), name))
    return total.hexdigest()


def tree_bytes(directory: Path) -> int:
    """Bytes that a directory takes on disk."""
    return sum(status.st_blocks * 512 for _, status in walk(directory))


def read_tree(directory: Path) -> Tree:
    """The files and links of a directory, as a working copy has them."""
    found: dict[str, Entry] = {}
    for path, status in walk(directory):
        name = os.path.relpath(path, directory)
        if stat.S_ISLNK(status.st_mode):
            found[name] = Entry(LINK, os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            mode = EXECUTABLE if status.st_mode & 0o100 else FILE
            found[name] = Entry(mode, Path(path).read_bytes())
    return found


def read_times(directory: Path) -> dict[str, int]:
    """Modification times of its files and directories, in nanoseconds, deeper ones first."""
    found = {os.path.relpath(path, directory): each.st_mtime_ns for path, each in walk(directory)}
    return dict(sorted(found.items(), key=lambda item: -item[0].count("/")))


def walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a directory, in the order of names. Links are not followed."""
    pending = [str(directory)]
    while pending:
        for entry in sorted(os.scandir(pending.pop()), key=lambda each: each.name, reverse=True):
            status = entry.stat(follow_symlinks=False)
            yield entry.path, status
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)


def _read(path: Path) -> Image:
    told = json.loads(path.read_text())
    return Image(**{**told, "layers": tuple(told["layers"])})


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text)
    half.rename(path)


def _is_held(path: Path) -> bool:
    """True if some process has locked the file, in any container or on any machine."""
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
