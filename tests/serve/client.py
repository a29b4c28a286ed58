"""Requests of a harness and of a controller to a gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from etude.core.types import Segment

TOOLS = [{"type": "function", "function": {"name": "test", "parameters": {}}}]


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def status(http: aiohttp.ClientSession, gateway: str) -> Any:
    async with http.get(f"{gateway}/status") as response:
        return await response.json()


async def until_up(http: aiohttp.ClientSession, gateway: str, count: int) -> None:
    while (await status(http, gateway))["up"] != count:
        await asyncio.sleep(0.02)


async def converse(
    http: aiohttp.ClientSession, gateway: str, session: str, turns: int, max_tokens: int = 16
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "read area.py"}]
    for turn in range(turns):
        ask = {"messages": messages, "tools": TOOLS, "max_tokens": max_tokens, "seed": turn}
        answer = await post(http, f"{gateway}/s/{session}/v1/chat/completions", ask)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "call a tool"}]


async def segments(http: aiohttp.ClientSession, gateway: str, session: str) -> tuple[Segment, ...]:
    async with http.get(f"{gateway}/s/{session}/segments") as response:
        assert response.status == 200
        return msgspec.msgpack.decode(await response.read(), type=tuple[Segment, ...])


async def versions(http: aiohttp.ClientSession, gateway: str, session: str) -> set[int]:
    return {
        span.version
        for segment in await segments(http, gateway, session)
        for span in segment.versions
    }
