"""Single sessions out of the objects that hold several (groups, and those of evaluations): only
what is asked for is decoded, so that a person who opens one does not wait for the tokens of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import msgspec

from etude.core.types import Cost, Json, Score, Status, Trajectory
from etude.store.codec import unpack
from etude.store.objects import Missing
from etude.store.runs import Run


class _Group(msgspec.Struct):
    trajectories: list[msgspec.Raw]


class _Named(msgspec.Struct):
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversation:
    """A `Trajectory` without its segments."""

    id: str
    task: str
    group: str
    score: Score | None
    status: Status
    error: str | None = None
    traceback: str = ""
    messages: list[dict[str, Json]] = field(default_factory=list)
    source: str = ""
    policy: str = ""
    cost: Cost = Cost()


def read_session(run: Run, key: str, id: str) -> Trajectory:
    """One session, whole. Raises `Missing` if the object holds none of that id."""
    where = f"{run.objects.url}: {key}"
    for raw in _each(run, key):
        if unpack(bytes(raw), _Named, where).id == id:
            return unpack(bytes(raw), Trajectory, where)
    raise Missing(f"{where} holds no session {id!r}")


def read_conversations(run: Run, key: str) -> list[Trajectory]:
    """All sessions of an object, without their tokens."""
    where = f"{run.objects.url}: {key}"
    found = [unpack(bytes(raw), _Conversation, where) for raw in _each(run, key)]
    return [
        Trajectory(segments=(), **{each.name: getattr(said, each.name) for each in fields(said)})
        for said in found
    ]


def _each(run: Run, key: str) -> Iterator[msgspec.Raw]:
    data, where = run.objects.get_sealed(key), f"{run.objects.url}: {key}"
    if key.startswith("groups/"):
        yield from unpack(data, _Group, where).trajectories
    else:
        yield from unpack(data, list[msgspec.Raw], where)
