"""The dashboard's server: a small JSON API over runs in their stores, and the page that uses it.

    GET /api/runs                              the runs that are shown
    GET /api/runs/RUN/overview                 headline, alarms, curves, stages
    GET /api/runs/RUN/rollouts?FILTER          rows; also sort, offset, limit
    GET /api/runs/RUN/failures?FILTER          failures by cause
    GET /api/runs/RUN/groups/GROUP             all attempts at one task
    GET /api/runs/RUN/sessions/ID              one conversation with its score
    GET /api/runs/RUN/sessions/ID/tokens       its tokens: segment, offset, limit, trainer
    GET /api/runs/RUN/ledger                   counts of samples by their fate
    GET /api/runs/RUN/fleet                    workers and weight versions
    GET /api/runs/RUN/doctor                   unfinished rollouts, and what each waits for
    GET /api/runs/RUN/review                   flagged sessions, verdicts, detectors
    GET /api/runs/RUN/realtime                 the loop of real-time RL
    GET /api/runs/RUN/export?format=F&FILTER   rows or conversations as a file
    GET /api/runs/RUN/compare?before=&after=   the next pair of sessions of two versions, to judge
    POST /api/runs/RUN/review                  a verdict on one session
    POST /api/runs/RUN/compare                 a verdict on a pair

The two POST requests are the only ones that write. FILTER stands for the fields of `table.Filter`.
Handlers are plain functions: the server calls them in threads, since the store is synchronous.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

import msgspec
from blake3 import blake3
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.core.errors import EtudeError
from etude.dash import answers, compare, detail
from etude.dash.exports import FORMATS, export
from etude.dash.fleet import Fleet
from etude.dash.guard import Access, guarded
from etude.dash.realtime import RealtimePage
from etude.dash.recorded import RecordedRun
from etude.dash.table import Filter
from etude.model.directory import MODEL_FILES
from etude.model.tokenizer import ChatTokenizer
from etude.store.decoding import decode_json
from etude.store.feedback import read_feedback
from etude.store.objects import Missing
from etude.store.runs import Run
from etude.store.verdicts import Verdict, add_verdict, read_preferences, read_verdicts

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
MOST_TOKENS = 20_000
MOST_BODY = 20_000
PAGING = ("sort", "offset", "limit", "format")

Answer = Callable[[RecordedRun, Request], Any]
T = TypeVar("T")


def create_app(runs: Sequence[RecordedRun], access: Access) -> ASGIApp:
    """The whole server, with access control."""
    by_name = {recorded.name: recorded for recorded in runs}
    fleets = {name: Fleet(recorded) for name, recorded in by_name.items()}
    loops = {name: RealtimePage(recorded) for name, recorded in by_name.items()}

    def listed(request: Request) -> Response:
        for recorded in runs:
            recorded.refresh()
        found = [answers.summary(recorded) for recorded in runs]
        return _json(request, {"runs": found, "writes": access.token is not None})

    def view(answer: Answer) -> Callable[[Request], Response]:
        def handle(request: Request) -> Response:
            recorded = _named(by_name, request.path_params["run"])
            recorded.refresh()
            with recorded.lock:
                found = answer(recorded, request)
            return found if isinstance(found, Response) else _json(request, found)

        return handle

    async def judge(request: Request) -> Response:
        recorded = _named(by_name, request.path_params["run"])
        verdict = _told(await _body(request), Verdict)
        recorded.row(verdict.session)
        add_verdict(recorded.run, verdict)
        return JSONResponse({"stored": True}, 201)

    async def choose(request: Request) -> Response:
        recorded = _named(by_name, request.path_params["run"])
        choice = _told(await _body(request), compare.Choice)
        add_verdict(recorded.run, compare.preference(recorded.table, choice))
        return JSONResponse({"stored": True}, 201)

    views: dict[str, Answer] = {
        "overview": lambda recorded, request: answers.overview(recorded),
        "rollouts": _rollouts,
        "failures": lambda recorded, request: answers.failures(recorded, _filter(request)),
        "groups/{group}": _group,
        "sessions/{id}": _session,
        "sessions/{id}/tokens": _tokens,
        "ledger": lambda recorded, request: answers.ledger(recorded),
        "fleet": lambda recorded, request: fleets[recorded.name].page(),
        "doctor": lambda recorded, request: answers.doctor(recorded),
        "review": lambda recorded, request: answers.review(recorded, read_verdicts(recorded.run)),
        "compare": _compare,
        "realtime": lambda recorded, request: loops[recorded.name].page(),
        "export": _export,
    }
    routes = [
        Route("/api/runs", listed),
        Route("/api/runs/{run}/review", judge, methods=["POST"]),
        Route("/api/runs/{run}/compare", choose, methods=["POST"]),
        *(Route(f"/api/runs/{{run}}/{path}", view(answer)) for path, answer in views.items()),
        Route("/{path:path}", _static),
    ]
    handlers: Mapping[Any, Any] = {EtudeError: _failed, ValueError: _failed, HTTPException: _failed}
    return guarded(Starlette(routes=routes, exception_handlers=handlers), access)


def _named(runs: Mapping[str, RecordedRun], name: str) -> RecordedRun:
    if name not in runs:
        raise Missing(f"there is no run {name!r} here: {', '.join(runs)}")
    return runs[name]


def _json(request: Request, value: object) -> Response:
    """An answer with an ETag, so that unchanged data is not sent again."""
    body = msgspec.json.encode(value)
    tag = f'"{blake3(body).hexdigest(length=12)}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(body, media_type="application/json", headers={"etag": tag})


def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, Missing) else 400)


def _filter(request: Request) -> Filter:
    return Filter.of(
        (name, value) for name, value in request.query_params.items() if name not in PAGING
    )


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise EtudeError(f"{name} must be a number from 0 to {most}")
    return min(int(text), most)


def _rollouts(recorded: RecordedRun, request: Request) -> Any:
    return answers.rollouts(
        recorded,
        _filter(request),
        request.query_params.get("sort", "new"),
        offset=_number(request, "offset", 0, 10**9),
        limit=_number(request, "limit", 100, answers.MOST_ROWS),
    )


def _group(recorded: RecordedRun, request: Request) -> Any:
    group = request.path_params["group"]
    if not re.fullmatch(r"[\w.-]+", group):
        raise Missing(f"{group!r} is not the name of a group")
    return {"group": group, "attempts": [detail.conversation(t) for t in recorded.group(group)]}


def _session(recorded: RecordedRun, request: Request) -> Any:
    id = request.path_params["id"]
    row = recorded.row(id)
    found = {"row": answers.short(recorded.table, row) | {"error": row.error}}  # the whole error
    try:
        told = recorded.conversation(id)
    except Missing as e:
        return found | {"not_stored": str(e)}
    return found | {"session": detail.conversation(told, read_feedback(recorded.run, id))}


def _tokens(recorded: RecordedRun, request: Request) -> Any:
    id = request.path_params["id"]
    row = recorded.row(id)
    try:
        t = recorded.session(id)
    except Missing as e:
        return {"segments": [], "not_stored": str(e)}
    found = {"segments": detail.segments(t), "trained": row.step is not None}
    number = _number(request, "segment", 0, 10**6)
    if number >= len(t.segments):
        return found
    segment = t.segments[number]
    trainer = None
    if row.step is not None and request.query_params.get("trainer") == "true":
        trainer = detail.trainer_logprobs(recorded.run, row.step, id, segment)
    return found | detail.tokens(
        segment,
        _piece(recorded.run),
        trainer,
        offset=_number(request, "offset", 0, 10**9),
        limit=_number(request, "limit", 4000, MOST_TOKENS),
    )


@lru_cache(maxsize=16)
def _piece(run: Run) -> detail.Piece:
    """The function from a token id to its text. It returns the id in brackets if the files of the
    model are missing."""
    try:
        files = {name: run.objects.get_sealed(f"model/{name}") for name in MODEL_FILES}
    except EtudeError:
        return lambda id: f"[{id}]"
    tokenizer = ChatTokenizer(files)
    return lru_cache(maxsize=300_000)(lambda id: tokenizer.decode([id]))


def _compare(recorded: RecordedRun, request: Request) -> Any:
    before, after = (request.query_params.get(name, "") for name in ("before", "after"))
    return compare.page(
        recorded,
        read_preferences(recorded.run),
        before=int(before) if re.fullmatch("[0-9]{1,9}", before) else -1,
        after=int(after) if re.fullmatch("[0-9]{1,9}", after) else -1,
        who=request.query_params.get("who", ""),
    )


def _export(recorded: RecordedRun, request: Request) -> Response:
    format = request.query_params.get("format", "jsonl")
    if format not in FORMATS:
        raise EtudeError(f"cannot export as {format!r}: choose one of {', '.join(FORMATS)}")
    places = recorded.table.find(_filter(request))
    rows = recorded.table.page(places, "new", offset=0, limit=len(places))
    name = re.sub(r"[^\w.-]", "_", recorded.name, flags=re.ASCII)  # headers are ASCII
    chunks = export(recorded, rows, format)
    first = next(chunks, b"")  # raises unreadable data as an error before the answer begins
    return StreamingResponse(
        itertools.chain((first,), chunks),
        media_type=FORMATS[format],
        headers={"content-disposition": f'attachment; filename="{name}.rollouts.{format}"'},
    )


async def _body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "the body must be JSON")
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise HTTPException(413, f"the body can have at most {MOST_BODY} bytes")
    return data


def _told(body: bytes, kind: type[T]) -> T:
    try:
        return decode_json(body, kind)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise EtudeError(f"not a valid verdict: {e}") from e


def _static(request: Request) -> Response:
    """A file of the page, or the page itself for the paths under /runs/, which are its views."""
    path = request.path_params["path"]
    name = "index.html" if not path or path.startswith("runs/") else path
    if name not in _files():
        raise HTTPException(404, f"there is no page {path}")
    suffix = name[name.rindex(".") :]
    return Response(_files()[name], headers={"content-type": TYPES[suffix]})


@lru_cache(maxsize=1)
def _files() -> dict[str, bytes]:
    """All files of the page by path. Nothing else is served."""
    root = resources.files("etude.dash").joinpath("static")
    folders = [("", root), *((f"{each.name}/", each) for each in root.iterdir() if each.is_dir())]
    return {
        f"{prefix}{file.name}": file.read_bytes()
        for prefix, folder in folders
        for file in folder.iterdir()
        if file.is_file() and file.name[file.name.rindex(".") :] in TYPES
    }
