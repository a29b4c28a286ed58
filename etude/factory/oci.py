"""Unpacking of OCI image layouts into a directory.

Images are not trusted: a path or a link in one never leads out of the directory, devices and
set-user-id bits are left out, and every blob must have the digest that it is named by.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError

_MACHINES = {"aarch64": "arm64", "x86_64": "amd64"}
_GONE, _ALL_GONE = ".wh.", ".wh..wh..opq"


@dataclass(frozen=True, slots=True)
class OciConfig:
    """Settings of an image for its processes."""

    workdir: str
    env: Mapping[str, str]


def manifest_digest(layout: Path, tag: str) -> str:
    """Digest of the image with this tag in a layout."""
    return str(_manifest(layout, tag)[0])


def unpack(layout: Path, tag: str, root: Path) -> None:
    """Unpack all layers of an image over each other."""
    _, manifest = _manifest(layout, tag)
    for layer in manifest["layers"]:
        kind = str(layer.get("mediaType", ""))
        if "zstd" in kind:
            raise EtudeError(
                f"{layout}: a layer is {kind}, which is not supported; copy it with gzip "
                f"(skopeo --dest-..)"
            )
        own: set[Path] = set()
        with tarfile.open(_blob(layout, layer["digest"])) as archive:
            for member in archive:
                _unpack_member(archive, member, root, own)


def read_config(layout: Path, tag: str) -> OciConfig:
    _, manifest = _manifest(layout, tag)
    config = json.loads(_blob(layout, manifest["config"]["digest"]).read_bytes()).get("config", {})
    env = dict(each.split("=", 1) for each in config.get("Env") or [])
    return OciConfig(workdir=config.get("WorkingDir") or "/", env=env)


def _manifest(layout: Path, tag: str) -> tuple[str, Any]:
    try:
        entries = json.loads((layout / "index.json").read_text())["manifests"]
    except (OSError, ValueError, KeyError) as e:
        raise EtudeError(f"{layout} is not an OCI layout: it has no readable index.json") from e
    named = [e for e in entries if tag in ("", _tag(e))]
    if len(named) != 1:
        tags = ", ".join(sorted(_tag(each) or "(none)" for each in entries))
        raise EtudeError(
            f"{layout}: oci.tag {tag!r} must match exactly one image; available: {tags}"
        )
    found = json.loads(_blob(layout, named[0]["digest"]).read_bytes())
    digest = named[0]["digest"]
    if "manifests" in found:  # one per architecture
        machine = _MACHINES.get(platform.machine(), platform.machine())
        fitting = [
            each
            for each in found["manifests"]
            if each.get("platform", {}).get("architecture") == machine
        ]
        if not fitting:
            raise EtudeError(f"{layout}: no image for {machine} machines")
        digest = fitting[0]["digest"]
        found = json.loads(_blob(layout, digest).read_bytes())
    return digest, found


def _tag(entry: Mapping[str, Any]) -> str:
    return str(entry.get("annotations", {}).get("org.opencontainers.image.ref.name", ""))


def _blob(layout: Path, digest: str) -> Path:
    kind, _, value = digest.partition(":")
    path = layout / "blobs" / kind / value
    if kind != "sha256" or not path.is_file():
        raise EtudeError(f"{layout}: the blob {digest} is missing")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != value:
            raise EtudeError(f"{layout}: the blob {digest} is broken; copy the image again")
    return path


def _unpack_member(
    archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path, own: set[Path]
) -> None:
    """Unpack one entry. `own`: paths that this layer has added so far, with all directories above
    them."""
    parent, _, name = os.path.normpath(f"/{member.name}").rpartition("/")
    if not name:
        return
    directory = resolve(root, parent)
    directory.mkdir(parents=True, exist_ok=True)
    if name == _ALL_GONE:
        for each in list(directory.iterdir()):
            _remove_below(each, own)
        return
    if name.startswith(_GONE):
        gone = name.removeprefix(_GONE)
        if gone in ("", ".", ".."):
            raise EtudeError(
                f"a layer removes {gone!r} ({member.name}), which no image tool writes"
            )
        _remove_below(directory / gone, own)
        return
    place = directory / name
    own.update((place, *place.parents))
    if member.isdir():
        if place.is_symlink() or not place.is_dir():
            _remove(place)
            place.mkdir()
        place.chmod(member.mode & 0o777 | 0o700)
        return
    if not (member.isreg() or member.issym() or member.islnk()):
        return
    _remove(place)
    if member.issym():
        place.symlink_to(member.linkname)
    elif member.islnk():
        above, _, last = os.path.normpath(f"/{member.linkname}").rpartition("/")
        os.link(resolve(root, above) / last, place, follow_symlinks=False)
    else:
        content = archive.extractfile(member)
        assert content is not None
        with place.open("xb") as file:
            shutil.copyfileobj(content, file)
        place.chmod(member.mode & 0o777)
        os.utime(place, (member.mtime, member.mtime))


def resolve(root: Path, path: str) -> Path:
    """Resolve a path and its links, with `root` as the root directory."""
    pending = [part for part in path.split("/") if part not in ("", ".")]
    here: list[str] = []
    for _ in range(len(pending) + 4096):
        if not pending:
            return root.joinpath(*here)
        part = pending.pop(0)
        if part == "..":
            here = here[:-1]
            continue
        place = root.joinpath(*here, part)
        if not place.is_symlink():
            here.append(part)
            continue
        to = os.readlink(place)
        if to.startswith("/"):
            here = []
        pending = [each for each in to.split("/") if each not in ("", ".")] + pending
        if len(pending) > 4096:
            break
    raise EtudeError(f"{path}: its links form a circle")


def _remove_below(path: Path, own: set[Path]) -> None:
    """Remove a path of the layers below. Entries of the same layer stay, whatever their order in
    the archive."""
    if path not in own:
        _remove(path)
    elif path.is_dir() and not path.is_symlink():
        for each in list(path.iterdir()):
            _remove_below(each, own)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
