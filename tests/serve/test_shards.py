"""Several gateways: every session has one shard, whichever gateway gets the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
import pytest

from etude.core.errors import EtudeError
from etude.core.remote import RemoteTask, RolloutRequest, SessionOffer
from etude.serve import process
from etude.serve.gateway import Gateway, http_client
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.session_journal import SessionJournal
from etude.serve.shards import FORWARDED, ShardedApp, Shards
from etude.serve.worker import keep_joined
from tests.serve.client import converse, post, segments, status, until_up
from tests.serve.conftest import Store, worker


@asynccontextmanager
async def two_gateways(store: Store, http: aiohttp.ClientSession) -> AsyncIterator[list[str]]:
    listeners = [process.bind("127.0.0.1", 0, None) for _ in range(2)]
    urls = [process.url_of(listener) for listener in listeners]
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(http_client())
        for index, listener in enumerate(listeners):
            shards = Shards(urls, index)
            made = Gateway(Router(http), store.objects, store.files, max_context=256, shards=shards)
            journal = SessionJournal(store.objects, shards.name)
            made.restore(journal)
            stack.callback(journal.close)
            app = ShardedApp(create_app(made.routes(), None), shards, plain)
            await stack.enter_async_context(process.serving(app, listener))
        yield urls


def offer(session: str) -> bytes:
    asked = RolloutRequest(
        id=session, task=RemoteTask(id="t"), base_url="", token="", seed=0, deadline=0.0
    )
    return msgspec.json.encode(SessionOffer(request=asked, timeout_s=9.0))


async def test_any_gateway_answers_for_any_session(
    store: Store, http: aiohttp.ClientSession
) -> None:
    names = [f"s{n}" for n in range(6)]
    async with two_gateways(store, http) as urls, worker(store, "east") as (east, own):
        joined = [asyncio.create_task(keep_joined(east, own, url, None)) for url in urls]
        await post(http, f"{urls[0]}/load", {"version": 1})
        for url in urls:
            await until_up(http, url, 1)
        assert [(await status(http, url))["version"] for url in urls] == [1, 1]
        for n, name in enumerate(names):
            await converse(http, urls[n % 2], name, turns=2, max_tokens=4)
        recorded = [[await segments(http, url, name) for name in names] for url in urls]
        assert recorded[0] == recorded[1] and all(len(each) == 1 for each in recorded[0])
        body = {"messages": [{"role": "user", "content": "read"}], "stream": True, "max_tokens": 4}
        for url in urls:
            async with http.post(f"{url}/s/s0/v1/chat/completions?a=b", json=body) as response:
                assert response.status == 200 and "x-request-id" in response.headers
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
        for task in joined:
            task.cancel()
        folders = {key.split("/")[1] for key in store.objects.list("sessions")}
        assert folders == {"0-of-2", "1-of-2"}
        # both hold some of them
        assert all(store.objects.size(f"sessions/{folder}") > 0 for folder in folders)
    async with two_gateways(store, http) as urls:
        assert [await segments(http, urls[0], name) for name in names[1:]] == recorded[0][1:]


async def test_sessions_for_others_to_run_have_one_desk(
    store: Store, http: aiohttp.ClientSession
) -> None:
    async with two_gateways(store, http) as urls:
        for n in range(4):  # about two belong to each of them
            url = f"{urls[n % 2]}/v1/sessions/s{n}"
            async with http.put(url, data=offer(f"s{n}")) as response:
                assert response.status == 204
        claimed = [(await post(http, f"{url}/v1/sessions", {"wait_s": 0}))["id"] for url in urls]
        assert claimed == ["s0", "s1"]
        for n in range(4):
            async with http.delete(f"{urls[1 - n % 2]}/s/s{n}") as response:
                assert response.status == 204
        for url in urls:
            async with http.post(f"{url}/v1/sessions", json={"wait_s": 0}) as response:
                assert response.status == 204, "what is over is given to nobody"
            async with http.get(f"{url}/v1/sessions/s0") as response:
                assert response.status == 404


async def test_only_what_was_recorded_can_be_scored(
    store: Store, http: aiohttp.ClientSession
) -> None:
    """The desk checks only the sessions of its own shard; for others it relies on the
    controller."""
    here = Shards(["here", "away"], 0)
    async with two_gateways(store, http) as urls, worker(store, "east", urls[0]):
        await post(http, f"{urls[0]}/load", {"version": 1})
        await until_up(http, urls[0], 1)
        names = [f"s{n}" for n in range(8)]
        away = [name for name in names if here.elsewhere(f"/s/{name}") is not None]
        silent, spoken = [name for name in names if name not in away][:2]
        await converse(http, urls[0], spoken, turns=1, max_tokens=4)
        for name, expected in ((silent, 400), (spoken, 204), (away[0], 204)):
            async with http.put(f"{urls[0]}/v1/sessions/{name}", data=offer(name)) as response:
                assert response.status == 204
            result = {"status": "done", "score": {"reward": 0.5}}
            score = f"{urls[0]}/v1/sessions/{name}/score"
            async with http.post(score, json=result) as response:
                assert response.status == expected, name


async def test_a_gateway_that_is_away_is_named(http: aiohttp.ClientSession, store: Store) -> None:
    away = "http://127.0.0.1:9"
    shards = Shards(["http://here", away], 0)
    made = Gateway(Router(http), store.objects, store.files, max_context=256, shards=shards)
    theirs = next(name for name in map(str, range(9)) if shards.elsewhere(f"/s/{name}/v1"))
    listener = process.bind("127.0.0.1", 0, None)
    url = process.url_of(listener)
    async with process.serving(ShardedApp(create_app(made.routes(), None), shards, http), listener):
        for path in (f"/s/{theirs}/segments", "/load"):
            method = "POST" if path == "/load" else "GET"
            async with http.request(method, url + path, json={"version": 0}) as response:
                assert response.status == 503
                assert away in (await response.json())["error"]["message"]
        async with http.get(f"{url}/s/{theirs}/segments", headers={FORWARDED: "1"}) as response:
            assert response.status == 421
            assert (await response.json())["error"]["code"] == "wrong_shard"
    with pytest.raises(EtudeError, match="no shard 2: --shards lists 2"):
        Shards(["a", "b"], 2)


def test_sessions_are_spread_and_stay() -> None:
    urls = ["http://a", "http://b", "http://c"]
    every = [Shards(urls, index) for index in range(3)]
    owned = [0, 0, 0]
    for n in range(300):
        path = f"/s/g{n:06d}.1/v1/chat/completions"
        places = [shards.elsewhere(path) for shards in every]
        owner = places.index(None)
        assert [place for place in places if place] == [urls[owner]] * 2
        owned[owner] += 1
    assert min(owned) > 60
    assert {shards.elsewhere("/v1/responses") for shards in every} == {None}
