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
NOT_YOURS = {403: "the token has another scope, or belongs to another session"}
UNKNOWN = {404: "the session was never offered, or has ended"}
OUTCOME = [
    {
        "name": "wait_s",
        "in": "query",
        "description": "seconds to wait for news of the session",
        "schema": {"type": "number", "default": 0},
    },
    {
        "name": "claimed",
        "in": "query",
        "description": "the client knows that the session is claimed: wait for its result",
        "schema": {"type": "boolean", "default": False},
    },
]


def description() -> Description:
    claim = telling(ClaimRequest, "There is no session to run.", NOT_YOURS)
    claimed = reading(remote.RolloutRequest, "A session to run.")
    claim["summary"] = claimed["summary"]
    claim["responses"]["200"] = claimed["responses"]["200"]
    score = telling(
        remote.RolloutResult,
        "Send the result of a session. The first result counts.",
        NOT_YOURS | UNKNOWN | {409: "the session already has another result"},
    )
    offer = telling(
        remote.SessionOffer, "Offer a session. Repeating the request changes nothing.", NOT_YOURS
    )
    outcome = reading(
        remote.SessionOutcome,
        "Whether the session is claimed, and its result.",
        NOT_YOURS | UNKNOWN | {400: "wait_s is not a number"},
    )
    withdrawn = telling(None, "Withdraw a session, which ends it.", NOT_YOURS)
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
