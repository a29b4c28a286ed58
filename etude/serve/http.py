"""HTTP basics of all servers: bounded bodies, errors, request ids, authentication, and clients that
disconnect.

An error is `{"error": {"message": .., "type": .., "code": .., "param": ..}}` with a matching
status, as in OpenAI's API; on Anthropic's routes it has Anthropic's form. A request may carry an id
in `x-request-id`; the answer returns it, or a new one. The client is identified before anything
else of the request is read, and every route has a policy (`serve/policies.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.serve.access import IDENTITY, Access, AccessDenied, NoToken, identity_of
from etude.serve.connections import DEPARTURE, Departure
from etude.serve.metrics import Metrics, RequestRecord
from etude.serve.policies import policy_of
from etude.store.decoding import decode_json

MAX_BODY_BYTES = 8 << 20
BODY_S = 60.0
"""Time for the whole body to arrive, so that a client that sends it byte by byte does not hold a
connection for ever."""
RETRY_AFTER_S = 1
MSGPACK = "application/msgpack"
DONE = "[DONE]"
"""The last event of a stream of OpenAI's chat completions."""
LAST = f"data: {DONE}\n\n".encode()
NOTHING_SENT = 499
"""The status of a stream until its first event; it remains if the client goes away before that."""
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

ENCODER = msgspec.json.Encoder()
T = TypeVar("T")
Decode = Callable[..., Any]
"""`decode_json` or `decode_msgpack`."""


class Error(msgspec.Struct):
    message: str
    type: str
    code: str
    param: str | None = None


class ErrorResponse(msgspec.Struct):
    error: Error


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    error: AnthropicError


ANTHROPIC_ROUTES = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer with a status other than 200. `code` is for programs, the message for people."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class Unavailable(ApiError):
    """No worker can answer now; the same request may succeed later, or elsewhere."""

    def __init__(self, message: str, *, status: int = 503, code: str = "unavailable") -> None:
        super().__init__(message, status=status, code=code)


class DeadlineExceeded(ApiError):
    """The client's deadline for the answer has passed; the answer is not computed any further."""

    def __init__(self) -> None:
        super().__init__(
            "the deadline of this request has passed", status=408, code="deadline_exceeded"
        )


class InternalError(ApiError):
    """A failure of the server. Clients get no details."""

    def __init__(self) -> None:
        super().__init__("internal error: see the server's log", status=500, code="internal_error")


class ClientDisconnected(ApiError):
    """The client closed the connection."""

    def __init__(self) -> None:
        super().__init__(
            "the client closed the connection", status=499, code="client_closed_request"
        )


