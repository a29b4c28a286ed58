"""The metrics of a server in Prometheus' format, and its reports of failures."""

from __future__ import annotations

import asyncio
import re
import signal
import time

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.serve import process
from etude.serve.http import (
    ApiError,
    ClientDisconnected,
    DeadlineExceeded,
    EventStream,
    SendEvent,
    Unavailable,
    create_app,
    deadline,
    error_response,
    read,
)
from etude.serve.metrics import BOUNDS_S, Metrics, RequestRecord
from tests.serve.conftest import served


def figures(text: str) -> dict[str, float]:
    pairs = re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)
    assert len(dict(pairs)) == len(pairs), "no figure is told twice"
    return {name: float(value) for name, value in pairs}


def test_a_server_that_was_asked_nothing_has_counted_nothing() -> None:
    assert set(figures(Metrics().text({})).values()) == {0.0}


def test_requests_are_counted_by_route_status_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    for route, status, seconds in (
        ("/a", 200, 0.01),
        ("/a", 200, 0.02),
        ("/a", 400, 0.5),
        ("/b", 200, 500.0),
    ):
        clock = iter((0.0, seconds))
        monkeypatch.setattr(time, "monotonic", clock.__next__)
        with metrics.answering(RequestRecord(method="GET", path=route, route=route, status=status)):
            pass
    for prompt, sampled in ((5, 7), (50, 70)):
        metrics.count_tokens(prompt, sampled)
    found = figures(metrics.text({"running": 3, "free": 0.5}))
    assert found['etude_requests_total{route="/a",status="200"}'] == 2
    assert found['etude_requests_total{route="/a",status="400"}'] == 1
    assert found['etude_requests_total{route="/b",status="200"}'] == 1
    buckets = [found[f'etude_request_seconds_bucket{{le="{bound}"}}'] for bound in BOUNDS_S]
    assert buckets == [1, 2, 2, 2, 3, 3, 3, 3, 3]
    assert found['etude_request_seconds_bucket{le="+Inf"}'] == 4
    assert found["etude_request_seconds_count"] == 4
    assert found["etude_request_seconds_sum"] == pytest.approx(500.53)
    assert (found["etude_prompt_tokens_total"], found["etude_sampled_tokens_total"]) == (55, 77)
    assert (found["etude_running"], found["etude_free"]) == (3, 0.5)


@pytest.mark.parametrize(
    ("error", "status", "kind", "headers"),
    [
        (ApiError("a"), 400, b"invalid_request_error", {}),
        (ApiError("a", status=401), 401, b"invalid_request_error", {"www-authenticate": "Bearer"}),
        (ApiError("a", status=499), 499, b"invalid_request_error", {}),
        (ApiError("a", status=500), 500, b"server_error", {}),
        (Unavailable("a"), 503, b"server_error", {"retry-after"}),
        (ApiError("a", code="request_timeout"), 400, b"invalid", {"connection": "close"}),
    ],
)
def test_whose_mistake_it_was_and_what_to_do(
    error: ApiError, status: int, kind: bytes, headers: dict[str, str] | set[str]
) -> None:
    response = error_response(error, "/v1/chat/completions")
    assert response.status_code == status and kind in bytes(response.body)
    told = {
        name: value
        for name, value in response.headers.items()
        if name in ("www-authenticate", "retry-after", "connection")
    }
    assert told == headers if isinstance(headers, dict) else set(told) == headers


async def test_a_deadline_is_told_from_a_timeout_within() -> None:
    with pytest.raises(DeadlineExceeded):
        async with deadline(0.001):
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError) as raised:
        async with deadline(60.0):
            raise TimeoutError("of something else")
    assert "of something else" in str(raised.value)
    async with deadline(None):
        pass


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure_of_ours() -> None:
    parts = iter(
        [
            {"type": "http.request", "body": b"[1,", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> dict[str, object]:
        return next(parts)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ClientDisconnected):
        await read(request, list[int])


async def test_signals_mean_what_they_did_when_a_server_has_ended() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    async with process.serving(app, process.bind("127.0.0.1", 0, None)) as running:
        during = [signal.getsignal(number) for number in numbers]
        assert all(now is not then for now, then in zip(during, before, strict=True))
        signal.raise_signal(signal.SIGTERM)
        await running
    assert [signal.getsignal(number) for number in numbers] == before


async def test_a_crash_is_a_500_with_a_body_and_an_id(http: aiohttp.ClientSession) -> None:
    async def health(request: Request) -> Response:
        raise RuntimeError("a secret")

    async def status(request: Request) -> Response:
        async def work(send: SendEvent) -> None:
            raise RuntimeError("a secret")

        return EventStream(work)

    async def up(request: Request) -> Response:
        async def work(send: SendEvent) -> None:
            await send({"first": 1})
            raise RuntimeError("a secret")

        return EventStream(work)

    metrics = Metrics()
    routes = [Route("/health", health), Route("/status", status), Route("/up", up)]
    async with served(create_app(routes, None, metrics)) as url:
        for path in ("/health", "/status"):
            async with http.get(f"{url}{path}", headers={"x-request-id": "mine"}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (500, "internal_error")
                assert "secret" not in error["message"]
                assert response.headers["x-request-id"] == "mine"
        async with http.get(f"{url}/up") as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
    found = figures(metrics.text({}))
    for route in ("health", "status", "up"):
        assert found[f'etude_requests_total{{route="{route}",status="500"}}'] == 1
