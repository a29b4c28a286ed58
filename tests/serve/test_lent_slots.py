"""RL on the slots that users leave: it keeps to its limit, gives way, and its sessions know."""

from __future__ import annotations

import asyncio

import aiohttp

from etude.core.lending import SlotPolicy
from etude.serve.worker import Worker
from tests.serve.client import converse, post, status

ASKED = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1, "stop_token_ids": []}


async def disturbed(http: aiohttp.ClientSession, gateway: str, session: str) -> bool:
    async with http.get(f"{gateway}/s/{session}/disturbed") as response:
        return bool(await response.json())


async def test_a_session_that_gave_way_is_disturbed(
    regions: list[Worker], gateway: str, http: aiohttp.ClientSession
) -> None:
    await converse(http, gateway, "before", turns=1)
    assert not await disturbed(http, gateway, "before")
    threads = [worker.engine_thread for worker in regions]
    for thread in threads:
        thread._between_steps.put(lambda thread=thread: thread.engine.limit_batch(0))
    waits = asyncio.create_task(converse(http, gateway, "waits", turns=1))
    while not sum(thread.num_waiting for thread in threads):
        await asyncio.sleep(0.01)
    for _ in range(4):  # users are not held up by the limit, nor by who waits for it
        await post(http, f"{gateway}/v1/completions", ASKED)
    assert not waits.done()
    for thread in threads:
        thread._between_steps.put(lambda thread=thread: thread.engine.limit_batch(8))
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
