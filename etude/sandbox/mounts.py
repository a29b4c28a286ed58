"""Directories of the host that every sandbox of a pool shows, read-only: a virtual environment, the
packages of another language, data.

They belong to the pool and not to a task: the process that sandboxes are forked from has let go of
the host's files before the first one is opened.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from etude.core.errors import EtudeError
from etude.sandbox.places import LINKS, WORK

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_TAKEN = (WORK, "/proc", "/dev", "/etc", "/mnt", *LINKS)
"""Paths that a sandbox has for itself."""


class Mount(NamedTuple):
    source: str
    target: str
    """Its path in a sandbox."""


def find_mounts(texts: Iterable[str]) -> tuple[Mount, ...]:
    """Parse `PATH` or `PATH:PLACE`, and check that the mount is possible. The result includes the
    Python installations that virtual environments among the mounts are based on."""
    found = [_parse(text) for text in texts]
    pythons = [Mount(home, home) for mount in found for home in _python_homes(mount)]
    return tuple(dict.fromkeys([*found, *pythons]))


def mount_places(texts: Iterable[str]) -> list[str]:
    """The paths of such mounts in a sandbox."""
    return [_parse(text).target for text in texts]


def mount_programs(names: Iterable[str], place: str) -> tuple[str, ...]:
    """The mount that shows this installation's programs, if it has one of these. They are not
    searched for commands: a caller names one by its path."""
    folder = sysconfig.get_path("scripts")
    is_there = any(os.path.exists(f"{folder}/{name}") for name in names)
    return (f"{folder}:{place}",) if is_there else ()


def search_path(mounts: Sequence[Mount]) -> list[str]:
    """The directories of programs that come before all others."""
    return [f"{each.target}/bin" for each in mounts if os.path.isdir(f"{each.source}/bin")]


def _parse(text: str) -> Mount:
    source, _, place = text.partition(":")
    source = os.path.abspath(source)
    target = os.path.normpath(place) if place else source
    what = f"sandbox.mounts: {text!r}"
    if not os.path.isdir(source):
        raise EtudeError(
            f"{what}: the directory {source} does not exist; create it, or give another path"
        )
    if not os.path.isabs(target):
        raise EtudeError(f"{what}: the path in the sandbox must begin with /, as in {text}:/opt/x")
    return Mount(source, target)


def check_walled(mounts: Sequence[Mount]) -> None:
    """Check that these mounts are possible in a sandbox with walls: it has paths of its own, and
    its commands run as an ordinary user."""
    for source, target in mounts:
        elsewhere = target != source and _below(target, _SYSTEM)
        if target == "/" or elsewhere or _below(target, _TAKEN):
            raise EtudeError(
                f"sandbox.mounts: {target} is in use within sandboxes; give another path there, "
                f"as in {source}:/opt/x"
            )
        if os.geteuid() == 0 and os.stat(source).st_mode & 0o005 != 0o005:
            raise EtudeError(
                f"sandbox.mounts: commands in a sandbox run as an ordinary user, who may not "
                f"read {source}; run `chmod -R o+rX` on it"
            )


def _python_homes(mount: Mount) -> list[str]:
    """The installations that `bin/python` leads to, link by link, except those that are in every
    sandbox."""
    homes: list[str] = []
    python = f"{mount.source}/bin/python"
    while os.path.islink(python):
        python = os.path.join(os.path.dirname(python), os.readlink(python))
        home = os.path.normpath(f"{python}/../..")
        there = home == "/" or _below(home, (mount.source, sys.base_prefix, *_SYSTEM))
        if os.path.isdir(home) and not there:
            homes.append(home)
    return homes


def _below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or Path(place) in Path(path).parents for place in places)
