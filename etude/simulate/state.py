"""The actual state of a simulated run, which the decisions know only from the messages that they
receive."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from etude.core.fleet import Worker


@dataclass(slots=True, eq=False)
class Process:
    """The actual state of a worker; the fleet knows only its messages."""

    url: str
    region: int
    pace: float
    """Speed of its clock."""
    version: int = -1
    alive: bool = True
    hung_until: float = 0.0
    slow_until: float = 0.0
    bad_download: bool = False
    loading: int | None = None
    life: int = 0
    beat: float = 0.0


@dataclass(slots=True, eq=False)
class Session:
    sample: str
    group: int
    turns_left: int
    oldest: int | None = None
    """The oldest version that it was sampled from."""
    request: int = 0
    """The number of the request that it waits for; answers to any other are too late."""
    worker: Worker | None = None


@dataclass(slots=True)
class GroupState:
    admitted: int
    open: set[str]
    pace: float = 1.0
    """Factor on the duration of its turns."""
    oldest: int = 1 << 60
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """The result of a simulated run."""

    seconds: float = 0.0
    steps: int = 0
    trainer_busy_s: float = 0.0
    engine_busy_s: float = 0.0
    engine_s: float = 0.0
    lag_max: int = 0
    store_bytes: int = 0
    """Bytes read from the store by workers, or by the relays of their regions."""
    versions_read: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    stuck: str = ""
    """The event that never came, if the run did not end."""
