"""Reader of single sessions from objects that hold several (groups and evaluations): only the
requested session is decoded, so that a person who opens one does not wait for the tokens of all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields

import msgspec

from etude.core.types import Cost, Json, PromptPart, Score, Status, Trajectory
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
    diff: str = ""
    source: str = ""
    policy: str = ""
    cost: Cost = Cost()
    prompt_parts: tuple[PromptPart, ...] = ()


class SessionReader:
    """The sessions of one run. The object that was read last is cached, since a person who opens a
    session next needs its tokens and the other sessions of its group, and a bucket is far away."""

    def __init__(self, run: Run) -> None:
        self._objects = run.objects
        self._last: tuple[str, list[tuple[str, msgspec.Raw]]] = ("", [])

    def session(self, key: str, id: str) -> Trajectory:
        """One session, whole. Raises `Missing` if the object holds none with that id."""
        where = self._where(key)
        for own, raw in self._each(key):
            if own == id:
                return unpack(bytes(raw), Trajectory, where)
        raise Missing(f"{where} has no session {id!r}")

    def conversations(self, key: str, only: Collection[str] | None = None) -> list[Trajectory]:
        """The sessions of an object, without their tokens. `only`: those with these ids, since an
        evaluation has thousands."""
        where = self._where(key)
        found = [
            unpack(bytes(raw), _Conversation, where)
            for own, raw in self._each(key)
            if only is None or own in only
        ]
        names = [each.name for each in fields(_Conversation)]
        return [
            Trajectory(segments=(), **{name: getattr(said, name) for name in names})
            for said in found
        ]

    def _each(self, key: str) -> list[tuple[str, msgspec.Raw]]:
        """Each session of an object, with its id."""
        last, sessions = self._last
        if last != key:
            data, where = self._objects.get_sealed(key), self._where(key)
            if key.startswith("groups/"):
                raws = unpack(data, _Group, where).trajectories
            else:
                raws = unpack(data, list[msgspec.Raw], where)
            sessions = [(unpack(bytes(raw), _Named, where).id, raw) for raw in raws]
            self._last = (key, sessions)
        return sessions

    def _where(self, key: str) -> str:
        return f"{self._objects.url}: {key}"
