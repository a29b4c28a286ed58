"""The spec file of an image."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Debian:
    """A system of Debian packages."""

    packages: tuple[str, ...] = ()
    suite: str = "bookworm"
    mirror: str = "http://deb.debian.org/debian"
    """Snapshots of snapshot.debian.org are frozen at a date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oci:
    """A system from an OCI image layout, as `skopeo copy .. oci:DIR` writes it."""

    layout: str
    tag: str = ""
    """Tag of the image; empty: the only one."""
    workdir: str = ""
    """Its directory that becomes the working copy; empty: that of the image's config, unless it is
    /."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pypi:
    """Python packages."""

    requirements: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The working copy."""

    source: str
    """A git URL or path, a folder, an sdist, or the name of a package."""
    commit: str = ""
    """A commit of a git repository, by its full id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Realism:
    """Settings that make a sandbox look like somebody's machine."""

    user: str = "dev"
    hostname: str = "devbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """The parts of an image. With neither `debian` nor `oci`, it lies over the programs of this
    machine."""

    name: str
    debian: Debian | None = None
    oci: Oci | None = None
    pypi: Pypi | None = None
    repository: Source | None = None
    realism: Realism | None = None
    env: Mapping[str, str] = field(default_factory=dict)


_TABLES: dict[str, type] = {
    "debian": Debian,
    "oci": Oci,
    "pypi": Pypi,
    "repository": Source,
    "realism": Realism,
}


def read_spec(path: Path) -> ImageSpec:
    try:
        told = tomllib.loads(path.read_text())
    except OSError as e:
        raise EtudeError(f"{path} cannot be read: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise EtudeError(f"{path} is not TOML: {e}") from e
    spec: ImageSpec = _filled(ImageSpec, told, str(path), "")
    if spec.debian and spec.oci:
        raise EtudeError(f"{path}: [debian] and [oci] each make a whole system: remove one of them")
    if spec.repository and spec.oci and spec.oci.workdir:
        raise EtudeError(
            f"{path}: [repository] and oci.workdir each make the working copy: remove one of them"
        )
    if not (spec.debian or spec.oci or spec.pypi or spec.repository):
        raise EtudeError(f"{path}: give at least one of [debian], [oci], [pypi] and [repository]")
    return _placed(spec, path.parent)


def _filled(kind: type, told: Mapping[str, Any], path: str, table: str) -> Any:
    """A dataclass from a table. Every key must be known, with a value of the right type."""
    where = f"{path}: {table}"
    known = {each.name: each for each in fields(kind)}
    if unknown := [key for key in told if key not in known]:
        raise EtudeError(f"{where}{unknown[0]} is an unknown key; known keys: {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, each in known.items():
        if name not in told:
            if each.default is MISSING and each.default_factory is MISSING:
                raise EtudeError(f"{where}{name} is missing")
            continue
        value = told[name]
        if name in _TABLES and not table:
            _check(value, dict, f"{where}{name}")
            values[name] = _filled(_TABLES[name], value, path, f"{name}.")
        elif str(each.type).startswith("tuple"):
            _check(value, list, f"{where}{name}")
            for item in value:
                _check(item, str, f"{where}{name}")
            values[name] = tuple(value)
        elif name == "env":
            _check(value, dict, f"{where}{name}")
            values[name] = {key: str(text) for key, text in value.items()}
        else:
            _check(value, str, f"{where}{name}")
            values[name] = value
    return kind(**values)


def _check(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "a string", list: "a list of strings", dict: "a table"}
        raise EtudeError(f"{where} must be {names[kind]}, not {value!r}")


def _placed(spec: ImageSpec, folder: Path) -> ImageSpec:
    """The spec with paths relative to the folder of its file."""
    if spec.oci:
        spec = replace(spec, oci=replace(spec.oci, layout=str(folder / spec.oci.layout)))
    if spec.repository and (folder / spec.repository.source).exists():
        place = str((folder / spec.repository.source).resolve())
        spec = replace(spec, repository=replace(spec.repository, source=place))
    return spec
