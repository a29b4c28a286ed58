"""Sessions over several windows: the beginning of each window, its record, and training on all of
it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from etude.core.advantage import AdvantageEstimator
from etude.core.protocols import Sandbox
from etude.core.sampling import Request, Sample
from etude.core.sandbox import CommandResult, SandboxSpec
from etude.core.types import Attempt, Group, Score, Task, Trajectory, turns
from etude.harness.agent import NUDGE, CodingAgent
from etude.harness.summary import REQUEST, CarriedState, Conversation
from etude.model.transformer import ModelConfig, Transformer
from etude.run.loop import assemble_batch
from etude.run.rollout import RolloutRunner
from etude.sandbox.fake import FakeSandbox, Files
from etude.serve.alone import PolicySessions
from etude.serve.fake import Scripted
from tests.serve.scripted import FILES, TOKENIZER, answers, call
from tests.small_model import ROUNDING, plain_logprobs, sharp

TASK = Task(
    id="t",
    prompt="fix area",
    sandbox=SandboxSpec(
        files={"area.py": "def area(a, b):\n    return a + b\n", "test_area.py": ""}
    ),
    meta={"module": "area.py"},
)


OUTPUT = "area(3, 4) is 7 not 12"
"""Of the tests."""


class ScriptedModel(Scripted):
    """Follows a script, with the log-probs that a real model gives the script in the same
    context."""

    def __init__(self, texts: Sequence[str], model: Transformer) -> None:
        super().__init__(answers(texts))
        self.model = model

    async def sample(self, request: Request) -> Sample:
        sample = await super().sample(request)
        logprobs = plain_logprobs(self.model, request.prompt, sample.tokens).tolist()
        return replace(sample, logprobs=tuple(logprobs))


class Environment:
    def tasks(self, split: str) -> Sequence[Task]:
        return [TASK]

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        yield FakeSandbox(task.sandbox.files, failing)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        return Score("a * b" in await sandbox.read("area.py"))


def failing(files: Files, argv: Any) -> CommandResult:
    return CommandResult(1, f"{OUTPUT}\n")


@pytest.fixture(scope="module")
def network() -> Transformer:
    config = ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=4096,
    )
    return sharp(config, seed=0)


async def attempt(
    texts: Sequence[str], network: Transformer, *, max_context: int = 4096, **options: Any
) -> tuple[Trajectory, ScriptedModel]:
    policy = ScriptedModel(texts, network)
    sessions = PolicySessions(policy, FILES, max_context=max_context)
    async with sessions.open(), aiohttp.ClientSession() as http:
        agent = CodingAgent(http, max_turns=12, max_tokens=60, timeout_s=600.0, **options)
        runner = RolloutRunner(Environment(), agent, sessions, concurrency=1)
        return await runner.attempt(TASK, "g.0", seed=3), policy


SCRIPT = [
    call("test"),
    "3 by 4 gave 7, look at area",
    call("read"),
    "line 2 adds, it must multiply",
    call("edit", line=2, text="return a * b"),
    "line 2 is fixed, submit",
    call("submit"),
]
"""A summary after every turn: the session has four windows."""


async def test_a_session_goes_on_over_four_windows_and_all_of_it_is_recorded_and_trained_on(
    network: Transformer,
) -> None:
    trajectory, policy = await attempt(SCRIPT, network, summarise_at=1)
    assert (trajectory.reward, trajectory.status) == (1.0, "done")
    assert [(segment.kind, segment.parent) for segment in trajectory.segments] == [
        ("turns", None),
        ("turns", 0),
        ("turns", 1),
        ("turns", 2),
    ]
    # A window has an action and its summary, the last one only the submission. Each opens with the
    # previous summary and the number of summaries.
    assert [len(turns(segment)) for segment in trajectory.segments] == [2, 2, 2, 1]
    openings = [TOKENIZER.decode(segment.prompt) for segment in trajectory.segments]
    assert "summary" not in openings[0].replace('"summarise"', "")
    for number, (opening, summary) in enumerate(zip(openings[1:], SCRIPT[1::2], strict=True), 1):
        assert f"fix area\n\nYour summary {number} of the session so far:\n{summary}" in opening
        assert all(earlier not in opening for earlier in SCRIPT[1::2] if earlier != summary)

    # Every context is the one that the model was given, and every log-prob matches it.
    for segment in trajectory.segments:
        plain = plain_logprobs(network, segment.prompt, segment.tokens).tolist()
        sampled = [n for n, of_policy in enumerate(segment.mask) if of_policy]
        recorded = [segment.logprobs[n] for n in sampled]
        assert recorded == pytest.approx([plain[n] for n in sampled], abs=ROUNDING)
    said = [
        segment.tokens[turn.start : turn.stop]
        for segment in trajectory.segments
        for turn in turns(segment)
    ]
    assert said == [tuple(tokens) for tokens in answers(SCRIPT)]

    # The single reward reaches every sampled token of every window.
    lost = replace(trajectory, id="g.1", score=Score(0.0))
    group = Group(id="g", task="t", slot=0, admitted=0, trajectories=(trajectory, lost))
    batch, _ = assemble_batch(1, [group], AdvantageEstimator())
    rows = [row for row in batch.rows if row.sample == "g.0"]
    assert len(rows) == 4
    for row in rows:
        assert {a for a, sampled in zip(row.advantages, row.mask, strict=True) if sampled} == {0.5}
    assert sum(sum(row.mask) for row in rows) == sum(map(len, answers(SCRIPT)))


async def test_without_a_trigger_there_is_one_window(network: Transformer) -> None:
    trajectory, policy = await attempt(SCRIPT[::2], network)
    assert trajectory.reward == 1.0 and len(trajectory.segments) == 1
    assert "summarise" not in TOKENIZER.decode(policy.asked[0].prompt)


async def test_the_model_may_sum_up_of_its_own_accord(network: Transformer) -> None:
    texts = [call("test"), call("summarise", text="area adds"), SCRIPT[4], SCRIPT[6]]
    trajectory, policy = await attempt(texts, network, summarise_tool=True)
    assert trajectory.reward == 1.0
    assert [len(turns(segment)) for segment in trajectory.segments] == [2, 2]
    assert "Your summary 1 of the session so far:\narea adds" in TOKENIZER.decode(
        trajectory.segments[1].prompt
    )
    # If the tool is not offered, or its text is missing, the call is a mistake like any other.
    for options, wrong in (({}, texts[1]), ({"summarise_tool": True}, call("summarise"))):
        trajectory, policy = await attempt([wrong, SCRIPT[6]], network, **options)
        assert len(trajectory.segments) == 1
        assert "error: no tool summarise" in str(trajectory.messages)


async def test_what_is_too_long_for_the_window_is_left_out_of_the_summary(
    network: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer of a tool fills the context before the threshold was noticed."""
    _, policy = await attempt([call("submit")], network)
    room = len(policy.asked[0].prompt) + 250
    monkeypatch.setitem(globals(), "OUTPUT", "x " * 500)
    texts = [call("test"), "the tests say too much", call("submit")]
    trajectory, policy = await attempt(texts, network, max_context=room, summarise_at=room - 80)
    assert trajectory.status == "done"
    assert f"fix area\n\n{REQUEST}" in TOKENIZER.decode(policy.asked[-2].prompt), "in one message"
    assert [(segment.kind, len(turns(segment))) for segment in trajectory.segments] == [
        ("turns", 1),
        ("summary", 1),
        ("turns", 1),
    ]
    assert "the tests say too much" in TOKENIZER.decode(trajectory.segments[2].prompt)
    ended, _ = await attempt(texts, network, max_context=room)
    assert ended.status == "truncated", "without summaries it ends as it stands"


