"""Rollouts that run elsewhere: the requests to a service, and its answers. In JSON over HTTP these
are the types of docs/environments-by-url.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from etude.core.types import Json, Score, Split, Task

RemoteStatus = Literal["running", "done", "timeout", "failed"]
"""`done`, `timeout` and `failed` as in a `Trajectory`; `running`: ask again."""
ENDED = ("done", "timeout", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTask:
    """A task as a service knows it: without a sandbox of ours."""

    id: str
    prompt: str = ""
    """The first message of the user."""
    messages: tuple[dict[str, Json], ...] = ()
    """The whole conversation that the session begins with, instead of `prompt`: exactly one of the
    two is given."""
    meta: dict[str, Json] = field(default_factory=dict)
    """Anything else that the service needs to receive with each rollout."""
    split: Split = "train"
    """The split that the task belongs to, in a file of tasks."""

    @classmethod
    def of(cls, task: Task, split: Split = "train") -> RemoteTask:
        return cls(
            id=task.id,
            prompt=task.prompt,
            messages=task.messages,
            meta=dict(task.meta),
            split=split,
        )

    def to_task(self) -> Task:
        return Task(id=self.id, prompt=self.prompt, messages=self.messages, meta=self.meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPage:
    """The answer of `GET /tasks`."""

    tasks: tuple[RemoteTask, ...]
    next: str | None = None
    """The value of `after` for the next page; None on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """The URL that the result of a session may be sent to, and the key for it."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One attempt at a task: the body of `POST /rollouts`, and the answer to `POST
    /v1/sessions`."""

    id: str
    """The id of the rollout. A repeated id, in `Idempotency-Key` too, means the same rollout."""
    task: RemoteTask
    base_url: str
    """An OpenAI-compatible URL for this rollout alone; requests to it are recorded."""
    token: str
    """The key for `base_url`."""
    seed: int
    deadline: float
    """Seconds since 1970. A rollout that is not finished then is answered in its current state,
    with status `timeout`."""
    model: str = "etude"
    temperature: float = 1.0
    """The temperature to sample at, so that the samples can be trained on."""
    max_tokens: int = 64
    """Tokens of one answer of the model, at most."""
    callback_url: str | None = None
    """A URL that the result may be sent to, instead of waiting for a request for it."""
    callback_token: str | None = None
    """The key for `callback_url`. Keep it from the agent, which could use it to set its own
    score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something that a rollout produced, for people to look at."""

    name: str
    text: str = ""
    url: str = ""
    """The artifact's location, if it is not text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The result of a rollout, or the status `running`."""

    id: str = ""
    status: RemoteStatus
    score: Score | None = None
    """The score, with status `done` or `timeout`."""
    error: str = ""
    """The failure, with status `failed`. A rollout in which the model did badly has not failed: its
    score shows it."""
    messages: tuple[dict[str, Json], ...] = ()
    """The conversation, for people to read; the tokens are recorded at `base_url`."""
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """The answer of `GET /health`."""

    capacity: int
    """Rollouts that it can run at the same time."""
    running: int = 0
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffer:
    """A session offered to another party to run, as the controller passes it to the gateway."""

    request: RolloutRequest
    """The request; its deadline is set when the session is claimed."""
    timeout_s: float
    """Time for the session, from the moment it is claimed."""
    claimed: bool = False
    """True if a party has claimed it already and only the result is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """The progress of an offered session."""

    claimed: bool
    result: RolloutResult | None = None
