"""Sessions with a model but without a run, for trying out an environment and an agent: a port of
this process with one policy, or a script, behind it. Each class is a
`run.rollout.SessionRecorder`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from etude.core.protocols import Policy
from etude.core.sampling import Request, Sample, Token
from etude.core.types import Json, Segment, SessionAccess
from etude.model.tokenizer import ChatTokenizer
from etude.serve import process
from etude.serve.access import SignedTokens
from etude.serve.answerer import ServedModel
from etude.serve.dialects import session_routes
from etude.serve.gateway import SessionAnswerer
from etude.serve.grammar import GrammarBuilder
from etude.serve.headers import read_segment_kind
from etude.serve.http import ApiError, create_app, read, respond
from etude.serve.session_records import SessionRecords
from etude.serve.tokens import MAX_SESSION_S, Scope, TokenAuthority


class _Sessions:
    """A port for sessions; the base of the two classes below."""

    def __init__(self) -> None:
        self._tokens = TokenAuthority()
        self._url = ""

    def routes(self) -> list[Route]:
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        listener = process.bind("127.0.0.1", 0, None)
        self._url = process.url_of(listener)
        app = create_app(self.routes(), SignedTokens(self._tokens))
        async with process.serving(app, listener):
            yield

    async def up(self) -> None: ...

    async def open_session(self, session: str) -> SessionAccess:
        key = self._tokens.mint(Scope.SESSION, session, MAX_SESSION_S)
        return SessionAccess(base_url=f"{self._url}/s/{session}/v1", api_key=key)

    async def disturbed(self, session: str, age_s: float) -> bool:
        return False

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        return ()

    async def forget(self, session: str) -> None: ...


class PolicySessions(_Sessions):
    """Sessions with a policy, recorded token by token."""

    def __init__(self, policy: Policy, files: Mapping[str, bytes], *, max_context: int) -> None:
        super().__init__()
        self._policy = policy
        self._model = ServedModel(
            tokenizer=ChatTokenizer(files), grammars=GrammarBuilder(files), max_context=max_context
        )
        self._records = SessionRecords(self._model.tokenizer, self._model.conversations)

    async def sample(self, request: Request, session: str) -> Sample:
        return await self._policy.sample(request)

    def stream(self, request: Request, session: str) -> AsyncIterator[Token | Sample]:
        return self._policy.stream(request)

    def routes(self) -> list[Route]:
        return [
            Route("/s/{session}" + route.path, route.endpoint, methods=list(route.methods or ()))
            for route in session_routes(self._model, self._answerer)
        ]

    def _answerer(self, http: HttpRequest) -> SessionAnswerer:
        session = http.path_params["session"]
        kind = read_segment_kind(http.headers)
        return SessionAnswerer(self._model, self, self._records, session, kind)

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        try:
            return self._records.recorder.segments(session)
        except KeyError:
            return ()

    async def forget(self, session: str) -> None:
        await self._records.forget(session)


class ScriptedSessions(_Sessions):
    """Sessions that get the assistant's answers from a list, in order, whatever the prompt. There
    is no model, so no tokens are recorded."""

    def __init__(self, answers: Sequence[dict[str, Json]]) -> None:
        super().__init__()
        self._answers = answers
        self._asked = 0

    def routes(self) -> list[Route]:
        return [Route("/s/{session}/v1/chat/completions", self._chat, methods=["POST"])]

    async def _chat(self, http: HttpRequest) -> Response:
        await read(http, dict[str, object])
        if self._asked == len(self._answers):
            raise ApiError(
                f"the script has only {len(self._answers)} answers, and all of them have been "
                f"given",
                code="script_over",
            )
        message = {"role": "assistant", "content": None, **self._answers[self._asked]}
        self._asked += 1
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        return respond(
            {
                "id": f"script-{self._asked}",
                "object": "chat.completion",
                "created": 0,
                "model": "script",
                "choices": [{"index": 0, "message": message, "finish_reason": reason}],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )


def parse_script(text: str, *, lines_of_json: bool) -> list[dict[str, Json]]:
    """Parse the assistant's answers: lines of JSON, each a text or a message; or plain text with a
    line of `---` between answers. Raises ValueError if it is neither, or has no answers."""
    if not text.strip():
        raise ValueError("it has no answers")
    if not lines_of_json:
        answers, part = [], list[str]()
        for line in [*text.splitlines(keepends=True), "---"]:
            if line.strip() == "---":
                answers.append({"content": "".join(part)})
                part = []
            else:
                part.append(line)
        return answers
    lines = enumerate(text.split("\n"), start=1)  # JSON strings may contain other line separators
    return [_parse_line(line, number) for number, line in lines if line.strip()]


def _parse_line(line: str, number: int) -> dict[str, Json]:
    try:
        said = json.loads(line)
    except json.JSONDecodeError as e:
        raise ValueError(f"line {number} is not valid JSON ({e.msg} at column {e.colno})") from e
    if not isinstance(said, str | dict):
        raise ValueError(f"line {number} must be a string or a message")
    return {"content": said} if isinstance(said, str) else said
