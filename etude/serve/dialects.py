"""The public routes of a server: those of all dialects, and those that every server has. A new
dialect is a folder next to `openai/`, a line here, and rows for its routes in `policies.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.serve.answerer import OpenAnswerer, ServedModel
from etude.serve.anthropic import schema as anthropic_schema
from etude.serve.anthropic.routes import Anthropic
from etude.serve.http import respond
from etude.serve.openai import schema as openai_schema
from etude.serve.openai.routes import OpenAi
from etude.serve.openapi import Health
from etude.serve.openapi import document as document_of
from etude.serve.responses import schema as responses_schema
from etude.serve.responses.routes import Responses

DIALECTS = (
    (OpenAi, openai_schema.description),
    (Responses, responses_schema.description),
    (Anthropic, anthropic_schema.description),
)


def public_routes(
    model: ServedModel, open_answerer: OpenAnswerer, gauges: Callable[[], Mapping[str, float]]
) -> list[Route]:
    """`gauges`: returns the current values of the server's gauges, by name."""

    async def health(http: HttpRequest) -> Response:
        return respond(Health())

    async def show_metrics(http: HttpRequest) -> Response:
        now = {"answers_under_way": model.concurrency.in_use, **gauges()}
        return Response(model.metrics.text(now), media_type="text/plain; version=0.0.4")

    async def openapi(http: HttpRequest) -> Response:
        return respond(document())

    return [
        *(route for dialect, _ in DIALECTS for route in dialect(model, open_answerer).routes()),
        Route("/health", health),
        Route("/metrics", show_metrics),
        Route("/openapi.json", openapi),
    ]


def session_routes(model: ServedModel, open_answerer: OpenAnswerer) -> list[Route]:
    """The routes that continue a conversation."""
    return [
        route for dialect, _ in DIALECTS for route in dialect(model, open_answerer).session_routes()
    ]


@cache
def document() -> dict[str, Any]:
    return document_of(description() for _, description in DIALECTS)
