"""The table `[tasks]` of a run's config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from etude.core.schema import Config, Count, CountOrZero, Positive

PULL = "pull"
"""The environment is whoever asks the gateway for sessions."""
URL = r"https?://[^\s/]+(/\S*)?"
EnvironmentReference = Annotated[str, Field(pattern=rf"^({PULL}|{URL}|.+:\w+)$")]
"""Code by name, the URL of a service, or `pull`."""


class TasksConfig(Config):
    """The environment, and how many of its tasks are used."""

    environment: EnvironmentReference = "etude.run.environment:CodeRepair"
    """The environment, which gives tasks and scores attempts: a `core.protocols.Environment`,
    called with the sandbox pool, counts and seed; or the URL of a service that runs the sessions
    itself; or `pull`, where a scheduler asks the gateway for them (docs/environments-by-url.md)."""
    path: str | None = None
    """A file of tasks in lines of JSON, instead of those that a service gives. `pull` needs one."""
    train: Count = 4096
    """Tasks to train on."""
    heldout: Count = 400
    """Tasks for evaluation; they share no program with the training tasks."""
    novel: CountOrZero = 200
    """Tasks for evaluation from templates that are never trained on."""
    timeout_s: Positive = 600.0
    """Time to open the sandbox of an attempt, or to wait for room at a service, and again to score
    it."""

    @property
    def is_remote(self) -> bool:
        """Whether sessions are run elsewhere, by whoever knows what they were worth."""
        return self.environment == PULL or self.environment.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _tasks_from_somewhere(self) -> TasksConfig:
        if self.path is not None and not self.is_remote:
            raise ValueError("path is for an environment by URL: this one has tasks of its own")
        if self.path is None and self.environment == PULL:
            raise ValueError('environment = "pull" gives no tasks: name a file of them with path')
        return self