def respond(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def respond_packed(value: object) -> Response:
    """A response in MessagePack, for Etude's own processes: bytes travel as bytes."""
    return Response(msgspec.msgpack.encode(value), media_type=MSGPACK)


def error_body(error: ApiError, path: str) -> ErrorResponse | AnthropicErrorResponse:
    """The error in the format of the API that the path belongs to."""
    if ANTHROPIC_ROUTES in path:
        usual = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(error.status, usual)
        # Anthropic has no code for this error: clients look for these words.
        is_too_long = error.code == "context_length_exceeded"
        message = f"prompt is too long: {error}" if is_too_long else str(error)
        return AnthropicErrorResponse(AnthropicError(kind, message))
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return ErrorResponse(Error(str(error), kind, error.code, error.param))


def error_response(error: ApiError | AccessDenied, path: str) -> Response:
    if isinstance(error, AccessDenied):
        error = ApiError(str(error), status=error.status, code=error.code)
    response = respond(error_body(error, path), error.status)
    if isinstance(error, Unavailable):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.code in ("request_timeout", "internal_error"):
        # The rest of the body could still come, byte by byte; after an internal error, the server
        # closes the connection.
        response.headers["Connection"] = "close"
    return response


async def read(request: Request, type: type[T], decode: Decode = decode_json) -> T:
    """Decode the body of a request. Raises ApiError with the place of the mistake."""
    body = await read_bytes(request)
    if not body:  # a decoder would call it truncated
        raise ApiError("request body: empty")
    try:
        return cast(T, decode(body, type))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(f"request body: {_complaint(str(e), type)}", param=_param(str(e))) from e


def _complaint(message: str, kind: object) -> str:
    """The message of msgspec. An unknown field is most likely a misspelt one, so the known ones are
    appended."""
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return message
    # otherwise the error is within a part of the body
    if not re.search(r"unknown field `[^`]*`$", message):
        return message
    known = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
    return f"{message}; known fields: {known}"


def _param(message: str) -> str | None:
    """The field that msgspec rejected."""
    found = re.search(r"`\$\.(\w+)|unknown field `(\w+)`|missing required field `(\w+)`", message)
    return next(filter(None, found.groups()), None) if found else None


async def read_bytes(request: Request) -> bytearray:
    """Read the body, within limits of size and time."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                part = await request.receive()
                if part["type"] == "http.disconnect":
                    raise ClientDisconnected()
                body += part.get("body", b"")
                more = part.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    message = f"request body: more than {MAX_BODY_BYTES} bytes"
                    raise ApiError(message, status=413, code="request_too_large")
    except TimeoutError as e:
        message = f"request body: incomplete after {BODY_S:g} s"
        raise ApiError(message, status=408, code="request_timeout") from e
    return body


@contextlib.asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """Raise DeadlineExceeded in the block once the given seconds have passed."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as e:
        if limit.expired():
            raise DeadlineExceeded() from e
        raise


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it if the client goes away. Call it only after the body has been
    read: then all that can still be received is the end of the connection."""
    return await _cancel_on_disconnect(request.scope, request.receive, work)


async def _cancel_on_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    is_working, has_cancelled = True, False

    def end() -> None:
        # May be called too late: the work can end in the same pass of the loop in which the client
        # goes.
        nonlocal has_cancelled
        if is_working:
            has_cancelled = task.cancel()

    with _watched(scope, receive, end):
        try:
            return await work
        except asyncio.CancelledError:
            if has_cancelled and not task.uncancel():
                raise ClientDisconnected() from None
            raise
        finally:
            is_working = False


@contextlib.contextmanager
def _watched(scope: Scope, receive: Receive, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` if the client goes away within the block."""
    departure: Departure | None = scope.get(DEPARTURE)
    if departure is not None:
        departure.watch(end)
        try:
            yield
        finally:
            departure.unwatch(end)
        return
    gone = asyncio.ensure_future(receive())  # under an ASGI server other than ours
    gone.add_done_callback(lambda _: end())
    try:
        yield
    finally:
        gone.cancel()


async def gather(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. The first failure cancels the others."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


SendEvent = Callable[[object], Awaitable[None]]


class EventStream(Response):
    """Server-sent events. `work` is called with a function that sends one event. An error before
    the first event becomes an ordinary error response; a later one becomes the last event of the
    stream. The work is cancelled if the client goes away.

    OpenAI's chat completions end a stream with `[DONE]`. With `named`, as in the newer APIs, each
    event is named by its `type`, and the last event is not a special one."""

    def __init__(
        self,
        work: Callable[[SendEvent], Coroutine[Any, Any, None]],
        *,
        named: bool = False,
        failed: Callable[[ApiError], object] | None = None,
        encode: Callable[[Any], bytes] | None = None,
    ) -> None:
        """`failed`: the event for an error, if it differs from the usual error body. `encode`: an
        event as bytes, for streams in our own format."""
        self.media_type = "text/event-stream" if encode is None else MSGPACK
        self.init_headers({"Cache-Control": "no-cache"})
        self.status_code = NOTHING_SENT
        self._work = work
        self._named = named or encode is not None
        self._failed = failed
        self._encoded = encode or self._as_event
        self._held = contextlib.ExitStack()

    def hold(self, stack: contextlib.ExitStack) -> None:
        """Close the stack when the stream has ended."""
        self._held.push(stack)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnected), self._held:
            await _cancel_on_disconnect(scope, receive, self._run(scope["path"], send))

    async def _run(self, path: str, send: Send) -> None:
        async def start() -> None:
            self.status_code = 200
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def send_event(value: object) -> None:
            if self.status_code != 200:
                await start()
            data = self._encoded(value)
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await self._work(send_event)
        except ApiError as e:
            if self.status_code != 200:
                raise
            await send_event(self._failed(e) if self._failed else error_body(e, path))
        if self.status_code != 200:
            await start()
        await send({"type": "http.response.body", "body": b"" if self._named else LAST})

    def _as_event(self, event: object) -> bytes:
        data = b"data: " + ENCODER.encode(event) + b"\n\n"
        if not self._named:
            return data
        name = event["type"] if isinstance(event, dict) else type(event).__struct_config__.tag  # type: ignore[attr-defined]
        return f"event: {name}\n".encode() + data


def create_app(
    routes: Sequence[Route], access: Access | None, metrics: Metrics | None = None
) -> ASGIApp:
    """The ASGI application of the routes. `access`: its authentication; None lets in everybody on
    this machine. Raises if a route has no policy."""
    return _App(list(map(guarded, routes)), access or NoToken(), metrics or Metrics())


class _App:
    """Routes behind one authentication. Once an answer has begun, nothing comes between its route
    and the connection, since every token of a stream would pay for it."""

    def __init__(self, routes: Sequence[Route], access: Access, metrics: Metrics) -> None:
        self._routes = routes
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = RequestRecord(method=scope["method"], path=scope["path"])
        request = Request(scope, receive)
        id = _request_id(request.headers)

        async def answer(response: Response) -> None:
            response.raw_headers.append((b"x-request-id", id))
            try:
                await response(scope, receive, send)
            finally:
                record.status = response.status_code

        response: Response | None = None
        with self._metrics.answering(record):
            try:
                address, _ = scope.get("client") or ("", 0)
                scope[IDENTITY] = self._access.identify(request.headers, address)
                response = await self._response(request, record)
                await answer(response)
            except (ApiError, AccessDenied) as e:
                await answer(error_response(e, scope["path"]))
            except Exception:
                if response is None or response.status_code == NOTHING_SENT:
                    await answer(error_response(InternalError(), scope["path"]))
                record.status = InternalError().status
                raise  # the ASGI server logs it

    async def _response(self, request: Request, record: RequestRecord) -> Response:
        scope, allowed = request.scope, set[str]()
        for route in self._routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                record.route = route.endpoint.__name__
                response: Response = await route.endpoint(request)
                return response
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        if allowed:
            error = ApiError("Method Not Allowed", status=405)
            response = error_response(error, scope["path"])
            response.headers["Allow"] = ", ".join(sorted(allowed))
            return response
        if scope["path"].endswith("/") and scope["path"] != "/":
            return RedirectResponse(request.url.replace(path=scope["path"].rstrip("/")))
        raise ApiError("Not Found", status=404, code="not_found")


def _request_id(headers: Headers) -> bytes:
    """The client's id if it is fit to be sent back, else a new one."""
    given = headers.get("x-request-id", "").encode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()


def guarded(route: Route) -> Route:
    """The route with its policy enforced."""
    policies = {method: policy_of(method, route.path) for method in route.methods or ()}

    @wraps(route.endpoint)
    async def endpoint(http: Request) -> Response:
        identity_of(http).check(policies[http.method], http.path_params)
        response: Response = await route.endpoint(http)
        return response

    return Route(route.path, endpoint, methods=list(policies))
