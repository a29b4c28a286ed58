"""The routes of production mode, and the decision who may be recorded.

    POST   /v1/chat/completions, /v1/responses, /v1/messages, also under /s/{session}
                          the dialects: recorded if the user consents and the session is sampled
    POST   /v1/feedback   what a user did about an answer
    POST   /v1/consent    consent of a user or an organisation: {granted, time}
    DELETE /v1/users      deletes all that is stored of a user

The product's backend acts for its users, with an admin's token. Headers name the user:
`X-Etude-User`, `X-Etude-Organisation`, `X-Etude-Session` and `X-Etude-Consent: granted` or
`refused`. They are turned into pseudonyms here, and not stored. A user's own token acts for that
user alone, and itself contains the user's organisation.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from functools import wraps
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.consent import Consent, Identity, is_sampled, may_record, pseudonym
from etude.core.errors import EtudeError
from etude.core.feedback import CUSTOM, STRENGTHS, FeedbackEvent, RateLimit, completion_key
from etude.serve.access import identity_of
from etude.serve.answerer import Answerer, PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes, session_routes
from etude.serve.headers import read_segment_kind
from etude.serve.http import ApiError, Unavailable, read, respond
from etude.serve.pools import Pools
from etude.serve.production.config import ProductionConfig, read_production, read_user_key
from etude.serve.production.recording import OpenSession, Recording, RecordingAnswerer
from etude.serve.production.schema import (
    CONSENT,
    MAX_NAME_CHARS,
    ORGANISATION,
    SESSION,
    USER,
    production_document,
)
from etude.serve.production.types import (
    ConsentRequest,
    ConsentStored,
    FeedbackRequest,
    FeedbackStored,
    UserDeleted,
)
from etude.serve.router import Router
from etude.serve.tokens import OF_USERS
from etude.serve.tokens import Scope as TokenScope
from etude.store.objects import Objects
from etude.store.production import Conflict, ProductionStore, digest
from etude.store.runs import Run

REFRESH_S = 5.0
"""Time for which a consent given to another gateway may be unknown here."""
SWEEP_S = 3600.0
CLOCK_SKEW_S = 300.0
WORDS = {"granted": True, "refused": False}


class Production:
    """Production mode, over the model and the router of a gateway."""

    def __init__(
        self, model: ServedModel, router: Router, store: ProductionStore,
        config: ProductionConfig, key: bytes, policy: str, pools: Pools | None = None,
    ) -> None:  # fmt: skip
        """`pools`: the worker pools, if the run learns from its users."""
        self._model = model
        self._router = router
        self._pools = pools
        self._store = store
        self._config = config
        self._key = key
        self._redactor = config.redactor()
        self._limit = RateLimit(
            config.feedback_per_minute, max(10, int(config.feedback_per_minute))
        )
        self.recording = Recording(
            model.tokenizer, store, self._redactor, policy, self._still_permitted
        )
        self._configured = {
            pseudonym(name, key): granted
            for table in (config.consent.users, config.consent.organisations)
            for name, granted in table.items()
        }
        self._said: dict[str, Consent] = {}
        self._heard = CLOCK_SKEW_S  # the time up to which consents were read

    def routes(self) -> list[Route]:
        dialects = public_routes(self._model, self._answerer, self._gauges)
        within = session_routes(self._model, self._answerer)
        return [
            *(self._for_user(route, "/s/{session}" + route.path) for route in within),
            Route("/v1/feedback", self.feedback, methods=["POST"]),
            Route("/v1/consent", self.consent, methods=["POST"]),
            Route("/v1/users", self.delete_user, methods=["DELETE"]),
            Route("/openapi.json", self.openapi),
            *(self._for_user(route, route.path) for route in dialects),
        ]

    def _for_user(self, route: Route, path: str) -> Route:
        """Conversations that the server keeps are separated by user, or by session if there is no
        user."""

        @wraps(route.endpoint)
        async def endpoint(http: HttpRequest) -> Response:
            session = http.path_params.get("session", "")
            http.scope["etude.session"] = session or _header(http, SESSION)
            owner = self._identity(http).user or (session and f"/session/{session}")
            http.scope["path_params"] = {**http.path_params, "session": owner}
            response: Response = await route.endpoint(http)
            return response

        return Route(path, endpoint, methods=list(route.methods or ()))

    def _identity(self, http: HttpRequest) -> Identity:
        user, organisation = _spoken_for(http)
        return Identity(
            user=pseudonym(user, self._key) if user else "",
            organisation=pseudonym(organisation, self._key) if organisation else "",
        )

    def _answerer(self, http: HttpRequest) -> Answerer:
        identity = self._identity(http)
        session = self._session(http, identity)
        home = None
        if self._pools is not None:
            home = self._pools.home(identity.user, http.scope["etude.session"])
        router = self._router if home is None else home[0]
        if session is None or session.dropped:
            return PolicyAnswerer(self._model, router)
        if home is not None:
            if session.router is not None and session.router is not home[0]:
                session.router.forget(session.key)
            session.router, session.arm = home
        return RecordingAnswerer(
            self._model, router, self.recording, session, read_segment_kind(http.headers)
        )

    def _session(self, http: HttpRequest, identity: Identity) -> OpenSession | None:
        """The session to record; None if it may not be recorded, or was not sampled."""
        if not self._permitted(http, identity):
            return None
        # without a session name, every answer is a session of its own
        name = http.scope["etude.session"] or secrets.token_hex(16)
        rate = self._config.sampling_rate
        if not is_sampled(identity, name, rate, self._key):
            return None
        key = f"{identity.user}/{name}"
        now = self._store.now()
        if (found := self.recording.sessions.get(key)) is None:
            # Two gateways may begin the same session at once.
            stored = pseudonym(key, self._key)[:16] + secrets.token_hex(8)
            found = OpenSession(
                key=key,
                name=f"{int(now * 1000):013d}-{stored}",
                identity=identity,
                started=now,
                propensity=rate,
                used=now,
            )
            self.recording.sessions[key] = found
        found.used = now
        return found

    def _permitted(self, http: HttpRequest, identity: Identity) -> bool:
        word = _header(http, CONSENT)
        if word and word not in WORDS:
            raise ApiError(f"{CONSENT} must be granted or refused", param=CONSENT)
        asked = WORDS.get(word) if self._config.consent.header else None
        return may_record(identity, [asked, *self._words(identity)])

    def _words(self, identity: Identity) -> list[bool | None]:
        subjects = [name for name in (identity.user, identity.organisation) if name]
        said = [self._said[name].granted for name in subjects if name in self._said]
        return [*said, *map(self._configured.get, subjects)]

    def _still_permitted(self, session: OpenSession) -> bool:
        """False if the user or the organisation has since refused to be recorded."""
        return False not in self._words(session.identity)

    async def feedback(self, http: HttpRequest) -> Response:
        identity = self._identity(http)
        if not identity.user:
            raise ApiError(f"the feedback names no user: send {USER}", param=USER)
        now = self._store.now()
        if wait := self._limit.admit(identity.user, now):
            message = f"too much feedback from this user: try again in {wait:.0f} s"
            raise Unavailable(message, status=429, code="too_many_requests")
        event = self._event(await read(http, FeedbackRequest), identity, now)
        if not self._permitted(http, identity):
            return respond(FeedbackStored("not_recorded"))
        try:
            new = await asyncio.to_thread(self._store.put_feedback, event)
        except Conflict as e:
            raise ApiError(str(e), status=409, code="conflict", param="event") from e
        except EtudeError as e:
            raise Unavailable(f"the feedback could not be stored: {e}") from e
        self.recording.counts["feedback"] += new
        return respond(FeedbackStored("stored" if new else "duplicate"))

    def _event(self, asked: FeedbackRequest, identity: Identity, now: float) -> FeedbackEvent:
        when = now if asked.time is None else asked.time
        if not now - 1e8 < when < now + CLOCK_SKEW_S:
            raise ApiError(
                "time must be in seconds since 1970, and not in the future", param="time"
            )
        strength = STRENGTHS.get(asked.kind) if asked.strength is None else asked.strength
        if strength is None and CUSTOM.fullmatch(asked.kind):
            raise ApiError("strength is required for a custom kind", param="strength")
        try:
            event = FeedbackEvent(
                event=digest(pseudonym(f"{identity.user}/{asked.event}", self._key)),
                user=identity.user,
                organisation=identity.organisation,
                completion=completion_key(asked.completion),
                choice=asked.choice,
                kind=asked.kind,
                strength=strength or 0.0,  # an unknown kind: `check` rejects it
                time=when,
                received=now,
                text=self._redactor.redact(asked.text),
            )
            event.check()
        except ValueError as e:
            raise ApiError(str(e)) from e
        return event

    async def consent(self, http: HttpRequest) -> Response:
        identity = self._identity(http)
        is_backend = identity_of(http).scope is TokenScope.ADMIN
        names_both = bool(identity.user and identity.organisation)
        if (is_backend and names_both) or not (identity.user or identity.organisation):
            raise ApiError(
                f"name either the user or the organisation that decides, by {USER} or "
                f"{ORGANISATION}"
            )
        asked = await read(http, ConsentRequest)
        now = self._store.now()
        when = now if asked.time is None else asked.time
        if not 0 <= when < now + CLOCK_SKEW_S:
            raise ApiError(
                "time must be in seconds since 1970, and not in the future", param="time"
            )
        subject = identity.user or identity.organisation
        word = Consent(subject=subject, granted=asked.granted, time=when)
        await asyncio.to_thread(self._store.put_consent, word)
        self._said[subject] = word.newer(self._said.get(subject))
        return respond(ConsentStored(self._said[subject].granted))

    async def delete_user(self, http: HttpRequest) -> Response:
        user = self._identity(http).user
        if not user:
            raise ApiError(f"the request names no user to delete: send {USER}", param=USER)
        for session in [s for s in self.recording.sessions.values() if s.identity.user == user]:
            # answers that are under way are not written any more
            session.dropped = "deleted"
            self.recording.forget(session)
            async with session.lock:
                session.known.clear()
        self._model.conversations.forget(user)
        deleted = await asyncio.to_thread(self._store.delete_user, user)
        self._forget_consent(user)
        return respond(UserDeleted(deleted))

    def _forget_consent(self, user: str) -> None:
        """Forget a consent as the store does: a user who returns has to consent again, but a
        refusal stays."""
        if user in self._said and self._said[user].granted:
            del self._said[user]

    async def openapi(self, http: HttpRequest) -> Response:
        return respond(production_document())

    def _gauges(self) -> dict[str, float]:
        counts = {f"production_{name}": float(n) for name, n in self.recording.counts.items()}
        return {"production_sessions": float(len(self.recording.sessions)), **counts}

    async def watch(self) -> None:
        """Follow consents given to other gateways, forget idle sessions, and sweep the store; runs
        until it is cancelled."""
        swept = -SWEEP_S
        while True:
            self.forget_idle()
            try:
                await self.refresh()
                if time.monotonic() - swept >= SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self.sweep)
            except EtudeError as e:
                print(f"production store: {e}", file=sys.stderr, flush=True)
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Read consents that were given to other gateways, or to this one before it started, and
        the users that were deleted elsewhere."""
        now = self._store.now()
        heard = await asyncio.to_thread(self._store.consents, self._heard - CLOCK_SKEW_S)
        tombstones = await asyncio.to_thread(self._store.tombstones)
        self._heard = now  # set only on success, so that a failed read is repeated
        for subject, word in heard.items():
            self._said[subject] = word.newer(self._said.get(subject))
        for user, tombstone in tombstones.items():
            if user in self._said and self._said[user].time <= tombstone.time:
                self._forget_consent(user)

    def forget_idle(self) -> None:
        limit = self._store.now() - self._config.session_idle_minutes * 60
        for session in [s for s in self.recording.sessions.values() if s.used < limit]:
            self.recording.forget(session)
            (session.router or self._router).forget(session.key)

    def sweep(self) -> None:
        config = self._config
        self._store.sweep(retention_s=config.retention_s, horizon_s=config.horizon_s)


