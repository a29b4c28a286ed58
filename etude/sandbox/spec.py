"""What a backend can give of a spec. The rest is refused by name, before anything is opened."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields

from etude.core.errors import EtudeError
from etude.core.sandbox import Limits, SandboxSpec


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
            "Take it out of the task's SandboxSpec, or choose another isolation under [sandbox]"
        )
    check_env(spec.env)


def check_env(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{name!r} cannot be the name of an environment variable")


_NOTHING = SandboxSpec()
