"""Checks that a backend can provide a spec. Anything else is refused by name, before a sandbox is
opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec, Service
from etude.sandbox.files import inside, to_bytes
from etude.sandbox.limits import LEAST_MEMORY_BYTES
from etude.sandbox.link import decoded, encoded
from etude.sandbox.places import WORK, WORKDIRS
from etude.sandbox.repository import read_commit
from etude.sandbox.tree import FILE, Entry, Tree

USER = "user"
"""Name of the user in a sandbox with walls."""


def check_spec(
    spec: SandboxSpec, *, backend: str, gives: Collection[str], limits: Collection[str] = ()
) -> None:
    """Raise EtudeError that names the parts of the spec that the backend does not provide. All
    backends provide `files` and `env`."""
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
            f"{backend} sandboxes do not support what the task needs: {', '.join(asked)}. "
            f"Remove it from the task's SandboxSpec, or from [sandbox] if it is set there; see "
            f"docs/sandboxes.md for what each isolation supports"
        )
    check_env(spec.env)


def given_within_walls(spec: SandboxSpec, workdirs: Collection[str] = WORKDIRS) -> set[str]:
    """The parts of this spec that every sandbox with its own walls provides."""
    gives = {"repository"}
    if spec.user == USER:
        gives.add("user")
    if spec.workdir in (WORK, *workdirs):
        gives.add("workdir")
    if not any(service.image for service in spec.services):
        gives.add("services")
    return gives


def check_machine(
    spec: SandboxSpec, *, backend: str, limits: Collection[str], gives: Collection[str] = ()
) -> None:
    """Check a spec for a backend with one machine per sandbox. `gives`: parts that it provides in
    addition to those of `given_within_walls`."""
    check_spec(spec, backend=backend, gives=given_within_walls(spec) | set(gives), limits=limits)
    if (spec.limits.memory_bytes or LEAST_MEMORY_BYTES) < LEAST_MEMORY_BYTES:
        raise EtudeError(f"limits.memory_bytes must be at least {LEAST_MEMORY_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedSpec(SandboxSpec):
    """A spec whose repository and files were read on another machine."""

    tree: Tree = field(default_factory=dict)


async def to_message(spec: SandboxSpec, *, max_bytes: int, max_entries: int) -> dict[str, Any]:
    """A spec as JSON, for another machine."""
    tree = await opening_tree(spec, max_bytes=max_bytes, max_entries=max_entries)
    told = asdict(replace(spec, files={}, repository=None))
    del told["files"], told["repository"]
    return told | {"tree": encoded(tree)}


def from_message(told: Mapping[str, Any]) -> UnpackedSpec:
    """The spec in such a message. ValueError if it is malformed."""
    try:
        tree = {inside(path): Entry(*each) for path, each in decoded(told["tree"]).items() if each}
        services = [
            Service(**{**each, "argv": tuple(each["argv"]), "check": tuple(each["check"])})
            for each in told["services"]
        ]
        parts = {
            "tree": tree,
            "limits": Limits(**told["limits"]),
            "services": tuple(services),
            "network": tuple(told["network"]),
        }
        return UnpackedSpec(**{**told, **parts})
    except (TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"not a valid sandbox spec: {e}") from e


async def opening_tree(spec: SandboxSpec, *, max_bytes: int, max_entries: int) -> Tree:
    """The initial content of the working copy: the repository, and the files over it."""
    found: dict[str, Entry] = dict(spec.tree) if isinstance(spec, UnpackedSpec) else {}
    if spec.repository:
        found = await read_commit(spec.repository, max_bytes=max_bytes, max_entries=max_entries)
    return found | {
        inside(path): Entry(FILE, to_bytes(content)) for path, content in spec.files.items()
    }


def check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} is not a valid name of an environment variable")


_NOTHING = SandboxSpec()
