"""The task of the benchmark `trl` for both sides: prompts, reward and settings. It imports neither
torch nor TRL, since each side imports it from a virtual environment of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Score, Task, Transcript
from etude.sandbox.fake import FakeSandbox

STEPS = 20
GROUPS_PER_STEP = 4
GROUP_SIZE = 8
MAX_TOKENS = 96
LR = 8e-5
MIN_WORDS = 8

TOPICS = (
    "rain, bread, a river, the moon, a bicycle, snow, tea, a library, the sea, a garden, a train, "
    "music, a lamp, "
    "winter, a bridge, a cat, a market, salt, the wind, a letter, a clock, apples, a mountain, "
    "sleep, a window, honey, "
    "a street, the sun, a ship, paper, a dog, fire"
)
PROMPTS = [f"Write one short sentence about {topic}." for topic in TOPICS.split(", ")]


def reward(text: str) -> float:
    """The share of words that begin with an s. It varies between answers, so that every group
    teaches something. Short answers are padded with missing words: if brevity paid, the side that
    learns first would also become faster."""
    words = text.lower().split()
    return sum(word.startswith("s") for word in words) / max(MIN_WORDS, len(words))


class Sentences:
    """An Environment with a prompt and a text as the answer."""

    def __init__(self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int) -> None:
        self._counts = counts

    def tasks(self, split: str) -> Sequence[Task]:
        prompts = PROMPTS[: self._counts[split]]
        return [
            Task(id=f"{split}-{n}", prompt=prompt, sandbox=SandboxSpec(files={"answer": ""}))
            for n, prompt in enumerate(prompts)
        ]

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        # nothing is executed, and the other side has no sandboxes either
        yield FakeSandbox(task.sandbox.files)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        return Score(reward(await sandbox.read("answer")))


class Writer:
    """An Agent that asks the model once."""

    def __init__(self, http: Any, *, max_tokens: int, temperature: float, **unused: Any) -> None:
        self._http = http
        self._sampling = {"model": "etude", "max_tokens": max_tokens, "temperature": temperature}

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        messages = task.opening
        body = {**self._sampling, "messages": messages, "seed": seed}
        headers = {"Authorization": f"Bearer {api_key}"}
        url = f"{base_url}/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            answer = (await response.json())["choices"][0]["message"]
        await sandbox.write("answer", answer["content"] or "")
        return Transcript(messages=[*messages, answer], finished=True)
