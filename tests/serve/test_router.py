"""Requests when workers answer, refuse or fail, and the status of all workers together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
import pytest
from aiohttp import web

from etude.core.clock import AwakeClock, ManualClock
from etude.core.sampling import RegionSpan, Request, Sample, Token, VersionSpan, expand_spans
from etude.serve.fake_worker import FakeWorker, Pace, fake_sample
from etude.serve.http import ApiError, DeadlineExceeded, Unavailable
from etude.serve.router import Router
from etude.serve.worker_answer import MAX_RETRIES
from etude.serve.worker_protocol import (
    FrameReader,
    GenerateFrame,
    GenerateRequest,
    JoinRequest,
    WorkerStatus,
)

ASK = Request(prompt=(1, 2), max_tokens=3, seed=1)
SAMPLED = Sample(
    tokens=(7, 8, 9),
    logprobs=(-1.0, -2.0, -3.0),
    versions=(VersionSpan(4, 2), VersionSpan(5, 1)),
    finish_reason="stop",
    top_logprobs=(((7, -1.0),), ((3, -0.5),), ((9, -3.0),)),
)
Answer = Callable[[web.Request], web.Response]


def fails(status: int, text: str) -> Answer:
    return lambda request: web.json_response({"error": {"message": text}}, status=status)


def samples(request: web.Request) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(SAMPLED))


class Worker:
    """Answers with the same responses again and again."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, bytes]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.read()))
        return self.answers[request.path[1:]](request)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def join(router: Router, url: str, region: str = "east", version: int = 0) -> None:
    await router.join(JoinRequest(url, region, version))


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (fails(400, "no room to answer"), ValueError, "^no room to answer$"),
        (fails(408, "too late"), DeadlineExceeded, None),
    ],
)
async def test_a_refusal_is_no_failure_of_the_worker(
    http: aiohttp.ClientSession, answer: Answer, error: type[Exception], said: str | None
) -> None:
    router, worker = Router(http), Worker(generate=answer)
    async with worker.listening() as url:
        await join(router, url)
        with pytest.raises(error, match=said):
            await router.sample(ASK)
        assert len(worker.asked) == 1 and len(router.fleet.up) == 1


async def test_a_worker_that_fails_is_left_and_another_asked(http: aiohttp.ClientSession) -> None:
    router, broken, well = (
        Router(http),
        Worker(generate=fails(500, "bits")),
        Worker(generate=samples),
    )
    async with broken.listening() as bad, well.listening() as good:
        await join(router, bad)
        await join(router, good, "west")
        for _ in range(3):
            assert await router.sample(ASK) == replace(
                SAMPLED, regions=(RegionSpan("west", len(SAMPLED.tokens)),)
            )
        assert [worker.url for worker in router.fleet.up] == [good] and len(broken.asked) <= 1
        assert [worker.active for worker in router.fleet.workers] == [0], "nothing is under way"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (fails(500, "bits have flipped"), "bits have flipped"),
        (lambda request: web.Response(status=500, text="<html>" * 100), "(<html>)+"),
    ],
)
async def test_what_fails_everywhere_is_said_with_the_last_reason(
    http: aiohttp.ClientSession, answer: Answer, said: str
) -> None:
    router, workers = Router(http), [Worker(generate=answer) for _ in range(MAX_RETRIES + 3)]
    listening = [worker.listening() for worker in workers]
    try:
        for each in listening:
            await join(router, await each.__aenter__())
        with pytest.raises(
            Unavailable, match=rf"{MAX_RETRIES + 1} workers in a row .*: {said}"
        ) as e:
            await router.sample(ASK)
        assert len(str(e.value)) < 400
        assert sum(len(worker.asked) for worker in workers) == MAX_RETRIES + 1
    finally:
        for each in listening:
            await each.__aexit__(None, None, None)


