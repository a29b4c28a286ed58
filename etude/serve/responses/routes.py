"""The routes of the Responses dialect. Each session has conversations of its own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.model.output_parser import message_of
from etude.model.tokenizer import Message
from etude.serve.access import identity_of
from etude.serve.answerer import OpenAnswerer, ServedModel, refusals
from etude.serve.conversations import StoredResponse
from etude.serve.headers import read_scheduling
from etude.serve.http import ApiError, read, respond
from etude.serve.openai.requests import checked_chat, template_options
from etude.serve.responses import types as responses
from etude.serve.responses.output import ResponseBuilder, ResponseWriter
from etude.serve.responses.requests import chat_messages, chat_request, custom_tools, listed
from etude.serve.turn import open_turn

MAX_LISTED = 100


class Responses:
    """The Responses API, over an answerer for each request."""

    def __init__(self, model: ServedModel, open_answerer: OpenAnswerer) -> None:
        self._model = model
        self._open = open_answerer

    def routes(self) -> list[Route]:
        return self.session_routes()

    def session_routes(self) -> list[Route]:
        one = "/v1/responses/{response}"
        return [
            Route("/v1/responses", self.create_response, methods=["POST"]),
            Route("/v1/responses/input_tokens", self.count_input_tokens, methods=["POST"]),
            Route(one, self.get_response),
            Route(one, self.delete_response, methods=["DELETE"]),
            Route(f"{one}/input_items", self.list_input_items),
            Route(f"{one}/cancel", self.cancel_response, methods=["POST"]),
        ]

    async def create_response(self, http: HttpRequest) -> Response:
        scheduling, answerer = read_scheduling(http), self._open(http)
        asked = await read(http, responses.ResponsesRequest)
        if asked.background:
            raise ApiError(
                "background: not supported; send the request without it and wait for the answer",
                param="background",
            )
        if asked.store is not False:
            with refusals():  # now, rather than once there is an answer that cannot be kept
                self._model.conversations.journal.check(asked)
        name, messages = self._model.called(asked.model), self._messages(http, asked)
        turn = await open_turn(self._model, answerer, chat_request(asked, messages), scheduling)
        builder = ResponseBuilder(
            asked=asked,
            model=name,
            num_read=len(turn.request.prompt),
            custom=custom_tools(asked),
            id=f"resp_{turn.id}",
        )
        if asked.stream:
            writer = ResponseWriter(builder, lambda made: self._keep(http, asked, messages, made))
            return await turn.stream(http, writer)
        sample, events = await turn.sample(http)
        made = builder.whole(sample, builder.items(sample, events))
        self._keep(http, asked, messages, made)
        await self._model.conversations.journal.commit()
        return respond(made)

    async def count_input_tokens(self, http: HttpRequest) -> Response:
        answerer = self._open(http)
        asked = await read(http, responses.InputTokensRequest)
        self._model.called(asked.model)
        chat = chat_request(asked, self._messages(http, asked))
        checked_chat(chat, self._model.max_context)
        prompt = await answerer.prompt(chat.messages, chat.tools or (), template_options(chat))
        return respond(responses.InputTokens(len(prompt)))

    async def get_response(self, http: HttpRequest) -> Response:
        return respond(self._stored(http).response)

    async def delete_response(self, http: HttpRequest) -> Response:
        self._stored(http)
        id: str = http.path_params["response"]
        self._model.conversations.delete(_session(http), id)
        await self._model.conversations.journal.commit()
        return respond(responses.Deleted(id))

    async def list_input_items(self, http: HttpRequest) -> Response:
        items = list(self._stored(http).items)
        if http.query_params.get("order") != "asc":
            items.reverse()
        after, limit = http.query_params.get("after"), http.query_params.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LISTED:
            raise ApiError(f"limit must be a number from 1 to {MAX_LISTED}", param="limit")
        ids = [item["id"] for item in items]
        first = ids.index(after) + 1 if after in ids else 0
        page = items[first : first + int(limit)]
        return respond(
            responses.ItemList(
                data=page,
                first_id=page[0]["id"] if page else None,
                last_id=page[-1]["id"] if page else None,
                has_more=first + len(page) < len(items),
            )
        )

    async def cancel_response(self, http: HttpRequest) -> Response:
        self._stored(http)
        raise ApiError("only background responses can be cancelled")

    def _messages(
        self, http: HttpRequest, asked: responses.InputTokensRequest
    ) -> Sequence[Message]:
        """The conversation so far, with the items that the request adds to it."""
        store = self._model.conversations
        session = _session(http)
        before: Sequence[Message] = ()
        if (id := asked.previous_response_id) is not None:
            kept = store.get(session, id)
            if kept is None:
                message = f"previous_response_id: response {id[:200]!r} is not stored here"
                param = "previous_response_id"
                raise ApiError(message, code="previous_response_not_found", param=param)
            before = kept.messages
        said = chat_messages(listed(asked.input), lambda id: store.item(session, id))
        if not before and not said:
            raise ApiError(
                "input: empty; send a message, or name a previous response", param="input"
            )
        return [*before, *said]

    def _keep(
        self, http: HttpRequest, asked: responses.ResponsesRequest, messages: Sequence[Message],
        made: responses.ResponseObject,
    ) -> None:  # fmt: skip
        if asked.store is False:
            return
        answer = chat_messages(msgspec.to_builtins(made.output), lambda id: None)
        items = [
            {"id": f"item_{secrets.token_hex(12)}", "type": "message", **item}
            for item in listed(asked.input)
        ]
        said = (*messages, *(answer or [message_of([])]))
        stored = StoredResponse(
            response=made,
            items=tuple(items),
            messages=said,
            previous=asked.previous_response_id,
        )
        self._model.conversations.put(_session(http), made.id, stored)

    def _stored(self, http: HttpRequest) -> StoredResponse:
        id: str = http.path_params["response"]
        found = self._model.conversations.get(_session(http), id)
        if found is None:
            message = f"response {id[:200]!r} is not stored here"
            raise ApiError(message, status=404, code="response_not_found")
        return found


def _session(http: HttpRequest) -> str:
    """The owner of a request's responses: its session, or else its client."""
    return str(http.path_params.get("session", identity_of(http).owner))
