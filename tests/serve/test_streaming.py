"""Streams through a gateway: tokens arrive as they are sampled, and the death of a worker in the
middle of an answer does not show in the text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request as HttpRequest

from etude.core.sampling import RegionSpan, Request, Sample, Token, VersionSpan
from etude.serve.engine_thread import EngineThread
from etude.serve.fake import Scripted
from etude.serve.gateway import Gateway
from etude.serve.http import (
    ClientDisconnected,
    DeadlineExceeded,
    cancel_on_disconnect,
    create_app,
)
from etude.serve.router import Router
from etude.serve.worker import Worker
from etude.serve.worker_protocol import JoinRequest
from etude.store.objects import Objects
from tests.serve.client import post, segments
from tests.serve.conftest import Store, served
from tests.serve.producing import ScriptedEngine
from tests.serve.scripted import FILES, TOKENIZER, answers
from tests.small_model import ROUNDING, plain_logprobs

ASK = {"messages": [{"role": "user", "content": "read"}], "return_token_ids": True, "seed": 3}


async def chunks(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with http.post(f"{url}/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def streamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[int]:
    told = [chunk async for chunk in chunks(http, url, body)]
    assert "error" not in told[-1], told[-1]
    return [id for chunk in told for choice in chunk["choices"] for id in choice["token_ids"]]


Stream = Callable[[EngineThread, Request], AsyncIterator[Token | Sample]]


@pytest.fixture
def dies_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Request]]:
    """The first worker that is asked fails after the given number of tokens."""

    def prepare(num_tokens: int) -> list[Request]:
        whole: Stream = EngineThread.stream
        asked: list[Request] = []

        async def stream(self: EngineThread, request: Request) -> AsyncIterator[Token | Sample]:
            asked.append(request)
            dies, count = len(asked) == 1, 0
            async with aclosing(whole(self, request)) as events:  # type: ignore[type-var]
                async for event in events:
                    if dies and count == num_tokens:
                        raise ConnectionResetError("the worker is gone")
                    count += 1
                    yield event

        monkeypatch.setattr(EngineThread, "stream", stream)
        return asked

    return prepare


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 24])
@pytest.mark.parametrize(
    "more", [{}, {"repetition_penalty": 1.3, "stop": ["never said"]}], ids=["plain", "history"]
)
async def test_another_worker_goes_on_behind_what_was_said(
    regions: list[Worker], gateway: str, store: Store, http: aiohttp.ClientSession,
    dies_once: Callable[[int], list[Request]], num_tokens: int, more: dict[str, Any],
) -> None:  # fmt: skip
    """24 of 24 tokens: only the end was missing."""
    body = ASK | {"max_tokens": 24, "temperature": 1.5} | more
    whole = await streamed(http, f"{gateway}/s/whole", body)
    assert len(whole) == 24
    asked = dies_once(num_tokens)
    torn = await streamed(http, f"{gateway}/s/torn", body)
    # Apart from rounding, the rest is the same too: tests/engine/test_begun.py.
    assert torn[:num_tokens] == whole[:num_tokens] and len(torn) == 24
    assert [len(request.begun) for request in asked] == [0, num_tokens]
    (segment,) = await segments(http, gateway, "torn")
    assert list(segment.tokens) == torn and all(segment.mask)
    assert segment.versions == (VersionSpan(0, 24),)
    counts = [count for count in (num_tokens, 24 - num_tokens) if count]
    assert [span.count for span in segment.regions] == counts
    assert len({span.region for span in segment.regions}) == len(counts)
    if not more:
        plain = plain_logprobs(store.model(0), segment.prompt, segment.tokens, 1.5).tolist()
        assert list(segment.logprobs) == pytest.approx(plain, abs=ROUNDING)
    async with http.get(f"{gateway}/s/torn/disturbed") as response:
        assert await response.json() is True
    async with http.get(f"{gateway}/s/whole/disturbed") as response:
        assert await response.json() is False


async def test_a_client_that_leaves_a_stream_leaves_no_work_behind(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    stream = chunks(http, f"{gateway}/s/s", ASK)
    async with aclosing(stream):  # type: ignore[type-var]
        await anext(stream)
    while any(region.report().running or region.report().waiting for region in regions):
        await asyncio.sleep(0.01)
    async with http.get(f"{gateway}/s/s/segments") as response:
        assert response.status == 404  # an answer whose end nobody has seen is not recorded


class Gated(Scripted):
    """Samples one token each time the gate is released."""

    tokenizer = TOKENIZER
    max_context = 4096

    def __init__(self, text: str, error: Exception | None = None) -> None:
        super().__init__(answers([text]))
        self.gate = asyncio.Semaphore(0)
        self.error = error

    async def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        async for event in super().stream(request):
            await self.gate.acquire()
            if self.error is not None and isinstance(event, Sample):
                raise self.error
            yield event


async def test_the_engine_is_told_at_once_that_nobody_listens() -> None:
    told: list[str] = []

    class Engine(ScriptedEngine):
        async def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
            try:
                async for event in super().stream(request):
                    yield event
            finally:
                told.append("closed")

    async def send(event: object) -> None:
        raise ClientDisconnected

    worker = Worker(Engine(answers(["Done."])), FILES, "east")  # type: ignore[arg-type]
    try:
        await worker._stream(Request(prompt=(1,), max_tokens=9, seed=0), send)
    except ClientDisconnected:
        assert told == ["closed"]
    else:
        pytest.fail("nobody was told that the client is gone")


async def test_tokens_come_as_they_are_sampled(http: aiohttp.ClientSession, tmp_path: Any) -> None:
    engine = Gated("so it is")
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    gateway = Gateway(Router(http), Objects.open(f"file:{tmp_path}"), FILES, max_context=4096)
    async with (
        served(create_app(worker.routes(), None)) as at,
        served(create_app(gateway.routes(), None)) as url,
    ):
        await post(http, f"{url}/workers", {"url": at, "region": "east", "version": 0})
        ids = []
        async for chunk in (stream := chunks_from(engine, http, f"{url}/s/s")):
            ids += [id for choice in chunk["choices"] for id in choice["token_ids"]]
            async with http.get(f"{url}/s/s/disturbed") as response:
                under_way = await response.json()
            whole = chunk["choices"][0]["finish_reason"] is not None
            async with http.get(f"{url}/s/s/segments") as response:
                assert response.status == (200 if whole else 404)
            assert under_way or whole
            engine.gate.release()  # there is a next token only now
        await stream.aclose()
        assert ids == answers(["so it is"])[0]
        async with http.get(f"{url}/s/s/disturbed") as response:
            assert await response.json() is False


async def chunks_from(
    engine: Gated, http: aiohttp.ClientSession, url: str
) -> AsyncIterator[dict[str, Any]]:
    engine.gate.release()
    async for chunk in chunks(http, url, ASK):
        yield chunk


REQUEST = Request(prompt=(5, 6), max_tokens=9, seed=0, stop_token_ids=(TOKENIZER.eos_token_id,))


@pytest.mark.parametrize("error", [ValueError("the grammar .."), DeadlineExceeded()])
async def test_what_goes_wrong_at_the_end_is_told(
    error: Exception, http: aiohttp.ClientSession
) -> None:
    """The worker is not at fault: no other worker is asked."""
    engine = Gated("a", error)
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    async with served(create_app(worker.routes(), None)) as url:
        router = Router(http)
        await router.join(JoinRequest(url, "east", 0))
        for _ in range(9):
            engine.gate.release()
        said = []
        with pytest.raises(type(error), match=str(error)):
            async for event in router.stream(REQUEST):
                said.append(event)
        assert [event.token for event in said if isinstance(event, Token)] == answers(["a"])[0]
        assert len(engine.asked) == 1 and [each.url for each in router.fleet.up] == [url]


async def test_a_stream_says_where_it_was_sampled(http: aiohttp.ClientSession) -> None:
    engine = Gated("a b")
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    async with served(create_app(worker.routes(), None)) as url:
        router = Router(http)
        await router.join(JoinRequest(url, "east", 0))
        for _ in range(9):
            engine.gate.release()
        events = [event async for event in router.stream(REQUEST)]
    assert isinstance(events[-1], Sample)
    assert events[-1].regions == (RegionSpan("east", len(events) - 1),)


async def test_work_is_cancelled_with_its_client_and_never_after_its_end() -> None:
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    http = HttpRequest({"type": "http"}, receive)
    assert await cancel_on_disconnect(http, asyncio.sleep(0, "done")) == "done"
    gone.set()
    for _ in range(5):
        await asyncio.sleep(0)  # a late cancellation would arrive here

    with pytest.raises(ClientDisconnected):
        await cancel_on_disconnect(http, asyncio.sleep(3600))
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("passes", range(4))
async def test_a_client_that_goes_as_the_work_ends_cancels_nothing_that_follows(
    passes: int,
) -> None:
    gone, done = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def answer() -> str:
        try:
            return await cancel_on_disconnect(HttpRequest({"type": "http"}, receive), waiting())
        except ClientDisconnected:
            return "gone"
        finally:
            for _ in range(5):
                await asyncio.sleep(0)

    async def waiting() -> str:
        await done.wait()
        return "done"

    answering = asyncio.create_task(answer())
    await asyncio.sleep(0.001)
    gone.set()
    for _ in range(passes):
        await asyncio.sleep(0)
    done.set()
    assert await answering in ("done", "gone") and not answering.cancelling()
