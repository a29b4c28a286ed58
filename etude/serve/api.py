"""The OpenAI-compatible API over a `Policy`: chat completions with tools, and completions with token ids.

What goes beyond OpenAI, for those who need tokens and not text: a prompt may be a list of token ids; `return_token_ids`
adds the exact ids; `weight_versions` says which weights sampled which tokens, as `[{"version": 7, "count": 21}, ..]`.

Every error is an envelope, `{"error": {"message": .., "type": .., "code": ..}}`. Every route needs the bearer token, if
there is one.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.core.seams import Policy
from etude.core.seeds import derive
from etude.core.types import Sample
from etude.model.tokenizer import ChatTokenizer, Message

MODEL = "etude"
MAX_BODY_BYTES = 8 << 20

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=100)]


class ApiError(Exception):
    """An answer other than 200. `code` is for programs, the message for people."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Unavailable(Exception):
    """Nobody can answer now; the same request may succeed later, or elsewhere."""


class Function(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: Function


class ChatMessage(msgspec.Struct):
    """The shape that a message must have. Fields that are not named here are passed on to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCall] | None = None


class ToolFunction(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class ToolShape(msgspec.Struct):
    function: ToolFunction


class Sampling(msgspec.Struct, kw_only=True):
    """What both kinds of request can say about how to sample."""

    model: str = MODEL
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    return_token_ids: bool = False


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[int]
    stop_token_ids: list[int] | None = None
    """Exactly these end the answer; without the field, the end of a turn does."""
    min_weight_version: int = 0
    """A worker with older weights refuses (503): what the gateway promised holds even if it is wrong about a worker."""
    logprobs: int | bool | None = None


class Api:
    """The handlers. A gateway or a worker adds routes of its own to `routes()`."""

    def __init__(self, policy: Policy, tokenizer: ChatTokenizer, *, max_context: int) -> None:
        self.policy, self.tokenizer, self.max_context = policy, tokenizer, max_context

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]

    async def chat(self, request: Request) -> Response:
        asked = await read_chat(request)
        prompt = self.encode_chat(
            lambda: self.tokenizer.encode(self.tokenizer.render(asked.messages, asked.tools or (), answer=True))
        )
        sample, message = await unless_gone(request, self.answer(self.policy, asked, prompt))
        return self.chat_response(asked, prompt, sample, message)

    def encode_chat(self, encode: Callable[[], T]) -> T:
        """Messages that the chat template cannot show are the client's mistake."""
        try:
            return encode()
        except (TypeError, ValueError, RecursionError) as e:
            raise ApiError(f"messages: the chat template cannot show them: {e}") from e

    async def answer(self, policy: Policy, asked: ChatRequest, prompt: Sequence[int]) -> tuple[Sample, Message]:
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        limit = asked.max_completion_tokens or asked.max_tokens
        stop = [self.tokenizer.eos, *self._stop_ids(asked.stop)]
        sample = await self._sample(policy, prompt, asked, limit, seed, stop)
        text = self.tokenizer.decode(sample.tokens[:-1] if sample.finish == "stop" else sample.tokens)
        message = self.tokenizer.parse(
            text, asked.tools or (), lambda number: f"call_{derive(seed, len(prompt), number):x}"
        )
        return sample, message

    def chat_response(self, asked: ChatRequest, prompt: Sequence[int], sample: Sample, message: Message) -> Response:
        finish = "tool_calls" if message.get("tool_calls") and sample.finish == "stop" else sample.finish
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": finish}
        if asked.logprobs:
            pairs = zip(sample.tokens, sample.logprobs, strict=True)
            content = [
                {"token": self.tokenizer.decode([token]), "logprob": logprob, "top_logprobs": []}
                for token, logprob in pairs
            ]
            choice["logprobs"] = {"content": content}
        return completion("chat.completion", asked, choice, prompt, sample)

    async def completions(self, request: Request) -> Response:
        asked = await read(request, CompletionRequest)
        check_supported(asked)
        prompt = self.tokenizer.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        stop = [self.tokenizer.eos] if asked.stop_token_ids is None else asked.stop_token_ids
        stop = [*stop, *self._stop_ids(asked.stop)]
        self.check_version(asked.min_weight_version)
        sample = await unless_gone(request, self._sample(self.policy, prompt, asked, asked.max_tokens, seed, stop))
        text = self.tokenizer.decode(sample.tokens[:-1] if sample.finish == "stop" else sample.tokens)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": sample.finish}
        if asked.logprobs:
            choice["logprobs"] = {"token_logprobs": sample.logprobs}
        return completion("text_completion", asked, choice, prompt, sample)

    def check_version(self, least: int) -> None:
        """A worker refuses here what its weights are too old for."""

    async def models(self, request: Request) -> Response:
        return respond(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "etude"}]}
        )

    async def health(self, request: Request) -> Response:
        return respond({"status": "ok"})

    async def _sample(
        self, policy: Policy, prompt: Sequence[int], asked: Sampling, limit: int | None, seed: int, stop: Sequence[int]
    ) -> Sample:
        room = self.max_context - len(prompt)
        if room < 1:
            message = f"the prompt has {len(prompt)} tokens, which leaves no room in a context of {self.max_context}"
            raise ApiError(message, code="context_length_exceeded")
        temperature = 1.0 if asked.temperature is None else asked.temperature
        try:
            return await policy.sample(
                prompt, max_tokens=min(limit or room, room), temperature=temperature, seed=seed, stop=stop
            )
        except ValueError as e:
            raise ApiError(str(e)) from e

    def _stop_ids(self, stop: str | list[str] | None) -> list[int]:
        ids = []
        for text in [stop] if isinstance(stop, str) else stop or []:
            match self.tokenizer.encode(text):
                case [id]:
                    ids.append(id)
                case tokens:
                    raise ApiError(
                        f"stop: {text!r} is {len(tokens)} tokens of this model; only single tokens can stop it"
                    )
        return ids


