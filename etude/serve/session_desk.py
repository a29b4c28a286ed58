"""Sessions that others run: the controller of a run offers them, a client claims one, and its
result settles it.

    POST   /v1/sessions {wait_s}            a session to run: task, base URL, token, deadline; 204
                                            if there is none
    POST   /v1/sessions/{session}/score     the session's result; the first result stands. This
                                            needs another token than the one that the agent gets
    PUT    /v1/sessions/{session}           offers it; repeating the offer changes nothing
    GET    /v1/sessions/{session}?wait_s=.. its state and its result: answers as soon as it is
                                            claimed, or with `claimed=true` as soon as it has a
                                            result
    DELETE /v1/sessions/{session}           withdraws it: it is over

A result may also be sent for a session that a service was asked to run (`callback_url`). Results
are in the journal before they are acknowledged. Offers and claims are not: the controller repeats
an offer to a gateway that does not know it.

A score requires an answer of the model: without one, nothing of the session could be trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.remote import (
    ENDED,
    RolloutRequest,
    RolloutResult,
    SessionOffer,
    SessionOutcome,
)
from etude.serve.http import ApiError, cancel_on_disconnect, read, read_bytes, respond
from etude.serve.session_journal import Journal, NoJournal, SettledSession, WithdrawnSession
from etude.store.decoding import decode_json, decode_known

MAX_WAIT_S = 60.0

T = TypeVar("T")


class ClaimRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /v1/sessions`."""

    wait_s: float = 0.0
    """Time to wait for a session, if none is free now."""


class SessionDesk:
    """The state of the offered sessions: free, claimed or settled. Pure."""

    def __init__(self) -> None:
        self._offers: dict[str, SessionOffer] = {}
        self._results: dict[str, RolloutResult] = {}

    def offer(self, session: str, offer: SessionOffer) -> None:
        known = self._offers.get(session)
        self._offers[session] = replace(offer, claimed=True) if known and known.claimed else offer

    def claim(self, now: float) -> RolloutRequest | None:
        """Claim the session that has waited longest."""
        for session, offer in self._offers.items():
            if not offer.claimed and session not in self._results:
                self._offers[session] = replace(offer, claimed=True)
                return replace(offer.request, deadline=now + offer.timeout_s)
        return None

    def settle(self, session: str, result: RolloutResult) -> None:
        """Set the result of a session. Raises KeyError for a session that was not offered, and
        ValueError for the result of another rollout or if the session has another result."""
        self.outcome(session)
        offer = self._offers.get(session)
        if offer and result.id not in ("", offer.request.id):
            raise ValueError(f"belongs to rollout {offer.request.id!r}, not {result.id!r}")
        if self._results.setdefault(session, result) != result:
            raise ValueError("already has another result")

    def outcome(self, session: str) -> SessionOutcome:
        """The session's state. Raises KeyError for a session that was not offered."""
        if (result := self._results.get(session)) is not None:
            return SessionOutcome(claimed=True, result=result)
        return SessionOutcome(claimed=self._offers[session].claimed)

    def restore(self, session: str, result: RolloutResult) -> None:
        """Restore a result of an earlier process; it stands even if nobody has offered the session
        yet."""
        self._results[session] = result

    def forget(self, session: str) -> bool:
        """Forget a session; returns True if it had a result."""
        self._offers.pop(session, None)
        return self._results.pop(session, None) is not None


