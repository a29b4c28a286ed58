"""What was decided about the weights that users are answered by, in the run's store.

    realtime/changes/{number:06d}.json     a `core.traffic.Change`

Each is created once and never changed. Whoever loses the race for a number, a person's command or
the loop, looks again at what holds now: nothing is decided twice, and nothing on old knowledge.
"""

from __future__ import annotations

from etude.core.traffic import Change
from etude.store.codec import from_json, seal, to_json
from etude.store.log import first_free
from etude.store.objects import Objects

FOLDER = "realtime/changes"


class TrafficLog:
    """Any number of writers and readers."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: list[Change] = []

    def changes(self) -> list[Change]:
        """All, oldest first. Costs one look at one key if there is nothing new."""
        known = len(self._known)
        end = first_free(self._objects, FOLDER, _key, known)
        self._known += [self._read(number) for number in range(known, end)]
        return list(self._known)

    def newest(self) -> Change | None:
        return changes[-1] if (changes := self.changes()) else None

    def append(self, change: Change) -> bool:
        """False if another change has that number."""
        return self._objects.create(_key(change.number), seal(to_json(change)))

    def _read(self, number: int) -> Change:
        key = _key(number)
        return from_json(
            self._objects.get_sealed(key), Change, f"{self._objects.url}: {key}"
        )


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"
