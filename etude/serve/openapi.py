"""The API as an OpenAPI document, made from the types that requests are read with and answers are
written from.

By hand is only what types do not say: the paths, which statuses they answer with, and the shapes of
messages and tools, which are read as objects because a chat template may use more of them than we
know.
"""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec

from etude import __version__
from etude.core.sampling import Priority
from etude.serve import headers
from etude.serve import protocol as wire

REQUESTS: dict[str, tuple[type, type, type, str]] = {
    "/v1/chat/completions": (
        wire.ChatRequest,
        wire.ChatCompletion,
        wire.ChatChunk,
        "The next message of a chat.",
    ),
    "/v1/completions": (
        wire.CompletionRequest,
        wire.Completion,
        wire.TextChunk,
        "What comes after a text.",
    ),
}
READS: dict[str, tuple[type, str]] = {
    "/v1/models": (wire.Models, "The model that is served."),
    "/health": (wire.Health, "That the server is there."),
}
ALWAYS = {401: "no token, or a wrong one"}
ASKING = {
    400: "a request that cannot be answered; the message says why",
    404: "another model than the one that is served",
    408: "a body that did not come in time, or a deadline that has passed",
    413: "a body that is too large",
    429: "too many answers are under way; see Retry-After",
    503: "nobody can answer now; see Retry-After",
}


SCHEDULING = [
    {
        "name": headers.PRIORITY,
        "in": "header",
        "description": "who is served first; standard if it is left out",
        "schema": {"type": "string", "enum": list(get_args(Priority))},
    },
    {
        "name": headers.DEADLINE_S,
        "in": "header",
        "description": "seconds after which nobody wants the answer any more",
        "schema": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": headers.MAX_DEADLINE_S,
        },
    },
]


@cache
def document() -> dict[str, Any]:
    named = [
        *(kind for kinds in REQUESTS.values() for kind in kinds[:3]),
        *(kind for kind, _ in READS.values()),
    ]
    named += [wire.Model, wire.ErrorResponse, wire.ChatMessage, wire.Tool]
    _, schemas = msgspec.json.schema_components(named, ref_template="#/components/schemas/{name}")
    chat = schemas["ChatRequest"]["properties"]
    chat["messages"]["items"] = _ref(wire.ChatMessage)
    chat["tools"]["anyOf"][0]["items"] = _ref(wire.Tool)
    paths: dict[str, Any] = {path: {"post": _asking(*kinds)} for path, kinds in REQUESTS.items()}
    paths |= {path: {"get": _reading(kind, text)} for path, (kind, text) in READS.items()}
    one = _reading(wire.Model, "The model of that name.", {404: ASKING[404]})
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    paths["/v1/models/{model}"] = {"get": one | {"parameters": [name]}}
    paths["/metrics"] = {
        "get": _answers(
            "Figures for Prometheus.", {"text/plain": {"schema": {"type": "string"}}}, {}
        )
    }
    paths["/openapi.json"] = {"get": _answers("This document.", _json({"type": "object"}), {})}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Etude",
            "version": __version__,
            "description": "OpenAI's API, served by Etude.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _asking(body: type, answer: type, chunk: type, text: str) -> dict[str, Any]:
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(chunk)}
    event = {
        "type": "object",
        "properties": {"data": data},
        "description": "one event; the last one's data is [DONE]",
    }
    content = {**_json(_ref(answer)), "text/event-stream": {"schema": event}}
    return _answers(text, content, ASKING) | {
        "parameters": SCHEDULING,
        "requestBody": {"required": True, "content": _json(_ref(body))},
    }


def _reading(kind: type, text: str, failures: dict[int, str] | None = None) -> dict[str, Any]:
    return _answers(text, _json(_ref(kind)), failures or {})


def _answers(text: str, content: dict[str, Any], failures: dict[int, str]) -> dict[str, Any]:
    id = {
        "x-request-id": {"description": "the request's own, or ours", "schema": {"type": "string"}}
    }
    responses: dict[str, Any] = {"200": {"description": text, "headers": id, "content": content}}
    for status, why in sorted((ALWAYS | failures).items()):
        responses[str(status)] = {
            "description": why,
            "headers": id,
            "content": _json(_ref(wire.ErrorResponse)),
        }
    return {"summary": text, "responses": responses}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(kind: type) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