@pytest.mark.parametrize("passed_s", [200.0, 500.0, 600.0])
async def test_the_next_worker_has_only_the_time_that_is_left(
    http: aiohttp.ClientSession, passed_s: float
) -> None:
    clock = ManualClock()
    router = Router(http, clock=AwakeClock(clock, blink_s=6000.0))

    def slow(request: web.Request) -> web.Response:
        clock.move(passed_s)
        return fails(500, "late")(request)

    first, second = Worker(generate=slow), Worker(generate=samples)
    async with first.listening() as url, second.listening() as its:
        await join(router, url)
        await join(router, its)
        next(worker for worker in router.fleet.workers if worker.url == its).active = 1
        asked = replace(ASK, deadline_s=500.0)
        if passed_s >= 500.0:
            with pytest.raises(DeadlineExceeded):
                await router.sample(asked)
            assert not second.asked
        else:
            assert (await router.sample(asked)).tokens == SAMPLED.tokens
            ((_, body),) = second.asked
            told = msgspec.msgpack.decode(body, type=GenerateRequest).request
            assert told.deadline_s == 300.0


async def test_a_worker_that_cannot_load_what_is_promised_is_told_and_may_come_again(
    http: aiohttp.ClientSession,
) -> None:
    router, worker = Router(http, live=3), Worker(load=fails(500, "a digest differs"))
    async with worker.listening() as url:
        for _ in range(2):
            with pytest.raises(ApiError, match="a digest differs") as refused:
                await join(router, url)
            assert (refused.value.status, refused.value.code) == (503, "load_failed")
            assert router.fleet.up == []
        worker.answers["load"] = lambda request: web.json_response({})
        await join(router, url)
        assert [each.version for each in router.fleet.up] == [3]
        assert [path for path, _ in worker.asked] == ["/load"] * 3


async def test_the_workers_of_a_region_are_reported_as_one(http: aiohttp.ClientSession) -> None:
    def tells(status: WorkerStatus) -> Worker:
        return Worker(status=lambda request: web.Response(body=msgspec.json.encode(status)))

    router = Router(http)
    one = tells(WorkerStatus("east", 5, 1, 2, 3.0, 10.0, 100))
    two = tells(WorkerStatus("east", 4, 10, 20, 30.0, 100.0, 1000))
    far = tells(WorkerStatus("west", 6, 7, 7, 7.0, 7.0, 7))
    async with one.listening() as a, two.listening() as b, far.listening() as c:
        for url, region in ((a, "east"), (b, "east"), (c, "west")):
            await join(router, url, region)
        assert await router.regions() == {
            "east": WorkerStatus("east", 4, 11, 22, 33.0, 110.0, 1100),
            "west": WorkerStatus("west", 6, 7, 7, 7.0, 7.0, 7),
        }


async def test_a_worker_that_goes_away_while_it_joins_is_told(http: aiohttp.ClientSession) -> None:
    router = Router(http, live=3)

    def leaves(request: web.Request) -> web.Response:
        (worker,) = router.fleet.workers
        router.fleet.leave(worker)
        return web.json_response({})

    async with Worker(load=leaves).listening() as url:
        with pytest.raises(Unavailable, match="left while it was joining"):
            await join(router, url)


async def test_a_worker_that_does_not_answer_is_left_out_of_what_is_told(
    http: aiohttp.ClientSession,
) -> None:
    router, status = Router(http), WorkerStatus("east", 0, 1, 1, 1.0, 1.0, 1)
    there = Worker(status=lambda request: web.Response(body=msgspec.json.encode(status)))
    async with there.listening() as url:
        await join(router, url)
        await join(router, "http://127.0.0.1:1", "west")
        assert await router.regions() == {"east": status}


