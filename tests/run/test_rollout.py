"""One attempt against fakes: any failure comes back as data that names its place."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from etude.core.clock import AwakeClock, ManualClock
from etude.core.errors import EtudeError
from etude.core.protocols import Sandbox
from etude.core.sampling import VersionSpan
from etude.core.sandbox import SandboxSpec
from etude.core.statistics import wilson
from etude.core.types import (
    Attempt,
    Cost,
    Credit,
    Limit,
    Part,
    Score,
    Segment,
    SessionAccess,
    Task,
    Trajectory,
    Transcript,
)
from etude.rewards.review import Review
from etude.run.evaluate import evaluate
from etude.run.process import AwakeLoop
from etude.run.rollout import RolloutRunner
from etude.sandbox.fake import FakeSandbox
from etude.store.codec import pack, unpack

TASK = Task(id="t", prompt="fix it", sandbox=SandboxSpec(files={"a.py": "x = 1\n"}))


class Parts:
    """Environment, agent and sessions in one, each of which can be made to fail."""

    def __init__(
        self,
        breaks: str = "",
        *,
        finished: bool = True,
        limit: Limit | None = None,
        version: int = 3,
    ) -> None:
        self.breaks = breaks
        self.finished = finished
        self.limit = limit
        self.version = version
        self.open_sandboxes = 0
        self.at_once = 0
        self.forgotten = [""][:0]
        self.experts_wanted: bool | None = None
        self.scored: Attempt | None = None

    def _maybe(self, what: str) -> None:
        if self.breaks == what:
            raise OSError("no such luck")

    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        self._maybe("sandbox")
        self.open_sandboxes += 1
        self.at_once = max(self.at_once, self.open_sandboxes)
        try:
            yield FakeSandbox(task.sandbox.files)
        finally:
            self.open_sandboxes -= 1

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        await asyncio.sleep(0)
        self._maybe("agent")
        return Transcript(
            messages=[{"role": "user", "content": f"{base_url} {api_key} {seed}"}],
            finished=self.finished,
            limit=self.limit,
        )

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        self._maybe("score")
        self.scored = attempt
        return Score(1.0)

    async def up(self) -> None:
        self._maybe("model")

    async def disturbed(self, session: str, age_s: float) -> bool:
        return self.breaks == "waits"

    async def open_session(self, session: str) -> SessionAccess:
        return SessionAccess(base_url=f"/s/{session}", api_key=f"key of {session}")

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        self._maybe("segments")
        self.experts_wanted = experts
        versions = (VersionSpan(self.version, 1),)
        return (
            Segment(prompt=(1,), tokens=(2,), mask=(True,), logprobs=(-0.5,), versions=versions),
        )

    async def forget(self, session: str) -> None:
        self._maybe("forget")
        self.forgotten.append(session)


def rollouts(parts: Parts, concurrency: int = 2) -> RolloutRunner:
    return RolloutRunner(parts, parts, parts, concurrency=concurrency)


class Cheating(Parts):
    """Writes a file, and scores by changing the working copy itself."""

    async def run(self, task: Task, sandbox: Sandbox, **given: Any) -> Transcript:
        await sandbox.write("conftest.py", "import os\nos._exit(0)\n")
        return Transcript(messages=[{"role": "assistant", "content": "done"}], finished=True)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        await sandbox.write("reward.json", "1")
        return Score(1.0, (Part("tests", 1.0),))


@pytest.mark.parametrize("detector", [True, False])
async def test_what_the_agent_changed_is_looked_at_and_not_what_the_grader_did(
    detector: bool,
) -> None:
    parts = Cheating()
    runner = RolloutRunner(parts, parts, parts, concurrency=1, review=Review(detector=detector))
    trajectory = await runner.attempt(TASK, "g.0", 7)
    score = trajectory.score
    assert "+os._exit(0)" in trajectory.diff and "reward.json" not in trajectory.diff
    assert score is not None and score.reward == 1.0
    assert score.flags == (("cheat:exit_code",) if detector else ())
    assert [part.name for part in score.parts] == ["tests", *["detector"] * detector]
    if detector:
        assert score.parts[1].evidence == "exit_code: conftest.py: os._exit(0)"


@pytest.mark.parametrize("experts", [True, False])
async def test_experts_are_kept_if_they_are_to_be_replayed(experts: bool) -> None:
    parts = Parts()
    await RolloutRunner(parts, parts, parts, concurrency=1, experts=experts).attempt(
        TASK, "g000001.2", seed=1
    )
    assert parts.experts_wanted is experts


@pytest.mark.parametrize("place", ["model", "sandbox", "agent", "score", "segments"])
async def test_a_failure_is_data_with_the_place_where_it_broke(place: str) -> None:
    parts = Parts(place)
    trajectory = await rollouts(parts).attempt(TASK, "g000001.2", seed=1)
    assert (trajectory.status, trajectory.score, trajectory.group) == ("failed", None, "g000001")
    error = trajectory.error or ""
    assert error.startswith(f"{place}: OSError in {__file__}, line ") and error.endswith(
        ": no such luck"
    )
    assert parts.open_sandboxes == 0 and parts.forgotten == ["g000001.2"]


async def test_a_score_is_given_for_the_transcript_and_the_tokens() -> None:
    parts = Parts()
    got = await rollouts(parts).attempt(TASK, "g.0", 7)
    assert parts.scored is not None and parts.scored.segments == got.segments != ()
    assert parts.scored.transcript.messages == got.messages


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (Score(math.nan), "the reward is nan: it must be a finite number"),
        (Score("1.0"), "the reward is '1.0': it must be a finite number"),  # type: ignore[arg-type]
        (
            Score(1.0, (Part("style", math.inf),)),
            "the part 'style' of the score is inf: it must be a finite number",
        ),
        (
            Score(1.0, (Part("style", 1.0), Part("style", 2.0))),
            "several parts of the score are called 'style': names must be unique",
        ),
        (Score(1.0, ({"style": 1.0},)), "contain {'style': 1.0}: each must be a Part"),  # type: ignore[arg-type]
        (
            Score(1.0, credit=(Credit(1.0, 1),)),
            "a credit is for segment 1, but the attempt has 1, counted from 0",
        ),
        (
            Score(1.0, credit=(Credit(1.0, -1),)),
            "a credit is for segment -1, but the attempt has 1, counted from 0",
        ),
        (
            Score(1.0, credit=(Credit(1.0, 0, turn=0), Credit(1.0, 0, turn=1))),
            "a credit is for turn 1 of segment 0, which has 1, counted from 0",
        ),
        (
            Score(1.0, credit=(Credit(math.nan, 0, turn=0),)),
            "the credit for turn 0 of segment 0 is nan: it must be a finite number",
        ),
        (Score(1.0, credit=(0.5,)), "contain 0.5: each must be a Credit"),  # type: ignore[arg-type]
        (
            Score(1.0, flags="cheat"),  # type: ignore[arg-type]
            "the flags of the score are the string 'cheat': use a tuple, such as ('cheat',)",
        ),
        ({"reward": 1.0}, "returned {'reward': 1.0}: score() must return a Score"),
        (1.0, "returned 1.0: score() must return a Score, such as Score(reward=1.0)"),
    ],
)
async def test_a_score_that_says_nothing_is_a_failure_and_no_zero(score: Any, told: str) -> None:
    class Confused(Parts):
        async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Any:
            return score

    got = await rollouts(Confused()).attempt(TASK, "g.0", 7)
    assert (got.status, got.reward) == ("failed", None)
    assert got.error is not None and got.error.startswith("score: ValueError") and told in got.error


class Hangs(Parts):
    """Hangs forever where it would otherwise fail."""

    async def _ever(self, what: str) -> None:
        if self.breaks == what:
            await asyncio.get_running_loop().create_future()

    def _maybe(self, what: str) -> None:
        pass

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        await self._ever("sandbox")
        async with super().open(task) as sandbox:
            yield sandbox

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        await self._ever("agent")
        return await super().run(task, sandbox, base_url=base_url, api_key=api_key, seed=seed)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        await self._ever("score")
        return await super().score(task, sandbox, attempt)


@pytest.mark.parametrize(
    ("place", "key"),
    [("sandbox", "tasks.timeout_s"), ("agent", "harness.timeout_s"), ("score", "tasks.timeout_s")],
)
async def test_what_hangs_has_failed(place: str, key: str) -> None:
    parts = Hangs(place)
    limits = {
        "agent_timeout_s": 0.01 if place == "agent" else None,
        "sandbox_timeout_s": None if place == "agent" else 0.01,
    }
    got = await RolloutRunner(parts, parts, parts, concurrency=1, **limits).attempt(TASK, "g.0", 7)
    assert got.error == f"{place}: TimeoutError: not done after 0.01 s, the limit set by {key}"
    assert got.status == "failed" and parts.open_sandboxes == 0


async def test_the_time_that_a_task_gives_its_scoring_comes_on_top() -> None:
    class Slow(Parts):
        def scoring_s(self, task: Task) -> float:
            return 3600.0

        async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
            await asyncio.sleep(0.02)
            return Score(0.0)

    parts = Slow()
    runner = RolloutRunner(parts, parts, parts, concurrency=1, sandbox_timeout_s=0.01)
    got = await runner.attempt(TASK, "g.0", 7)
    assert got.status == "done" and got.score == Score(0.0)


async def test_a_timeout_of_their_own_is_told_as_they_told_it() -> None:
    class Late(Parts):
        async def run(
            self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
        ) -> Transcript:
            raise TimeoutError("the compiler took too long")

    parts = Late()
    runner = RolloutRunner(parts, parts, parts, concurrency=1, agent_timeout_s=60.0)
    got = await runner.attempt(TASK, "g.0", 7)
    assert got.error is not None and got.error.endswith(": the compiler took too long")


def test_a_trajectory_says_where_it_came_from_and_what_it_cost() -> None:
    loop, clock = AwakeLoop(), ManualClock()
    loop.clock = AwakeClock(clock)

    class TwoTurns(Parts):
        async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
            clock.move(1.5)
            return await super().score(task, sandbox, attempt)

        async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
            first = Segment(
                prompt=(1, 2, 3),
                tokens=(4, 5, 6, 7),
                mask=(True, True, False, True),
                logprobs=(-1.0, -1.0, 0.0, -1.0),
                versions=(VersionSpan(3, 3),),
            )
            return (first, *await super().segments(session, experts=experts))

    with contextlib.closing(loop):
        done, failed = (
            loop.run_until_complete(
                RolloutRunner(
                    parts, parts, parts, concurrency=1, source="env.py:Own", policy="mine"
                ).attempt(TASK, "g.0", 7)
            )
            for parts in (TwoTurns(), TwoTurns("score"))
        )
    # its calls read 3 and 6 tokens of the first segment, and the prompt of the second
    assert done.cost == Cost(prompt_tokens=3 + 6 + 1, sampled_tokens=4, seconds=1.5, calls=3)
    assert failed.status == "failed" and failed.cost == done.cost, "it has said as much"
    assert failed.segments == done.segments and failed.score is None
    assert failed.traceback.endswith("OSError: no such luck") and "in score" in failed.traceback
    for each in (done, failed):
        assert (each.source, each.policy) == ("env.py:Own", "mine")


async def test_an_agent_that_never_asks_the_model_is_told_where_to() -> None:
    class Silent(Parts):
        async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
            return ()

    got = await rollouts(Silent()).attempt(TASK, "g.0", 7)
    assert got.status == "failed" and got.error is not None
    assert got.error.startswith(
        "agent: it ended without an answer of the model: it must send requests to"
    )


async def test_an_agent_that_was_out_of_time_before_an_answer_is_told_so() -> None:
    class Slow(Parts):
        async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
            return ()

    got = await rollouts(Slow(finished=False)).attempt(TASK, "g.0", 7)
    assert got.status == "failed" and got.error is not None
    assert "its time (harness.timeout_s)" in got.error


async def test_what_breaks_because_the_run_stops_is_no_failure() -> None:
    class BreaksOnItsWayOut(Parts):
        @contextlib.asynccontextmanager
        async def open(self, task: Task) -> AsyncIterator[Sandbox]:
            try:
                await asyncio.get_running_loop().create_future()
                yield FakeSandbox()
            finally:
                raise ProcessLookupError

    parts = BreaksOnItsWayOut()
    attempt = asyncio.create_task(rollouts(parts).attempt(TASK, "g.0", 7))
    await asyncio.sleep(0.01)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert parts.forgotten == ["g.0"]


async def test_an_agent_that_returns_nothing_has_failed() -> None:
    class Forgets(Parts):
        async def run(
            self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
        ) -> Transcript:
            return None  # type: ignore[return-value]

    got = await rollouts(Forgets()).attempt(TASK, "g.0", 7)
    assert got.status == "failed"
    assert got.error == "agent: TypeError: run() must return a Transcript, not a NoneType"


@pytest.mark.parametrize("method", ["run", "score"])
async def test_a_method_that_is_not_a_coroutine_is_told_to_be_one(method: str) -> None:
    parts = Parts()
    setattr(parts, method, lambda *args, **options: Score(1.0))
    got = await rollouts(parts).attempt(TASK, "g.0", 7)
    assert got.error is not None
    assert f"{method}() is not a coroutine: write `async def {method}(...)`" in got.error


async def test_scores_may_come_from_numpy() -> None:
    class Computed(Parts):
        async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
            half: Any = np.float32(0.5)
            evidence = "half a pair: \ud800"
            parts: Any = [Part("half", half, evidence)]
            return Score(half, parts, ("odd",), (Credit(half, 0, turn=0),))

    got = await rollouts(Computed()).attempt(TASK, "g.0", 7)
    assert type(got.reward) is float and unpack(pack(got), Trajectory, "here") == got
    assert got.score == Score(
        0.5, (Part("half", 0.5, "half a pair: ?"),), ("odd",), (Credit(0.5, 0, turn=0),)
    )


@pytest.mark.parametrize(
    ("messages", "kept"),
    [
        ([{"role": "user", "calls": ("a", "\ud800b")}], [{"role": "user", "calls": ["a", "?b"]}]),
        ([{"role": object()}], "agent: TypeError: Object of type object is not JSON serializable"),
        (["said"], "agent: ValueError: the messages of its transcript are not a list of objects"),
    ],
)
async def test_a_transcript_that_cannot_be_stored_is_the_failure_of_its_agent(
    messages: Any, kept: object
) -> None:
    class Own(Parts):
        async def run(
            self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
        ) -> Transcript:
            return Transcript(messages=messages, finished=True)

    got = await rollouts(Own()).attempt(TASK, "g.0", 7)
    assert (got.error or got.messages) == kept and unpack(pack(got), Trajectory, "here") == got


@pytest.mark.parametrize(
    ("finished", "limit", "status"),
    [
        (True, None, "done"),
        (False, None, "timeout"),
        (False, "time", "timeout"),
        (False, "turns", "truncated"),
        (False, "context", "truncated"),
    ],
)
async def test_a_session_is_graded_as_it_stands(
    finished: bool, limit: Limit | None, status: str
) -> None:
    parts = Parts("forget", finished=finished, limit=limit)
    trajectory = await rollouts(parts).attempt(TASK, "g.0", seed=9)
    assert (trajectory.status, trajectory.reward, trajectory.num_sampled) == (status, 1.0, 1)
    assert trajectory.messages == [{"role": "user", "content": "/s/g.0 key of g.0 9"}]


async def test_a_session_that_ran_out_of_time_while_it_waited_for_the_model_is_not_graded() -> None:
    parts = Parts("waits", finished=False)
    got = await rollouts(parts).attempt(TASK, "g.0", seed=9)
    assert (got.status, got.score, got.error) == (
        "failed", None, "agent: its time ran out while it waited for the model"
    )  # fmt: skip
    assert parts.open_sandboxes == 0 and parts.forgotten == ["g.0"]
    done = await rollouts(Parts("waits", finished=True)).attempt(TASK, "g.0", seed=9)
    assert (done.status, done.reward) == ("done", 1.0), "it came to an end of its own all the same"
    wordy = Parts("waits", finished=False, limit="turns")
    truncated = await rollouts(wordy).attempt(TASK, "g.0", seed=9)
    assert (truncated.status, truncated.reward) == ("truncated", 1.0), "so did this one"


def test_the_gateway_has_its_time_to_say_so() -> None:
    loop, clock = AwakeLoop(), ManualClock()
    loop.clock = AwakeClock(clock)

    class Slow(Parts):
        async def disturbed(self, session: str, age_s: float) -> bool:
            for _ in range(100):
                clock.move(1.0)
                await asyncio.sleep(0)
            return True

    parts = Slow(finished=False)
    with contextlib.closing(loop):
        attempt = RolloutRunner(parts, parts, parts, concurrency=1, agent_timeout_s=60.0).attempt(
            TASK, "g.0", 7
        )
        got = loop.run_until_complete(attempt)
    assert got.error == "agent: its time ran out while it waited for the model"


def test_a_session_that_ran_out_of_time_while_we_were_stopped_is_not_graded() -> None:
    """Its agent may measure time by a clock that went on."""
    loop, clock = AwakeLoop(), ManualClock()
    loop.clock = AwakeClock(clock)

    class Watches(Parts):
        async def run(
            self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
        ) -> Transcript:
            clock.move(90.0)
            await asyncio.sleep(0)
            return await super().run(task, sandbox, base_url=base_url, api_key=api_key, seed=seed)

    with contextlib.closing(loop):
        attempts = [
            rollouts(Watches(finished=finished)).attempt(TASK, "g.0", 9)
            for finished in (True, False)
        ]
        done, stopped = (loop.run_until_complete(attempt) for attempt in attempts)
    assert (done.status, stopped.status, stopped.score) == ("done", "failed", None)
    assert stopped.error == "agent: its time ran out while the controller was suspended"


async def test_no_session_begins_while_no_worker_is_up() -> None:
    class Waits(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.back = asyncio.Event()

        async def up(self) -> None:
            await self.back.wait()

    parts = Waits()
    attempts = [asyncio.create_task(rollouts(parts).attempt(TASK, f"g.{n}", n)) for n in range(3)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert parts.at_once == 0
    parts.back.set()
    assert [(await attempt).status for attempt in attempts] == ["done"] * 3


async def test_no_more_sessions_at_once_than_allowed() -> None:
    parts = Parts()
    each = rollouts(parts, concurrency=3)
    await asyncio.gather(*(each.attempt(TASK, f"g.{n}", seed=n) for n in range(20)))
    assert parts.at_once == 3


async def test_an_evaluation_counts_what_was_solved() -> None:
    report = await evaluate(
        [TASK] * 4, rollouts(Parts()).attempt, stage="rl", split="novel", version=3, seed=0
    )
    assert (report.solved, report.total, report.rate) == (4, 4, 1.0)
    assert (report.low, report.high) == wilson(4, 4) and report.example


async def test_an_evaluation_refuses_tokens_of_another_version() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await evaluate(
            [TASK], rollouts(Parts(version=4)).attempt, stage="rl", split="novel", version=3, seed=0
        )
    assert "evaluated version 3, but tokens come from [4]" in str(caught.value.exceptions[0])


async def test_an_evaluation_tries_again_and_never_counts_a_failure_as_zero() -> None:
    outcomes = iter(["agent", "sandbox", ""])

    async def attempt(task: Task, sample: str, seed: int) -> Trajectory:
        return await rollouts(Parts(next(outcomes))).attempt(task, sample, seed)

    report = await evaluate([TASK], attempt, stage="rl", split="novel", version=3, seed=0)
    assert report.solved == 1
    with pytest.raises(ExceptionGroup) as caught:
        await evaluate(
            [TASK], rollouts(Parts("sandbox")).attempt, stage="rl", split="novel", version=3, seed=0
        )
    assert isinstance(caught.value.exceptions[0], EtudeError)
