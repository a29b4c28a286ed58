"""The smallest environment and the smallest agent: a model with fresh weights learns to answer in
vowels, in a minute.

etude try examples/custom_env.toml             what nothing, a good song and a session earn
etude run examples/custom_env.toml             the reward rises from 0.5 to nearly 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Part, Score, Task, Transcript


class Vowels:
    """An Environment: its tasks, their sandboxes, and the score of an attempt."""

    def __init__(self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int) -> None:
        self.pool = pool
        self.counts = counts

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            Task(
                id=f"{split}-{n}",
                prompt=f"sing {n}",
                sandbox=SandboxSpec(files={"song.txt": ""}),
            )
            for n in range(self.counts[split])
        ]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self.pool.open(task.sandbox)

    def solution(self, task: Task) -> Mapping[str, str]:
        return {"song.txt": "aeiou"}  # for `etude try`; no agent sees it

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        song = await sandbox.read("song.txt")
        vowels = sum(letter in "aeiou" for letter in song.lower())
        # A song with half vowels is solved (reward 1); below that, every vowel counts.
        reward = min(1.0, 2 * vowels / max(1, len(song)))
        return Score(reward, parts=(Part("vowels", vowels, evidence=song),))


class Singer:
    """An Agent: it asks the model once and writes the answer to the file. Any program that can use
    an OpenAI-compatible URL can take its place."""

    def __init__(
        self, http: aiohttp.ClientSession, *, max_tokens: int, temperature: float, **unused: Any
    ) -> None:
        self.http = http
        self.sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        messages = task.opening
        body = {**self.sampling, "messages": messages, "seed": seed}
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())  # names the wrong field
            answer = (await response.json())["choices"][0]["message"]
        await sandbox.write("song.txt", answer["content"] or "")
        return Transcript(messages=[*messages, answer], finished=True)