class SessionRoutes:
    """The desk over HTTP."""

    def __init__(self, has_answer: Callable[[str], bool] = lambda session: True) -> None:
        """`has_answer`: returns False if the model is known not to have answered in a session."""
        self.journal: Journal = NoJournal()
        self._has_answer = has_answer
        self._desk = SessionDesk()
        self._changed = asyncio.Condition()

    def restore(self, entry: SettledSession) -> None:
        self._desk.restore(entry.session, decode_json(entry.result, RolloutResult))

    def routes(self) -> list[Route]:
        return [
            Route("/v1/sessions", self.claim, methods=["POST"]),
            Route("/v1/sessions/{session}/score", self.settle, methods=["POST"]),
            Route("/v1/sessions/{session}", self.offer, methods=["PUT"]),
            Route("/v1/sessions/{session}", self.outcome, methods=["GET"]),
            Route("/v1/sessions/{session}", self.withdraw, methods=["DELETE"]),
        ]

    async def claim(self, http: HttpRequest) -> Response:
        asked = await read(http, ClaimRequest)
        waiting = self._when(lambda: self._desk.claim(time.time()), asked.wait_s)
        claimed = await cancel_on_disconnect(http, waiting)
        await self._tell()
        return Response(status_code=204) if claimed is None else respond(claimed)

    async def settle(self, http: HttpRequest) -> Response:
        session = http.path_params["session"]
        result = await read(http, RolloutResult, decode_known)
        if result.status not in ENDED or (result.score is None) != (result.status == "failed"):
            raise ApiError(
                f"status {result.status!r} {'with' if result.score else 'without'} a score: "
                f"done and timeout need a score, and failed must not have one",
                param="status",
            )
        try:
            self._check_scorable(session, result)
            self._desk.settle(session, result)
        except KeyError as e:
            raise _unknown(session) from e
        except ValueError as e:
            raise ApiError(f"session {session!r} {e}", status=409, code="settled") from e
        self.journal.append(SettledSession(session=session, result=msgspec.json.encode(result)))
        await self.journal.commit()
        await self._tell()
        return Response(status_code=204)

    def _check_scorable(self, session: str, result: RolloutResult) -> None:
        """Reject a score for a session without an answer. Raises KeyError for a session that was
        not offered. A rejection settles nothing: the session may still be run, or reported as
        failed, which needs no answer."""
        if self._desk.outcome(session).result is not None:
            return  # sent again, perhaps after the session was read
        if result.score is not None and not self._has_answer(session):
            raise ApiError(
                f"session {session!r} has a score, but no recorded answer of the model, so "
                f"there is nothing to train on: call the model at the session's base_url, with "
                f"its token, before sending the score; or send the status 'failed'",
                code="no_answer",
            )

    async def offer(self, http: HttpRequest) -> Response:
        self._desk.offer(http.path_params["session"], await read(http, SessionOffer))
        await self._tell()
        return Response(status_code=204)

    async def outcome(self, http: HttpRequest) -> Response:
        session = http.path_params["session"]
        is_known = http.query_params.get("claimed") == "true"
        try:
            wait_s = float(http.query_params.get("wait_s", 0.0))
        except ValueError as e:
            raise ApiError("wait_s must be a number", param="wait_s") from e

        def news() -> SessionOutcome | None:
            now = self._desk.outcome(session)
            return now if now.result is not None or (now.claimed and not is_known) else None

        await read_bytes(http)
        try:
            found = await cancel_on_disconnect(http, self._when(news, wait_s))
            return respond(found or self._desk.outcome(session))
        except KeyError as e:  # also if it is forgotten in the meantime
            raise _unknown(session) from e

    async def withdraw(self, http: HttpRequest) -> Response:
        await self.forget(http.path_params["session"])
        await self.journal.commit()
        return Response(status_code=204)

    async def forget(self, session: str) -> None:
        """Forget a session. This is durable once the journal is committed."""
        if self._desk.forget(session):
            self.journal.append(WithdrawnSession(session=session))
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _when(self, poll: Callable[[], T | None], wait_s: float) -> T | None:
        """The first result of `poll` that is not None, or None after the time limit."""
        found = poll()
        if found is not None or not wait_s > 0:
            return found
        try:
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)), self._changed:
                while (found := poll()) is None:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return found


def _unknown(session: str) -> ApiError:
    return ApiError(f"session {session!r} was never offered", status=404, code="unknown_session")
