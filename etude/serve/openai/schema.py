"""OpenAI's dialect in the OpenAPI document, made from the types that requests are decoded with and
answers are encoded from.

Only what the types do not express is written by hand: the paths, the statuses they answer with, and
the shapes of messages and tools. Those are decoded as plain objects, because a chat template may
use more fields of them than are known here.
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
        "The continuation of a text.",
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
    paths["/v1/models"] = {"get": reading(wire.Models, "The models that are served.")}
    one = reading(wire.Model, "The model with this name.", NO_SUCH_MODEL)
    name = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }
    paths["/v1/models/{model}"] = {"get": one | {"parameters": [name]}}
    return Description(paths, schemas)
