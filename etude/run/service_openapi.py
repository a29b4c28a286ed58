"""The protocol of environments by URL as an OpenAPI document, generated from the types that are
read and written:

    python -m etude.run.service_openapi > docs/environments-by-url.openapi.json
"""

from __future__ import annotations

import json
from typing import Any

from etude.core.remote import RolloutRequest, RolloutResult, ServiceHealth, TaskPage
from etude.run.service import WAIT_S
from etude.store.decoding import known_schemas, schemas_of

Schema = dict[str, Any]

SCHEMAS = "#/components/schemas/{name}"


def document() -> Schema:
    kinds = [ServiceHealth, TaskPage, RolloutRequest]
    schemas = schemas_of(kinds, SCHEMAS)
    schemas |= known_schemas([RolloutResult], SCHEMAS)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Etude: environments by URL",
            "version": "1",
            "description": "API of a service that runs rollouts of its product for Etude.",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _paths() -> Schema:
    id = _parameter("id", "path", {"type": "string"}, "id of the rollout")
    unknown = "unknown id: was the service restarted?"
    return {
        "/health": {
            "get": _route(
                "Return the capacity of the service, to show that it is up.", {200: ServiceHealth}
            )
        },
        "/tasks": {
            "get": _route(
                "Return a page of tasks, always the same ones in the same order.",
                {200: TaskPage},
                parameters=[
                    _parameter("split", "query", {"enum": ["train", "heldout", "novel"]}, ""),
                    _parameter("limit", "query", {"type": "integer"}, "maximum number of tasks"),
                    _parameter("after", "query", {"type": "string"}, "`next` of the previous page"),
                ],
            )
        },
        "/rollouts": {
            "post": _route(
                "Start a rollout. If its id is known, return its result, or that it is running.",
                {200: RolloutResult, 202: RolloutResult},
                failures={
                    400: "permanently refused",
                    429: "no room now, nothing was started; 503 means the same",
                    500: "internal error: the attempt is repeated under another id",
                    503: "no room now, nothing was started",
                },
                parameters=[
                    _parameter("Idempotency-Key", "header", {"type": "string"}, "id of the rollout")
                ],
                body=RolloutRequest,
            )
        },
        "/rollouts/{id}": {
            "get": _route(
                "Return the result of a rollout as soon as there is one.",
                {200: RolloutResult},
                failures={404: unknown},
                parameters=[
                    id,
                    _parameter(
                        "wait_s",
                        "query",
                        {"type": "number", "examples": [WAIT_S]},
                        "how long to hold the request while the rollout is running",
                    ),
                ],
            ),
            "delete": _route(
                "Cancel a rollout whose result is no longer needed; the service may forget it.",
                {},
                failures={204: "cancelled, or unknown"},
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
