"""A relay in each region: its workers together read each object of the weights only once from the
store."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from obstore.store import MemoryStore

from etude.core.types import VersionRef
from etude.serve.access import SignedTokens
from etude.serve.http import create_app
from etude.serve.relay import ShardRelay
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.objects import Objects
from etude.weights.cache import HostCache
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.relay import PAUSE_S, TOKEN_VARIABLE, Relay
from tests.serve.conftest import served
from tests.weights.test_weights import Tensors, bits, larger, run

REGIONS, WORKERS, VERSIONS = 2, 6, 4


class Counted(Objects):
    """Counts only the bytes of shards; manifests are small, and everybody reads them."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store, "s3://fake")
        self.shard_bytes = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.shard_bytes += len(data) if "/shards/" in key or "/objects/" in key else 0
        return data


@pytest.fixture(scope="module")
def published() -> tuple[MemoryStore, dict[int, Tensors]]:
    store = MemoryStore()
    publisher = Publisher(Chain(Objects(store, "s3://fake")))
    return store, run(publisher, larger(1), range(1, VERSIONS + 1))


async def test_a_region_downloads_each_version_once(
    published: tuple[MemoryStore, dict[int, Tensors]], tmp_path: Path
) -> None:
    store, made = published
    alone = Counted(store)
    reader = Follower(Chain(alone))
    for version in made:
        reader.fetch(version)
    stores, loop = [Counted(store) for _ in range(REGIONS)], asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        # Threads of their own: the relays need those of the loop.
        workers = stack.enter_context(ThreadPoolExecutor(REGIONS * WORKERS))
        followers: list[Follower] = []
        for number, objects in enumerate(stores):
            relay = ShardRelay(Chain(objects), HostCache(tmp_path / str(number)))
            url = await stack.enter_async_context(served(create_app(relay.routes(), None)))
            followers += [Follower(Chain(Counted(store)), relay=Relay(url)) for _ in range(WORKERS)]
        for version, tensors in made.items():
            fetched = await asyncio.gather(
                *(loop.run_in_executor(workers, each.fetch, version) for each in followers)
            )
            assert all(bits(each) == bits(tensors) for each in fetched)
    direct = [each.chain.objects.shard_bytes for each in followers]  # type: ignore[attr-defined]
    assert sum(direct) == 0, "no worker has read the store for them"
    relayed = sum(objects.shard_bytes for objects in stores)
    assert 0 < relayed <= 1.1 * REGIONS * alone.shard_bytes


async def test_whatever_is_wrong_with_a_relay_costs_a_download(
    published: tuple[MemoryStore, dict[int, Tensors]], tmp_path: Path
) -> None:
    store, made = published

    class Lying(ShardRelay):
        async def shard(self, http):  # type: ignore[no-untyped-def]
            response = await super().shard(http)
            response.body = response.body[:-1] + b"?"
            return response

    lying = Lying(Chain(Counted(store)), HostCache(tmp_path))
    empty = ShardRelay(Chain(Counted(MemoryStore())), HostCache(tmp_path / "empty"))
    async with (
        served(create_app(lying.routes(), None)) as one,
        served(create_app(empty.routes(), None)) as other,
    ):
        for url in (one, other, "http://127.0.0.1:1"):
            follower = Follower(Chain(Counted(store)), relay=Relay(url))
            got = await asyncio.to_thread(follower.fetch, VERSIONS)
            assert bits(got) == bits(made[VERSIONS]), url


def test_a_relay_that_does_not_answer_is_waited_for_once(
    published: tuple[MemoryStore, dict[int, Tensors]],
) -> None:
    store, made = published
    now = 0.0
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        silent.setblocking(False)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        relay = Relay(url, timeout_s=0.2, now=lambda: now)
        follower = Follower(Chain(Counted(store)), relay=relay)
        for version, tensors in made.items():
            assert bits(follower.fetch(version)) == bits(tensors)
        assert calls(silent) == 1
        now = PAUSE_S
        assert bits(Follower(Chain(Counted(store)), relay=relay).fetch(1)) == bits(made[1])
        assert calls(silent) == 1


def calls(listener: socket.socket) -> int:
    """The number of connections since the last call."""
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


async def test_a_relay_is_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    store, tokens = Objects(MemoryStore(), "s3://fake"), TokenAuthority("secret" * 8)
    chain = Chain(store)
    hash = chain.put_shard(1, 1, b"bytes")
    relay = ShardRelay(chain, HostCache(tmp_path))
    target = VersionRef(1, 1, "")
    async with served(create_app(relay.routes(), SignedTokens(tokens))) as url:
        for scope, found in ((Scope.WORKER, b"bytes"), (Scope.USER, None)):
            monkeypatch.setenv(TOKEN_VARIABLE, tokens.mint(scope, "x", 600.0))
            assert await asyncio.to_thread(Relay(url).shard, target, hash) == found
        monkeypatch.setenv(TOKEN_VARIABLE, tokens.mint(Scope.WORKER, "x", 600.0))
        for wrong in ("f" * 64, "../../config.json", "x"):
            assert await asyncio.to_thread(Relay(url).shard, target, wrong) is None
        headers = {"Authorization": f"Bearer {tokens.mint(Scope.WORKER, 'x', 600.0)}"}
        async with http.get(f"{url}/shards/1/1/{'F' * 64}", headers=headers) as response:
            assert response.status == 404 and "is not a hash" in await response.text()
