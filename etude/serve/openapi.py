"""The API of a server as an OpenAPI document: the descriptions of its dialects, and the routes that
all servers have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from etude import __version__
from etude.core.sampling import Priority
from etude.serve import headers
from etude.serve.http import ErrorResponse
from etude.store import decoding

Schema = dict[str, Any]

SCHEMAS = "#/components/schemas/{name}"
ALWAYS = {401: "no token, or an invalid one"}
NO_SUCH_MODEL = {404: "the model is not served here"}
BODY = {
    400: "the request is invalid; the message says why",
    408: "the body did not arrive in time, or the deadline has passed",
    413: "the body is too large",
}
ASKING = {
    **NO_SUCH_MODEL,
    **BODY,
    429: "too many answers are in progress; see Retry-After",
    503: "no worker can answer at the moment; see Retry-After",
}
SCHEDULING = [
    {
        "name": headers.PRIORITY,
        "in": "header",
        "description": "which requests are served first; default and always in sessions: standard",
        "schema": {"type": "string", "enum": list(get_args(Priority))},
    },
    {
        "name": headers.DEADLINE_S,
        "in": "header",
        "description": "seconds after which the answer is not needed any more",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": headers.MAX_DEADLINE_S},
    },
]

_REQUEST_ID = {
    "x-request-id": {
        "description": "the id that the request sent, or a new one",
        "schema": {"type": "string"},
    }
}


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class Description:
    """The paths of one part of an API, and the schemas that they refer to."""

    paths: Mapping[str, Schema]
    schemas: Mapping[str, Schema]


def document(dialects: Iterable[Description]) -> Schema:
    paths: dict[str, Schema] = {
        "/health": {"get": reading(Health, "Whether the server is up.")},
        "/metrics": {
            "get": _answers(
                "Metrics for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, {}
            )
        },
        "/openapi.json": {"get": _answers("This document.", _json({"type": "object"}), {})},
    }
    schemas = schemas_of([Health, ErrorResponse])
    for dialect in dialects:
        paths |= dialect.paths
        assert all(schemas.get(name, schema) == schema for name, schema in dialect.schemas.items())
        schemas |= dialect.schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Etude",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs, served by Etude.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def schemas_of(types: Iterable[type]) -> dict[str, Schema]:
    return decoding.schemas_of(types, SCHEMAS)


def asking(
    body: type, answer: type, chunk: type | None, text: str, *,
    error: type = ErrorResponse, last: str | None = None,
) -> Schema:  # fmt: skip
    """A route that answers a request whole or, if there is a `chunk` type, in a stream. `last`: the
    data that ends a stream, if it is not a chunk."""
    content = _json(ref(answer))
    if chunk is not None:
        data: Schema = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": ref(chunk),
        }
        if last is not None:
            data = {"anyOf": [{"const": last}, data]}
        event = {
            "type": "object",
            "properties": {"data": data},
            "description": "one event of a stream",
        }
        content["text/event-stream"] = {"schema": event}
    return _answers(text, content, ASKING, error) | {
        "parameters": SCHEDULING,
        "requestBody": {"required": True, "content": _json(ref(body))},
    }


def telling(body: type | None, text: str, failures: Mapping[int, str]) -> Schema:
    """A route that accepts a message and answers with 204."""
    made = _answers(text, {}, {**failures, **(BODY if body else {})})
    del made["responses"]["200"]
    made["responses"]["204"] = {"description": text, "headers": _REQUEST_ID}
    if body is not None:
        made["requestBody"] = {"required": True, "content": _json(ref(body))}
    return made


def reading(kind: type, text: str, failures: Mapping[int, str] | None = None) -> Schema:
    return _answers(text, _json(ref(kind)), failures or {})


def ref(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _answers(
    text: str, content: Schema, failures: Mapping[int, str], error: type = ErrorResponse
) -> Schema:
    responses: Schema = {"200": {"description": text, "headers": _REQUEST_ID, "content": content}}
    for status, why in sorted({**ALWAYS, **failures}.items()):
        responses[str(status)] = {
            "description": why,
            "headers": _REQUEST_ID,
            "content": _json(ref(error)),
        }
    return {"summary": text, "responses": responses}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}
