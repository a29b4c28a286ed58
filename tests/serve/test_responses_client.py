"""The official client of OpenAI against the Responses dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from etude.serve import conversations
from etude.serve.conversations import ConversationStore, StoredResponse
from etude.serve.fake import Scripted
from etude.serve.openapi import Health
from tests.serve.conftest import served
from tests.serve.scripted import answers, call, prompts, scripted_app

TOOLS: Any = [
    {
        "type": "function",
        "name": "edit",
        "parameters": {"type": "object", "properties": {"line": {"type": "integer"}}},
        "strict": False,
    },
    {"type": "custom", "name": "patch", "description": "Takes a patch."},
    {"type": "web_search"},
]
EDITS = "<think>so it is</think>\n\nI edit." + call("edit", line=3) + call("patch", input="-a\n+b")
KINDS = ["reasoning", "message", "function_call", "custom_tool_call"]


@asynccontextmanager
async def client_of(*texts: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, Scripted]]:
    policy = Scripted(answers(texts))
    async with (
        served(scripted_app(policy, token="secret")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client, policy


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.responses.create(**{"model": "etude", "input": "read"} | options)


async def test_an_answer_with_reasoning_text_and_calls() -> None:
    async with client_of(EDITS) as (client, policy):
        made = await ask(
            client,
            instructions="Be brief.",
            tools=TOOLS,
            reasoning={"effort": "low", "summary": "auto"},
            text={"verbosity": "low"},
            include=["reasoning.encrypted_content"],
            parallel_tool_calls=True,
            prompt_cache_key="k",
            metadata={"a": "b"},
            service_tier="auto",
            truncation="auto",
            user="me",
            extra_body={"client_metadata": {"x": "y"}},
        )
    assert [item.type for item in made.output] == KINDS
    reasoning, message, edit, patch = made.output
    assert reasoning.content[0].text == "so it is" and reasoning.summary == []
    assert message.content[0].text == "I edit." == made.output_text
    assert (edit.name, edit.arguments) == ("edit", '{"line": 3}')
    assert (patch.name, patch.input) == ("patch", "-a\n+b")
    assert made.status == "completed" and made.metadata == {"a": "b"} and made.error is None
    assert made.incomplete_details is None
    assert made.usage.input_tokens == len(policy.asked[0].prompt)
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    (shown,) = prompts(policy)
    assert "web_search" not in shown and "Takes a patch." in shown
    assert shown.endswith("<|user|>Be brief.<|end|><|user|>read<|end|><|assistant|>")


async def test_a_stream_is_the_answer_in_pieces() -> None:
    async with client_of(EDITS, EDITS) as (client, _):
        whole = await ask(client, tools=TOOLS)
        events = [event async for event in await ask(client, tools=TOOLS, stream=True)]
        kept = await client.responses.retrieve(events[-1].response.id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed" and last.response == kept
    told = [event.item for event in events if event.type == "response.output_item.done"]
    assert told == last.response.output
    assert [without_ids(item) for item in told] == [without_ids(item) for item in whole.output]
    parts = [event for event in events if hasattr(event, "item_id")]
    assert [event.item_id for event in parts] == [told[event.output_index].id for event in parts]
    assert {event.content_index for event in parts if hasattr(event, "content_index")} == {0}
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "I edit." and len(deltas) > 1
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "so it is" and len(thought) > 1
    done = [event.arguments for event in events if event.type.endswith("arguments.done")]
    assert done == ['{"line": 3}']


def without_ids(item: Any) -> dict[str, Any]:
    said: dict[str, Any] = item.model_dump(exclude_none=True)
    return {key: value for key, value in said.items() if key not in ("id", "call_id")}


async def test_the_client_s_own_view_of_a_stream() -> None:
    async with (
        client_of(EDITS) as (client, _),
        client.responses.stream(model="etude", input="read", tools=TOOLS) as stream,
    ):
        async for _ in stream:
            pass
        made = await stream.get_final_response()
    assert [item.type for item in made.output] == KINDS and made.output_text == "I edit."


RESULTS = ["function_call_output", "custom_tool_call_output"]


@pytest.mark.parametrize("kept", ["by the server", "by the client", "by reference"])
async def test_a_conversation_goes_on(kept: str) -> None:
    async with client_of(EDITS, "Done.", "Bye.") as (client, policy):
        first = await ask(client, tools=TOOLS, instructions="Be brief.")
        results: Any = [
            {"type": kind, "call_id": item.call_id, "output": output}
            for kind, item, output in zip(
                RESULTS,
                first.output[2:],
                ["changed", [{"type": "input_text", "text": "patched"}]],
                strict=True,
            )
        ]
        said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "read"}]}]
        if kept == "by the server":
            options: Any = {"previous_response_id": first.id, "input": results}
        elif kept == "by the client":
            sent = [item.model_dump(exclude_none=True) for item in first.output]
            options = {"input": [*said, *sent, *results], "store": False}
        else:
            sent = [{"type": "item_reference", "id": item.id} for item in first.output]
            options = {"input": [*said, *sent, *results]}
        second = await ask(client, tools=TOOLS, instructions="Be brief.", **options)
        assert second.output_text == "Done."
        if kept == "by the server":
            third = await ask(client, previous_response_id=second.id, input="thanks")
            assert third.output_text == "Bye."
    before, shown = prompts(policy)[:2]
    assert shown == before + (
        "<think>so it is</think>I edit." + call("edit", line=3) + call("patch", input="-a\n+b")
        + "<|end|><|tool|>changed<|end|><|tool|>patched<|end|><|assistant|>"
    )  # fmt: skip


async def test_what_is_kept_can_be_seen_and_deleted() -> None:
    async with client_of("Done.", "Done.") as (client, _):
        items: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        made = await ask(client, input=items)
        assert await client.responses.retrieve(made.id) == made
        listed = [item async for item in client.responses.input_items.list(made.id, order="asc")]
        assert [item.content for item in listed] == ["a", "b"]
        page = await client.responses.input_items.list(made.id, limit=1)
        assert [item.content for item in page.data] == ["b"] and page.has_more
        after = await client.responses.input_items.list(made.id, after=page.data[0].id)
        assert [item.content for item in after.data] == ["a"]
        for wrong in (0, 101, -1, "all", 10**20):
            with pytest.raises(
                openai.BadRequestError, match="limit must be a number from 1 to 100"
            ):
                await client.responses.input_items.list(made.id, limit=wrong)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(made.id)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as told:
            await ask(client, previous_response_id=made.id)
        assert told.value.code == "previous_response_not_found"
        unkept = await ask(client, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_an_answer_that_was_cut_off() -> None:
    async with client_of("read a test", "read a test") as (client, _):
        made = await ask(client, max_output_tokens=2)
        assert made.status == "incomplete" and made.output[0].status == "incomplete"
        assert made.incomplete_details.reason == "max_output_tokens"
        events = [event async for event in await ask(client, max_output_tokens=2, stream=True)]
        assert events[-1].type == "response.incomplete"


async def test_tokens_are_counted() -> None:
    async with client_of("Done.") as (client, policy):
        count = await client.responses.input_tokens.count(model="etude", input="read", tools=TOOLS)
        await ask(client, tools=TOOLS)
    assert count.input_tokens == len(policy.asked[0].prompt)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"input": [{"type": "computer_call"}]}, "'computer_call'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'x' is not stored here"),
        ({"input": []}, "input: empty"),
        ({"input": "a " * 5000}, "tokens"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "name": ["f"]}]}, r"tools\[0\]: Expected `str`"),
    ],
)
async def test_mistakes_are_told_as_openai_does(more: dict[str, Any], words: str) -> None:
    async with client_of("Done.") as (client, _):
        with pytest.raises(openai.BadRequestError, match=words) as told:
            await ask(client, **more)
    assert told.value.type == "invalid_request_error"


def test_an_item_is_found_without_a_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may refer to a hundred thousand items, in a store with as many; a slow search would
    block all other clients."""
    store = ConversationStore(max_bytes=1000)

    def keep(session: str, name: str) -> None:
        response = {"output": [{"id": f"{name}-{n}", "text": "x" * 100} for n in range(2)]}
        stored = StoredResponse(response=response, items=(), messages=())
        store.put(session, name, stored)

    for name in ("a", "b", "c"):
        keep("s", name)
    keep("t", "d")
    looked: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(conversations.msgspec, "to_builtins", looked.append)
        found = store.item("s", "b-1")
    assert found == {"id": "b-1", "text": "x" * 100} and not looked
    assert store.item("s", "a-0") is None, "it was the oldest, and there was no more room"
    assert store.item("s", "d-0") is None and store.item("t", "d-0")
    store.delete("s", "b")
    assert store.item("s", "b-1") is None and store.item("s", "c-1")
    store.forget("s")
    assert store.item("s", "c-1") is None and store.item("t", "d-1")


def test_the_oldest_conversations_are_forgotten_first() -> None:
    item = {"id": "i", "content": "x" * 100}
    store = ConversationStore(max_bytes=1000)
    for number in range(20):
        stored = StoredResponse(response=Health(), items=(item,), messages=())
        store.put("s" if number % 2 else "t", str(number), stored)
    assert store.num_bytes <= 1000
    assert store.get("s", "19") and store.get("t", "18") and not store.get("s", "1")
    assert store.get("t", "19") is None  # another session's
    store.forget("s")
    assert store.get("s", "19") is None and store.get("t", "18")
