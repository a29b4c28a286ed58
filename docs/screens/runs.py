"""Agents and environments for the captured screens: an agent that always fails, and an environment
in which every attempt earns the same."""

from __future__ import annotations

import asyncio
from typing import Any

from custom_env import Singer, Vowels

from etude.core.sandbox import Sandbox
from etude.core.types import Attempt, Score, Task, Transcript


class Failing(Singer):
    """Reads from the answer what is not there."""

    async def run(self, task: Task, sandbox: Sandbox, **told: Any) -> Transcript:
        transcript = await super().run(task, sandbox, **told)
        await asyncio.sleep(1.0)
        answer = transcript.messages[-1]
        return Transcript(messages=[answer["tool_calls"][0]], finished=True)


class Unmoved(Vowels):
    """Nothing is worth anything."""

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        await asyncio.sleep(0.5)
        return Score(0.0)
