"""Rollouts that are run elsewhere: what is asked of a service, and what it answers. In JSON over
HTTP these are the types of docs/environments-by-url.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from etude.core.types import Json, Score, Split, Task

RemoteStatus = Literal["running", "done", "timeout", "failed"]
"""`done`, `timeout` and `failed` as of a `Trajectory`; `running`: ask again."""
ENDED = ("done", "timeout", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTask:
    """A task as a service knows it: it has no sandbox of ours."""

    id: str
    prompt: str = ""
    """What the user says first."""
    messages: tuple[dict[str, Json], ...] = ()
    """Or the whole conversation that the session begins with: exactly one of the two is given."""
    meta: dict[str, Json] = field(default_factory=dict)
    """Whatever else the service wants to be told again with each rollout."""
    split: Split = "train"
    """In a file of tasks: the one that it belongs to."""

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
    """What to give as `after` for the page behind this one; None: it was the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callback:
    """Where the result of a session may be sent, and the key for it."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One attempt at a task: the body of `POST /rollouts`, and what `POST /v1/sessions` answers."""

    id: str
    """Of the rollout. The same one again, in `Idempotency-Key` too, means the same rollout."""
    task: RemoteTask
    base_url: str
    """An OpenAI-compatible URL of this rollout alone: what is asked there is recorded."""
    token: str
    """The key for it."""
    seed: int
    deadline: float
    """Seconds since 1970. What is not over then is answered as it stands, with `timeout`."""
    model: str = "etude"
    temperature: float = 1.0
    """To sample with, so that what is sampled can be trained on."""
    max_tokens: int = 64
    """Of one answer of the model, at most."""
    callback_url: str | None = None
    """Where the result may be sent instead of waiting to be asked for it."""
    callback_token: str | None = None
    """The key for that. It is not for the agent, which could say with it what it was worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something that a rollout made, for people to look at."""

    name: str
    text: str = ""
    url: str = ""
    """Where it lies, if it is no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What became of a rollout, or that it is still running."""

    id: str = ""
    status: RemoteStatus
    score: Score | None = None
    """With `done` and `timeout`."""
    error: str = ""
    """With `failed`: what broke. A rollout in which the model did badly has not failed: its score
    says so."""
    messages: tuple[dict[str, Json], ...] = ()
    """The conversation, for people to read; the tokens themselves are recorded at `base_url`."""
    artifacts: tuple[Artifact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """The answer of `GET /health`."""

    capacity: int
    """Rollouts that it can run at once."""
    running: int = 0
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOffer:
    """A session that somebody else shall run, as the controller tells the gateway."""

    request: RolloutRequest
    """Its deadline is set when it is claimed."""
    timeout_s: float
    """From then on."""
    claimed: bool = False
    """Somebody has it already: all that is missing is the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOutcome:
    """How far an offered session has come."""

    claimed: bool
    result: RolloutResult | None = None
