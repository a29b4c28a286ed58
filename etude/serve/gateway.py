"""The gateway: one URL in front of all workers, and the recorder of what was sampled.

    POST   /v1/chat/completions                 like any OpenAI server; not recorded. Likewise
                                                /v1/responses and /v1/messages
    POST   /s/{session}/v1/chat/completions     the same, recorded: a harness is given
                                                /s/{session}/v1 as its base URL. The header
                                                `X-Etude-Segment: summary` or `subagent` tells the
                                                kind of the segment that the request opens, if it
                                                opens one
    GET    /s/{session}/segments                the session so far, as msgpack of
                                                tuple[Segment, ...]; `?experts=true` puts the
                                                routed experts into the store first, and names them
    GET    /s/{session}/disturbed?age_s=..      true if one of its requests had to wait for a
                                                worker that was silent or gone, was broken off, or
                                                is under way; or if this process was stopped since
                                                the session began
    DELETE /s/{session}                         forgets it
    ..     /v1/sessions                         sessions that others run (`serve.session_desk`)
    POST   /load {version}                      moves every worker to the version; answers once all
                                                of them serve it and all shards know it
    POST   /workers {url, region, version}      a worker joins, and repeats this as its heartbeat;
                                                answers once the worker is up, unless it is already
                                                being told what to load
    POST   /tokens {scope, subject, lifetime_s}  makes a token; DELETE /tokens/{id} revokes one
    GET    /up                                  answers as soon as a worker is up
    GET    /status
    GET    /weights                             the digest of the live tensors of every worker

    python -m etude.serve.gateway --store RUN --port 8100

`serve/policies.py` defines who may use which of them.

With `--production FILE` the gateway serves the users of a product instead (`production/`): they are
recorded if they consent, and nobody can read a session back.

Token ids travel between gateway and workers in both directions (`POST /generate`), and every
request carries its own seed. So if a worker dies or falls silent, its requests are simply sent to
another one, with the tokens that the client has already received.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import aiohttp
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.errors import EtudeError
from etude.core.sampling import Request, Sample, Token
from etude.core.types import SegmentKind
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.serve import heartbeat, process
from etude.serve.access import SignedTokens, identity_of
from etude.serve.answerer import (
    PolicyAnswerer,
    ServedModel,
    Show,
    TemplateOptions,
    as_stream,
    template_errors,
)
from etude.serve.closed_sessions import ClosedSessions
from etude.serve.dialects import public_routes, session_routes
from etude.serve.grammar import GrammarBuilder
from etude.serve.headers import read_segment_kind
from etude.serve.http import (
    ApiError,
    EventStream,
    cancel_on_disconnect,
    create_app,
    gather,
    read,
    read_bytes,
    respond,
    respond_packed,
)
from etude.serve.pools import Pools
from etude.serve.production.routes import open_production
from etude.serve.recorder import Prompt
from etude.serve.router import Router
from etude.serve.segments import RecordedTurn
from etude.serve.session_desk import SessionRoutes
from etude.serve.session_journal import SessionJournal
from etude.serve.session_records import SessionRecords
from etude.serve.session_schema import gateway_document
from etude.serve.shards import DESK, FORWARDED, ShardedApp, Shards
from etude.serve.token_routes import TokenRoutes
from etude.serve.tokens import SECRET_VARIABLE, TokenAuthority, read_secret
from etude.serve.worker_protocol import (
    DrainRequest,
    JoinRequest,
    LoadRequest,
    read_model_files,
)
from etude.store.experts import put_experts
from etude.store.objects import Objects
from etude.store.realtime import TrafficLog
from etude.store.runs import Run
from etude.store.telemetry import store_used


class Gateway:
    """The public API over all workers, the same API for recorded sessions, and the routes by which
    workers join and weights change."""

    def __init__(
        self, router: Router, objects: Objects, files: Mapping[str, bytes], *, max_context: int,
        tokens: TokenAuthority | None = None,
        shards: Shards | None = None,
        pools: Pools | None = None,
    ) -> None:  # fmt: skip
        self.router = router
        self.pools = pools
        self.shards = shards or Shards()
        self.objects = objects
        self.tokens = tokens or TokenAuthority()
        self.token_routes = TokenRoutes(self.tokens, objects)
        self.model = ServedModel(
            tokenizer=ChatTokenizer(files),
            grammars=GrammarBuilder(files),
            max_context=max_context,
        )
        self.records = SessionRecords(self.model.tokenizer, self.model.conversations)
        self.closed = ClosedSessions(objects, self.shards.name)
        self.desk = SessionRoutes(self._has_answer)

    def restore(self, journal: SessionJournal) -> None:
        """Resume the sessions of earlier processes, except those that are over. All of them count
        as disturbed, since they had to wait for this process."""
        for mark in self.closed.restore():
            self.tokens.close_session(mark.session, mark.t)
        for session in self.records.restore(journal, self.desk.restore):
            self.router.disturb(session)
        self.desk.journal = journal

    def _has_answer(self, session: str) -> bool:
        """True if the session has a recorded answer, or if another shard holds it: the controller,
        which reads it there, fails an attempt without an answer."""
        return self.shards.elsewhere(f"/s/{session}") is not None or self.records.has_answer(
            session
        )

    def routes(self) -> list[Route]:
        plain = PolicyAnswerer(self.model, self.router)
        return [
            *map(self._session_route, session_routes(self.model, self._session_answerer)),
            Route("/s/{session}/segments", self.segments),
            Route("/s/{session}/disturbed", self.disturbed),
            Route("/s/{session}", self.forget, methods=["DELETE"]),
            *self.desk.routes(),
            *self.fleet_routes(),
            Route("/openapi.json", self.openapi),
            *public_routes(self.model, lambda http: plain, dict),
        ]

    def fleet_routes(self) -> list[Route]:
        """Routes for workers, and for those who change their weights."""
        return [
            Route("/load", self.load, methods=["POST"]),
            Route("/workers", self.join, methods=["POST"]),
            Route("/workers/drain", self.drain, methods=["POST"]),
            Route("/up", self.up),
            Route("/status", self.status),
            Route("/weights", self.weights),
            *self.token_routes.routes(),
        ]

    def _session_answerer(self, http: HttpRequest) -> SessionAnswerer:
        session = http.path_params["session"]
        kind = read_segment_kind(http.headers)
        self.records.check(session)
        return SessionAnswerer(self.model, self.router, self.records, session, kind)

    def _session_route(self, route: Route) -> Route:
        """Wrap a dialect's route: a request counts as under way from the first byte of its body to
        the end of its answer."""

        @wraps(route.endpoint)
        async def endpoint(http: HttpRequest) -> Response:
            with ExitStack() as stack:
                stack.enter_context(self.router.under_way(http.path_params["session"]))
                response: Response = await route.endpoint(http)
                if isinstance(response, EventStream):
                    response.hold(stack.pop_all())
                return response

        return Route("/s/{session}" + route.path, endpoint, methods=list(route.methods or ()))

    async def segments(self, http: HttpRequest) -> Response:
        session: str = http.path_params["session"]
        recorder = self.records.recorder
        self.records.check(session)
        try:
            segments, experts = recorder.segments(session), recorder.experts(session)
        except KeyError as e:
            raise ApiError(
                f"session {session!r} has no recorded answers", status=404, code="unknown_session"
            ) from e
        if http.query_params.get("experts") == "true":
            names = await asyncio.to_thread(
                lambda: [put_experts(self.objects, ids) if ids else None for ids in experts]
            )
            segments = tuple(
                replace(s, experts=name) for s, name in zip(segments, names, strict=True)
            )
        return respond_packed(segments)

    async def forget(self, http: HttpRequest) -> Response:
        session: str = http.path_params["session"]
        self.tokens.close_session(session)
        self.router.forget(session)
        await self.closed.add(session)
        await self.desk.forget(session)
        await self.records.forget(session)
        if (url := self.shards.elsewhere(DESK)) is not None:
            path = f"{DESK}/{quote(session, safe='')}"
            await self.router.tell([url], path, None, identity_of(http).token, "DELETE")
        return Response(status_code=204)

    async def disturbed(self, http: HttpRequest) -> Response:
        session = http.path_params["session"]
        age = http.query_params.get("age_s", "inf")
        try:
            return respond(self.router.disturbed(session, float(age)))
        except ValueError as e:
            raise ApiError(f"age_s must be a number, not {age!r}", param="age_s") from e

    async def openapi(self, http: HttpRequest) -> Response:
        return respond(gateway_document())

    async def load(self, http: HttpRequest) -> Response:
        asked = await read(http, LoadRequest)
        if asked.quarantined is not None:
            self.router.fleet.quarantine(asked.quarantined)
        await self.router.load(asked.version)
        if FORWARDED not in http.headers:
            await self.router.tell(self.shards.others, "/load", asked, identity_of(http).token)
        return respond(LoadRequest(version=self.router.fleet.floor))

    async def join(self, http: HttpRequest) -> Response:
        """Register a worker. The gateway will ask it with the token that it joins with."""
        asked = await read(http, JoinRequest)
        asked.users_only &= self.pools is None  # in production mode all clients are users
        router = self.router
        if asked.pool:
            if self.pools is None:
                raise ApiError("pools need a gateway in production mode", param="pool")
            router = self.pools.router(asked.pool)
        await router.join(asked, identity_of(http).token)
        return respond(LoadRequest(version=router.fleet.floor))

    async def drain(self, http: HttpRequest) -> Response:
        """Drain a worker, or stop draining it: it gets no new requests. It can be used elsewhere
        once it has nothing active any more, as the answer and `/status` show."""
        asked = await read(http, DrainRequest)
        fleet = self.router.fleet
        if asked.draining and not fleet.spares(asked.url, asked.keep):
            raise ApiError(
                f"{asked.keep} workers must keep running", status=409, code="last_workers"
            )
        if (worker := fleet.drain(asked.url, asked.draining)) is None:
            raise ApiError(f"no worker at {asked.url}", status=404, code="unknown_worker")
        if FORWARDED not in http.headers:
            token = identity_of(http).token
            await self.router.tell(self.shards.others, "/workers/drain", asked, token)
        await self.router.wake()
        return respond({"state": fleet.state(asked.url).value, "active": worker.active})

    async def up(self, http: HttpRequest) -> Response:
        await read_bytes(http)
        await cancel_on_disconnect(http, self.router.up())
        return Response(status_code=204)

    async def status(self, http: HttpRequest) -> Response:
        fleet = self.router.fleet
        regions = await self.router.regions()
        silent = sorted({worker.region for worker in fleet.suspects})
        workers = {
            worker.url: {"state": fleet.state(worker.url).value, "active": worker.active}
            for worker in (*fleet.workers, *fleet.suspects)
        }
        status: dict[str, object] = {"version": fleet.floor, "up": len(fleet.up), "silent": silent}
        status |= {"workers": workers, "quarantined": sorted(fleet.quarantined)}
        status["users_ttft_p99_s"] = self.router.users_ttft_p99_s
        if self.pools is not None:
            status["pools"] = self.pools.status()
        own = store_used(self.objects, f"gateway {self.shards.name}")
        return respond(status | {"regions": regions, "store": own})

    async def weights(self, http: HttpRequest) -> Response:
        return respond(await self.router.weights())


class SessionPolicy(Protocol):
    """The policy that answers a session: the workers, through the router, or a policy of this
    process."""

    async def sample(self, request: Request, session: str) -> Sample: ...

    def stream(self, request: Request, session: str) -> AsyncIterator[Token | Sample]: ...


class SessionAnswerer:
    """Answers one request of a session: its prompt continues what was recorded, and its answer is
    recorded."""

    def __init__(
        self, model: ServedModel, router: SessionPolicy, records: SessionRecords, session: str,
        kind: SegmentKind,
    ) -> None:  # fmt: skip
        self._model = model
        self._router = router
        self._records = records
        self._session = session
        self._kind = kind
        self._life = records.life(session)
        self._prompt: Prompt | None = None

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions
    ) -> tuple[int, ...]:
        with template_errors():
            draft = self._records.recorder.partial_prompt(self._session, messages, tools, options)
            if (tokens := self._records.encoded.get(draft.text)) is None:
                (tokens,) = await self._model.encode([draft.text], "messages")
                self._records.encoded.add(draft.text, tokens)
            self._prompt = draft.complete(tokens)
        return self._prompt.tokens

    async def sample(self, requests: Sequence[Request], show: Show, id: str) -> list[Sample]:
        return await gather([self._sample(request, show) for request in requests])

    async def _sample(self, request: Request, show: Show) -> Sample:
        if (again := await self._unreceived(request)) is not None:
            return again
        sample = await self._router.sample(self._asked(request), self._session)
        self._records.recorder.received(await self._record(request, sample, show))
        return sample

    async def stream(
        self, requests: Sequence[Request], show: Show, id: str
    ) -> list[AsyncIterator[Token | Sample]]:
        return [self._stream(request, show) for request in requests]

    async def _stream(self, request: Request, show: Show) -> AsyncIterator[Token | Sample]:
        """Stream an answer. It is recorded once it is complete, before the client is told that it
        is."""
        if (again := await self._unreceived(request)) is not None:
            async for event in as_stream(again):
                yield event
            return
        stream = self._router.stream(self._asked(request), self._session)
        async with aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                if isinstance(event, Sample):
                    turn = await self._record(request, event, show)
                    yield event
                    self._records.recorder.received(turn)
                else:
                    yield event

    async def _unreceived(self, request: Request) -> Sample | None:
        """An answer that was recorded, but that its client never received because one side went
        away."""
        assert self._prompt is not None
        return await self._records.take_unreceived(self._session, self._prompt, request)

    def _asked(self, request: Request) -> Request:
        """The request to the policy: it also asks for the routed experts that the recorder needs,
        and has the priority batch, since a rollout can wait for users and other clients of the same
        workers."""
        assert self._prompt is not None
        priority = "batch" if request.priority == "standard" else request.priority
        return replace(request, experts_from=self._prompt.routed.num_tokens, priority=priority)

    async def _record(self, request: Request, sample: Sample, show: Show) -> RecordedTurn:
        assert self._prompt is not None
        message = show(request, sample)
        return await self._records.record(
            self._session, self._prompt, sample, message, request.params, self._kind, self._life
        )


async def serve_gateway(
    *,
    store_url: str,
    port: int,
    host: str = "127.0.0.1",
    version: int = -1,
    shards: Shards | None = None,
    production: Path | None = None,
    awaits_load: bool = False,
) -> None:
    """`production`: the file of production mode. `awaits_load`: see `Router`."""
    secret, shards = read_secret(), shards or Shards()
    if production is not None and secret is None:
        raise EtudeError(f"production mode needs tokens: set {SECRET_VARIABLE} (docs/serve.md)")
    listener = process.bind(host, port, secret, SECRET_VARIABLE)
    tokens = TokenAuthority(secret)
    access = SignedTokens(tokens) if secret else None
    run = Run.open(store_url, create=False)
    files = read_model_files(run)
    max_context = json.loads(files["config.json"])["max_position_embeddings"]
    async with http_client() as http:
        timeout_s = run.config().heartbeat_timeout_s
        router = Router(http, version, timeout_s, awaits_load=awaits_load)
        pools = Pools(
            lambda: Router(http, -1, timeout_s, awaits_load=True), TrafficLog(run.objects)
        )
        gateway = Gateway(
            router, run.objects, files, max_context=max_context, tokens=tokens, shards=shards,
            pools=None if production is None else pools,
        )  # fmt: skip
        await gateway.token_routes.restore()
        watched = [router.watch, gateway.token_routes.watch, heartbeat.send_heartbeats]
        if production is None:
            gateway.restore(SessionJournal(run.objects, shards.name))
            routes = gateway.routes()
        else:
            # No journal: only production mode writes what users say, and redacts it.
            mode = open_production(production, gateway.model, router, run, pools)
            await mode.refresh()
            await pools.refresh()
            routes = [*gateway.fleet_routes(), *mode.routes()]
            watched += [mode.watch, pools.watch]
        app = create_app(routes, access, gateway.model.metrics)
        async with process.serving(ShardedApp(app, shards, http), listener) as running:
            print(f"gateway at {process.url_of(listener)}", flush=True)
            # Sessions are many small objects without cycles. A garbage collection over all of them
            # would take a tenth of the time, in one pause.
            gc.freeze()
            gc.set_threshold(200_000, 20, 100)
            async with process.meanwhile(*(watch() for watch in watched)):
                await running


def http_client() -> aiohttp.ClientSession:
    """A client with any number of connections and no limit on the time of a request: a worker that
    dies closes its connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
        auto_decompress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.gateway",
        description="One URL in front of all workers of a run.",
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--version", type=int, default=-1, help="oldest weight version that may answer"
    )
    parser.add_argument(
        "--await-load",
        action="store_true",
        help="answer nothing until the controller of the run says which version to serve, "
        "also after a restart",
    )
    parser.add_argument(
        "--shards", default="", metavar="URL,URL", help="URLs of all gateway processes of the run"
    )
    parser.add_argument("--shard", type=int, default=0, help="index of this process, from 0")
    parser.add_argument("--production", type=Path, help="configuration file of production mode")
    a = parser.parse_args()
    process.run(
        lambda: serve_gateway(
            store_url=a.store,
            port=a.port,
            host=a.host,
            version=a.version,
            shards=Shards(a.shards.split(","), a.shard),
            production=a.production,
            awaits_load=a.await_load,
        )
    )


if __name__ == "__main__":
    main()
