"""The gateway: one URL in front of all workers, and the recorder of what was sampled.

    POST   /v1/chat/completions                 like any OpenAI server; not recorded
    POST   /s/{session}/v1/chat/completions     the same, recorded: a harness is given /s/{session}/v1 as its base URL
    GET    /s/{session}/segments                the session so far, as msgpack of tuple[Segment, ...]; `?experts=true`
                                                puts the routed experts into the store first, and names them
    DELETE /s/{session}                         forgets it
    POST   /load {version}                      every worker moves to the version; answers when all of them serve it
    POST   /workers {url, region, version}      a worker joins; answers when it is up
    GET    /status
    GET    /weights                             what every worker computes with, by the digest of its live tensors

    python -m etude.serve.gateway --store RUN --port 8100

Between the gateway and the workers go token ids both ways, and every request carries its own randomness. So a request
whose worker dies is simply sent to another one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.core.fleet import Fleet, Worker
from etude.core.seams import Ask, Token
from etude.core.types import Sample
from etude.model.tokenizer import ChatTokenizer
from etude.serve import process
from etude.serve import protocol as wire
from etude.serve.api import Api, read_chat, replay, showing
from etude.serve.grammar import Grammars
from etude.serve.http import MSGPACK, ApiError, Events, Unavailable, create_app, read, respond, together, unless_gone
from etude.serve.recorder import Recorder
from etude.serve.wire import Held, Join, Load, WorkerStatus, read_model_files
from etude.store.experts import put_experts
from etude.store.objects import Objects

PATIENCE_S = 20.0
"""How long a request waits for a worker to come up before it fails. Well below the time that a session has: otherwise
the session would run out of time and be graded, as if the model had been slow."""
RESENDS = 3

T = TypeVar("T")


class WorkerFailed(Exception):
    """A worker did not answer, or not as it should."""


class Completed(msgspec.Struct):
    choices: tuple[wire.TextChoice]
    usage: wire.Usage


class Router:
    """The workers as one `Policy`."""

    def __init__(self, http: aiohttp.ClientSession, live: int = -1) -> None:
        self.fleet = Fleet(live)
        self._http = http
        self._changed = asyncio.Condition()

    async def sample(self, ask: Ask, session: str = "") -> Sample:
        asked = request_of(ask)
        for _ in range(1 + RESENDS):
            worker = await self._pick(session)
            try:
                sample = await self._ask(worker, asked | {"min_weight_version": self.fleet.live})
                # A worker that was taken out meanwhile may have gone on with weights that are too old by now.
                if self.fleet.knows(worker):
                    return replace(sample, region=worker.region)
            except WorkerFailed as e:
                self.fleet.leave(worker)
                why = str(e)
            else:
                why = f"{worker.url} was taken out"
            finally:
                self.fleet.done(worker)
        raise Unavailable(f"{1 + RESENDS} workers in a row have failed, the last one with: {why}")

    async def stream(self, ask: Ask, session: str = "") -> AsyncIterator[Token | Sample]:
        """Only when it is whole: the worker may die before, and another one would have to begin again."""
        async for event in replay(await self.sample(ask, session)):
            yield event

    async def load(self, version: int) -> None:
        """A worker that says that it cannot follow is taken out. If all say so, the promise is not made, and the old
        weights go on."""
        refusals: dict[Worker, str] = {}
        while behind := [w for w in self.fleet.behind(version) if w not in refusals]:  # again for those who just joined
            answers = await asyncio.gather(*(self._bring(worker, version) for worker in behind))
            refusals |= {worker: why for worker, why in zip(behind, answers, strict=True) if why is not None}
        if refusals and all(worker in refusals for worker in self.fleet.workers):
            reasons = "; ".join(f"{worker.region} ({worker.url}): {why}" for worker, why in refusals.items())
            raise ApiError(f"no worker can serve version {version}: {reasons}", status=502, code="load_failed")
        for worker in refusals:
            self.fleet.leave(worker)
        self.fleet.promise(version)
        await self._wake()

    async def join(self, joining: Join) -> None:
        worker = self.fleet.join(joining.url, joining.region, joining.version)
        while self.fleet.knows(worker) and worker.version < self.fleet.live:
            if (refusal := await self._bring(worker, self.fleet.live)) is not None:
                raise ApiError(refusal, status=503, code="load_failed")
        if not self.fleet.knows(worker):
            raise Unavailable(f"{worker.url} went away while it joined")
        await self._wake()

    async def regions(self) -> dict[str, WorkerStatus]:
        """The workers of a region taken together."""
        regions: dict[str, WorkerStatus] = {}
        for status in await self._ask_all("/status", WorkerStatus):
            known = regions.get(status.region)
            regions[status.region] = status if known is None else known.joined_with(status)
        return regions

    async def weights(self) -> list[Held]:
        return await self._ask_all("/weights", Held)

    async def _pick(self, session: str) -> Worker:
        try:
            async with asyncio.timeout(PATIENCE_S), self._changed:
                await self._changed.wait_for(lambda: self.fleet.up)
        except TimeoutError as e:
            raise Unavailable(f"no worker came up within {PATIENCE_S:.0f} s") from e
        worker = self.fleet.pick(session)
        assert worker is not None  # nothing ran since somebody was up
        return worker

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, worker: Worker, asked: dict[str, Any]) -> Sample:
        status, body = await self._post(worker, "/v1/completions", asked)
        if 400 <= status < 500:
            raise ValueError(_message(body))
        if status != 200:
            raise WorkerFailed(_message(body))
        return sample_of(msgspec.msgpack.decode(body, type=Completed))

    async def _bring(self, worker: Worker, version: int) -> str | None:
        """Has a worker load a version; returns why, if it says that it cannot. One that is gone says nothing: it is
        taken out, and loads what was promised when it joins again."""
        try:
            status, body = await self._post(worker, "/load", {"version": version})
        except WorkerFailed:
            self.fleet.leave(worker)
            return None
        if status != 200:
            return _message(body)
        worker.version = max(worker.version, version)
        return None

    async def _post(self, worker: Worker, path: str, value: object) -> tuple[int, bytes]:
        try:
            body, headers = msgspec.json.encode(value), {"Accept": MSGPACK}
            async with self._http.post(worker.url + path, data=body, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise WorkerFailed(f"{worker.url}{path}: {type(e).__name__} {e}") from e

    async def _ask_all(self, path: str, type: type[T]) -> list[T]:
        """What the workers say of themselves; those that do not answer are left out."""

        async def ask(worker: Worker) -> list[T]:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(worker.url + path) as response:
                    return [msgspec.json.decode(await response.read(), type=type)]
            return []

        return [answer for told in await asyncio.gather(*map(ask, self.fleet.workers)) for answer in told]


def request_of(ask: Ask) -> dict[str, Any]:
    """An ask as a worker reads it. What is as usual is left out: most asks are plain."""
    asked: dict[str, Any] = {
        "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.seed,
        "stop_token_ids": ask.stop, "return_token_ids": True, "logprobs": ask.top_logprobs, "detokenize": False,
    }  # fmt: skip
    if ask.top_p != 1.0:
        asked["top_p"] = ask.top_p
    if ask.top_k:
        asked["top_k"] = ask.top_k
    if ask.stop_texts:
        asked["stop"] = ask.stop_texts
    if ask.experts_from is not None:
        asked["routed_experts_from"] = ask.experts_from
    if ask.grammar is not None:
        asked["structured_outputs"] = {"grammar": ask.grammar}
    if ask.prediction is not None:
        asked["prediction"] = {"type": "content", "content": ask.prediction}
    if ask.drafts:
        asked["drafts"] = ask.drafts
    return asked


def sample_of(completed: Completed) -> Sample:
    choice, guessed = completed.choices[0], completed.usage.completion_tokens_details
    assert choice.logprobs and choice.token_ids and choice.weight_version  # they were asked for
    return Sample(
        tokens=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs.token_logprobs),
        versions=tuple(choice.weight_version),
        finish=choice.finish_reason,
        experts=choice.routed_experts or None,
        top=tuple(
            tuple((int(word.removeprefix(wire.ID_PREFIX)), logprob) for word, logprob in others.items())
            for others in choice.logprobs.top_logprobs or ()
        ),
        accepted=guessed.accepted_prediction_tokens if guessed else 0,
        rejected=guessed.rejected_prediction_tokens if guessed else 0,
    )


def _message(body: bytes) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return body.decode(errors="replace")[:200]


@dataclass(frozen=True, slots=True)
class AtHome:
    """The router as seen by one session, whose requests go to one worker as long as that is up."""

    router: Router
    session: str

    async def sample(self, ask: Ask) -> Sample:
        return await self.router.sample(ask, self.session)

    def stream(self, ask: Ask) -> AsyncIterator[Token | Sample]:
        return self.router.stream(ask, self.session)

    async def load(self, version: int) -> None:
        await self.router.load(version)


class Gateway(Api):
    def __init__(self, router: Router, objects: Objects, files: Mapping[str, bytes], *, max_context: int) -> None:
        super().__init__(router, ChatTokenizer(files), Grammars(files), max_context=max_context)
        self.router, self.objects = router, objects
        self.recorder = Recorder(self.tokenizer)

    def routes(self) -> list[Route]:
        own = [
            Route("/s/{session}/v1/chat/completions", self.recorded_chat, methods=["POST"]),
            Route("/s/{session}/segments", self.segments),
            Route("/s/{session}", self.forget, methods=["DELETE"]),
            Route("/load", self.load, methods=["POST"]),
            Route("/workers", self.join, methods=["POST"]),
            Route("/status", self.status),
            Route("/weights", self.weights),
        ]
        return own + super().routes()

    async def recorded_chat(self, request: Request) -> Response:
        session: str = request.path_params["session"]
        asked = await read_chat(request, self.max_context)
        with showing():
            draft = self.recorder.draft(session, asked.messages, asked.tools or ())
            prompt = draft.ended(*await self.encode([draft.text], "messages"))
        form, asks = await self.chat_question(asked, prompt.tokens)
        asks = [replace(ask, experts_from=prompt.routed.num_tokens) for ask in asks]
        policy = AtHome(self.router, session)
        samples = await unless_gone(request, together([self.sample(policy, ask) for ask in asks]))
        for ask, sample in zip(asks, samples, strict=True):
            self.recorder.record(session, prompt, sample, form.message(ask, sample))
        if not asked.stream:
            return respond(self.whole(form, asks, samples))
        # What is recorded is what the client was given, so nothing is given before it is whole.
        return Events(lambda say: self.say_all(say, asked, form, asks, [replay(sample) for sample in samples]))

    async def segments(self, request: Request) -> Response:
        session: str = request.path_params["session"]
        try:
            segments, experts = self.recorder.trajectory(session), self.recorder.experts(session)
        except KeyError as e:
            raise ApiError(f"session {session!r} has no recorded answer", status=404, code="unknown_session") from e
        if request.query_params.get("experts") == "true":
            names = await asyncio.to_thread(
                lambda: [put_experts(self.objects, ids) if ids else None for ids in experts]
            )
            segments = tuple(replace(s, experts=name) for s, name in zip(segments, names, strict=True))
        return Response(msgspec.msgpack.encode(segments), media_type=MSGPACK)

    async def forget(self, request: Request) -> Response:
        session: str = request.path_params["session"]
        self.recorder.forget(session)
        self.router.fleet.forget(session)
        return Response(status_code=204)

    async def load(self, request: Request) -> Response:
        asked = await read(request, Load)
        await self.router.load(asked.version)
        return respond(Load(version=self.router.fleet.live))

    async def join(self, request: Request) -> Response:
        await self.router.join(await read(request, Join))
        return respond(Load(version=self.router.fleet.live))

    async def status(self, request: Request) -> Response:
        fleet = self.router.fleet
        return respond({"version": fleet.live, "up": len(fleet.up), "regions": await self.router.regions()})

    async def weights(self, request: Request) -> Response:
        return respond(await self.router.weights())


async def serve_gateway(*, store_url: str, port: int, host: str = "127.0.0.1", version: int = -1) -> None:
    token = process.token()
    listener = process.bind(host, port, token)
    objects = Objects.open(store_url, create=False)
    files = read_model_files(objects)
    max_context = json.loads(files["config.json"])["max_position_embeddings"]
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # As many connections as there are requests, and no limit on their time: a worker that dies closes its connections.
    connector, patient = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=patient) as http:
        gateway = Gateway(Router(http, version), objects, files, max_context=max_context)
        async with process.serving(create_app(gateway.routes(), token, gateway.metrics), listener) as running:
            print(f"gateway at {process.url_of(listener)}", flush=True)
            await running


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.gateway", description="One URL in front of all workers."
    )
    parser.add_argument("--store", required=True, help="the run's store; the model's files lie under model/")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--version", type=int, default=-1, help="the oldest weights that may answer")
    a = parser.parse_args()
    process.run(lambda: serve_gateway(store_url=a.store, port=a.port, host=a.host, version=a.version))


if __name__ == "__main__":
    main()
