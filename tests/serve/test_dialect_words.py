"""Requests in every dialect, the resulting request to the policy, and every field of the answer.

`dialects.json` holds the expected values. After a change of the answers, write it again, and read
what has changed in it:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/serve/test_dialect_words.py
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import aiohttp

from etude.core.sampling import Request, Sample
from etude.serve.answerer import PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes
from etude.serve.fake import Scripted
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import create_app
from tests.serve.conftest import served
from tests.serve.scripted import FILES, TOKENIZER, answers, call

ANSWERS = Path(__file__).with_name("dialects.json")
SCHEMA = {"type": "object", "properties": {"line": {"type": "integer"}}}
FUNCTIONS = [
    {"type": "function", "function": {
        "name": "edit", "description": "Edits.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "test"}},
]  # fmt: skip
ITEMS = [
    {"type": "function", "name": "edit", "description": "Edits.", "parameters": SCHEMA},
    {"type": "custom", "name": "shell", "description": "Runs."},
    {"type": "web_search"},
]
BLOCKS = [
    {"name": "edit", "description": "Edits.", "input_schema": SCHEMA},
    {"type": "web_search_20250305", "name": "web_search"},
]
ASK = {"model": "m", "messages": [{"role": "user", "content": "read"}]}
MESSAGES = ASK | {"max_tokens": 60}
THOUGHT = "<think>so it is</think>\n\nI edit. " + call("edit", line=3)
TWICE = call("edit", line=1) + call("edit", line=2)
HISTORY = [
    {"type": "message", "role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "x", "text": "re"}, {"type": "x", "text": "ad"}]},
    {"type": "reasoning", "id": "r", "summary": [], "content": [
        {"type": "reasoning_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "function_call", "call_id": "c1", "name": "edit", "arguments": '{"line": 3}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls"},
    {"type": "function_call_output", "call_id": "c1", "output": "ok"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "t", "text": "a"}]},
]  # fmt: skip
TOLD = [
    {"role": "user", "content": [{"type": "text", "text": "re"}, {"type": "text", "text": "ad"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I edit."},
        {"type": "tool_use", "id": "c1", "name": "edit", "input": {"line": 3}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "ok"}]},
        {"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
]  # fmt: skip
# path, the model's answer, the body
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("chat/completions", "Done.", ASK),
    ("chat/completions", THOUGHT, ASK | {"tools": FUNCTIONS, "seed": 3, "n": 1}),
    ("chat/completions", TWICE, ASK | {"tools": FUNCTIONS, "tool_choice": "none"}),
    ("chat/completions", TWICE, ASK | {"tools": FUNCTIONS, "tool_choice": "required"}),
    ("chat/completions", THOUGHT, ASK | {"tools": FUNCTIONS, "parallel_tool_calls": False}),
    ("chat/completions", "Done.", ASK | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2}),
    ("chat/completions", "Done.", ASK | {"response_format": {"type": "json_object"}}),
    ("chat/completions", "Done.", ASK | {
        "return_token_ids": True, "temperature": 0.5, "stop": "e"}),
    ("chat/completions", "Done.", ASK | {"echo": True}),
    ("chat/completions", "Done.", ASK | {"top_logprobs": 2}),
    ("chat/completions", "Done.", ASK | {"tool_choice": "required"}),
    ("completions", "Done.", {"model": "m", "prompt": "read", "logprobs": 1, "seed": 1}),
    ("completions", "Done.", {"prompt": [1, 2, 3], "max_tokens": 3, "return_token_ids": True}),
    ("completions", "Done.", {"prompt": "read", "echo": True}),
    ("messages", "Done.", MESSAGES | {"system": "be brief"}),
    ("messages", THOUGHT, MESSAGES | {"tools": BLOCKS, "thinking": {"type": "adaptive"}}),
    ("messages", THOUGHT, MESSAGES | {"tools": BLOCKS, "thinking": {"type": "disabled"}}),
    ("messages", THOUGHT, MESSAGES | {"tools": BLOCKS, "tool_choice": {"type": "any"}}),
    ("messages", "Done.", MESSAGES | {"max_tokens": 2, "top_k": 3, "temperature": 0.5}),
    ("messages", "Done. Yes", MESSAGES | {"stop_sequences": ["one", "."]}),
    ("messages", "Done.", MESSAGES | {"messages": TOLD, "tools": BLOCKS,
                                      "output_config": {"effort": "low"}}),
    ("messages", "Done.", MESSAGES | {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {}}]}]}),
    ("messages", "Done.", {"messages": []}),
    ("messages/count_tokens", "", {"model": "m", "messages": TOLD, "tools": BLOCKS}),
    ("responses", "Done.", {"model": "m", "input": "read", "instructions": "be brief"}),
    ("responses", THOUGHT, {"input": "read", "tools": ITEMS, "metadata": {"a": "b"}}),
    ("responses", call("shell", input="ls -l"), {"input": "read", "tools": ITEMS, "top_p": 0.5}),
    ("responses", "Done.", {"input": "read", "max_output_tokens": 2, "store": False}),
    ("responses", "Done.", {"input": HISTORY, "tools": ITEMS, "reasoning": {"effort": "high"}}),
    ("responses", "Done.", {"input": "read", "tools": ITEMS, "tool_choice": {
        "type": "function", "name": "edit"}}),
    ("responses", "Done.", {"input": "read", "text": {"format": {
        "type": "json_schema", "name": "x", "schema": SCHEMA}}}),
    ("responses", "Done.", {"input": [{"type": "item_reference", "id": "gone"}]}),
    ("responses", "Done.", {"input": [{"type": "computer_call"}]}),
    ("responses", "Done.", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("responses", "Done.", {"input": [{"type": "function_call"}]}),
    ("responses/input_tokens", "", {"input": HISTORY, "tools": ITEMS}),
    ("responses/nothing/cancel", "", {}),
]  # fmt: skip

STREAMED = {0, 1, 5, 7, 11, 12, 15, 17, 18, 19, 25, 26, 27, 31}


class Policy(Scripted):
    """A scripted policy that supports top log-probs and stop texts."""

    def answer(self, tokens: list[list[int]]) -> None:
        self._answers = iter(tokens)
        self.asked.clear()

    async def sample(self, request: Request) -> Sample:
        sample = await super().sample(request)
        text = TOKENIZER.decode(sample.tokens)
        changes: dict[str, Any] = {}
        if request.top_logprobs:
            tops = tuple((token, -0.5) for token in range(3, 3 + request.top_logprobs))
            changes["top_logprobs"] = (tops,) * len(sample.tokens)
        if any(stop in text for stop in request.stop):
            changes["finish_reason"] = "stop"
        return Sample(**{f.name: getattr(sample, f.name) for f in fields(sample)} | changes)


def plain(value: Any) -> Any:
    """The value without random or measured fields."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        drawn = ("created", "created_at")
        return {name: "..." if name in drawn and each else plain(each)
                for name, each in value.items()}  # fmt: skip
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, str):
        text = re.sub(r"\b(chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|ctc_)[0-9a-f]{8,}", r"\1ID", value)
        return re.sub(r"\bcall_[0-9a-f]{4,}", "call_ID", text)
    return value


