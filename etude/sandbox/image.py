"""Images: what sandboxes show in place of, or beside, the programs of this machine.

An image is a list of layers, directories that are named after the digest of what is in them and
that all sandboxes of a machine share, read-only. The store is a directory: `layers/DIGEST/`, one
record for each image, and for each finished step of a build the layer that it made, so that a build
that broke off goes on where it was. A thing is there once its record is, which is written last.
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
"""Where an image over the programs of this machine has its Python packages."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a sandbox is opened from."""

    name: str
    layers: tuple[str, ...]
    """Digests, from the lowest on."""
    system: bool
    """Whether the layers are a whole system; otherwise they lie over the programs of this
    machine."""
    work: str = ""
    """Digest of the layer that is the working copy at first; empty: none."""
    env: Mapping[str, str] = field(default_factory=dict)
    size_bytes: int = 0
    hostname: str = "localhost"
    user: str = ""
    """What commands are called, with a home of that name made of /etc/skel; empty: `user`, with
    none."""

    @property
    def digest(self) -> str:
        """Of all that a sandbox can see of it; its name and size are no part of that."""
        seen = {
            key: value for key, value in asdict(self).items() if key not in ("name", "size_bytes")
        }
        return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()

    @property
    def reference(self) -> str:
        """Name and digest, as a task gives it that means this very image."""
        return f"{self.name}@sha256:{self.digest}"


def default_store() -> ImageStore:
    """The one of this user: $ETUDE_IMAGES, or below the directory for caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return ImageStore(Path(os.environ.get("ETUDE_IMAGES") or Path(caches, "etude", "images")))


class ImageStore:
    """The images of one machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, reference: str) -> Image:
        """By name, or by name and digest."""
        name, _, digest = reference.partition("@sha256:")
        if not _NAME.fullmatch(name) or not (path := self._record(name)).is_file():
            known = ", ".join(each.name for each in self.list()) or "none"
            raise EtudeError(
                f"there is no image {name!r} in {self.root} (there: {known}): make it with "
                f"etude images build SPEC.toml"
            )
        image = _read(path)
        if digest and digest != image.digest:
            raise EtudeError(
                f"the image {name} of this machine is {image.reference}, and the task asks for "
                f"another, sha256:{digest}: build that one, or name the image without a digest"
            )
        return image

    def list(self) -> list[Image]:
        return [_read(path) for path in sorted((self.root / "images").glob("*.json"))]

    def save(self, image: Image) -> None:
        if not _NAME.fullmatch(image.name):
            raise EtudeError(
                f"image name {image.name!r}: lower-case letters, digits, '.', '_' and '-' only"
            )
        _write(self._record(image.name), json.dumps(asdict(image), indent=1))

    def remove(self, name: str) -> int:
        """The bytes that are free now. Layers that another image has stay; those of earlier builds,
        which no image has any more, go as well. It waits for builds."""
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
        """The layer that a step with this key has made."""
        path = self.root / "steps" / step
        digest = path.read_text() if path.is_file() else ""
        return digest if digest and self.layer(digest).is_dir() else None

    def building(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, no layer is removed."""
        return self._locked("all", fcntl.LOCK_SH)

    def one_at_a_time(self, step: str) -> contextlib.AbstractContextManager[None]:
        """Of all builds of this machine, whoever runs them."""
        return self._locked(step, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def _locked(self, name: str, kind: int) -> Iterator[None]:
        """The kernel lets go when a process dies."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / name).open("w") as lock:
            fcntl.flock(lock, kind)
            yield

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory beside the layers, for one that is being made; what a killed build left is
        taken away first."""
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
        """Take a directory over as the layer that a step has made; its digest."""
        made.chmod(0o755)  # commands in a sandbox are an ordinary user's
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
    """SHA-256 of names, modes and contents, whenever and by whom they were written."""
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
    """What a directory takes on disk."""
    return sum(status.st_blocks * 512 for _, status in walk(directory))


def read_tree(directory: Path) -> Tree:
    """Its files and links, as a working copy has them."""
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
    """When each of its files and directories was written, in nanoseconds; what is deeper first."""
    found = {os.path.relpath(path, directory): each.st_mtime_ns for path, each in walk(directory)}
    return dict(sorted(found.items(), key=lambda item: -item[0].count("/")))


def walk(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All below, in the order of their names. Links are not followed."""
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
    """Whether somebody has locked it, in whatever container or on whatever machine."""
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
