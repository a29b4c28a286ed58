"""The Responses dialect in the OpenAPI document."""

from __future__ import annotations

from etude.serve.openapi import Description, Schema, asking, reading, schemas_of
from etude.serve.responses import types as responses

NOT_KEPT = {400: "the query is invalid", 404: "the response is not stored here"}
RESPONSE: Schema = {
    "name": "response",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"},
}


def description() -> Description:
    types = [
        responses.ResponsesRequest, responses.ResponseObject, responses.StreamEvent,
        responses.InputTokensRequest, responses.InputTokens, responses.Deleted,
        responses.ItemList,
    ]  # fmt: skip
    create = asking(
        responses.ResponsesRequest, responses.ResponseObject, responses.StreamEvent,
        "The next items of a conversation.",
    )  # fmt: skip
    count = asking(
        responses.InputTokensRequest, responses.InputTokens, None,
        "The number of tokens in a conversation.",
    )  # fmt: skip
    items = _of_one(responses.ItemList, "The input items of a response.")
    paths: dict[str, Schema] = {
        "/v1/responses": {"post": create},
        "/v1/responses/input_tokens": {"post": count},
        "/v1/responses/{response}": {
            "get": _of_one(responses.ResponseObject, "A stored response."),
            "delete": _of_one(responses.Deleted, "Delete a stored response."),
        },
        "/v1/responses/{response}/input_items": {"get": items},
    }
    return Description(paths, schemas_of(types))


def _of_one(kind: type, text: str) -> Schema:
    return reading(kind, text, NOT_KEPT) | {"parameters": [RESPONSE]}
