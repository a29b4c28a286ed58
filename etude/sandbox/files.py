"""Paths of a working copy, the same for every kind of sandbox."""

from __future__ import annotations

from pathlib import PurePosixPath


def inside(path: str) -> str:
    """The path in its plain form. ValueError if it does not name a file of the working copy."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not plain.parts or "\0" in path:
        raise ValueError(f"{path!r} leaves the working copy")
    return str(plain)