def asked_for(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """The request with the prompt as text, and without a random seed."""
    seed = request.seed if "seed" in body else "drawn"
    return plain(request) | {"prompt": TOKENIZER.decode(request.prompt), "seed": seed}


def said(response: aiohttp.ClientResponse, text: str) -> Any:
    """The body of a response, or the events of its stream."""
    if response.content_type != "text/event-stream":
        return json.loads(text)
    events = []
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        if name == "data" and value != "[DONE]":
            events.append(json.loads(value))
        elif line:
            events.append(line)
    return events


async def found(http: aiohttp.ClientSession) -> dict[str, Any]:
    told = {}
    policy = Policy([], version=7)
    model = ServedModel(tokenizer=TOKENIZER, grammars=GrammarBuilder(FILES), max_context=4096)
    answerer = PolicyAnswerer(model, policy)
    routes = public_routes(model, lambda http: answerer, dict)
    async with served(create_app(routes, None, model.metrics)) as url:
        for number, (path, text, body) in enumerate(ASKED):
            for stream in (False, True) if number in STREAMED else (False,):
                policy.answer(answers([text]))
                sent = body | ({"stream": True} if stream else {})
                if stream and "completions" in path:
                    sent["stream_options"] = {"include_usage": True}
                async with http.post(f"{url}/v1/{path}", json=sent) as response:
                    answer = said(response, await response.text())
                    told[f"{number} {path}{' streamed' * stream}"] = {
                        "status": response.status,
                        "answer": plain(answer),
                        "asked": [asked_for(request, body) for request in policy.asked],
                    }
    return told


async def test_every_field_is_what_it_was(http: aiohttp.ClientSession) -> None:
    answers = json.loads(json.dumps(await found(http)))
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        text = json.dumps(answers, indent=1, ensure_ascii=False)
        # deeply nested values are written on one line
        flat = re.sub(r"\n {4,}", " ", re.sub(r"\n {3}([\]}])", r" \1", text))
        ANSWERS.write_text(f"{flat}\n")
    expected = json.loads(ANSWERS.read_text())
    for name, answer in answers.items():
        assert answer == expected[name], name
    assert answers.keys() == expected.keys()
