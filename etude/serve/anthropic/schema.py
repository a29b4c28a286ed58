"""Anthropic's dialect in the OpenAPI document."""

from __future__ import annotations

from etude.serve.anthropic import types as anthropic
from etude.serve.http import AnthropicErrorResponse
from etude.serve.openapi import Description, asking, schemas_of


def description() -> Description:
    messages = asking(
        anthropic.MessagesRequest, anthropic.Message, anthropic.MessageStart,
        "The next message of a conversation.", error=AnthropicErrorResponse,
    )  # fmt: skip
    count = asking(
        anthropic.TokenCountRequest, anthropic.TokenCount, None,
        "The number of tokens in a conversation.", error=AnthropicErrorResponse,
    )  # fmt: skip
    types = [
        anthropic.MessagesRequest, anthropic.Message, anthropic.TokenCountRequest,
        anthropic.TokenCount, anthropic.MessageStart, AnthropicErrorResponse,
    ]  # fmt: skip
    paths = {"/v1/messages": {"post": messages}, "/v1/messages/count_tokens": {"post": count}}
    return Description(paths, schemas_of(types))
