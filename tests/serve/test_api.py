from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from starlette.types import ASGIApp

from etude.core.errors import EtudeError
from etude.core.sampling import Request, Sample
from etude.model.tokenizer import ChatTokenizer
from etude.serve import process
from etude.serve.access import OneToken
from etude.serve.answerer import PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes
from etude.serve.fake import Scripted
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import MAX_BODY_BYTES, Unavailable, create_app
from tests.serve.conftest import served
from tests.small_model import small_files

FILES = small_files()
TOKENIZER = ChatTokenizer(FILES)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {"properties": {"line": {"type": "integer"}, "text": {}}},
        },
    },
    {"type": "function", "function": {"name": "test", "parameters": {}}},
]
ASK = {"model": "etude", "messages": [{"role": "user", "content": "read"}]}


def served_model(**options: Any) -> ServedModel:
    grammars = GrammarBuilder(FILES)
    return ServedModel(tokenizer=TOKENIZER, grammars=grammars, max_context=64, **options)


def app(policy: Scripted, token: str | None, model: ServedModel | None = None) -> ASGIApp:
    answerer = PolicyAnswerer(model or served_model(), policy)
    routes = public_routes(answerer.model, lambda http: answerer, dict)
    return create_app(routes, OneToken(token) if token else None, answerer.model.metrics)


def said(text: str) -> list[int]:
    return TOKENIZER.encode(text + "<|end|>")


def called(arguments: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "1", "function": {"name": "edit", "arguments": arguments}}],
    }


@pytest.fixture
def policy() -> Scripted:
    return Scripted(
        [said("so<tool_call>edit 3 a + b</tool_call><tool_call>test</tool_call>"), said("test")],
        version=7,
    )


@pytest.fixture
async def url(policy: Scripted) -> AsyncIterator[str]:
    async with served(app(policy, None)) as url:
        yield url


async def post(http: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with http.post(
        url, data=body if isinstance(body, bytes) else json.dumps(body)
    ) as response:
        return response.status, await response.json()


async def test_chat_with_parallel_tool_calls(
    http: aiohttp.ClientSession, url: str, policy: Scripted
) -> None:
    status, answer = await post(
        http, f"{url}/v1/chat/completions", ASK | {"tools": TOOLS, "seed": 3}
    )
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so"
    calls = choice["message"]["tool_calls"]
    assert [
        (c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls
    ] == [
        ("function", "edit", {"line": 3, "text": "a + b"}),
        ("function", "test", {}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert answer["usage"]["prompt_tokens"] == len(policy.asked[0].prompt)
    assert answer["choices"][0]["weight_version"] == [
        {"version": 7, "count": answer["usage"]["completion_tokens"]}
    ]
    assert (
        TOKENIZER.decode(policy.asked[0].prompt)
        == "<|tools|>edit test<|end|><|user|>read<|end|><|assistant|>"
    )


async def test_content_in_parts_and_max_tokens(
    http: aiohttp.ClientSession, url: str, policy: Scripted
) -> None:
    parts = [{"type": "text", "text": "re"}, {"type": "text", "text": "ad"}]
    ask = ASK | {
        "messages": [{"role": "user", "content": parts}],
        "max_completion_tokens": 1,
        "logprobs": True,
    }
    status, answer = await post(http, f"{url}/v1/chat/completions", ask)
    assert (status, TOKENIZER.decode(policy.asked[0].prompt)) == (
        200,
        "<|user|>read<|end|><|assistant|>",
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-0.5]


async def test_fields_that_change_nothing_here_are_taken(
    http: aiohttp.ClientSession, url: str, policy: Scripted
) -> None:
    ask = ASK | {
        "reasoning_effort": "high",
        "verbosity": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": True,
    }
    assert (await post(http, f"{url}/v1/chat/completions", ask))[0] == 200


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"tool_choice": "required"}, 400),
        ({"response_format": {"type": "json_object"}}, 400),
        ({"response_format": {"type": "json_object"}, "tool_choice": "none"}, 200),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, 200),
    ],
)
async def test_calls_that_cannot_be_enforced_are_refused(
    http: aiohttp.ClientSession, policy: Scripted, more: dict[str, Any], status: int
) -> None:
    config = json.loads(FILES["tokenizer_config.json"]) | {"tool_syntax": "kimi_k2"}
    files = FILES | {"tokenizer_config.json": json.dumps(config).encode()}
    model = ServedModel(
        tokenizer=ChatTokenizer(files), grammars=GrammarBuilder(files), max_context=64
    )
    async with served(app(policy, None, model)) as url:
        ask = ASK | {"tools": TOOLS} | more
        assert (await post(http, f"{url}/v1/chat/completions", ask))[0] == status


