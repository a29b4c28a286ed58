"""The routes of Anthropic's dialect."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.serve.answerer import OpenAnswerer, ServedModel
from etude.serve.anthropic import types as anthropic
from etude.serve.anthropic.output import MessageBuilder, MessageWriter
from etude.serve.anthropic.requests import chat_request
from etude.serve.headers import read_scheduling
from etude.serve.http import read, respond
from etude.serve.openai.requests import checked_chat, template_options
from etude.serve.turn import open_turn


class Anthropic:
    """Anthropic's API over an answerer for each request."""

    def __init__(self, model: ServedModel, open_answerer: OpenAnswerer) -> None:
        self._model = model
        self._open = open_answerer

    def routes(self) -> list[Route]:
        return self.session_routes()

    def session_routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, http: HttpRequest) -> Response:
        scheduling, answerer = read_scheduling(http), self._open(http)
        asked = await read(http, anthropic.MessagesRequest)
        name = self._model.called(asked.model)
        turn = await open_turn(self._model, answerer, chat_request(asked), scheduling)
        thinking = asked.thinking is None or asked.thinking.type != "disabled"
        builder = MessageBuilder(turn, name, thinking=thinking)
        if asked.stream:
            return await turn.stream(http, MessageWriter(builder))
        return respond(builder.message(*await turn.sample(http)))

    async def count_tokens(self, http: HttpRequest) -> Response:
        answerer = self._open(http)
        asked = await read(http, anthropic.TokenCountRequest)
        self._model.called(asked.model)
        chat = checked_chat(chat_request(asked), self._model.max_context)
        prompt = await answerer.prompt(chat.messages, chat.tools or (), template_options(chat))
        return respond(anthropic.TokenCount(len(prompt)))
