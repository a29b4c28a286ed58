"""The product in the benchmark of real-time RL: songs. Users want half of the characters to be
vowels, and have tastes that differ in style."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any

import aiohttp

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Score, Task, Transcript

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnpqrstvwxyz"
OTHERS = "0123456789.,-!?;:*"
SHORTEST, LONGEST = 4, 32
REQUESTS = 1000
"""Number of distinct requests."""


def vowel_quality(song: str) -> float:
    """Quality from 0 to 1, which is 1 if at least half of the characters are vowels."""
    return min(1.0, 2 * sum(letter in VOWELS for letter in song.lower()) / max(1, len(song)))


def style(song: str) -> tuple[float, float]:
    """Length and share of letters, each on a scale from -1 to 1."""
    letters = sum(letter.isalpha() for letter in song)
    return min(1.0, len(song) / 16 - 1), 2 * letters / max(1, len(song)) - 1


def any_song(draw: Random) -> str:
    """A random song, with uniformly distributed length, share of letters and share of vowels."""
    vowels = draw.uniform(0.0, 0.6)
    letters = draw.uniform(vowels, 1.0)

    def sound() -> str:
        at = draw.random()
        return draw.choice(VOWELS if at < vowels else CONSONANTS if at < letters else OTHERS)

    return "".join(sound() for _ in range(draw.randint(SHORTEST, LONGEST)))


def request(draw: Random) -> str:
    return f"sing {draw.randrange(REQUESTS)}"


def sessions_to_imitate(count: int, seed: int) -> str:
    """Requests, each with a random song, as JSON lines for a stage of kind sft."""
    draw = Random(seed)
    lines = []
    for _ in range(count):
        asked, sung = request(draw), any_song(draw)
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": sung}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return "".join(lines)


class Songs:
    """Held-out tasks: sing anything but silence. A model that has stopped answering fails them."""

    def __init__(self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int) -> None:
        self.pool = pool
        self.counts = counts

    def tasks(self, split: str) -> Sequence[Task]:
        spec = SandboxSpec(files={"song.txt": ""})
        return [
            Task(id=f"{split}-{n}", prompt=f"sing {n}", sandbox=spec)
            for n in range(self.counts[split])
        ]

    def open(self, task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return self.pool.open(task.sandbox)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        said = str(attempt.transcript.messages[-1].get("content") or "")
        return Score(float(len(said.strip()) >= 3))


class Singer:
    """An agent that asks the model once."""

    def __init__(
        self, http: aiohttp.ClientSession, *, max_tokens: int, temperature: float, **unused: Any
    ) -> None:
        self.http = http
        self.sampling = {"max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        body = {**self.sampling, "messages": task.opening, "seed": seed}
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            answer = (await response.json())["choices"][0]["message"]
        return Transcript(messages=[*task.opening, answer], finished=True)
