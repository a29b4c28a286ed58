"""One rollout: an attempt at a task, from the open sandbox to the scored trajectory. It always
returns: failures become data."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from numbers import Real
from typing import Protocol, TypeVar

from etude.core.errors import Interrupted, RolloutFailure, boundary, user_traceback
from etude.core.protocols import Agent, Environment
from etude.core.remote import Callback, SessionOffer, SessionOutcome
from etude.core.types import (
    Attempt,
    Cost,
    Credit,
    Json,
    Part,
    Score,
    Segment,
    SessionAccess,
    Status,
    Task,
    Trajectory,
    Transcript,
    turns,
)
from etude.rewards.review import Review
from etude.run.process import stopped_since
from etude.run.session_sandbox import SessionSandbox, diff_of

T = TypeVar("T")

RECORDED_S = 5.0
"""Time to read the recording of a session that failed: the cause may be that nothing answers."""
DIFF_CHARS = 64_000
"""The most characters of an agent's diff that are kept, about as much as a person reads."""


TRIES = 4
"""The most tries of an attempt that is interrupted."""


class SessionRecorder(Protocol):
    """Recorder of sessions with the model: the gateway, or a fake. Here each session is named by
    its sample."""

    async def up(self) -> None:
        """Return as soon as a model can be reached."""

    async def open_session(self, session: str) -> SessionAccess:
        """Open a new session, which the harness of another session cannot reach."""

    async def disturbed(self, session: str, age_s: float) -> bool:
        """True if a request of the session, which started `age_s` ago, had to wait for a process
        that was silent or gone, or has no answer."""

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        """The session's segments; empty if the model has not answered. `experts`: keep the routed
        experts in the store, under names that the segments hold."""

    async def forget(self, session: str) -> None: ...


class SessionDesk(Protocol):
    """The gateway as the place where sessions are offered to other parties, and where they report
    the results."""

    async def callback(self, session: str) -> Callback:
        """The callback at which the party that runs the session reports its result."""

    async def offer(self, session: str, offer: SessionOffer) -> None:
        """Offer a session. Repeating an offer has no effect."""

    async def outcome(
        self, session: str, wait_s: float, *, claimed: bool = False
    ) -> SessionOutcome | None:
        """The state of an offered session, as soon as it is claimed (or, with `claimed`, has a
        result), or after `wait_s`. None: no such session was offered."""


