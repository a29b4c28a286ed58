"""The gateway's API as an OpenAPI document: all dialects, and the sessions that others run."""

from __future__ import annotations

from functools import cache
from typing import Any

from etude.core import remote
from etude.serve.dialects import DIALECTS
from etude.serve.openapi import SCHEMAS, Description, document, reading, schemas_of, telling
from etude.serve.session_desk import ClaimRequest
from etude.store.decoding import known_schemas

SESSION = {
    "name": "session",
    "in": "path",
    "required": True,
    "description": "its id",
    "schema": {"type": "string", "minLength": 1},
}
NOT_YOURS = {403: "a token of another scope, or of another session"}
UNKNOWN = {404: "nobody offered it, or it is over"}
OUTCOME = [
    {
        "name": "wait_s",
        "in": "query",
        "description": "how long to wait for news of it",
        "schema": {"type": "number", "default": 0},
    },
    {
        "name": "claimed",
        "in": "query",
        "description": "that it is claimed is known: news is its result alone",
        "schema": {"type": "boolean", "default": False},
    },
]


def description() -> Description:
    claim = telling(ClaimRequest, "There is none to run now.", NOT_YOURS)
    claimed = reading(remote.RolloutRequest, "A session to run.")
    claim["summary"] = claimed["summary"]
    claim["responses"]["200"] = claimed["responses"]["200"]
    score = telling(
        remote.RolloutResult,
        "What became of a session. The first result stands.",
        NOT_YOURS | UNKNOWN | {409: "it has another result already"},
    )
    offer = telling(
        remote.SessionOffer, "Offer a session. The same again changes nothing.", NOT_YOURS
    )
    outcome = reading(
        remote.SessionOutcome,
        "Whether it is claimed, and its result.",
        NOT_YOURS | UNKNOWN | {400: "wait_s is no number"},
    )
    withdrawn = telling(None, "Take a session back: it is over.", NOT_YOURS)
    at_session = {"parameters": [SESSION]}
    return Description(
        {
            "/v1/sessions": {"post": claim},
            "/v1/sessions/{session}/score": {"post": score | at_session},
            "/v1/sessions/{session}": {
                "put": offer | at_session,
                "get": outcome | {"parameters": [SESSION, *OUTCOME]},
                "delete": withdrawn | at_session,
            },
        },
        schemas_of(
            [
                ClaimRequest,
                remote.RolloutRequest,
                remote.SessionOffer,
                remote.SessionOutcome,
            ]
        )
        | known_schemas([remote.RolloutResult], SCHEMAS),
    )


@cache
def gateway_document() -> dict[str, Any]:
    return document([*(described() for _, described in DIALECTS), description()])
