"""Sessions that others run: they are offered by the controller of a run, claimed by whoever asks
for one, and settled by the result.

    POST   /v1/sessions {wait_s}            a session to run: task, base URL, token, deadline; 204
                                            if there is none
    POST   /v1/sessions/{session}/score     what became of it; the first result stands. The token
                                            that opens it is not the one that an agent is given
    PUT    /v1/sessions/{session}           offers it; the same again changes nothing
    GET    /v1/sessions/{session}?wait_s=.. whether it is claimed, and its result: as soon as it is
                                            claimed, or with `claimed=true` as soon as it has one
    DELETE /v1/sessions/{session}           takes it back: it is over

A result may also be sent for a session that a service was asked to run (`callback_url`). It is in
the journal before it is acknowledged; what is offered and claimed is not, and the controller offers
it again to a gateway that does not know it.

A score needs an answer of the model: without one, nothing of the session could be trained on.
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
    """How long to wait for a session, if there is none to run now."""


class SessionDesk:
    """Which sessions are free, which are claimed, and what became of them. Pure."""

    def __init__(self) -> None:
        self._offers: dict[str, SessionOffer] = {}
        self._results: dict[str, RolloutResult] = {}

    def offer(self, session: str, offer: SessionOffer) -> None:
        known = self._offers.get(session)
        self._offers[session] = replace(offer, claimed=True) if known and known.claimed else offer

    def claim(self, now: float) -> RolloutRequest | None:
        """The session that waits longest."""
        for session, offer in self._offers.items():
            if not offer.claimed and session not in self._results:
                self._offers[session] = replace(offer, claimed=True)
                return replace(offer.request, deadline=now + offer.timeout_s)
        return None

    def settle(self, session: str, result: RolloutResult) -> None:
        """KeyError for a session that nobody offered, ValueError for the result of another rollout
        than the session's, and for a session that has another result."""
        self.outcome(session)
        offer = self._offers.get(session)
        if offer and result.id not in ("", offer.request.id):
            raise ValueError(f"is of the rollout {offer.request.id!r}, not of {result.id!r}")
        if self._results.setdefault(session, result) != result:
            raise ValueError("has another result already")

    def outcome(self, session: str) -> SessionOutcome:
        """KeyError for a session that nobody offered."""
        if (result := self._results.get(session)) is not None:
            return SessionOutcome(claimed=True, result=result)
        return SessionOutcome(claimed=self._offers[session].claimed)

    def restore(self, session: str, result: RolloutResult) -> None:
        """A result of an earlier life, which stands also if nobody has offered the session yet."""
        self._results[session] = result

    def forget(self, session: str) -> bool:
        """Whether it had a result."""
        self._offers.pop(session, None)
        return self._results.pop(session, None) is not None


class SessionRoutes:
    """The desk over HTTP."""

    def __init__(self, has_answer: Callable[[str], bool] = lambda session: True) -> None:
        """`has_answer`: whether the model has answered in a session, as far as that is known."""
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
                f"status {result.status!r} {'with' if result.score else 'without'} a score: give "
                f"one with done and timeout, and none with failed",
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
        """KeyError for a session that nobody offered. Nothing is settled by a refusal: the session
        may still be run, or said to have failed, which needs no answer."""
        if self._desk.outcome(session).result is not None:
            return  # sent again, perhaps when the record was read already
        if result.score is not None and not self._has_answer(session):
            raise ApiError(
                f"session {session!r} has a score, but no answer of the model was recorded in it, "
                f"so there is nothing to train on: ask the model at the session's base_url, with "
                f"its token, before the score is sent; or send the status 'failed'",
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
        except KeyError as e:  # also if it is forgotten meanwhile
            raise _unknown(session) from e

    async def withdraw(self, http: HttpRequest) -> Response:
        await self.forget(http.path_params["session"])
        await self.journal.commit()
        return Response(status_code=204)

    async def forget(self, session: str) -> None:
        """It is stored when the journal is committed."""
        if self._desk.forget(session):
            self.journal.append(WithdrawnSession(session=session))
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _when(self, poll: Callable[[], T | None], wait_s: float) -> T | None:
        """What `poll` gives, as soon as it gives something, or None after so long."""
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
    return ApiError(
        f"session {session!r} is not one that was offered", status=404, code="unknown_session"
    )
