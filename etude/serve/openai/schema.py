"""OpenAI's dialect as OpenAPI describes it, made from the types that requests are read with and
answers are written from.

By hand is only what types do not say: the paths, which statuses they answer with, and the shapes of
messages and tools, which are read as objects because a chat template may use more of them than we
know.
"""

from __future__ import annotations

from typing import Any

from etude.serve.http import DONE
from etude.serve.openai import types as wire
from etude.serve.openapi import NO_SUCH_MODEL, Description, asking, reading, ref, schemas_of

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


def description() -> Description:
    named = [kind for kinds in REQUESTS.values() for kind in kinds[:3]]
    schemas = schemas_of([*named, wire.Models, wire.Model, wire.ChatMessage, wire.Tool])
    chat = schemas["ChatRequest"]["properties"]
    chat["messages"]["items"] = ref(wire.ChatMessage)
    chat["tools"]["anyOf"][0]["items"] = ref(wire.Tool)
    paths: dict[str, Any] = {
        path: {"post": asking(*kinds, last=DONE)} for path, kinds in REQUESTS.items()
    }
    paths["/v1/models"] = {"get": reading(wire.Models, "The model that is served.")}
    one = reading(wire.Model, "The model of that name.", NO_SUCH_MODEL)
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    paths["/v1/models/{model}"] = {"get": one | {"parameters": [name]}}
    return Description(paths, schemas)