class RolloutRunner:
    def __init__(
        self,
        environment: Environment,
        agent: Agent,
        sessions: SessionRecorder,
        *,
        concurrency: int,
        source: str = "",
        policy: str = "",
        experts: bool = False,
        needs_model: bool = True,
        agent_timeout_s: float | None = None,
        sandbox_timeout_s: float | None = None,
        review: Review | None = None,
    ) -> None:
        """`source` and `policy` are fields of the `Trajectory`. `needs_model`: an agent that never
        called the model has failed.

        `agent_timeout_s`, `sandbox_timeout_s`: an agent, or an environment that opens a sandbox or
        scores, has failed if it is still at work after this time, so that a hanging one cannot hold
        up a run. The time that a task itself allows for its scoring is added.

        `review`: further processing of the score that the environment gave."""
        self.environment = environment
        self.agent = agent
        self.sessions = sessions
        self.source = source
        self.policy = policy
        self.experts = experts
        self._needs_model = needs_model
        self._agent_timeout_s = agent_timeout_s
        self._sandbox_timeout_s = sandbox_timeout_s
        self._review = review
        self._room = asyncio.Semaphore(concurrency)
        self.running = 0
        """Attempts in progress."""

    async def attempt(self, task: Task, sample: str, seed: int) -> Trajectory:
        async with self._room, self._counted():
            began = asyncio.get_running_loop().time()
            trajectory = Trajectory(
                id=sample,
                task=task.id,
                group=_group(sample),
                segments=(),
                score=None,
                status="failed",
                source=self.source,
                policy=self.policy,
            )
            for number in range(TRIES):
                # Processes that an earlier try left running must not be able to use this session.
                session = f"{sample}~{number}" if number else sample
                outcome, is_final = await self._try(task, seed, session, trajectory)
                if is_final:
                    break
            seconds = asyncio.get_running_loop().time() - began
            return replace(outcome, cost=_cost(outcome.segments, seconds))

    async def _try(
        self, task: Task, seed: int, session: str, started: Trajectory
    ) -> tuple[Trajectory, bool]:
        """One try: the trajectory, and False if the attempt should be tried again."""
        try:
            return await self._attempt(task, seed, session, started), True
        except RolloutFailure as e:
            if _is_cancelled():
                raise asyncio.CancelledError from e
            failed = replace(
                started,
                error=str(e),
                traceback=user_traceback(e.__cause__) if e.__cause__ else "",
                segments=await self._recorded(session),
            )
            return failed, not isinstance(e, Interrupted)
        finally:
            # Nobody will read this recording: if it cannot be deleted now, it goes away with the
            # gateway.
            with contextlib.suppress(RolloutFailure):
                async with boundary("forget"):
                    await self.sessions.forget(session)

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def _recorded(self, session: str) -> tuple[Segment, ...]:
        """The recorded segments of a session that failed, for people to read; empty if they are not
        available."""
        with contextlib.suppress(RolloutFailure):
            async with boundary("segments"), asyncio.timeout(RECORDED_S):
                return await self.sessions.segments(session, experts=False)
        return ()

    async def _attempt(
        self, task: Task, seed: int, session: str, started: Trajectory
    ) -> Trajectory:
        async with boundary("model"):
            await self.sessions.up()
            access = await self.sessions.open_session(session)
        began = asyncio.get_running_loop().time()
        async with boundary("sandbox"), contextlib.AsyncExitStack() as stack:
            async with _at_most(self._sandbox_timeout_s, "tasks.timeout_s"):
                sandbox = await stack.enter_async_context(self.environment.open(task))
            lent = SessionSandbox(sandbox)
            async with boundary("agent"), _at_most(self._agent_timeout_s, "harness.timeout_s"):
                running = self.agent.run(
                    task,
                    lent.as_sandbox,
                    base_url=access.base_url,
                    api_key=access.api_key,
                    seed=seed,
                )
                transcript = await _coroutine("run", running)
                messages = _messages(transcript)
            await lent.end_processes()
            async with boundary("agent"):
                if _is_late(transcript):
                    await self._check_time(session, began)
            async with boundary("segments"):
                segments = await self.sessions.segments(session, experts=self.experts)
            if self._needs_model and not segments:
                raise RolloutFailure(_unanswered(transcript))
            async with boundary("score"), _at_most(self._scoring_limit_s(task), "tasks.timeout_s"):
                attempt = Attempt(transcript=transcript, segments=segments)
                diff = await diff_of(sandbox)  # before other code writes there
                scoring = self.environment.score(task, sandbox, attempt)
                score = _checked(await _coroutine("score", scoring), segments)
                if self._review:
                    score = await self._review.complete(task, messages, segments, diff, score)
                    score = _checked(score, segments)
        return replace(
            started,
            segments=segments,
            score=score,
            status=_status(transcript),
            messages=messages,
            diff=diff[:DIFF_CHARS],
            prompt_parts=transcript.prompt_parts,
        )

    def _scoring_limit_s(self, task: Task) -> float | None:
        if self._sandbox_timeout_s is None:
            return None
        return self._sandbox_timeout_s + scoring_s(self.environment, task)

    async def _check_time(self, session: str, began: float) -> None:
        """Refuse a timeout if the agent may have lost some of its time to other processes."""
        if stopped_since(began):
            raise RolloutFailure("agent: its time ran out while the controller was suspended")
        if await self.sessions.disturbed(session, asyncio.get_running_loop().time() - began):
            raise RolloutFailure("agent: its time ran out while it waited for the model")


def scoring_s(environment: Environment, task: Task) -> float:
    """The time that a task itself allows for its scoring, if its environment has such a limit."""
    asked: Callable[[Task], float] = getattr(environment, "scoring_s", lambda task: 0.0)
    return asked(task)


@contextlib.asynccontextmanager
async def _at_most(seconds: float | None, key: str) -> AsyncIterator[None]:
    """Limit the time of a block. `key`: the config key that sets the limit."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError as e:
        if not deadline.expired():
            raise
        raise TimeoutError(f"not done after {seconds:g} s, the limit set by {key}") from e


def _is_cancelled() -> bool:
    """True if the attempt ends because the run does: an error on the way out is then not its own
    failure."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _coroutine(method: str, result: Awaitable[T]) -> Awaitable[T]:
    if not inspect.isawaitable(result):
        raise TypeError(f"{method}() is not a coroutine: write `async def {method}(...)`")
    return result


