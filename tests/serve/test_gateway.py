"""A gateway and workers, all in one process and over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from etude.core.errors import EtudeError
from etude.core.sampling import Request, SamplingParams, VersionSpan
from etude.serve.gateway import Gateway, serve_gateway
from etude.serve.http import Unavailable, create_app
from etude.serve.router import Router
from etude.serve.tokens import SECRET_VARIABLE
from etude.serve.worker import Worker
from etude.serve.worker_answer import WorkerFailed
from etude.serve.worker_protocol import GenerateRequest
from etude.weights.manifest import read_manifest
from tests.serve.client import converse, post, segments, status, until_up, versions
from tests.serve.conftest import Store, served, worker
from tests.small_model import ROUNDING, plain_logprobs


async def test_recorded_logprobs_are_those_of_the_model(
    regions: list[Worker], gateway: str, store: Store, http: aiohttp.ClientSession
) -> None:
    await asyncio.gather(*(converse(http, gateway, f"s{n}", turns=3) for n in range(6)))
    model = store.model(0)
    recorded = [await segments(http, gateway, f"s{n}") for n in range(6)]
    # the same seeds give the same tokens, whichever worker answered
    assert len({segment.tokens for (segment,) in recorded}) == 1
    for (segment,) in recorded:
        plain = plain_logprobs(model, segment.prompt, segment.tokens).tolist()
        pairs = [
            (a, b)
            for a, b, sampled in zip(segment.logprobs, plain, segment.mask, strict=True)
            if sampled
        ]
        assert [a for a, _ in pairs] == pytest.approx([b for _, b in pairs], abs=ROUNDING)
        assert segment.versions == (VersionSpan(0, len(pairs)),)
    async with http.delete(f"{gateway}/s/s0") as response:
        assert response.status == 204
    async with http.get(f"{gateway}/s/s0/segments") as response:
        assert response.status == 404
    seen = (await status(http, gateway))["regions"]
    assert seen.keys() == {"east", "west"}
    assert all(
        region["version"] == 0 and region["tokens"] > 0 and region["busy_s"] > 0
        for region in seen.values()
    )


async def test_a_harness_may_call_the_model_what_it_likes(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    message = {"role": "user", "content": "read"}
    body = {"model": "gpt-4o", "messages": [message], "max_tokens": 2}
    for place in ("", "/s/s"):
        async with http.post(f"{gateway}{place}/v1/chat/completions", json=body) as response:
            assert response.status == 200 and (await response.json())["model"] == "gpt-4o"


async def test_a_harness_says_what_a_context_is_for(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    url = f"{gateway}/s/s/v1/chat/completions"
    for text, temperature, header in (
        ("read area.py", 1.0, {}),
        ("sum it up", 0.5, {"X-Etude-Segment": "summary"}),
        ("help", 1.0, {"X-Etude-Segment": "subagent"}),
    ):
        body = {"messages": [{"role": "user", "content": text}], "temperature": temperature}
        async with http.post(url, json=body | {"max_tokens": 4}, headers=header) as response:
            assert response.status == 200
    recorded = await segments(http, gateway, "s")
    assert [(segment.kind, segment.parent) for segment in recorded] == [
        ("turns", None),
        ("summary", 0),
        ("subagent", 1),
    ]
    assert [(span.params, span.count) for segment in recorded for span in segment.sampling] == [
        (SamplingParams(temperature=temperature), len(segment.tokens))
        for segment, temperature in zip(recorded, (1.0, 0.5, 1.0), strict=True)
    ]
    async with http.post(url, json=body, headers={"X-Etude-Segment": "dream"}) as response:
        assert response.status == 400
        told = (await response.json())["error"]["message"]
    assert "X-Etude-Segment" in told and "turns, summary, subagent" in told


async def test_workers_prove_what_they_compute_with(
    regions: list[Worker], gateway: str, store: Store, http: aiohttp.ClientSession
) -> None:
    for version in (1, 2):
        await post(http, f"{gateway}/load", {"version": version})
        async with http.get(f"{gateway}/weights") as response:
            held = await response.json()
        root = read_manifest(store.objects, version).root
        assert {worker["region"]: (worker["version"], worker["root"]) for worker in held} == {
            "east": (version, root),
            "west": (version, root),
        }
        assert all(len(worker["pauses_s"]) == version + 1 for worker in held)
    gauges = regions[0].gauges()
    assert 0 < gauges["swap_pause_seconds_p50"] <= gauges["swap_pause_seconds_max"]


async def test_weights_change_under_way_and_nobody_is_dropped(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    sessions = [
        asyncio.create_task(converse(http, gateway, f"s{n}", turns=3, max_tokens=60))
        for n in range(8)
    ]
    while not any(region.report().tokens for region in regions):
        await asyncio.sleep(0)
    await post(http, f"{gateway}/load", {"version": 1})
    await converse(http, gateway, "after", turns=1)
    await asyncio.gather(*sessions)
    assert await versions(http, gateway, "after") == {1}
    for n in range(8):
        for segment in await segments(http, gateway, f"s{n}"):
            assert [span.version for span in segment.versions] == sorted(
                {span.version for span in segment.versions}
            )


async def test_a_session_stays_with_its_worker(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    await converse(http, gateway, "s", turns=4, max_tokens=4)
    assert sorted(region.report().tokens > 0 for region in regions) == [False, True]


async def test_weights_that_are_not_what_was_published_are_not_served(
    regions: list[Worker], gateway: str, store: Store, http: aiohttp.ClientSession
) -> None:
    store.damage(1)
    for version, words in (
        (1, "cannot be restored exactly as published"),
        (7, "version 7 is not published"),
    ):
        async with http.post(f"{gateway}/load", json={"version": version}) as response:
            assert response.status == 502
            assert words in (await response.json())["error"]["message"]
        # they continue with the weights that they have
        assert (await status(http, gateway))["up"] == 2
    await converse(http, gateway, "s", turns=1)
    assert await versions(http, gateway, "s") == {0}


async def test_a_worker_that_cannot_follow_is_taken_out(
    regions: list[Worker],
    gateway: str,
    store: Store,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(version: int) -> None:
        raise ValueError("no disk")

    monkeypatch.setattr(regions[0].engine_thread, "_fetch", broken)
    await post(http, f"{gateway}/load", {"version": 1})
    assert (await status(http, gateway))["up"] == 1
    await asyncio.gather(*(converse(http, gateway, f"s{n}", turns=1) for n in range(4)))
    assert [await versions(http, gateway, f"s{n}") for n in range(4)] == [{1}] * 4
    monkeypatch.undo()
    await until_up(http, gateway, 2)
    assert regions[0].version == 1


async def test_a_worker_that_is_gone_does_not_hold_up_new_weights(
    store: Store, gateway: str, http: aiohttp.ClientSession
) -> None:
    """It has not rejected the weights: it loads them when it returns."""
    async with AsyncExitStack() as stack:
        async with worker(store, "east") as (_, url):
            await post(http, f"{gateway}/workers", {"url": url, "region": "east", "version": 0})
        await post(http, f"{gateway}/load", {"version": 1})
        assert (await status(http, gateway))["up"] == 0
        await stack.enter_async_context(worker(store, "east", gateway))
        await until_up(http, gateway, 1)
        await converse(http, gateway, "s", turns=1)
    assert await versions(http, gateway, "s") == {1}


async def test_a_request_is_not_sent_for_ever(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, asked = Router(http), []

    async def failing(worker: object, body: object) -> None:
        asked.append(worker)
        raise WorkerFailed("out of memory")

    monkeypatch.setattr(router, "_ask", failing)
    for number in range(9):
        router.fleet.join(f"http://127.0.0.1:{number}", "east", 0, 0.0)
    with pytest.raises(
        Unavailable, match="4 workers in a row failed, the last with: out of memory"
    ):
        await router.sample(Request(prompt=(1,), max_tokens=1, seed=0))
    assert len(set(asked)) == 4


async def test_requests_wait_for_the_first_worker(
    store: Store, gateway: str, http: aiohttp.ClientSession
) -> None:
    await post(http, f"{gateway}/load", {"version": 1})  # a promise, which the workers will keep
    waiting = asyncio.create_task(converse(http, gateway, "s", turns=1))
    async with worker(store, "east", gateway):
        await waiting
    assert await versions(http, gateway, "s") == {1}


async def test_a_gateway_that_was_restarted_finds_its_workers(
    store: Store, http: aiohttp.ClientSession
) -> None:
    def made() -> Gateway:
        return Gateway(
            Router(http),
            store.objects,
            store.files,
            max_context=store.config.max_position_embeddings,
        )

    async with AsyncExitStack() as stack:
        async with served(create_app(made().routes(), None)) as url:
            await post(http, f"{url}/load", {"version": 1})
            await stack.enter_async_context(worker(store, "east", url))
            await until_up(http, url, 1)
        async with served(create_app(made().routes(), None), port=int(url.rpartition(":")[2])):
            await converse(http, url, "s", turns=1)
            assert await versions(http, url, "s") == {1}


async def test_a_worker_refuses_what_its_weights_are_too_old_for(
    store: Store, http: aiohttp.ClientSession
) -> None:
    async with worker(store, "east") as (_, url):
        for least, loaded in ((0, None), (2, 1)):
            if loaded is not None:
                await post(http, f"{url}/load", {"version": loaded})
            asked = GenerateRequest(Request(prompt=(1,), max_tokens=1, seed=0), least)
            body = msgspec.msgpack.encode(asked)
            async with http.post(f"{url}/generate", data=body) as response:
                assert response.status == 503


async def test_a_client_that_goes_away_leaves_no_work_behind(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    asked = {"messages": [{"role": "user", "content": "test"}], "logprobs": False}
    before, request, seeds = 0, None, itertools.count()
    while not any(region.report().running for region in regions):
        if request is None or request.done():  # it may have ended before it was observed
            before = sum(region.report().tokens for region in regions)
            told = asked | {"seed": next(seeds)}
            request = asyncio.create_task(post(http, f"{gateway}/s/s/v1/chat/completions", told))
        await asyncio.sleep(0)
    assert request is not None
    request.cancel()
    while any(region.report().running or region.report().waiting for region in regions):
        await asyncio.sleep(0.01)
    assert sum(region.report().tokens for region in regions) == before


async def test_pools_are_for_production_mode(store: Store, http: aiohttp.ClientSession) -> None:
    made = Gateway(Router(http), store.objects, store.files, max_context=64)
    asked = {"url": "http://127.0.0.1:1", "region": "east", "version": 0, "pool": "blue"}
    async with (
        served(create_app(made.routes(), None)) as url,
        http.post(f"{url}/workers", json=asked) as response,
    ):
        assert response.status == 400
        said = (await response.json())["error"]
    assert said["message"] == "pools need a gateway in production mode"
    assert said["param"] == "pool" and not made.router.fleet.workers


async def test_production_mode_needs_tokens(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(EtudeError, match=f"needs tokens: set {SECRET_VARIABLE}"):
        await serve_gateway(store_url=store.url, port=0, production=tmp_path / "production.toml")