def _spoken_for(http: HttpRequest) -> tuple[str, str]:
    """The user and the organisation that a request acts for. An admin's token, which the product's
    backend has, acts for anybody, and so does a feedback token without a subject. A token with a
    subject acts for that user alone; a session's token acts for nobody. Except with an admin's
    token, the organisation comes from the token."""
    token, named = identity_of(http), _header(http, USER)
    if token.scope is TokenScope.ADMIN:
        return named, _header(http, ORGANISATION)
    if token.scope is TokenScope.FEEDBACK and not token.subject:
        return named, token.organisation
    if token.scope not in OF_USERS:
        return "", ""
    if named not in ("", token.subject):
        raise ApiError(
            "this token belongs to another user", status=403, code="wrong_user", param=USER
        )
    return token.subject, token.organisation


def _header(http: HttpRequest, name: str) -> str:
    value = http.headers.get(name, "").strip()
    if len(value) > MAX_NAME_CHARS:
        raise ApiError(f"{name}: at most {MAX_NAME_CHARS} characters", param=name)
    return value


def open_production(
    path: Path, model: ServedModel, router: Router, run: Run, pools: Pools | None = None
) -> Production:
    """Open production mode by its configuration file, for the model of a run."""
    config = read_production(path)
    objects = run.objects if config.store is None else Objects.open(config.store)
    key = read_user_key(Path(config.user_key_file), create=True)
    told = run.config()
    store = ProductionStore(objects, announces=told.realtime is not None)
    return Production(model, router, store, config, key, told.name, pools)
