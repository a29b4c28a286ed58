"""The official client of Anthropic against the Messages dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest

from etude.serve.fake import Scripted
from tests.serve.conftest import served
from tests.serve.scripted import TOKENIZER, answers, call, prompts, scripted_app

TOOLS: Any = [
    {
        "name": "edit",
        "description": "Changes a line.",
        "input_schema": {"type": "object", "properties": {"line": {"type": "integer"}}},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "test", "input_schema": {"type": "object", "properties": {}}},
    {"type": "web_search_20250305", "name": "web_search"},
]
ASK: dict[str, Any] = {"model": "etude", "max_tokens": 500}
READ: Any = [{"role": "user", "content": "read"}]
EDITS = "<think>so it is</think>\n\nI edit." + call("edit", line=3) + call("test")


@asynccontextmanager
async def client_of(*texts: str) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Scripted]]:
    policy = Scripted(answers(texts))
    async with (
        served(scripted_app(policy, token="secret")) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        yield client, policy


async def test_an_answer_with_thinking_text_and_parallel_calls() -> None:
    async with client_of(EDITS) as (client, policy):
        message = await client.messages.create(
            **ASK,
            system=[{"type": "text", "text": "Be brief."}],
            messages=READ,
            tools=TOOLS,
            tool_choice={"type": "auto"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "me"},
            service_tier="auto",
        )
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, edit, test = message.content
    assert thinking.type == "thinking" and thinking.thinking == "so it is" and thinking.signature
    assert text.type == "text" and text.text == "I edit."
    assert edit.type == "tool_use" and (edit.name, edit.input) == ("edit", {"line": 3})
    assert test.type == "tool_use" and (test.name, test.input) == ("test", {})
    assert edit.id != test.id and message.stop_reason == "tool_use"
    assert message.usage.input_tokens == len(policy.asked[0].prompt)
    assert message.usage.output_tokens == len(answers([EDITS])[0])
    (shown,) = prompts(policy)
    assert "web_search" not in shown and "Changes a line." in shown
    assert shown.endswith("<|user|>Be brief.<|end|><|user|>read<|end|><|assistant|>")


async def test_a_stream_is_the_answer_in_pieces() -> None:
    async with client_of(EDITS, EDITS) as (client, _):
        whole = await client.messages.create(**ASK, messages=READ, tools=TOOLS)
        kinds = []
        async with client.messages.stream(**ASK, messages=READ, tools=TOOLS) as stream:
            async for event in stream:
                kinds.append(event.type)
            streamed = await stream.get_final_message()
    assert [without_ids(block) for block in streamed.content] == [
        without_ids(block) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("thinking") > 1 and kinds.count("text") > 1


def without_ids(block: Any) -> dict[str, Any]:
    said: dict[str, Any] = block.model_dump(exclude_none=True)
    said.pop("id", None)
    return said


async def test_a_conversation_with_results_of_tools() -> None:
    async with client_of(EDITS, "Done.") as (client, policy):
        first = await client.messages.create(**ASK, messages=READ, tools=TOOLS)
        calls = [block for block in first.content if block.type == "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "changed"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "1 failed"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ]
        history: Any = [
            *READ,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = await client.messages.create(**ASK, messages=history, tools=TOOLS)
    assert second.content[0].type == "text" and second.content[0].text == "Done."
    assert second.stop_reason == "end_turn"
    before, shown = prompts(policy)
    assert shown == before + (
        "<think>so it is</think>I edit." + call("edit", line=3) + call("test") + "<|end|>"
        "<|tool|>changed<|end|><|tool|>1 failed<|end|><|user|>Go on.<|end|><|assistant|>"
    )


async def test_what_ends_an_answer_is_told() -> None:
    async with client_of("read a test", "read a test", "read a test") as (client, policy):
        cut = await client.messages.create(model="etude", max_tokens=2, messages=READ)
        assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
        quiet = await client.messages.create(
            **ASK,
            messages=READ,
            thinking={"type": "disabled"},
            extra_body={"temperature": 0.5, "top_k": 5, "context_management": {"edits": []}},
        )
        assert quiet.stop_reason == "end_turn" and quiet.stop_sequence is None
    assert policy.asked[1].params.temperature == 0.5 and policy.asked[1].params.top_k == 5


async def test_a_stop_sequence_is_named() -> None:
    """The script does not stop on its own, so the sample ends with the token that completes the
    stop text."""
    stopped = TOKENIZER.encode("read a stop")
    options: Any = {"stop_sequences": ["never", "stop"], "max_tokens": len(stopped)}

    class Stops(Scripted):
        async def sample(self, request: Any) -> Any:
            sample = await super().sample(request)
            return type(sample)(
                tokens=sample.tokens, logprobs=sample.logprobs, versions=sample.versions,
                finish_reason="stop",
            )  # fmt: skip

    policy = Stops([stopped, stopped])
    async with (
        served(scripted_app(policy)) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="x") as client,
    ):
        told = await client.messages.create(model="etude", messages=READ, **options)
        async with client.messages.stream(model="etude", messages=READ, **options) as stream:
            streamed = await stream.get_final_message()
    for message in (told, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "stop")
        assert message.content[0].text == "read a "
    assert policy.asked[0].stop == ("never", "stop")


async def test_tokens_are_counted() -> None:
    async with client_of("Done.") as (client, policy):
        count = await client.messages.count_tokens(model="etude", messages=READ, tools=TOOLS)
        await client.messages.create(**ASK, messages=READ, tools=TOOLS)
    assert count.input_tokens == len(policy.asked[0].prompt)


async def test_thinking_is_not_shown_to_who_turned_it_off() -> None:
    async with client_of(EDITS) as (client, _):
        message = await client.messages.create(
            **ASK, messages=READ, tools=TOOLS, thinking={"type": "disabled"}
        )
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "prompt is too long: .*tokens"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool is named"),
    ],
)
async def test_mistakes_are_told_as_anthropic_does(more: dict[str, Any], words: str) -> None:
    async with client_of("Done.") as (client, _):
        with pytest.raises(anthropic.BadRequestError, match=words) as told:
            await client.messages.create(**{**ASK, "messages": READ} | more)
    body: Any = told.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


async def test_who_may_not_ask_is_told_as_anthropic_does(http: aiohttp.ClientSession) -> None:
    async with client_of("Done.") as (client, _):
        with pytest.raises(anthropic.AuthenticationError) as told:
            await client.with_options(api_key="wrong").messages.create(**ASK, messages=READ)
        body: Any = told.value.body
        assert body["error"]["type"] == "authentication_error"
        url = str(client.base_url).rstrip("/")
        async with http.get(f"{url}/v1/messages", headers={"x-api-key": "secret"}) as response:
            assert response.status == 405 and (await response.json())["type"] == "error"
