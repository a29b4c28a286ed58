"""Predictions through gateway and worker: the answer is the same, and the usage counts the accepted
tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from etude.engine.engine import Engine
from etude.model.transformer import ModelConfig
from etude.serve.engine_thread import EngineThread
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.worker import Worker
from etude.serve.worker_protocol import JoinRequest
from etude.store.objects import Objects
from tests.serve.client import post
from tests.serve.conftest import served
from tests.small_model import sharp, small_files

FILES = small_files()
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "read area.py"}], "seed": 1, "max_tokens": 60,
    "return_token_ids": True,
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"why": {"enum": ["a typo", "a sign", "a loop"]}},
    "required": ["why"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "test", "parameters": {"type": "object", "properties": {}}},
    }
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "several": {"n": 3},
    "stop": {"stop": ["a", "tool"]},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "tools": {"tools": TOOLS, "tool_choice": "required"},
}


@pytest.fixture
async def url(http: aiohttp.ClientSession, tmp_path: Path) -> AsyncIterator[str]:
    """In float32, so that batching does not change a token."""
    config = ModelConfig.from_json(FILES["config.json"])
    thread = EngineThread(
        Engine(sharp(config, 0, factor=3.0), max_num_seqs=8), lambda version: {}, FILES
    )
    objects = Objects.open(f"file:{tmp_path}/run")
    gateway = Gateway(Router(http), objects, FILES, max_context=config.max_position_embeddings)
    async with AsyncExitStack() as stack:
        stack.callback(thread.close)
        worker = await stack.enter_async_context(
            served(create_app(Worker(thread, FILES, "here").routes(), None))
        )
        await gateway.router.join(JoinRequest(worker, "here", 0))
        yield await stack.enter_async_context(served(create_app(gateway.routes(), None)))


def ids(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def foreseen(answer: dict[str, Any]) -> tuple[int, int]:
    details = answer["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("way", WAYS)
async def test_the_answer_is_the_same(way: str, url: str, http: aiohttp.ClientSession) -> None:
    asked = ASK | WAYS[way]
    plain = await post(http, f"{url}/v1/chat/completions", asked)
    assert "completion_tokens_details" not in plain["usage"]
    said = ids(plain)[0]
    before = [*said[:4], 7, *said[5:]]
    for route in ("/v1/chat/completions", "/s/session/v1/chat/completions"):
        for guess in (
            {"prediction": {"type": "content", "content": before}},
            {"drafts": [[7, 8], before]},
        ):
            answer = await post(http, url + route, asked | guess)
            assert ids(answer) == ids(plain)
            assert [choice["message"] for choice in answer["choices"]] == [
                c["message"] for c in plain["choices"]
            ]
            accepted, _ = foreseen(answer)
            assert accepted >= min(len(said), 40) - 6


async def test_texts_and_what_is_none(url: str, http: aiohttp.ClientSession) -> None:
    plain = await post(http, f"{url}/v1/chat/completions", ASK)
    for content in (
        "",
        "read area.py",
        [{"type": "text", "text": "read"}, {"type": "text", "text": " it"}],
        [],
    ):
        prediction = {"type": "content", "content": content}
        assert ids(
            await post(http, f"{url}/v1/chat/completions", ASK | {"prediction": prediction})
        ) == ids(plain)
    asked = {
        "prompt": plain["prompt_token_ids"],
        "seed": 1,
        "max_tokens": 60,
        "return_token_ids": True,
    }
    prediction = {"type": "content", "content": ids(plain)[0]}
    answer = await post(http, f"{url}/v1/completions", asked | {"prediction": prediction})
    assert ids(answer) == ids(plain)
    assert foreseen(answer)[0] > 40
    for wrong in (
        {"prediction": {"type": "content", "content": [5, {"type": "text", "text": "5"}]}},
        {"prediction": {"type": "content", "content": [5000]}},
        {"prediction": {"type": "content"}},
        {"prediction": {"type": "text", "content": "a"}},
        {"drafts": [[5000]]},
        {"drafts": [-1]},
    ):
        async with http.post(f"{url}/v1/chat/completions", json=ASK | wrong) as response:
            assert response.status == 400, wrong
            assert next(iter(wrong)) in (await response.json())["error"]["message"]