def _checked(score: Score, segments: tuple[Segment, ...]) -> Score:
    """The score in plain numbers and text, which can be stored. An environment that cannot score an
    attempt has failed; the attempt then has no reward, rather than a reward of 0."""
    if not isinstance(score, Score):
        raise ValueError(
            f"the environment returned {score!r}: score() must return a Score, such as "
            "Score(reward=1.0)"
        )
    for what, given, kind in (("parts", score.parts, Part), ("credit", score.credit, Credit)):
        if strangers := [each for each in given if not isinstance(each, kind)]:
            raise ValueError(
                f"the {what} of the score contain {strangers[0]!r}: each must be a {kind.__name__}"
            )
    if isinstance(score.flags, str):
        raise ValueError(
            f"the flags of the score are the string {score.flags!r}: use a tuple, such as "
            f"({score.flags!r},)"
        )
    if twice := [name for name, n in Counter(part.name for part in score.parts).items() if n > 1]:
        raise ValueError(
            f"several parts of the score are called {twice[0]!r}: names must be unique"
        )
    return Score(
        reward=_number("the reward", score.reward),
        parts=tuple(
            Part(
                part.name,
                _number(f"the part {part.name!r} of the score", part.value),
                part.evidence.encode(errors="replace").decode(),
            )
            for part in score.parts
        ),
        flags=tuple(map(str, score.flags)),
        credit=tuple(_credit(credit, segments) for credit in score.credit),
    )


def _credit(credit: Credit, segments: tuple[Segment, ...]) -> Credit:
    where = f"segment {credit.segment}"
    if credit.segment not in range(len(segments)):
        raise ValueError(
            f"a credit is for {where}, but the attempt has {len(segments)}, counted from 0"
        )
    if credit.turn is not None:
        where = f"turn {credit.turn} of {where}"
        count = len(turns(segments[credit.segment]))
        if credit.turn not in range(count):
            raise ValueError(f"a credit is for {where}, which has {count}, counted from 0")
    return replace(credit, value=_number(f"the credit for {where}", credit.value))


def _number(what: str, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r}: it must be a finite number")
    return float(value)


def _cost(segments: tuple[Segment, ...], seconds: float) -> Cost:
    answers = [(segment, answer) for segment in segments for answer in turns(segment)]
    return Cost(
        prompt_tokens=sum(len(segment.prompt) + answer.start for segment, answer in answers),
        sampled_tokens=sum(len(answer) for _, answer in answers),
        seconds=seconds,
        calls=len(answers),
    )


def _is_late(transcript: Transcript) -> bool:
    """True if the agent ran out of time. Unlike time, turns and context cannot be lost to other
    processes."""
    return not transcript.finished and transcript.limit in (None, "time")


def _status(transcript: Transcript) -> Status:
    if transcript.finished:
        return "done"
    return "timeout" if _is_late(transcript) else "truncated"


def _unanswered(transcript: Transcript) -> str:
    if not transcript.finished:
        return (
            "agent: its time (harness.timeout_s) or its context (model.max_context) ran out "
            "before the model's first answer"
        )
    return (
        "agent: it ended without an answer of the model: it must send requests to the base_url "
        "that run() is given (a program: to OPENAI_BASE_URL), where the session is recorded"
    )


def _messages(transcript: Transcript) -> list[dict[str, Json]]:
    """The messages as plain JSON in UTF-8, since they are stored; messages that cannot be encoded
    are the agent's failure. Half a surrogate pair becomes a "?": a model can emit it, and must not
    be able to fail on purpose that way."""
    if not isinstance(transcript, Transcript):
        raise TypeError(f"run() must return a Transcript, not a {type(transcript).__name__}")
    plain = json.loads(json.dumps(transcript.messages, ensure_ascii=False).encode(errors="replace"))
    if not isinstance(plain, list) or not all(isinstance(message, dict) for message in plain):
        raise ValueError("the messages of its transcript are not a list of objects")
    return plain


def _group(sample: str) -> str:
    return sample.rpartition(".")[0]