async def test_who_leaves_a_stream_leaves_its_worker_free_at_once(
    http: aiohttp.ClientSession,
) -> None:
    frames = [GenerateFrame(token=Token(7, -1.0, 0)), GenerateFrame(sample=SAMPLED)]
    body = b"".join(frame.packed() for frame in frames)
    worker, router = Worker(generate=lambda request: web.Response(body=body)), Router(http)
    async with worker.listening() as url:
        await join(router, url)
        stream = router.stream(ASK)
        assert isinstance(await anext(stream), Token)
        (known,) = router.fleet.workers
        assert known.active == 1
        await stream.aclose()
        assert known.active == 0


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (GenerateFrame(status=408, error="late").packed(), DeadlineExceeded),
        (GenerateFrame(status=422, error="never").packed(), ValueError),
    ],
)
async def test_what_was_said_before_an_error_is_handed_out_first(
    http: aiohttp.ClientSession, last: bytes, error: type[Exception]
) -> None:
    body = GenerateFrame(token=Token(7, -1.0, 0)).packed() + last
    worker, router = Worker(generate=lambda request: web.Response(body=body)), Router(http)
    async with worker.listening() as url:
        await join(router, url)
        stream = router.stream(ASK)
        assert await anext(stream) == Token(7, -1.0, 0)
        with pytest.raises(error):
            await anext(stream)
        (known,) = router.fleet.workers
        assert known.active == 0


async def test_a_stream_that_is_no_stream_is_a_failure_of_its_worker(
    http: aiohttp.ClientSession,
) -> None:
    said, rest = GenerateFrame(token=Token(7, -1.0, 0)), GenerateFrame(sample=SAMPLED)
    broken = Worker(generate=lambda request: web.Response(body=said.packed() + b"\0\0\0\1\xc1"))
    other, router = Worker(generate=lambda request: web.Response(body=rest.packed())), Router(http)
    async with broken.listening() as one, other.listening() as two:
        await join(router, one)
        stream = router.stream(ASK)
        assert await anext(stream) == said.token
        await join(router, two)
        (sample,) = [event async for event in stream]
        assert sample == replace(SAMPLED, regions=(RegionSpan("east", 3),))
        assert [worker.url for worker in router.fleet.workers] == [two]
        begun = msgspec.msgpack.decode(other.asked[0][1], type=GenerateRequest).request.begun
        assert begun == (said.token,)


async def test_the_worker_of_benchmarks_goes_on_behind_what_was_begun(
    http: aiohttp.ClientSession,
) -> None:
    pace = Pace(words=(5, 6, 7), end=2, num_tokens=4, first_s=0.0, each_s=0.0)
    asked = replace(ASK, max_tokens=4)
    whole = fake_sample(pace, asked)
    said = [
        Token(token, logprob, 0)
        for token, logprob in zip(whole.tokens, whole.logprobs, strict=True)
    ]
    server = await asyncio.get_running_loop().create_server(
        lambda: FakeWorker(pace), "127.0.0.1", 0
    )
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with http.get(f"{url}/status") as response:
            status = msgspec.json.decode(await response.read(), type=WorkerStatus)
        assert [*expand_spans(whole.versions)] == [status.version] * 4
        for begun in (0, 3, 4):
            body = GenerateRequest(replace(asked, begun=tuple(said[:begun])), -1, stream=True)
            data = msgspec.msgpack.encode(body)
            async with http.post(f"{url}/generate", data=data) as response:
                frames = list(FrameReader().push(await response.read()))
            assert [frame.token for frame in frames[:-1]] == said[begun:]
            assert frames[-1].sample == whole


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_may_be_split_anywhere(size: int) -> None:
    sample = Sample(
        tokens=(1,), logprobs=(-0.5,), versions=(), finish_reason="stop", experts=bytes(100)
    )
    said = [
        *(GenerateFrame(token=Token(n, -0.5, 0)) for n in range(5)),
        GenerateFrame(sample=sample),
        GenerateFrame(status=503, error="gone"),
    ]
    data = b"".join(frame.packed() for frame in said)
    reader = FrameReader()
    parts = [data[place : place + size] for place in range(0, len(data) - 1, size)]
    assert [frame for part in parts for frame in reader.push(part)][:6] == said[:6]
    assert list(reader.push(b"")) == []
