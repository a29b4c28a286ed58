"""What a backend can give of a spec. The rest is refused by name, before anything is opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec
from etude.sandbox.files import inside, to_bytes
from etude.sandbox.repository import read_commit
from etude.sandbox.tree import FILE, Entry, Tree


def check_spec(
    spec: SandboxSpec, *, backend: str, gives: Collection[str], limits: Collection[str] = ()
) -> None:
    """Raise EtudeError for the first part that is asked for and not among those that the backend
    gives. `files` and `env` are given by all."""
    asked = [
        field.name
        for field in fields(SandboxSpec)
        if field.name not in ("files", "env", "limits")
        and getattr(spec, field.name) != getattr(_NOTHING, field.name)
        and field.name not in gives
    ]
    asked += [
        f"limits.{field.name}"
        for field in fields(Limits)
        if getattr(spec.limits, field.name) is not None and field.name not in limits
    ]
    if asked:
        raise EtudeError(
            f"{backend} sandboxes cannot give what the task asks for: {', '.join(asked)}. "
            "Take it out of the task's SandboxSpec, or out of [sandbox] if it stands there; "
            "docs/sandboxes.md says what each isolation gives"
        )
    check_env(spec.env)


async def opening_tree(spec: SandboxSpec, *, max_bytes: int, max_entries: int) -> Tree:
    """What the working copy holds at first: the repository, and the files over it."""
    found: dict[str, Entry] = {}
    if spec.repository:
        found = await read_commit(spec.repository, max_bytes=max_bytes, max_entries=max_entries)
    return found | {
        inside(path): Entry(FILE, to_bytes(content)) for path, content in spec.files.items()
    }


def check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be the name of an environment variable")


_NOTHING = SandboxSpec()