async def test_completions_with_token_ids(
    http: aiohttp.ClientSession, url: str, policy: Scripted
) -> None:
    ask = {
        "prompt": [1, 2, 3],
        "return_token_ids": True,
        "logprobs": 1,
        "max_tokens": 3,
        "stop_token_ids": [],
    }
    status, answer = await post(http, f"{url}/v1/completions", ask)
    choice = answer["choices"][0]
    assert (status, [ask.prompt for ask in policy.asked], choice["finish_reason"]) == (
        200,
        [(1, 2, 3)],
        "length",
    )
    assert (
        choice["token_ids"]
        == said("so<tool_call>edit 3 a + b</tool_call><tool_call>test</tool_call>")[:3]
    )
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert answer["choices"][0]["weight_version"] == [{"version": 7, "count": 3}]


async def test_models_and_health(http: aiohttp.ClientSession, url: str) -> None:
    async with http.get(f"{url}/v1/models") as response:
        assert (await response.json())["data"][0]["id"] == "etude"
    async with http.get(f"{url}/health") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", b"", "request body: empty"),
        ("chat/completions", b"{", "request body"),
        ("chat/completions", b"\xff", "request body"),
        ("chat/completions", {}, "messages"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0]"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "text only; a part of type 'image_url'",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "text only",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "text only",
        ),
        ("chat/completions", ASK | {"tools": [{"type": "function"}]}, "tools[0]"),
        ("chat/completions", ASK | {"tools": [{"function": {"name": "a b"}}]}, "tools[0]"),
        ("chat/completions", ASK | {"tools": [{"function": {"name": "a\n"}}]}, "tools[0]"),
        (
            "chat/completions",
            ASK | {"tools": [{"function": {"name": "a", "parameters": None}}]},
            "tools[0]",
        ),
        (
            "chat/completions",
            ASK | {"tools": [{"function": {"name": "a", "parameters": {"properties": 3}}}]},
            "tools[0]",
        ),
        ("chat/completions", ASK | {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", ASK | {"temperature": -1}, "temperature"),
        ("chat/completions", ASK | {"temperature": "hot"}, "temperature"),
        ("chat/completions", ASK | {"seed": 2**63}, "seed"),
        ("chat/completions", ASK | {"seed": 10**30}, "seed"),
        ("chat/completions", b'{"messages": ' + b"[" * 10**5, "request body"),
        (
            "chat/completions",
            {"messages": [called('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}")]},
            "template",
        ),
        ("chat/completions", {"messages": [called('{"a": ' + "9" * 5000 + "}")]}, "template"),
        ("chat/completions", {"messages": [called('{"a": "\\ud800"}')]}, "template"),
        ("chat/completions", {"messages": [called("{")]}, "template"),
        ("chat/completions", ASK | {"n": 0}, "n"),
        ("chat/completions", ASK | {"n": 10**6}, "n"),
        ("chat/completions", ASK | {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ("chat/completions", ASK | {"stop": ""}, "stop"),
        ("chat/completions", ASK | {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", ASK | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", ASK | {"top_p": 0}, "top_p"),
        ("chat/completions", ASK | {"frobnicate": 1}, "frobnicate"),
        ("chat/completions", ASK | {"reasoning_effort": 3}, "reasoning_effort"),
        ("chat/completions", ASK | {"response_format": {"type": "xml"}}, "response_format"),
        ("chat/completions", ASK | {"tools": TOOLS + TOOLS}, "names must be unique"),
        ("chat/completions", ASK | {"tool_choice": "required"}, "no tools"),
        (
            "chat/completions",
            ASK | {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "no tool is named",
        ),
        ("completions", {"prompt": "a", "min_weight_version": 1}, "min_weight_version"),
        ("completions", {"prompt": "a", "detokenize": False}, "detokenize"),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "return " * 100}]},
            "no room",
        ),
        ("completions", {"prompt": {}}, "prompt"),
        ("completions", {"prompt": [1] * 64}, "no room"),
    ],
)
async def test_bad_input_is_explained(
    http: aiohttp.ClientSession, url: str, path: str, body: Any, words: str
) -> None:
    status, answer = await post(http, f"{url}/v1/{path}", body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {"logit_bias": {"1": 5}}),
        ("chat/completions", {"frequency_penalty": 0.5}),
        ("chat/completions", {"presence_penalty": -1}),
        ("chat/completions", {"functions": []}),
        ("chat/completions", {"modalities": ["audio"]}),
        ("completions", {"echo": True}),
        ("completions", {"best_of": 2}),
        ("completions", {"suffix": "x"}),
    ],
)
async def test_what_is_not_supported_is_said_to_be(
    http: aiohttp.ClientSession, url: str, path: str, more: dict[str, Any]
) -> None:
    asked = ASK if path == "chat/completions" else {"prompt": "a"}
    status, answer = await post(http, f"{url}/v1/{path}", asked | more)
    (name,) = more
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "unsupported_parameter", name)
    assert error["message"].startswith(f"{name} is not supported by this server: remove it")


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_model_that_is_not_served(
    http: aiohttp.ClientSession, policy: Scripted, path: str
) -> None:
    asked = ASK if path == "chat/completions" else {"prompt": "a"}
    async with served(app(policy, None, served_model(name="etude"))) as url:
        status, answer = await post(http, f"{url}/v1/{path}", asked | {"model": "gpt-4o"})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "available: 'etude'" in error["message"]