async def test_where_there_is_no_room_for_a_summary_that_is_due_it_goes_back_too(
    network: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window was full before the answer of the tool was added."""
    _, policy = await attempt([call("submit")], network)
    num_opening = len(policy.asked[0].prompt)
    monkeypatch.setitem(globals(), "OUTPUT", "x " * 500)
    texts = [call("test"), "the tests say too much", call("submit")]
    trajectory, policy = await attempt(
        texts, network, max_context=num_opening + 250, summarise_at=num_opening
    )
    assert trajectory.status == "done"
    assert f"fix area\n\n{REQUEST}" in TOKENIZER.decode(policy.asked[1].prompt)
    assert "the tests say too much" in TOKENIZER.decode(trajectory.segments[-1].prompt)
    assert [message["content"] for message in trajectory.messages].count(REQUEST) == 1
    with_request = len(policy.asked[1].prompt)
    ended, _ = await attempt(texts, network, max_context=with_request, summarise_at=num_opening)
    assert ended.status == "truncated", "there is no room for it behind the task either"


async def test_a_summary_may_be_a_call_of_the_tool(network: Transformer) -> None:
    texts = [call("test"), call("summarise", text="area adds"), call("submit")]
    trajectory, _ = await attempt(texts, network, summarise_at=1, summarise_tool=True)
    opening = TOKENIZER.decode(trajectory.segments[1].prompt)
    assert "Your summary 1 of the session so far:\narea adds" in opening


async def test_a_summary_is_asked_for_within_the_reminder_to_call_a_tool(
    network: Transformer,
) -> None:
    texts = ["hm", "nothing is done", call("submit")]
    trajectory, policy = await attempt(texts, network, summarise_at=1)
    assert trajectory.status == "done"
    assert f"{NUDGE}\n\n{REQUEST}" in TOKENIZER.decode(policy.asked[1].prompt), "in one message"
    user = [message["content"] for message in trajectory.messages if message["role"] == "user"]
    assert user[1:3] == [NUDGE, REQUEST], "people read them one by one"


def test_what_the_harness_knows_goes_on_beside_the_summary() -> None:
    talk = Conversation([{"role": "user", "content": "build it"}], summarise_at=100)
    talk.answered({"role": "assistant", "content": "yes"}, 99)
    assert not talk.is_full
    talk.answered({"role": "assistant", "content": "more"}, 100)
    assert talk.is_full
    talk.reopen("half of it stands", CarriedState("walls, then roof", ("roof", "door")))
    assert not talk.is_full
    assert talk.window == [
        {
            "role": "user",
            "content": "build it\n\nYour summary 1 of the session so far:\nhalf of it stands\n\n"
            "plan:\nwalls, then roof\n\nopen to-dos:\n- roof\n- door",
        }
    ]
    talk.reopen("all of it", CarriedState())
    assert "Your summary 2 of" in talk.window[0]["content"], "counted on"
    assert "half of it" not in talk.window[0]["content"]
    assert len(talk.said) == 5, "people read all of it"


def test_a_conversation_that_ends_with_another_role_gets_a_message_of_its_own() -> None:
    opening = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    talk = Conversation(opening, summarise_at=1)
    talk.reopen("greeted", CarriedState())
    assert talk.window[:2] == opening and talk.window[2]["role"] == "user"


def test_going_back_needs_something_to_go_back_to() -> None:
    opening = {"role": "user", "content": "hi"}
    assert not Conversation([opening]).step_back()
    talk = Conversation([opening], summarise_at=10)
    assert not talk.step_back(), "the task itself is too long"
    talk.answered({"role": "assistant", "content": "read"}, 5)
    talk.add({"role": "tool", "content": "x" * 999})
    read = list(talk.window)
    talk.answered({"role": "assistant", "content": "read on"}, 9)
    assert talk.step_back() and talk.window == read
    assert talk.step_back() and talk.window == [opening]
    assert not talk.step_back()
