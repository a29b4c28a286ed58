"""Between gateway and worker, requests and samples arrive as they were sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import msgspec
import pytest

from etude.core.sampling import RegionSpan, Request, Sample, SamplingParams, VersionSpan
from etude.serve.fake import Scripted
from etude.serve.http import DeadlineExceeded, create_app
from etude.serve.router import Router
from etude.serve.worker import Worker
from etude.serve.worker_protocol import GenerateRequest, JoinRequest
from tests.serve.conftest import served
from tests.serve.test_api import FILES, TOKENIZER, said

FULL = Request(
    prompt=(5, 6, 7), max_tokens=3, seed=2**63 - 1,
    params=SamplingParams(temperature=0.5, top_p=0.9, top_k=7, grammar='start: "a" | "b"'),
    stop_token_ids=(1, 2), stop=("zz", "日本"), top_logprobs=2, experts_from=1, prediction=(8, 9),
    drafts=((3, 4), (5,)), priority="batch",
)  # fmt: skip
SAMPLE = Sample(
    tokens=(7, 8), logprobs=(-0.1, -1 / 3), versions=(VersionSpan(1, 1), VersionSpan(2, 1)),
    finish_reason="length", experts=b"\x00\xff\x01", accepted_draft_tokens=1,
    rejected_draft_tokens=4, top_logprobs=(((7, -0.1), (9, -2.5)), ((8, -1 / 3),)),
)  # fmt: skip


class FakeEngine(Scripted):
    """Everything that a worker needs of an engine to answer."""

    tokenizer, max_context = TOKENIZER, 64

    def __init__(self, answer: Sample | Exception = SAMPLE, version: int = 2) -> None:
        super().__init__([said("test")], version)
        self._answer = answer

    async def sample(self, request: Request) -> Sample:
        self.asked.append(request)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def gauges(self) -> dict[str, float]:
        return {}


@asynccontextmanager
async def router_to(
    engine: FakeEngine, http: aiohttp.ClientSession, live: int = 0
) -> AsyncIterator[tuple[Router, str]]:
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    async with served(create_app(worker.routes(), None)) as url:
        router = Router(http, live)
        await router.join(JoinRequest(url, "east", engine.version))
        yield router, url


async def test_nothing_is_lost_on_the_way(http: aiohttp.ClientSession) -> None:
    engine = FakeEngine()
    async with router_to(engine, http) as (router, _):
        for request in (FULL, Request(prompt=(5,), max_tokens=1, seed=0)):
            assert await router.sample(request) == replace(SAMPLE, regions=(RegionSpan("east", 2),))
            assert engine.asked[-1] == request


async def test_what_is_left_of_a_deadline_goes_along(http: aiohttp.ClientSession) -> None:
    engine = FakeEngine()
    async with router_to(engine, http) as (router, _):
        await router.sample(replace(FULL, deadline_s=600.0))
    (asked,) = engine.asked
    assert asked.deadline_s is not None and 0 < asked.deadline_s <= 600.0
    assert replace(asked, deadline_s=None) == FULL


async def test_a_refusal_is_told_from_a_failure(http: aiohttp.ClientSession) -> None:
    """A request that can never be answered, or a passed deadline, is not the worker's fault: the
    worker stays."""
    for error, kind in ((ValueError("top_p must be .."), ValueError), (DeadlineExceeded(),) * 2):
        expected = kind if isinstance(kind, type) else type(kind)
        async with router_to(FakeEngine(error), http) as (router, url):
            with pytest.raises(expected, match=str(error)):
                await router.sample(FULL)
            assert [worker.url for worker in router.fleet.up] == [url]


@pytest.mark.parametrize(("least", "status"), [(-1, 200), (2, 200), (3, 503)])
async def test_older_weights_than_promised_do_not_answer(
    http: aiohttp.ClientSession, least: int, status: int
) -> None:
    engine = FakeEngine(version=2)
    body = msgspec.msgpack.encode(GenerateRequest(FULL, least))
    async with (
        router_to(engine, http) as (_, url),
        http.post(f"{url}/generate", data=body) as response,
    ):
        assert (response.status, len(engine.asked)) == (status, int(status == 200))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        msgspec.msgpack.encode({"request": {"prompt": ["a"]}, "min_weight_version": 0}),
        msgspec.msgpack.encode(
            {"request": {"prompt": [1], "max_tokens": 1, "seed": 1, "priority": "soon"},
             "min_weight_version": 0}
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_read_is_refused(http: aiohttp.ClientSession, body: bytes) -> None:
    async with (
        router_to(FakeEngine(), http) as (_, url),
        http.post(f"{url}/generate", data=body) as response,
    ):
        assert response.status == 400
        assert "request body" in (await response.json())["error"]["message"]
