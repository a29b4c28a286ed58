"""Production mode in the OpenAPI document."""

from __future__ import annotations

from functools import cache
from typing import Any

from etude.serve.dialects import DIALECTS
from etude.serve.openapi import Description, asking, document, schemas_of
from etude.serve.production import types

USER = "X-Etude-User"
ORGANISATION = "X-Etude-Organisation"
SESSION = "X-Etude-Session"
CONSENT = "X-Etude-Consent"
MAX_NAME_CHARS = 256

_HEADERS = [
    {
        "name": name,
        "in": "header",
        "description": text,
        "schema": {"type": "string", "maxLength": MAX_NAME_CHARS} | limits,
    }
    for name, text, limits in (
        (USER, "for whom", {}),
        (ORGANISATION, "the user's organisation", {}),
        (CONSENT, "whether the user may be recorded", {"enum": ["granted", "refused"]}),
    )
]


def description() -> Description:
    def route(body: type | None, answer: type, text: str) -> dict[str, Any]:
        made = asking(body or answer, answer, None, text) | {"parameters": _HEADERS}
        conflict = {
            "409": made["responses"]["400"] | {"description": "the id belongs to another event"}
        }
        made["responses"] = made["responses"] | conflict
        if body is None:
            del made["requestBody"]
        return made

    feedback = route(types.FeedbackRequest, types.FeedbackStored, "A user's reaction to an answer.")
    consent = route(types.ConsentRequest, types.ConsentStored, "Whether a user may be recorded.")
    deleted = route(None, types.UserDeleted, "Delete all stored data of a user.")
    bodies = [types.FeedbackRequest, types.FeedbackStored, types.ConsentRequest]
    return Description(
        {
            "/v1/feedback": {"post": feedback},
            "/v1/consent": {"post": consent},
            "/v1/users": {"delete": deleted},
        },
        schemas_of([*bodies, types.ConsentStored, types.UserDeleted]),
    )


@cache
def production_document() -> dict[str, Any]:
    return document([*(described() for _, described in DIALECTS), description()])
