"""An environment written for OpenEnv: a number is to be guessed. Run by its own server."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State


class Guess(Action):
    number: int


class Told(Observation):
    text: str


class GuessEnvironment(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        self._number = (seed or 0) % 10
        self._state = State(episode_id=episode_id)
        return Told(text=f"It is {self._number}.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        right = action.number == self._number
        self._state.step_count += 1
        return Told(text="yes" if right else "no", reward=float(right), done=right)

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name="guess", description="Guess a number.", version="1")


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
