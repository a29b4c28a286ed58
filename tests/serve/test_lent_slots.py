"""RL on the slots that users leave: it keeps to its limit, gives way, and its sessions know."""

from __future__ import annotations

import asyncio
import time

import aiohttp

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
    for _ in range(4):  # users are not held up by the limit, nor by who waits for it
        await post(http, f"{gateway}/v1/completions", ASKED)
    assert not waits.done()
    for thread in threads:
        thread.limit_batch(8)
    await waits
    assert await disturbed(http, gateway, "waits")


async def test_what_users_wait_for_is_measured(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    """By the gateway, for whoever lends whole workers, and by the worker, for its slots."""
    assert (await status(http, gateway))["users_ttft_p99_s"] is None
    policies = [SlotPolicy(slots=8, max_ttft_s=0.0) for _ in regions]
    for worker, policy in zip(regions, policies, strict=True):
        worker.engine_thread.lending = policy
        worker.engine_thread.num_batch = 1
    async with http.post(f"{gateway}/v1/completions", json={**ASKED, "stream": True}) as response:
        await response.read()
    assert (await status(http, gateway))["users_ttft_p99_s"] > 0.0
    assert sorted(policy.decide(0.0) for policy in policies) == [4, 8]
    await converse(http, gateway, "s", turns=1)
    assert sorted(policy.decide(0.0) for policy in policies) == [5, 8], "a rollout is no user"


async def test_outside_its_hours_a_worker_is_for_users_alone(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    """What it was sampling goes on elsewhere, and comes to the same end."""
    await converse(http, gateway, "expected", turns=1, max_tokens=60)
    east, west = (worker.engine_thread for worker in regions)
    for thread in (east, west):
        thread.limit_batch(0)
    moved = asyncio.create_task(converse(http, gateway, "moved", turns=1, max_tokens=60))
    while not east.num_waiting + west.num_waiting:
        await asyncio.sleep(0.01)
    first, other = (east, west) if east.num_waiting else (west, east)
    far = (time.gmtime().tm_hour + 12) % 24  # from now, whenever this runs
    hours = (f"{far:02d}:00-{far:02d}:01",)
    first.lending = SlotPolicy(slots=8, max_ttft_s=1.0, hours=hours)
    other.limit_batch(8)
    lending = asyncio.create_task(first.lend())
    await moved
    lending.cancel()
    own, elsewhere = [await segments(http, gateway, name) for name in ("expected", "moved")]
    assert own[0].tokens == elsewhere[0].tokens
    while await states(http, gateway) != ["draining", "live"]:  # at its next heartbeat
        await asyncio.sleep(0.02)
