"""Sessions and feedback of users, read as they arrive.

A look reads new data: for the users who were active since the last look (`store.news`), everything
that was not read before. At the start of the process, and every hour, all keys are listed, since
news is only a hint.

A session is closed when it is settled and its fate is in the ledger. Only its figures are then
kept, in the run's store, so that it is not read again after a restart:

    realtime/sessions/{number:06d}   a `ClosedSessions`

These objects can be deleted at any time, and are computed again from the sessions themselves.
Figures of sessions that no longer exist, because their user was deleted or their retention has
ended, are removed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from etude.core.consent import Consent, Tombstone
from etude.core.errors import EtudeError
from etude.core.feedback import FeedbackEvent, join
from etude.core.realtime_config import RealtimeConfig
from etude.core.recorded import RecordedTurn, by_answer, put_together
from etude.core.updates import SessionFigures
from etude.realtime.cycle import session_figures
from etude.realtime.signals import SessionOutcome, SignalTable, session_outcome
from etude.store.codec import Damaged, pack, seal, unpack
from etude.store.news import CLOCK_SKEW_S
from etude.store.objects import Missing, Objects
from etude.store.production import ProductionStore, UserKey

FOLDER = "realtime/sessions"
CLOSED_TOGETHER = 500
"""Sessions whose figures are stored in one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSessions:
    table: str
    """The signal strengths in use; figures computed with another table are computed again."""
    sessions: tuple[SessionFigures, ...]


@dataclass(slots=True)
class _User:
    """The data of a user, by key, that has been read and is not closed."""

    turns: dict[UserKey, RecordedTurn | None] = field(default_factory=dict)
    """A damaged turn is None."""
    events: dict[UserKey, FeedbackEvent | None] = field(default_factory=dict)
    outcomes: list[SessionOutcome] = field(default_factory=list)
    closed: dict[str, SessionFigures] = field(default_factory=dict)
    """Figures by session."""


def signal_table(config: RealtimeConfig) -> SignalTable:
    return SignalTable(
        strengths=config.signals,
        horizon_s=60 * config.horizon_minutes,
        horizon_per_turn_s=60 * config.horizon_minutes_per_turn,
    )


