"""The servers' OpenAPI documents, compared with a stored version.

Clients are written against these documents. After a change to them, write `descriptions.json`
again, and read what has changed in it:

    ETUDE_WRITE_ANSWERS=1 python -m pytest tests/serve/test_descriptions.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from etude.serve import dialects, session_schema
from etude.serve.http import ApiError, EventStream
from etude.serve.production import schema as production_schema

DESCRIPTIONS = Path(__file__).with_name("descriptions.json")
DOCUMENTS = {
    "alone": dialects.document,
    "gateway": session_schema.gateway_document,
    "production": production_schema.production_document,
}


def lines(document: dict[str, Any]) -> dict[str, Any]:
    """The document by path and schema, without the version."""
    found: dict[str, Any] = dict(document["paths"])
    found |= {f"#{name}": told for name, told in document["components"]["schemas"].items()}
    rest = {name: told for name, told in document.items() if name not in ("paths", "components")}
    rest["info"] = {**rest["info"], "version": "..."}
    others = {n: told for n, told in document["components"].items() if n != "schemas"}
    return {"": rest, "components": others} | found


def test_every_field_is_described_as_it_was() -> None:
    told: dict[str, Any] = {}
    for name, document in DOCUMENTS.items():
        for place, each in lines(json.loads(json.dumps(document()))).items():
            if told.get(f"alone {place}") != each:
                told[f"{name} {place}"] = each
    if os.environ.get("ETUDE_WRITE_ANSWERS"):
        written = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in told.items()]
        DESCRIPTIONS.write_text("{\n" + ",\n".join(written) + "\n}\n")
    expected = json.loads(DESCRIPTIONS.read_text())
    for place, each in told.items():
        assert each == expected.get(place), place
    assert told.keys() == expected.keys()


async def sent(stream: EventStream) -> list[Message]:
    told: list[Message] = []

    async def send(message: Message) -> None:
        told.append(message)

    await stream._run("/v1/chat/completions", send)
    return told


@pytest.mark.parametrize("named", [False, True])
async def test_a_stream_without_events_is_a_stream(named: bool) -> None:
    async def nothing(send_event: object) -> None: ...

    start, end = await sent(EventStream(nothing, named=named))
    assert start["status"] == 200
    assert (b"cache-control", b"no-cache") in start["headers"]
    assert end["body"] == (b"" if named else b"data: [DONE]\n\n") and not end.get("more_body")


async def test_an_error_before_the_first_event_is_an_answer_of_its_own() -> None:
    async def fails(send_event: object) -> None:
        raise ApiError("no")

    with pytest.raises(ApiError, match="no"):
        await sent(EventStream(fails))


async def test_an_error_on_the_way_is_the_last_event() -> None:
    async def fails(send_event: Any) -> None:
        await send_event({"a": 1})
        await send_event({"a": 2})
        raise ApiError("no", param="x")

    start, *events, end = await sent(EventStream(fails))
    assert start["type"] == "http.response.start" and len(events) == 3
    assert events[0]["body"] == b'data: {"a":1}\n\n' and events[0]["more_body"]
    told = json.loads(events[2]["body"].removeprefix(b"data: "))
    assert told["error"]["message"] == "no" and told["error"]["param"] == "x"
    assert end["body"] == b"data: [DONE]\n\n"
    own = EventStream(fails, failed=lambda error: {"failed": str(error)})
    assert (await sent(own))[3]["body"] == b'data: {"failed":"no"}\n\n'
