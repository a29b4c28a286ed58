"""An agent that is limited only in its waiting time for the model: an unfinished session must have
waited."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from etude.core.sandbox import Sandbox
from etude.core.types import Task, Transcript

WAIT_S = 8.0


class Impatient:
    def __init__(
        self, session: aiohttp.ClientSession, *, max_tokens: int, temperature: float, **_: Any
    ) -> None:
        self._session = session
        self._sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        messages = task.opening
        url, headers = f"{base_url}/chat/completions", {"Authorization": f"Bearer {api_key}"}
        for turn in range(3):
            body = {**self._sampling, "messages": messages, "seed": seed + turn}
            try:
                async with (
                    asyncio.timeout(WAIT_S),
                    self._session.post(url, json=body, headers=headers) as response,
                ):
                    answer = (await response.json())["choices"][0]["message"]
            except TimeoutError:
                return Transcript(messages=messages, finished=False)
            messages += [answer, {"role": "user", "content": "go on"}]
        return Transcript(messages=messages, finished=True)
