"""Recorded sessions in every dialect, over a gateway and a worker whose model follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from etude.core.types import Segment
from etude.serve.fake import Scripted
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.session_journal import SessionJournal
from etude.serve.worker import Worker
from etude.store.objects import Objects
from tests.serve.client import post, segments
from tests.serve.conftest import served
from tests.serve.scripted import FILES, TOKENIZER, answers, call


class ScriptedEngine(Scripted):
    """An engine with the members that a worker needs."""

    tokenizer = TOKENIZER
    max_context = 4096


@asynccontextmanager
async def gateway_over(
    http: aiohttp.ClientSession, texts: Sequence[str], directory: str
) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(answers(texts))
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    gateway = Gateway(Router(http), Objects.open(directory), FILES, max_context=4096)
    gateway.restore(SessionJournal(gateway.objects))
    async with (
        served(create_app(worker.routes(), None)) as at,
        served(create_app(gateway.routes(), None)) as url,
    ):
        await post(http, f"{url}/workers", {"url": at, "region": "east", "version": 0})
        yield url, engine


TURNS = [
    "<think>so it is</think>\n\nI edit. " + call("edit", line=3),
    "<think>hm</think>" + call("test") + call("test"),
    "Done.",
]
EDIT = {"type": "object", "properties": {"line": {"type": "integer"}}}


async def chat(url: str, *, stream: bool, keep_reasoning: bool) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": EDIT}}
        for name in ("edit", "test")
    ]
    messages: list[Any] = [{"role": "user", "content": "read"}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for _ in TURNS:
            asked: Any = {"model": "m", "messages": messages, "tools": tools}
            if stream:
                chunks = await client.chat.completions.create(stream=True, **asked)
                answer = put_together([chunk.choices[0].delta async for chunk in chunks])
            else:
                made = await client.chat.completions.create(**asked)
                answer = made.choices[0].message.model_dump(exclude_none=True)
            if not keep_reasoning:
                answer.pop("reasoning_content", None)
            messages.append(answer)
            messages += [
                {"role": "tool", "tool_call_id": called["id"], "content": "ok"}
                for called in answer.get("tool_calls", ())
            ]


def put_together(deltas: Sequence[Any]) -> dict[str, Any]:
    """A message assembled from its deltas."""
    said = [delta.model_dump(exclude_none=True) for delta in deltas]
    answer: dict[str, Any] = {"role": "assistant"}
    for key in ("content", "reasoning_content"):
        if text := "".join(piece.get(key, "") for piece in said):
            answer[key] = text
    calls = [called for piece in said for called in piece.get("tool_calls", ())]
    assert [called.pop("index") for called in calls] == list(range(len(calls)))
    return answer | ({"tool_calls": calls} if calls else {})


async def messages(url: str, *, stream: bool, keep_reasoning: bool) -> None:
    tools: Any = [{"name": name, "input_schema": EDIT} for name in ("edit", "test")]
    history: list[Any] = [{"role": "user", "content": "read"}]
    options: Any = {"model": "m", "max_tokens": 500, "tools": tools}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="x") as client:
        for _ in TURNS:
            if stream:
                async with client.messages.stream(messages=history, **options) as told:
                    made: Any = await told.get_final_message()
            else:
                made = await client.messages.create(messages=history, **options)
            shown = [b for b in made.content if keep_reasoning or b.type != "thinking"]
            history.append({"role": "assistant", "content": shown})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
                for block in made.content
                if block.type == "tool_use"
            ]
            history.append({"role": "user", "content": results})


async def responses(url: str, *, stream: bool, keep_reasoning: bool) -> None:
    """With `keep_reasoning` the server stores all of the conversation."""
    tools: Any = [
        {"type": "function", "name": name, "parameters": EDIT, "strict": False}
        for name in ("edit", "test")
    ]
    items: list[Any] = [{"role": "user", "content": "read"}]
    last = None
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for _ in TURNS:
            options: Any = {"model": "m", "tools": tools, "input": items}
            if keep_reasoning:
                options["previous_response_id"] = last
            if stream:
                events = await client.responses.create(stream=True, **options)
                made: Any = [event async for event in events][-1].response
            else:
                made = await client.responses.create(**options)
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
                for item in made.output
                if item.type == "function_call"
            ]
            last = made.id
            if keep_reasoning:
                items = results
            else:
                items += [item for item in made.output if item.type != "reasoning"]
                items += results


@pytest.mark.parametrize("keep_reasoning", [True, False], ids=["whole", "without reasoning"])
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "streamed"])
@pytest.mark.parametrize("dialect", [chat, messages, responses])
async def test_a_session_is_one_segment_of_the_sampled_tokens(
    dialect: Any, stream: bool, keep_reasoning: bool, http: aiohttp.ClientSession, tmp_path: Any
) -> None:
    async with gateway_over(http, TURNS, f"file:{tmp_path}") as (url, engine):
        await dialect(f"{url}/s/one", stream=stream, keep_reasoning=keep_reasoning)
        (segment,) = await segments(http, url, "one")
        async with http.delete(f"{url}/s/one") as response:
            assert response.status == 204
    assert sampled(segment) == [token for answer in answers(TURNS) for token in answer]
    # each prompt of the model is the beginning of the segment
    context = segment.prompt + segment.tokens
    for asked in engine.asked:
        assert context[: len(asked.prompt)] == asked.prompt
    text = TOKENIZER.decode(context)
    for turn in TURNS:
        assert turn in text


def sampled(segment: Segment) -> list[int]:
    return [token for token, drawn in zip(segment.tokens, segment.mask, strict=True) if drawn]


async def test_a_session_reads_only_its_own_responses(
    http: aiohttp.ClientSession, tmp_path: Any
) -> None:
    async with gateway_over(http, ["Done."], f"file:{tmp_path}") as (url, _):
        made = await post(http, f"{url}/s/one/v1/responses", {"input": "read"})
        async with http.get(f"{url}/s/one/v1/responses/{made['id']}") as response:
            assert response.status == 200
        for other in ("/s/two", ""):
            async with http.get(f"{url}{other}/v1/responses/{made['id']}") as response:
                assert response.status == 404
        async with http.delete(f"{url}/s/one") as response:
            assert response.status == 204
        async with http.get(f"{url}/s/one/v1/responses/{made['id']}") as response:
            assert response.status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["", "/s/one"])
async def test_what_no_journal_can_hold_is_refused_before_anything_is_sampled(
    http: aiohttp.ClientSession, tmp_path: Any, session: str, stream: bool
) -> None:
    schema = {"type": "object", "title": 2**70}
    said = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    async with gateway_over(http, ["Done."], f"file:{tmp_path}") as (url, engine):
        asked = {"input": "read", "text": said, "stream": stream}
        async with http.post(f"{url}{session}/v1/responses", json=asked) as response:
            assert response.status == 400
            assert "too large to record" in (await response.json())["error"]["message"]
        assert engine.asked == []
