"""The protocol of environments by URL as an OpenAPI document, generated from the types that are
read and written:

    python -m etude.run.service_openapi > docs/environments-by-url.openapi.json
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from etude.core.remote import RolloutRequest, RolloutResult, ServiceHealth, TaskPage
from etude.run.service import WAIT_S
from etude.store.decoding import known_schemas

Schema = dict[str, Any]

SCHEMAS = "#/components/schemas/{name}"


def document() -> Schema:
    kinds = [ServiceHealth, TaskPage, RolloutRequest]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMAS)
    schemas |= known_schemas([RolloutResult], SCHEMAS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Etude: environments by URL",
            "version": "1",
            "description": "What a service answers that runs rollouts of its product for Etude.",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _paths() -> Schema:
    id = _parameter("id", "path", {"type": "string"}, "of the rollout")
    unknown = "it is not known: was the service restarted?"
    return {
        "/health": {"get": _route("That it is there, and its capacity.", {200: ServiceHealth})},
        "/tasks": {
            "get": _route(
                "A page of its tasks, the same and in the same order whenever it is asked for.",
                {200: TaskPage},
                parameters=[
                    _parameter("split", "query", {"enum": ["train", "heldout", "novel"]}, ""),
                    _parameter("limit", "query", {"type": "integer"}, "tasks at most"),
                    _parameter("after", "query", {"type": "string"}, "`next` of the page before"),
                ],
            )
        },
        "/rollouts": {
            "post": _route(
                "Begin a rollout, unless its id is known: then its result, or that it is running.",
                {200: RolloutResult, 202: RolloutResult},
                failures={
                    400: "it will never be taken",
                    429: "no room now, and nothing was begun; so does 503",
                    500: "it broke: the attempt is made again, under another id",
                    503: "no room now, and nothing was begun",
                },
                parameters=[_parameter("Idempotency-Key", "header", {"type": "string"}, "the id")],
                body=RolloutRequest,
            )
        },
        "/rollouts/{id}": {
            "get": _route(
                "Its result, as soon as there is one.",
                {200: RolloutResult},
                failures={404: unknown},
                parameters=[
                    id,
                    _parameter(
                        "wait_s",
                        "query",
                        {"type": "number", "examples": [WAIT_S]},
                        "how long to wait with the answer while it is running",
                    ),
                ],
            ),
            "delete": _route(
                "Nobody wants it any more: it may be ended, and forgotten.",
                {},
                failures={204: "also if it is not known"},
                parameters=[id],
            ),
        },
    }


def _route(
    summary: str,
    answers: dict[int, type],
    *,
    failures: dict[int, str] | None = None,
    parameters: list[Schema] | None = None,
    body: type | None = None,
) -> Schema:
    responses: Schema = {
        str(status): {"description": kind.__name__, "content": _json(kind)}
        for status, kind in answers.items()
    }
    responses |= {str(status): {"description": why} for status, why in (failures or {}).items()}
    route: Schema = {"summary": summary, "responses": responses}
    if parameters:
        route["parameters"] = parameters
    if body is not None:
        route["requestBody"] = {"required": True, "content": _json(body)}
    return route


def _parameter(name: str, place: str, schema: Schema, text: str) -> Schema:
    told = {"name": name, "in": place, "required": place == "path", "schema": schema}
    return told | ({"description": text} if text else {})


def _json(kind: type) -> Schema:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


if __name__ == "__main__":
    print(json.dumps(document(), indent=2))
