"""A worker: one engine, one port, one region.

The engine runs on a thread of its own, because a step may take long and the port must answer meanwhile; the event loop
hands it closures that it runs between two steps, and gets the finished requests back. New weights are fetched and
checked on a third thread while the engine serves, and swapped in between two steps.

    python -m etude.serve.worker --store RUN --region east --port 8101 --gateway http://127.0.0.1:8100

A worker without weights serves nothing; it joins the gateway, and the gateway tells it what to load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import aiohttp
import msgspec
import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Sample
from etude.engine.engine import Engine, Finished, Request
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig, Transformer
from etude.serve import process
from etude.serve.api import Api, ApiError, Unavailable, create_app, read, respond
from etude.serve.wire import Load, WorkerStatus, read_model_files
from etude.store.objects import Objects
from etude.weights.follow import fetch

HEARTBEAT_S = 1.0

Fetch = Callable[[int], Mapping[str, Tensor]]


class EngineThread:
    """An engine as a `Policy`. Everything but `_run` and `_serve_once` belongs to the event loop."""

    def __init__(self, engine: Engine, fetch: Fetch) -> None:
        self.engine, self._fetch = engine, fetch
        self.busy_s = 0.0
        self.num_tokens = 0
        self.started = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._answers: dict[str, asyncio.Future[Sample]] = {}
        self._between_steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loading = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def sample(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, stop: Sequence[int]
    ) -> Sample:
        request = Request(
            id=str(next(self._ids)), prompt=tuple(prompt), max_tokens=max_tokens,
            temperature=temperature, seed=seed, stop=frozenset(stop),
        )  # fmt: skip
        if self.engine.version < 0:
            raise Unavailable("this worker has no weights yet; ask again when it has joined the gateway")
        self.engine.check(request)
        answer: asyncio.Future[Sample] = self._loop.create_future()
        self._answers[request.id] = answer
        self._between_steps.put(partial(self.engine.add, request))
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                self._between_steps.put(partial(self.engine.abort, request.id))
            del self._answers[request.id]

    async def load(self, version: int) -> None:
        async with self._loading:  # of two calls for one version, the second finds it there
            if version == self.engine.version:
                return
            tensors = await asyncio.to_thread(self._fetch, version)
            swapped = asyncio.Event()

            def swap() -> None:
                self.engine.load(version, tensors)
                self._loop.call_soon_threadsafe(swapped.set)

            self._between_steps.put(swap)
            await swapped.wait()

    def close(self) -> None:
        self._between_steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._serve_once():
            pass

    def _serve_once(self) -> bool:
        """What the loop asked for, then one step. False when the worker is closed."""
        while not self._between_steps.empty() or self.engine.idle:
            act = self._between_steps.get()
            if act is None:
                return False
            act()
        began = time.monotonic()
        finished = self.engine.step()
        self.busy_s += time.monotonic() - began
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)
        return True

    def _deliver(self, finished: list[Finished]) -> None:
        for done in finished:
            self.num_tokens += len(done.sample.tokens)
            answer = self._answers.get(done.id)
            if answer is not None and not answer.done():
                answer.set_result(done.sample)


class Worker(Api):
    def __init__(self, engine: EngineThread, tokenizer: ChatTokenizer, region: str) -> None:
        super().__init__(engine, tokenizer, max_context=engine.engine.max_context)
        self.engine_thread, self.region = engine, region

    def routes(self) -> list[Route]:
        own = [Route("/load", self.load, methods=["POST"]), Route("/status", self.status)]
        return super().routes() + own

    async def load(self, request: HttpRequest) -> Response:
        """Answers when the version is live."""
        asked = await read(request, Load)
        try:
            await self.engine_thread.load(asked.version)
        except (EtudeError, ValueError) as e:
            raise ApiError(f"version {asked.version} cannot be served: {e}", status=500, code="load_failed") from e
        return respond(Load(version=self.version))

    async def status(self, request: HttpRequest) -> Response:
        return respond(self.report())

    @property
    def version(self) -> int:
        return self.engine_thread.engine.version

    def report(self) -> WorkerStatus:
        thread = self.engine_thread
        return WorkerStatus(
            region=self.region,
            version=self.version,
            running=thread.engine.num_running,
            waiting=thread.engine.num_waiting,
            busy_s=thread.busy_s,
            wall_s=time.monotonic() - thread.started,
            tokens=thread.num_tokens,
        )

    def check_version(self, least: int) -> None:
        if self.version < least:
            raise Unavailable(f"this worker serves version {self.version}, and the request wants {least} or newer")


def die_with_the_engine() -> None:
    """Requests would wait for ever for an engine that is gone; whoever owns the process starts another."""
    report = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        report(args)
        os._exit(1)

    threading.excepthook = end


async def keep_joined(worker: Worker, url: str, gateway_url: str, token: str | None) -> None:
    """Tells the gateway again and again that this worker is there: it may have been restarted and know of nobody. The
    gateway answers when the worker is up, having told it to load what is missing."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        while True:
            body = msgspec.json.encode({"url": url, "region": worker.region, "version": worker.version})
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it is not there now; it will be
                async with session.post(f"{gateway_url}/workers", data=body):
                    pass
            await asyncio.sleep(HEARTBEAT_S)


async def serve_worker(
    *, store_url: str, region: str, port: int, host: str = "127.0.0.1", gateway_url: str | None = None,
    version: int | None = None, max_batch: int = 32, threads: int = 1,
) -> None:  # fmt: skip
    die_with_the_engine()
    torch.set_num_threads(threads)
    token = process.token()
    listener = process.bind(host, port, token)
    objects = Objects.open(store_url, create=False)
    files = read_model_files(objects)
    model = Transformer(ModelConfig.from_json(files["config.json"])).requires_grad_(False)
    engine = EngineThread(Engine(model, max_batch=max_batch, version=-1), partial(fetch, objects))
    worker = Worker(engine, ChatTokenizer(files), region)
    if version is not None:
        await engine.load(version)
    async with process.serving(create_app(worker.routes(), token), listener) as running:
        url = process.url_of(listener)
        print(f"worker {region} at {url}", flush=True)
        joined = asyncio.create_task(keep_joined(worker, url, gateway_url, token)) if gateway_url else None
        await running
        if joined:
            joined.cancel()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.worker", description="Serves a model from a run's store."
    )
    parser.add_argument("--store", required=True, help="the run's store; the model's files lie under model/")
    parser.add_argument("--region", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--gateway", help="where to join; without it the worker serves alone")
    parser.add_argument("--version", type=int, help="weights to load at once; otherwise the gateway says which")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    a = parser.parse_args()
    process.run(
        lambda: serve_worker(
            store_url=a.store, region=a.region, port=a.port, host=a.host, gateway_url=a.gateway,
            version=a.version, max_batch=a.max_batch, threads=a.threads,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
