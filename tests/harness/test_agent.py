"""The built-in agent with a scripted model behind a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from etude.core.errors import RolloutFailure
from etude.core.protocols import Agent
from etude.core.sandbox import CommandResult, SandboxSpec
from etude.core.types import Task, Transcript
from etude.harness.agent import NUDGE, CodingAgent, parse_arguments, turn_seed
from etude.harness.tools import SCHEMAS, Tools, report
from etude.sandbox.fake import FakeSandbox, Files

MODULE = "def area(a, b):\n    return a + b\n"
TASK = Task(
    id="t",
    prompt="fix area",
    sandbox=SandboxSpec(files={"shape.py": MODULE, "test_shape.py": ""}),
    meta={"module": "shape.py"},
)
Answer = dict[str, Any]
LONG_S = 60.0


def says(*calls: tuple[str, str], content: str | None = None) -> Answer:
    """An assistant message with these tool calls; arguments are texts, as a model writes them."""
    message: Answer = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return message


@contextlib.asynccontextmanager
async def model(
    respond: Callable[[Answer], Answer | web.Response],
) -> AsyncIterator[tuple[str, list[Answer]]]:
    """The URL of a model, and the requests that it received."""
    requests: list[Answer] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer key"
        requests.append(await request.json())
        answer = respond(requests[-1])
        return (
            answer
            if isinstance(answer, web.Response)
            else web.json_response({"choices": [{"message": answer}]})
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", requests
    finally:
        await runner.cleanup()


async def play(
    answers: list[Answer],
    sandbox: FakeSandbox | None = None,
    *,
    max_turns: int = 8,
    timeout_s: float = LONG_S,
) -> tuple[Transcript, list[Answer]]:
    script = iter(answers)
    async with (
        model(lambda request: next(script)) as (url, requests),
        aiohttp.ClientSession() as session,
    ):
        agent: Agent = CodingAgent(session, max_turns=max_turns, max_tokens=50, timeout_s=timeout_s)
        box = sandbox or FakeSandbox(TASK.sandbox.files, succeeds)
        return await agent.run(TASK, box, base_url=url, api_key="key", seed=7), requests


def succeeds(files: Files, argv: Any) -> CommandResult:
    return CommandResult(0, "")


def passes_when_fixed(files: Files, argv: Any) -> CommandResult:
    fixed = "a * b" in files["shape.py"]
    return CommandResult(0, "ok\n") if fixed else CommandResult(1, "area(3, 4) -> 7, not 12\n")


async def test_a_whole_session() -> None:
    answers = [
        says(("read", "{}"), ("test", "{}")),
        says(("edit", '{"line": 2, "text": "return a * b"}'), content="a product"),
        says(("test", "{}"), ("submit", "{}")),
    ]
    sandbox = FakeSandbox(TASK.sandbox.files, passes_when_fixed)
    transcript, requests = await play(answers, sandbox)
    assert transcript.finished
    assert sandbox.files["shape.py"] == "def area(a, b):\n    return a * b\n"
    assert sandbox.commands == [("python", "test_shape.py")] * 2
    first, second, third = answers
    assert transcript.messages == [
        {"role": "user", "content": "fix area"},
        first,
        {
            "role": "tool",
            "tool_call_id": "call_0",
            "content": "1 def area(a, b):\n2     return a + b",
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "area(3, 4) -> 7, not 12"},
        second,
        {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
        third,
        {"role": "tool", "tool_call_id": "call_0", "content": "ok"},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    # Each request carries the history so far, word for word: the recorder sees an unbroken context.
    assert [request["messages"] for request in requests] == [
        transcript.messages[:n] for n in (1, 4, 6)
    ]


async def test_what_a_request_says() -> None:
    _, [request, other] = await play([says(("test", "{}")), says(("submit", "{}"))])
    fixed = {key: value for key, value in request.items() if key not in ("messages", "seed")}
    assert fixed == {
        "model": "etude", "max_tokens": 50, "temperature": 1.0, "tools": SCHEMAS,
        "parallel_tool_calls": True
    }  # fmt: skip
    assert [request["seed"], other["seed"]] == [turn_seed(7, 0), turn_seed(7, 1)]
    assert request["seed"] != other["seed"]


async def test_calls_after_submit_are_not_made() -> None:
    sandbox = FakeSandbox(TASK.sandbox.files)
    transcript, _ = await play(
        [says(("submit", "{}"), ("edit", '{"line": 1, "text": "x"}'))], sandbox
    )
    assert transcript.finished and sandbox.files == TASK.sandbox.files


async def test_an_answer_without_a_call_is_nudged_and_costs_a_turn() -> None:
    transcript, requests = await play(
        [says(content="hm"), says(("test", "{}")), says(content="hm")], max_turns=3
    )
    assert (transcript.finished, transcript.limit) == (False, "turns") and len(requests) == 3
    assert [message["content"] for message in transcript.messages].count(NUDGE) == 2


async def test_two_answers_in_a_row_without_a_call_end_the_session() -> None:
    transcript, requests = await play(
        [says(content="hm"), says(content="hm"), says(("submit", "{}"))], max_turns=3
    )
    assert not transcript.finished and len(requests) == 2
    assert [message["content"] for message in transcript.messages] == [
        "fix area",
        "hm",
        NUDGE,
        "hm",
        NUDGE,
    ]


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (("fly", "{}"), "error: no tool fly"),
        (("__init__", "{}"), "error: no tool __init__"),
        (("read", "not json"), "error: read takes ()"),
        (("read", "[" * 100_000), "error: read takes ()"),
        (("read", '["shape.py"]'), "error: read takes ()"),
        (("read", '{"path": "../x"}'), "error: read takes ()"),
        (("edit", '{"line": "2", "text": "x"}'), "error: edit takes (line: int, text: str)"),
        (("edit", '{"line": true, "text": "x"}'), "error: edit takes (line: int, text: str)"),
        (("edit", '{"line": 0, "text": "x"}'), "error: lines are 1 to 2"),
        (("edit", '{"line": 3, "text": "x"}'), "error: lines are 1 to 2"),
        (("edit", '{"line": 1, "text": "x\\ny"}'), "error: text is one line"),
        (("test", '{"x": 1}'), "error: test takes ()"),
    ],
)
async def test_a_wrong_call_is_answered_and_changes_nothing(
    call: tuple[str, str], content: str
) -> None:
    sandbox = FakeSandbox(TASK.sandbox.files)
    transcript, _ = await play([says(call), says(("submit", "{}"))], sandbox)
    assert transcript.messages[2]["content"] == content and sandbox.files == TASK.sandbox.files


async def test_out_of_time_keeps_what_was_said() -> None:
    class Slow(FakeSandbox):
        async def run(self, argv: Any, **how: Any) -> CommandResult:
            await asyncio.Event().wait()
            raise AssertionError

    transcript, _ = await play([says(("test", "{}"))], Slow(TASK.sandbox.files), timeout_s=0.5)
    assert (transcript.finished, transcript.limit) == (False, "time")
    assert transcript.messages[0] == {"role": "user", "content": "fix area"}


async def test_a_sandbox_that_breaks_is_a_failed_rollout() -> None:
    class Broken(FakeSandbox):
        async def run(self, argv: Any, **how: Any) -> CommandResult:
            raise RolloutFailure("sandbox: gone")

    with pytest.raises(RolloutFailure, match="gone"):
        await play([says(("test", "{}"))], Broken(TASK.sandbox.files))


async def test_an_http_error_is_a_failed_rollout_with_status_and_body() -> None:
    async with (
        model(lambda request: web.Response(status=503, text="no engine is live")) as (url, _),
        aiohttp.ClientSession() as session,
    ):
        agent = CodingAgent(session, max_turns=1, max_tokens=1, timeout_s=LONG_S)
        with pytest.raises(RolloutFailure, match="503: no engine is live"):
            await agent.run(
                TASK, FakeSandbox(TASK.sandbox.files), base_url=url, api_key="key", seed=0
            )


@pytest.mark.parametrize(
    ("ran", "line"),
    [
        (CommandResult(0, "ok\n"), "ok"),
        (CommandResult(0, ""), "ok"),
        (CommandResult(1, "noise\narea(3, 4) -> 7, not 12\n"), "area(3, 4) -> 7, not 12"),
        (
            CommandResult(1, "Traceback (most recent call last):\n  File\nNameError: x\n"),
            "error: NameError: x",
        ),
        (CommandResult(-9, ""), "error: exit -9"),
        (CommandResult(None, "noise"), "timeout"),
    ],
)
def test_report_is_one_line(ran: CommandResult, line: str) -> None:
    assert report(ran) == line


@pytest.mark.parametrize(
    ("line", "text", "module"),
    [
        (1, "def area(x, y):", "def area(x, y):\n    return a + b\n"),
        (2, "return 1", "def area(a, b):\n    return 1\n"),
        (2, "        return 1  ", "def area(a, b):\n    return 1\n"),
        (2, "", "def area(a, b):\n    \n"),
    ],
)
async def test_edit_keeps_the_indentation(line: int, text: str, module: str) -> None:
    sandbox = FakeSandbox(TASK.sandbox.files)
    assert await Tools(TASK, sandbox).edit(line, text) == "ok"
    assert sandbox.files["shape.py"] == module


def test_schemas_are_in_order_and_small() -> None:
    assert [schema["function"]["name"] for schema in SCHEMAS] == ["read", "edit", "test", "submit"]
    assert SCHEMAS[1]["function"]["parameters"] == {
        "type": "object",
        "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
        "required": ["line", "text"],
    }
    assert len(json.dumps(SCHEMAS)) < 1000
    for schema in SCHEMAS:
        told = schema["function"]["description"]
        assert told and (getattr(Tools, schema["function"]["name"]).__doc__ or "").startswith(told)


async def test_someone_elses_timeout_is_not_the_end_of_the_session() -> None:
    class Late(FakeSandbox):
        async def run(self, argv: Any, **how: Any) -> CommandResult:
            raise TimeoutError("of the sandbox")

    with pytest.raises(TimeoutError):
        await play([says(("test", "{}"))], Late(TASK.sandbox.files))


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "9" * 5000])
def test_arguments_that_cannot_be_read_are_none(text: str) -> None:
    assert parse_arguments(text) is None


async def test_a_session_begins_with_the_messages_of_its_task() -> None:
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "fix area"})
    task = replace(TASK, prompt="", messages=said)
    async with (
        model(lambda body: says(("submit", "{}"))) as (url, requests),
        aiohttp.ClientSession() as session,
    ):
        agent = CodingAgent(session, max_turns=2, max_tokens=9, timeout_s=LONG_S, temperature=1.0)
        await agent.run(task, FakeSandbox(TASK.sandbox.files), base_url=url, api_key="key", seed=0)
    assert requests[0]["messages"] == list(said)


def test_a_task_that_names_no_module_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"task 't' has no meta\['module'\]"):
        Tools(replace(TASK, meta={}), FakeSandbox({}))
