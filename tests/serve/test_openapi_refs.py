"""The OpenAPI document is self-contained: every name that it refers to is defined in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from etude.serve import openapi
from etude.serve.dialects import document, public_routes
from etude.serve.gateway import Gateway
from etude.serve.http import create_app, respond, respond_packed
from etude.serve.policies import policy_of
from etude.serve.production.schema import production_document
from etude.serve.router import Router
from etude.serve.session_desk import SessionRoutes
from etude.serve.session_schema import gateway_document
from etude.serve.shards import DESK
from etude.store.objects import Objects
from tests.serve.conftest import served
from tests.serve.test_api import FILES, served_model


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


DOCUMENTS = pytest.mark.parametrize("document", [document, gateway_document])
Document = Callable[[], Any]


@DOCUMENTS
def test_every_reference_leads_somewhere(document: Document) -> None:
    whole = json.loads(msgspec.json.encode(document()))
    found = set(references(whole))
    assert found
    for reference in found:
        place: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
        assert isinstance(place, dict)


def test_the_events_of_a_stream_are_described_as_json() -> None:
    """Data without a type is read as any text, whatever its schema."""
    streams = {
        path: operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
        for path, methods in document()["paths"].items()
        for operation in methods.values()
        if "text/event-stream" in operation["responses"]["200"].get("content", {})
    }
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses"} <= streams.keys()
    for event in streams.values():
        data = event["properties"]["data"]
        *words, data = data.get("anyOf", [data])
        assert words in ([], [{"const": "[DONE]"}])  # the end of OpenAI's streams
        assert data["contentMediaType"] == "application/json"
        assert list(references(data["contentSchema"]))


def test_production_mode_says_when_two_events_contradict() -> None:
    paths = production_document()["paths"]
    for path in ("/v1/feedback", "/v1/consent", "/v1/users"):
        (operation,) = paths[path].values()
        answers = operation["responses"]
        assert {"200", "400", "401", "409"} <= answers.keys()
        assert answers["409"]["content"] == answers["400"]["content"]


def test_what_is_no_json_is_described_as_what_it_is() -> None:
    answer = openapi.document([])["paths"]["/metrics"]["get"]["responses"]["200"]
    assert answer["content"] == {"text/plain": {"schema": {"type": "string"}}}


def test_packed_answers_say_that_they_are() -> None:
    assert respond_packed([1]).media_type == "application/msgpack"
    assert respond([1]).media_type == "application/json"


@DOCUMENTS
def test_parameters_stand_where_the_standard_wants_them(document: Document) -> None:
    """A generated client looks for parameters nowhere else."""
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            parameters = operation.get("parameters", [])
            assert {each["in"] for each in parameters} <= {"path", "header", "query"}
            assert all(each["name"] and each["schema"]["type"] for each in parameters)
            within = {each["name"]: each["required"] for each in parameters if each["in"] == "path"}
            assert within == dict.fromkeys(re.findall(r"\{(\w+)\}", path), True)
            assert all(answer["description"] for answer in operation["responses"].values())
            statuses = {int(status) for status in operation["responses"]}
            assert statuses & {200, 204} and 401 in statuses
            if "requestBody" in operation:
                assert operation["requestBody"]["required"] is True
                assert statuses >= {400, 408, 413}
            if not path.startswith(DESK):
                assert 200 in statuses and (404 in statuses or not within)
                assert statuses >= {404, 429, 503} or "requestBody" not in operation


def test_all_that_is_served_is_described_and_nothing_else() -> None:
    routes = public_routes(served_model(), lambda http: None, dict)  # type: ignore[arg-type, return-value]
    served = {
        (re.sub(r":\w+", "", route.path), method.lower())
        for route in routes
        for method in route.methods or ()
        # there are no background responses, so nothing could be cancelled
        if method != "HEAD" and not route.path.endswith("/cancel")
    }
    paths = document()["paths"]
    assert served == {(path, method) for path, methods in paths.items() for method in methods}


def test_a_gateway_describes_the_sessions_that_others_run() -> None:
    served = {
        (route.path, method.lower())
        for route in SessionRoutes().routes()
        for method in route.methods or ()
        if method != "HEAD"
    }
    paths = gateway_document()["paths"]
    more = {(path, method) for path in paths.keys() - document()["paths"] for method in paths[path]}
    assert more == served
    assert all(policy_of(method.upper(), path) for path, method in more)


async def test_a_gateway_hands_out_its_own_description(http: aiohttp.ClientSession) -> None:
    gateway = Gateway(Router(http), Objects.open("memory:"), FILES, max_context=64)
    async with (
        served(create_app(gateway.routes(), None)) as url,
        http.get(f"{url}/openapi.json") as response,
    ):
        assert "/v1/sessions/{session}/score" in (await response.json())["paths"]


def test_how_a_stream_ends_is_described() -> None:
    """The last event is not JSON in OpenAI's chat; everywhere else it is like the others."""
    for path, methods in document()["paths"].items():
        answer = methods.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
        if "text/event-stream" in answer:
            data = answer["text/event-stream"]["schema"]["properties"]["data"]
            ends = [each.get("const") for each in data.get("anyOf", ())]
            assert ends == (["[DONE]", None] if path.endswith("completions") else [])


def test_messages_and_tools_have_shapes_of_their_own() -> None:
    chat = document()["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(references(chat["messages"])) == {"#/components/schemas/ChatMessage"}
    assert set(references(chat["tools"])) == {"#/components/schemas/Tool"}
