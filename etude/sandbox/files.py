"""Paths of a working copy, the same for every kind of sandbox."""

from __future__ import annotations

from pathlib import PurePosixPath


def inside(path: str) -> str:
    """The path in normal form. ValueError if it does not name a file of the working copy."""
    if (plain := inside_directory(path)) == ".":
        raise ValueError(f"{path!r} leaves the working copy")
    return plain


def inside_directory(path: str) -> str:
    """The normal form of a directory's path, which may be that of the working copy itself."""
    plain = PurePosixPath(path)
    if plain.is_absolute() or ".." in plain.parts or not path or "\0" in path:
        raise ValueError(f"{path!r} leaves the working copy")
    return str(plain)


def to_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