class UserSessions:
    """The recorded sessions of users that one policy answered, and their outcomes. `objects`: those
    of the run. `refused`: users and organisations whose sessions are not read, in addition to those
    who have withdrawn."""

    def __init__(
        self,
        store: ProductionStore,
        objects: Objects,
        *,
        policy: str,
        table: SignalTable,
        refused: Collection[str] = (),
    ) -> None:
        self._store = store
        self._objects = objects
        self._policy = policy
        self._table = table
        self._refused = frozenset(refused)
        self._users: defaultdict[str, _User] = defaultdict(_User)
        self._tombstones: dict[str, Tombstone] = {}
        self._consents: dict[str, Consent] = {}
        self._heard = CLOCK_SKEW_S
        self._stored: dict[int, set[str]] = {}
        """Number of an object of `FOLDER` -> the ids of the sessions whose figures it holds."""
        self._unstored: set[str] = set()
        self._is_stale = False
        """True if an object of `FOLDER` holds data that must be removed, or that is useless."""
        self._is_begun = False

    def look(self) -> None:
        """Read the new data."""
        if not self._is_begun:
            self._read_closed()
            self._is_begun = True
        since, self._heard = self._heard - CLOCK_SKEW_S, self._store.now()
        for subject, word in self._store.consents(since).items():
            self._consents[subject] = word.newer(self._consents.get(subject))
        tombstones = self._store.tombstones()
        before = self._tombstones
        self._tombstones = tombstones
        if (active := self._store.news.read()) is None:
            listed = _by_user(self._store.keys())
            for user in listed.keys() | self._users.keys():
                self._refresh(user, listed.get(user, ()))
        else:
            deleted = {user for user, stone in tombstones.items() if before.get(user) != stone}
            for user in sorted(active | deleted):
                self._refresh(user, list(self._store.keys(user)))

    def outcomes(self) -> list[SessionOutcome]:
        """The outcomes of all sessions that are not closed."""
        return [
            outcome
            for user in self._users.values()
            for outcome in user.outcomes
            if self._may_read(outcome.user, outcome.organisation)
        ]

    def figures(self) -> list[SessionFigures]:
        """The figures of all sessions."""
        closed = (one for user in self._users.values() for one in user.closed.values())
        return [one for one in closed if self._may_read(one.user, one.organisation)] + [
            session_figures(outcome) for outcome in self.outcomes()
        ]

    def tombstones(self) -> dict[str, Tombstone]:
        return self._store.tombstones()

    def close(self, has_fate: Callable[[str], bool], now: float) -> None:
        """Close the sessions that are settled and have a fate."""
        for user in self._users.values():
            done = [o for o in user.outcomes if now >= o.settles_at and has_fate(o.id)]
            for outcome in done:
                figures = session_figures(outcome)
                user.closed[figures.session] = figures
                self._unstored.add(figures.id)
            if done:
                self._let_go(user)
        self._store_closed()

    def _may_read(self, user: str, organisation: str) -> bool:
        return not any(
            subject in self._refused
            or ((word := self._consents.get(subject)) is not None and not word.granted)
            for subject in (user, organisation)
        )

    def _refresh(self, name: str, keys: Iterable[UserKey]) -> None:
        """Read the new data of a user, and drop data that no longer exists."""
        user = self._users[name]
        listed = dict.fromkeys(keys)
        sessions = {key.session for key in listed}
        stone = self._tombstones.get(name)
        deleted = -1.0 if stone is None else stone.time
        for session, figures in list(user.closed.items()):
            if session not in sessions or figures.started <= deleted:
                del user.closed[session]
                self._unstored.discard(figures.id)
                self._is_stale = True
        known = {event for figures in user.closed.values() for event in figures.events}
        for key in listed:
            with contextlib.suppress(Missing):
                if key.session and key.session not in user.closed and key not in user.turns:
                    user.turns[key] = self._store.turn(key)
                if key.event and key.event not in known and key not in user.events:
                    user.events[key] = self._store.event(key)
        user.turns = {
            key: turn
            for key, turn in user.turns.items()
            if key in listed and (turn is None or turn.started > deleted)
        }
        user.events = {
            key: event
            for key, event in user.events.items()
            if key in listed and (event is None or event.received > deleted)
        }
        user.outcomes = self._outcomes(user)
        if not listed and not user.closed:
            del self._users[name]

    def _outcomes(self, user: _User) -> list[SessionOutcome]:
        damaged = {key.session for key, turn in user.turns.items() if turn is None}
        turns = [turn for turn in user.turns.values() if turn and turn.session not in damaged]
        sessions = [one for one in put_together(turns).sessions if one.policy == self._policy]
        events = [event for event in user.events.values() if event is not None]
        joined = join(by_answer(sessions), events, now=0.0, horizon_s=0.0)
        return [session_outcome(one, joined.by_answer, self._table) for one in sessions]

    def _let_go(self, user: _User) -> None:
        """Drop all data of closed sessions except their figures."""
        known = {event for figures in user.closed.values() for event in figures.events}
        user.outcomes = [o for o in user.outcomes if o.session.session not in user.closed]
        user.turns = {k: t for k, t in user.turns.items() if k.session not in user.closed}
        user.events = {k: e for k, e in user.events.items() if k.event not in known}

    # Figures of closed sessions, in the run's store

    def _read_closed(self) -> None:
        for key in self._objects.list(FOLDER):
            with contextlib.suppress(Missing, Damaged, ValueError):
                found = unpack(self._objects.get_sealed(key), ClosedSessions, key)
                number = int(key.rpartition("/")[2])
                self._stored[number] = {figures.id for figures in found.sessions}
                if found.table != repr(self._table):
                    self._is_stale = True
                    continue
                for figures in found.sessions:
                    self._users[figures.user].closed[figures.session] = figures

    def _store_closed(self) -> None:
        """Remove at once the figures that must go; store new ones many at a time."""
        is_full = len(self._unstored) >= CLOSED_TOGETHER
        if not self._is_stale and not is_full:
            return
        closed = {f.id: f for user in self._users.values() for f in user.closed.values()}
        for number, ids in list(self._stored.items()):
            if left := ids & closed.keys():
                if left != ids:
                    self._objects.put(_key(number), self._packed(closed[id] for id in sorted(left)))
                self._stored[number] = left
            else:
                self._objects.delete(_key(number))
                del self._stored[number]
        self._is_stale = False
        if is_full:
            number = max(self._stored, default=-1) + 1
            new = self._packed(closed[id] for id in sorted(self._unstored))
            if not self._objects.create(_key(number), new):
                raise EtudeError(
                    f"{self._objects.url}: another real-time RL loop has written {_key(number)}"
                )
            self._stored[number], self._unstored = self._unstored, set()

    def _packed(self, figures: Iterable[SessionFigures]) -> bytes:
        return seal(pack(ClosedSessions(table=repr(self._table), sessions=tuple(figures))))


def _by_user(keys: Iterable[UserKey]) -> dict[str, list[UserKey]]:
    found: defaultdict[str, list[UserKey]] = defaultdict(list)
    for each in keys:
        found[each.user].append(each)
    return found


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}"