def completion(kind: str, asked: Sampling, choice: dict[str, Any], prompt: Sequence[int], sample: Sample) -> Response:
    if asked.return_token_ids:
        choice |= {"token_ids": sample.tokens, "prompt_token_ids": prompt}
    prompt_tokens, sampled_tokens = len(prompt), len(sample.tokens)
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }
    return respond(
        {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "choices": [choice],
            "usage": usage,
            "weight_versions": sample.versions,
        }
    )


def respond(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read(request: Request, type: type[T]) -> T:
    """The body of a request, or 400 with the place that is wrong."""
    try:
        return msgspec.json.decode(await _body(request), type=type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(f"request body: {e}") from e


async def _body(request: Request) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            message = f"request body: more than {MAX_BODY_BYTES} bytes"
            raise ApiError(message, status=413, code="request_too_large")
    return body


async def read_chat(request: Request) -> ChatRequest:
    asked = await read(request, ChatRequest)
    check_supported(asked)
    for place, values, shape in (("messages", asked.messages, ChatMessage), ("tools", asked.tools or [], ToolShape)):
        for number, value in enumerate(values):
            try:
                msgspec.convert(value, shape)
            except (msgspec.ValidationError, RecursionError) as e:
                raise ApiError(f"{place}[{number}]: {e}") from e
    asked.messages = [_plain(message) for message in asked.messages]
    return asked


def _plain(message: Message) -> Message:
    """Content may come in parts; chat templates expect text."""
    if not isinstance(content := message.get("content"), list):
        return message
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
        raise ApiError('messages: this model reads text only, in parts of {"type": "text", "text": ..}')
    return message | {"content": "".join(part["text"] for part in content)}


def check_supported(asked: Sampling) -> None:
    if asked.stream:
        raise ApiError("stream: answers come whole; leave it out or send false")
    if asked.n not in (None, 1):
        raise ApiError(f"n: one answer a request, not {asked.n}; send the request {asked.n} times with different seeds")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Waits for the work, and cancels it when the client goes away. Call it after the body has been read: all that can
    still be received then is the end of the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client closed the connection", status=499, code="client_closed_request")
        return await task
    finally:
        gone.cancel()
        task.cancel()


def create_app(routes: Sequence[Route], token: str | None) -> ASGIApp:
    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, ApiError):
            return envelope(str(error), error.status, error.code)
        if isinstance(error, Unavailable):
            return envelope(str(error), 503, "unavailable")
        assert isinstance(error, HTTPException)
        return envelope(error.detail, error.status_code, "not_found" if error.status_code == 404 else "invalid_request")

    app = Starlette(routes=routes, exception_handlers={ApiError: failed, Unavailable: failed, HTTPException: failed})
    return app if token is None else authorised(app, token)


def envelope(message: str, status: int, code: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return respond({"error": {"message": message, "type": kind, "code": code}}, status)


def authorised(app: ASGIApp, token: str) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Nothing behind it is reached without the token."""
    expected = f"Bearer {token}".encode()

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(given, expected):
            await app(scope, receive, send)
        else:
            await envelope("send the token of this server as 'Authorization: Bearer ..'", 401, "unauthorized")(
                scope, receive, send
            )

    return check