async def test_a_body_has_a_largest_size(http: aiohttp.ClientSession, url: str) -> None:
    fits = json.dumps(ASK).encode()
    assert (
        await post(http, f"{url}/v1/chat/completions", fits + b" " * (MAX_BODY_BYTES - len(fits)))
    )[0] == 200
    status, answer = await post(http, f"{url}/v1/chat/completions", b" " * (MAX_BODY_BYTES + 1))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_a_body_has_a_deadline(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.serve.http.BODY_S", 0.05)
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # up to the end of the connection
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    writer.close()


class Refusing(Scripted):
    async def sample(self, ask: Request) -> Sample:
        raise ValueError(f"temperature must not be {ask.params.temperature}")


async def test_what_the_policy_refuses_is_the_clients_mistake(http: aiohttp.ClientSession) -> None:
    async with served(app(Refusing([]), None)) as url:
        for path, ask in (("chat/completions", ASK), ("completions", {"prompt": [1]})):
            status, answer = await post(http, f"{url}/v1/{path}", ask | {"temperature": 1e-40})
            assert (status, answer["error"]["message"]) == (400, "temperature must not be 1e-40")


async def test_unknown_routes_have_the_envelope_too(http: aiohttp.ClientSession, url: str) -> None:
    assert await post(http, f"{url}/v1/nothing", {}) == (
        404,
        {
            "error": {
                "message": "Not Found",
                "type": "invalid_request_error",
                "code": "not_found",
                "param": None,
            }
        },
    )
    async with http.get(f"{url}/v1/chat/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


async def test_nothing_is_reached_without_the_token(
    http: aiohttp.ClientSession, policy: Scripted
) -> None:
    async with served(app(policy, "secret")) as url:
        for path in ("/health", "/v1/models", "/v1/chat/completions", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                async with http.get(url + path, headers=headers) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (
                        401,
                        "unauthorized",
                    )
        async with http.get(
            f"{url}/health", headers={"Authorization": "Bearer secret"}
        ) as response:
            assert response.status == 200
    assert policy.asked == []


def test_a_port_that_others_can_reach_needs_a_token() -> None:
    with pytest.raises(EtudeError, match="ETUDE_TOKEN"):
        process.bind("0.0.0.0", 0, None)
    for host in ("example.org", "10.0.0.1", "::"):
        with pytest.raises(EtudeError, match="can be reached from other machines"):
            process.bind(host, 0, None)
    process.bind("0.0.0.0", 0, "secret").close()


class Slow(Scripted):
    """Never answers; signals when it was asked, and when its client gave up."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def sample(self, ask: Request) -> Sample:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


async def test_a_client_that_goes_away_cancels_its_request(http: aiohttp.ClientSession) -> None:
    policy = Slow()
    async with served(app(policy, None)) as url:
        request = asyncio.create_task(post(http, f"{url}/v1/chat/completions", ASK))
        await policy.asked.wait()
        request.cancel()
        await policy.cancelled.wait()


class Gone(Scripted):
    async def sample(self, ask: Request) -> Sample:
        raise Unavailable("nobody is up")


async def test_nobody_there_is_503(http: aiohttp.ClientSession) -> None:
    async with served(app(Gone([]), None)) as url:
        status, answer = await post(http, f"{url}/v1/chat/completions", ASK)
    assert (status, answer["error"]["message"]) == (503, "nobody is up")
