"""Environments of `verifiers` (0.4 and newer), single-turn or with tools: their tasks, harness and
rewards, with our model behind them.

`verifiers` runs the session and scores it, in this process and in the runtime that its
configuration names. Its harness calls the model at the session's own URL, so the gateway records
every token, as for any other agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.types import Attempt, Json, Part, Score, Task, Transcript
from etude.run.rollout import SessionDesk
from etude.run.task_folder import HELDOUT_SHARE, hash_of
from etude.sandbox.fake import FakeSandboxPool

_KEY = "ETUDE_SESSION_API_KEY"
"""`verifiers` takes keys only from variables, and hides variables with such a name from the
programs that it starts."""


class VerifiersEnvironment:
    """A `core.protocols.Environment`. `tasks.path` names a TOML file with the table `[env]` of
    `verifiers`."""

    def __init__(
        self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int, path: str
    ) -> None:
        """`counts`: split -> number of tasks. `path`: the file."""
        self._vf = _package()
        self._counts = counts
        self._config = self._read(Path(path))
        self._found: dict[str, Any] = {}

    def _read(self, path: Path) -> Any:
        try:
            told = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as e:
            raise EtudeError(f"tasks.path = {str(path)!r} cannot be read: {e}") from e
        config = self._vf.resolve_env_config(told.get("env", told))
        if len(seats := config.agent_harnesses()) != 1:
            raise EtudeError(
                f"{path}: {config.env_id} has {len(seats)} agents ({', '.join(seats)}), but a "
                "session can have only one: choose an environment with a single agent"
            )
        return config

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split. One in four, by a hash of its number, is held out. None are
        novel."""
        wanted = self._counts[split] if split in ("train", "heldout") else 0
        # no more tasks than needed: a taskset may be endless
        chosen = dict(islice(self._named(split), wanted))
        self._found |= chosen
        return [Task(id=name, prompt=_opening(task)) for name, task in chosen.items()]

    def _named(self, split: str) -> Iterator[tuple[str, Any]]:
        taskset = self._config.taskset.id
        for task in self._vf.load_taskset(self._config.taskset):
            name = f"{taskset}/{task.data.idx}"
            if ("heldout" if hash_of(name) % HELDOUT_SHARE == 0 else "train") == split:
                yield name, task

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """An empty sandbox: `verifiers` runs the session, so there is nothing to look at here."""
        async with FakeSandboxPool().open(SandboxSpec()) as nothing:
            yield nothing

    def own_agent(self, desk: SessionDesk | None, **limits: Any) -> VerifiersAgent:
        return VerifiersAgent(self._vf, self._config, self._found, **limits)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        assert attempt.transcript.score is not None
        return attempt.transcript.score


class VerifiersAgent:
    """A `core.protocols.Agent`: one episode of the environment."""

    def __init__(
        self,
        vf: Any,
        config: Any,
        tasks: Mapping[str, Any],
        *,
        max_turns: int,
        max_tokens: int,
        timeout_s: float,
        temperature: float,
        **unused: Any,
    ) -> None:
        self._vf = vf
        (seat,) = config.agent_harnesses()
        limits = {"max_turns": getattr(config, seat).max_turns or max_turns}
        limited = getattr(config, seat).model_copy(update=limits)
        self._config = config.model_copy(update={seat: limited})
        self._tasks = tasks
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._timeout_s = timeout_s

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        vf = self._vf
        with _in_environ(base_url, api_key) as variable:
            context = vf.ModelContext(
                model="etude",
                client=vf.EvalClientConfig(base_url=base_url, api_key_var=variable),
                sampling=vf.SamplingConfig(**self._sampling, seed=seed),
            )
            # A new one for each episode, because it keeps the clients of the model for its
            # lifetime.
            environment = vf.load_environment(self._config)
            try:
                async with asyncio.timeout(self._timeout_s) as late, environment.serving():
                    episode = await environment.run_episode(self._tasks[task.id], context)
            except TimeoutError as e:
                if not late.expired():
                    raise
                raise RolloutFailure(
                    f"verifiers is not done after {self._timeout_s:g} s (harness.timeout_s); "
                    "give its agent a shorter timeout"
                ) from e
        return to_transcript(episode)


def to_transcript(episode: Any) -> Transcript:
    """The transcript of an episode. RolloutFailure if `verifiers` reports that it failed."""
    errors = [*episode.errors, *(each for trace in episode.traces for each in trace.errors)]
    if not episode.ok or len(episode.traces) != 1:
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else "no reason given"
        raise RolloutFailure(f"verifiers: the episode failed: {told}")
    (trace,) = episode.traces
    return Transcript(
        messages=[to_message(message) for message in trace.messages],
        finished=not (trace.is_truncated or trace.is_timeout),
        limit="time" if trace.is_timeout else "turns",
        score=to_score(trace),
    )


def to_message(message: Any) -> dict[str, Json]:
    """The message in OpenAI's format, whose tool calls have a `function`; those of `verifiers` do
    not."""
    told: dict[str, Json] = message.model_dump(mode="json", exclude_none=True)
    if calls := told.get("tool_calls"):
        told["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return told


def to_score(trace: Any) -> Score:
    """The weighted sum of the rewards; its parts are the single rewards and the metrics."""
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise RolloutFailure(f"verifiers: the reward {missing[0]!r} was not computed")
    rewards = [
        Part(name, reward.score, f"weight {reward.weight:g}")
        for name, reward in trace.rewards.items()
    ]
    metrics = [
        Part(f"metric {name}" if name in trace.rewards else name, value)
        for name, value in trace.metrics.items()
        if value is not None
    ]
    return Score(trace.reward, (*rewards, *metrics))


def _package() -> Any:
    try:
        import verifiers.v1
    except ImportError as e:
        raise EtudeError(
            "verifiers environments need the package and uv, which starts its harnesses: pip "
            "install 'etude[verifiers]', together with the packages of the environments "
            "themselves"
        ) from e
    return verifiers.v1


def _opening(task: Any) -> str:
    """The opening message for people to read; `verifiers` decides what the model is shown."""
    return task.data.prompt_text or task.data.name or "(the user of the environment speaks first)"


@contextlib.contextmanager
def _in_environ(base_url: str, api_key: str) -> Iterator[str]:
    variable = f"{_KEY}_{hashlib.blake2b(base_url.encode(), digest_size=8).hexdigest()}"
    os.environ[variable] = api_key
    try:
        yield variable
    finally:
        del os.environ[variable]
