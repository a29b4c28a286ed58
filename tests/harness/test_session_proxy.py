"""Requests of a program to its session's model, and what is forwarded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from etude.core.seeds import derive
from etude.harness import session_proxy
from etude.harness.session_proxy import SessionProxy


class Model:
    """Records its requests, and sends the given answers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.answer: tuple[int, str, bytes] = (200, "application/json", b"{}")

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        told = json.loads(body) if body else None
        self.asked.append((request.method, str(request.rel_url), dict(request.headers), told))
        status, kind, said = self.answer
        return web.Response(status=status, body=said, content_type=kind)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def serving(handler: Any) -> tuple[web.ServerRunner, str]:
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def opened(
    http: aiohttp.ClientSession,
) -> AsyncIterator[tuple[Model, SessionProxy, str]]:
    model = Model()
    behind, url = await serving(model)
    proxy = SessionProxy(
        http, base_url=f"{url}/s/one/v1/", api_key="true key", seed=7,
        defaults={"temperature": 0.5, "max_tokens": 9},
    )  # fmt: skip
    before, own = await serving(proxy)
    yield model, proxy, own
    await before.cleanup()
    await behind.cleanup()


async def test_what_a_request_leaves_out_is_added_turn_by_turn(
    http: aiohttp.ClientSession, opened: tuple[Model, SessionProxy, str]
) -> None:
    model, proxy, url = opened
    assert not proxy.has_asked
    headers = {"Authorization": "Bearer theirs", "anthropic-version": "1", "X-Other": "x"}
    for path, body in (
        ("chat/completions", {"messages": []}),
        ("embeddings", {"input": "x"}),
        ("chat/completions", {"messages": [], "temperature": 1.0, "seed": 3}),
        ("messages", {"messages": []}),
        ("chat/completions", {"messages": []}),
    ):
        await http.post(f"{url}/v1/{path}?a=b", json=body, headers=headers)
    await http.get(f"{url}/v1/models", headers=headers)
    bodies = [told for *_, told in model.asked]
    assert bodies == [
        {"temperature": 0.5, "max_tokens": 9, "seed": derive(7, 0), "messages": []},
        {"input": "x"},
        {"temperature": 1.0, "max_tokens": 9, "seed": 3, "messages": []},
        {"temperature": 0.5, "messages": []},
        {"temperature": 0.5, "max_tokens": 9, "seed": derive(7, 3), "messages": []},
        None,
    ]
    method, place, sent, _ = model.asked[0]
    assert (method, place) == ("POST", "/s/one/v1/chat/completions?a=b")
    assert sent["Authorization"] == "Bearer true key" and sent["Accept-Encoding"] == "identity"
    assert sent["anthropic-version"] == "1" and "X-Other" not in sent
    assert model.asked[-1][:2] == ("GET", "/s/one/v1/models") and proxy.has_asked


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v2/models", "/v1/../tokens", "/v1/.hidden", "/v1/a//b"]
)
async def test_there_is_nothing_else(
    http: aiohttp.ClientSession, opened: tuple[Model, SessionProxy, str], path: str
) -> None:
    model, _, url = opened
    place = aiohttp.client.URL(f"{url}{path}", encoded=True)
    async with http.post(place, json={}) as response:
        assert response.status == 404 and "only the model's routes" in (await response.text())
    assert model.asked == []


async def test_what_is_no_object_is_refused(
    http: aiohttp.ClientSession,
    opened: tuple[Model, SessionProxy, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, proxy, url = opened
    monkeypatch.setattr(session_proxy, "_MAX_BODY_BYTES", 20)
    for body, why in (
        (b"[1]", "it is a list"),
        (b"{oh", "not a valid JSON object"),
        (b" " * 21, "20 bytes"),
    ):
        async with http.post(f"{url}/v1/chat/completions", data=body) as response:
            assert response.status == 400 and why in await response.text()
    assert model.asked == [] and not proxy.has_asked
    async with http.post(f"{url}/v1/chat/completions", data=b"{}" + b" " * 18) as response:
        assert response.status == 200


async def test_the_last_conversation_is_kept(
    http: aiohttp.ClientSession, opened: tuple[Model, SessionProxy, str]
) -> None:
    model, proxy, url = opened
    asked = [{"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "yes"}

    async def ask(status: int, kind: str, said: bytes, body: Any) -> tuple[int, str, bytes]:
        model.answer = status, kind, said
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            return response.status, response.content_type, await response.read()

    said = json.dumps({"choices": [{"message": answer}]}).encode()
    found = await ask(200, "application/json", said, {"messages": asked})
    assert found == (200, "application/json", said)
    assert proxy.messages == [*asked, answer] and proxy.refusal == ""
    found = await ask(200, "text/event-stream", b"data: x\n\n", {"messages": asked})
    assert found == (200, "text/event-stream", b"data: x\n\n") and proxy.messages == asked
    for empty in (b"{}", b'{"choices": []}', b'{"choices": [{}]}'):
        await ask(200, "application/json", empty, {"messages": asked})
        assert proxy.messages == asked
    await ask(200, "application/json", said, {"messages": "text"})
    assert proxy.messages == asked
    assert (await ask(429, "text/plain", b"too \n many" + b"x" * 300, {"messages": []}))[0] == 429
    assert proxy.refusal == "429 " + ("too many" + "x" * 300)[:200] and proxy.messages == asked
    assert not proxy.out_of_context
    await ask(400, "application/json", b'{"code": "context_length_exceeded"}', {"messages": []})
    assert proxy.out_of_context
    await ask(200, "application/json", said, {"messages": asked})
    assert proxy.refusal == "" and proxy.out_of_context


async def test_of_a_long_answer_the_beginning_is_noted_and_all_is_passed_on(
    http: aiohttp.ClientSession,
    opened: tuple[Model, SessionProxy, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, proxy, url = opened
    monkeypatch.setattr(session_proxy, "_NOTED_BYTES", 10)
    asked = [{"role": "user", "content": "hi"}]
    said = json.dumps({"choices": [{"message": {"role": "assistant", "content": "yes"}}]}).encode()
    for status, told in ((200, ""), (500, '500 {"choices"')):
        model.answer = status, "application/json", said
        async with http.post(f"{url}/v1/chat/completions", json={"messages": asked}) as response:
            assert (response.status, await response.read()) == (status, said)
        assert (proxy.messages, proxy.refusal) == (asked, told)
