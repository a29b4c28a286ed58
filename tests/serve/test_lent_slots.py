"""RL on slots that users leave free: it keeps to its limit, gives way to users, and its sessions
are marked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time

import aiohttp
import pytest

from etude.core.lending import SlotPolicy
from etude.serve.worker import Worker
from tests.serve.client import converse, post, segments, status

ASKED = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "stop_token_ids": []}


async def disturbed(http: aiohttp.ClientSession, gateway: str, session: str) -> bool:
    async with http.get(f"{gateway}/s/{session}/disturbed") as response:
        return bool(await response.json())


async def states(http: aiohttp.ClientSession, gateway: str) -> list[str]:
    return sorted(each["state"] for each in (await status(http, gateway))["workers"].values())


async def test_a_session_that_gave_way_is_disturbed(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    await converse(http, gateway, "before", turns=1)
    assert not await disturbed(http, gateway, "before")
    threads = [worker.engine_thread for worker in regions]
    for thread in threads:
        thread.limit_batch(0)
    waits = asyncio.create_task(converse(http, gateway, "waits", turns=1))
    while not sum(thread.num_waiting for thread in threads):
        await asyncio.sleep(0.01)
    for _ in range(4):  # Neither the limit nor the requests waiting for it hold up users.
        await post(http, f"{gateway}/v1/completions", ASKED)
    assert not waits.done()
    for thread in threads:
        thread.limit_batch(8)
    await waits
    assert await disturbed(http, gateway, "waits")


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_what_users_wait_for_is_measured(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession, stream: bool
) -> None:
    """Measured by the gateway, which lends whole workers, and by the worker, which lends slots;
    streamed or not."""
    assert (await status(http, gateway))["users_ttft_p99_s"] is None
    policies = [SlotPolicy(slots=8, max_ttft_s=0.0) for _ in regions]
    for worker, policy in zip(regions, policies, strict=True):
        worker.engine_thread.lending = policy
    await converse(http, gateway, "s", turns=1)
    assert (await status(http, gateway))["users_ttft_p99_s"] is None, "a rollout is no user"
    assert [policy.decide(0.0) for policy in policies] == [8, 8]
    sampling = asyncio.create_task(keep_sampling(http, gateway))
    asked = {**ASKED, "stream": stream}
    while [policy.decide(0.0) for policy in policies] == [8, 8]:
        async with http.post(f"{gateway}/v1/completions", json=asked) as response:
            await response.read()
    assert (await status(http, gateway))["users_ttft_p99_s"] > 0.0
    sampling.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sampling


async def keep_sampling(http: aiohttp.ClientSession, gateway: str) -> None:
    for number in itertools.count():
        names = [f"s{number}{letter}" for letter in "abcd"]
        sessions = [converse(http, gateway, name, turns=1, max_tokens=60) for name in names]
        await asyncio.gather(*sessions)


async def test_an_engine_that_may_not_begin_rests(
    regions: list[Worker],
    gateway: str,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rested, pause_s = threading.Event(), 0.00123
    monkeypatch.setattr("etude.serve.engine_thread.REST_S", pause_s)
    monkeypatch.setattr("time.sleep", lambda s: rested.set() if s == pause_s else None)
    for worker in regions:
        worker.engine_thread.limit_batch(0)
    waits = asyncio.create_task(converse(http, gateway, "waits", turns=1))
    await asyncio.to_thread(rested.wait)
    for worker in regions:
        worker.engine_thread.limit_batch(8)
    await waits


async def test_outside_its_hours_a_worker_is_for_users_alone(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    """A request continues on another worker, and samples the same tokens."""
    await converse(http, gateway, "expected", turns=1, max_tokens=60)
    east, west = (worker.engine_thread for worker in regions)
    for thread in (east, west):
        thread.limit_batch(0)
    moved = asyncio.create_task(converse(http, gateway, "moved", turns=1, max_tokens=60))
    while not east.num_waiting + west.num_waiting:
        await asyncio.sleep(0.01)
    first, other = (east, west) if east.num_waiting else (west, east)
    far = (time.gmtime().tm_hour + 12) % 24  # far from now, whenever this runs
    hours = (f"{far:02d}:00-{far:02d}:01",)
    first.lending = SlotPolicy(slots=8, max_ttft_s=1.0, hours=hours)
    other.limit_batch(8)
    lending = asyncio.create_task(first.lend())
    await moved
    lending.cancel()
    own, elsewhere = [await segments(http, gateway, name) for name in ("expected", "moved")]
    assert own[0].tokens == elsewhere[0].tokens
    while await states(http, gateway) != ["draining", "live"]:  # known from its next heartbeat
        await asyncio.sleep(0.02)
