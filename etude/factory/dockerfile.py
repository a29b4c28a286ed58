"""Dockerfiles, as far as a sandbox can stand in for the image that they would build.

Files, variables and the working directory are taken over. Any other line is refused, unless the
user states that sandboxes have its effect already.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from posixpath import join, normpath, relpath

from etude.core.errors import EtudeError

_WITHOUT_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"}
"""Instructions without effect on an agent or a grader: Harbor starts containers with a command of
its own."""
_ARCHIVES = (".tar", ".gz", ".tgz", ".bz2", ".xz")


@dataclass(frozen=True, slots=True)
class Image:
    """The parts of an image that a sandbox needs to resemble it."""

    workdir: str
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    """Files in the working directory."""
    executables: tuple[str, ...]
    """Executable ones of these files."""


class Unsupported(EtudeError):
    """A line that a sandbox cannot stand in for."""


def read_image(folder: Path, provided: Collection[str], workdir: str | None = None) -> Image:
    """Read `folder/Dockerfile`. `provided`: patterns of lines with an effect that sandboxes have
    already. `workdir`: overrides that of the Dockerfile."""
    here = ""
    env: dict[str, str] = {}
    copies: list[tuple[str, list[str], str]] = []
    for line in instructions((folder / "Dockerfile").read_text()):
        word, _, rest = line.partition(" ")
        keyword = word.upper()
        if keyword in _WITHOUT_EFFECT or is_provided(line, provided) or _is_our_python(line):
            continue
        if keyword == "WORKDIR" and "$" not in rest:
            here = normpath(join(here or "/", rest))
        elif keyword == "ENV" and "$" not in rest:
            env |= _variables(folder, line, rest)
        elif keyword in ("COPY", "ADD"):
            *sources, target = _copied(folder, line, rest)
            copies.append((line, sources, join(here or "/", target)))
        else:
            raise Unsupported(
                f"{folder / 'Dockerfile'}: {line!r} is not supported: Dockerfiles are read, but "
                f"not built. If your sandboxes have what the line installs ([sandbox] mounts), "
                f"add the line, or a pattern for it, to provided.txt beside the tasks"
            )
    if not (final := workdir or here):
        raise Unsupported(
            f"{folder / 'Dockerfile'} has no WORKDIR, and that of its image is not known"
        )
    files: dict[str, Path] = {}
    for line, sources, target in copies:
        for path, place in _placed(folder, sources, target):
            inside = relpath(place, final)
            if inside == "." or inside.startswith("../"):
                raise Unsupported(
                    f"{folder / 'Dockerfile'}: {line!r} puts a file at {place}, which is not "
                    f"inside the working directory {final}, and a sandbox has nothing else"
                )
            files[inside] = path
    return Image(
        workdir=final,
        env=env,
        files={place: path.read_bytes() for place, path in files.items()},
        executables=tuple(place for place, path in files.items() if path.stat().st_mode & 0o100),
    )


def instructions(text: str) -> Iterator[str]:
    """The instructions of a Dockerfile, each on one line, without comments."""
    whole = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\[ \t]*\n", " ", whole).splitlines():
        if line.strip():
            yield " ".join(line.split())


def is_provided(line: str, provided: Collection[str]) -> bool:
    return any(fnmatchcase(line, pattern) for pattern in provided)


def _is_our_python(line: str) -> bool:
    """True if an image is a Python of the version that sandboxes have."""
    major, minor = sys.version_info[:2]
    return bool(re.fullmatch(rf"FROM python:{major}\.{minor}(\.\d+)?(-[\w.-]+)?", line))


def _words(folder: Path, line: str, rest: str) -> list[str]:
    try:
        return shlex.split(rest)
    except ValueError as e:
        raise Unsupported(f"{folder / 'Dockerfile'}: {line!r} cannot be parsed: {e}") from e


def _variables(folder: Path, line: str, rest: str) -> dict[str, str]:
    words = _words(folder, line, rest)
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    name, _, value = rest.partition(" ")  # the old form, with one variable per line
    if not value:
        raise Unsupported(f"{folder / 'Dockerfile'}: {line!r} is not an assignment")
    return {name: value}


def _copied(folder: Path, line: str, rest: str) -> list[str]:
    """The sources and the target."""
    words = _words(folder, line, rest)
    if words[:1] and words[0].startswith(("--", "[", "<<")) or "$" in rest or len(words) < 2:
        raise Unsupported(f"{folder / 'Dockerfile'}: {line!r} is not a plain copy")
    fetched = [each for each in words[:-1] if "://" in each or each.endswith(_ARCHIVES)]
    if line.upper().startswith("ADD") and fetched:
        raise Unsupported(f"{folder / 'Dockerfile'}: {line!r} downloads or unpacks {fetched[0]}")
    if (folder / ".dockerignore").exists():
        raise Unsupported(f"{folder}: its .dockerignore is not supported, and affects {line!r}")
    return words


def _placed(folder: Path, sources: list[str], target: str) -> Iterator[tuple[Path, str]]:
    """Each file and the path that a copy gives it. The content of a directory goes into the target,
    and so does a file if the target is a directory."""
    for source in sources:
        pattern = normpath(source.lstrip("/"))
        if ".." in source.split("/"):
            raise Unsupported(f"{folder / 'Dockerfile'}: {source} must be named without '..'")
        found = [folder] if pattern == "." else sorted(folder.glob(pattern))
        if not found:
            raise Unsupported(f"{folder / 'Dockerfile'}: {source}, which it copies, does not exist")
        for path in found:
            if path.is_dir():
                below = sorted(each for each in path.rglob("*") if each.is_file())
                yield from (
                    (each, normpath(join(target, each.relative_to(path).as_posix())))
                    for each in below
                )
            elif target.endswith(("/", "/.")) or len(sources) > 1 or len(found) > 1:
                yield path, normpath(join(target, path.name))
            else:
                yield path, normpath(target)
