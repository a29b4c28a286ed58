"""Your product as an environment of Etude, by URL. It needs only the standard library: copy this
file, or install it.

    def rollout(asked: Rollout) -> Result:
        answer = asked.chat([{"role": "user", "content": asked.task["prompt"]}])
        return Result(reward=float("42" in answer["content"]))

    tasks = {"train": [{"id": "1", "prompt": "What is 6 * 7?"}]}
    Service(rollout, tasks=tasks, capacity=8).serve(port=8700)

Each rollout runs in a thread of its own. It fails by raising an exception; a failure is never a
reward of 0. The protocol is docs/environments-by-url.md of Etude.
"""

from __future__ import annotations

import hmac
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

KEPT = 4096
"""Number of finished results that are kept for repeated requests."""
MAX_WAIT_S = 30.0
MAX_BODY_BYTES = 64 << 20
AWAY_S = 60.0
"""A gateway that is away for longer is given up."""
CALLBACK_TRIES = 3
"""Tries after a gateway came back: it may learn of the session only then."""
RETRY_S = 1.0


@dataclass(frozen=True)
class Result:
    """The result of a rollout: its reward, and details for people to look at."""

    reward: float
    parts: Sequence[Mapping[str, Any]] = ()
    """`{"name": "tests", "value": 0.5, "evidence": "3 of 6 pass"}`"""
    flags: Sequence[str] = ()
    artifacts: Sequence[Mapping[str, str]] = ()
    """`{"name": "diff", "text": ".."}`, or with a `url`."""
    messages: Sequence[Mapping[str, Any]] = ()
    status: Literal["done", "timeout"] = "done"
    """`timeout`: your product ran out of time, and is scored in its present state."""
    credit: Sequence[Mapping[str, Any]] = ()
    """Process rewards: `{"value": 0.5, "segment": 0, "turn": 2}`; without `turn`, for the whole
    segment."""

    def to_json(self) -> dict[str, Any]:
        score = {
            "reward": self.reward,
            "parts": list(self.parts),
            "flags": list(self.flags),
            "credit": list(self.credit),
        }
        return {
            "status": self.status,
            "score": score,
            "artifacts": list(self.artifacts),
            "messages": list(self.messages),
        }


@dataclass(frozen=True)
class Rollout:
    """One attempt that Etude requests."""

    id: str
    task: Mapping[str, Any]
    base_url: str
    """Base URL for the OpenAI client of your product, with `token` as its key."""
    token: str
    seed: int
    deadline: float
    """Seconds since 1970."""
    model: str = "etude"
    temperature: float = 1.0
    max_tokens: int = 64
    callback_url: str | None = None
    callback_token: str | None = field(default=None, repr=False)
    """Only for sending the result. Keep it from your product: an agent that finds it could set its
    own score."""
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set when the result is not wanted any more."""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Rollout:
        known = cls.__dataclass_fields__.keys() - {"cancelled"}
        try:
            return cls(**{name: value for name, value in body.items() if name in known})
        except (TypeError, AttributeError) as e:
            raise ValueError(f"invalid rollout: {e}") from e

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline - time.time())

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """One answer of the model, for products without a client of their own."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            **options,
        }
        answer = _post(f"{self.base_url}/chat/completions", body, self.token, self.remaining_s + 1)
        message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
        return message


Tasks = Mapping[str, Sequence[Mapping[str, Any]]] | Callable[[str], Sequence[Mapping[str, Any]]]
"""The tasks of each split; each task has an id, a prompt or messages, and optionally meta."""


class Service:
    """Answers Etude's requests, and runs a function for each rollout."""

    def __init__(
        self,
        rollout: Callable[[Rollout], Result],
        *,
        tasks: Tasks | None = None,
        capacity: int = 8,
        token: str | None = None,
    ) -> None:
        """`token`: required in requests; the same as ETUDE_SERVICE_TOKEN on Etude's side."""
        self._rollout = rollout
        self._tasks = tasks
        self._capacity = capacity
        self._token = token
        self._known: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, Rollout] = {}
        self._changed = threading.Condition()

    def server(self, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
        """A server for the caller to run; its port is `server_port`."""
        service = self

        class Handler(_Handler):
            def answer(self, method: str, path: str, query: Mapping[str, str], body: bytes) -> None:
                if not service._is_allowed(self.headers.get("Authorization", "")):
                    self.say(401, {"error": "the token is missing or invalid"})
                else:
                    try:
                        said = service.answer(method, path, query, body)
                    except ValueError as e:
                        said = 400, {"error": f"{method} {path}: {e}"}
                    self.say(*said)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exception(), ConnectionError):  # the client went away
                    super().handle_error(request, client_address)

        return Server((host, port), Handler)

    def serve(self, host: str = "127.0.0.1", port: int = 8700) -> None:
        with self.server(host, port) as server:
            print(f"environment at http://{host}:{server.server_port}", flush=True)
            server.serve_forever()

    def _is_allowed(self, authorization: str) -> bool:
        expected = f"Bearer {self._token}".encode()
        return self._token is None or hmac.compare_digest(authorization.encode(), expected)

    def answer(
        self, method: str, path: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, Any]:
        """The status and the JSON body of the answer to any request."""
        place = path.strip("/").split("/")
        if (method, place) == ("GET", ["health"]):
            with self._changed:
                running = len(self._asked)
            return 200, {"status": "ok", "capacity": self._capacity, "running": running}
        if (method, place) == ("GET", ["tasks"]):
            return self._page(query)
        if (method, place) == ("POST", ["rollouts"]):
            return self._begin(Rollout.from_json(json.loads(body)))
        if len(place) == 2 and place[0] == "rollouts":
            if method == "GET":
                return self._look(place[1], min(MAX_WAIT_S, float(query.get("wait_s", 0))))
            if method == "DELETE":
                return self._cancel(place[1])
        return 404, {"error": f"no route {method} {path}"}

    def _page(self, query: Mapping[str, str]) -> tuple[int, Any]:
        if self._tasks is None:
            return 404, {"error": "this service has no tasks: set tasks.path to a file"}
        split = query.get("split", "train")
        tasks = self._tasks(split) if callable(self._tasks) else self._tasks.get(split, ())
        first = int(query.get("after", 0))
        end = first + int(query.get("limit", 500))
        return 200, {
            "tasks": list(tasks[first:end]),
            "next": str(end) if end < len(tasks) else None,
        }

    def _begin(self, asked: Rollout) -> tuple[int, Any]:
        with self._changed:
            if known := self._known.get(asked.id):
                return (202 if known["status"] == "running" else 200), known
            if len(self._asked) >= self._capacity:
                return 503, {"error": "at capacity: try again in a moment"}
            self._asked[asked.id] = asked
            self._known[asked.id] = {"id": asked.id, "status": "running"}
            begun = self._known[asked.id]
        threading.Thread(target=self._run, args=(asked,), daemon=True).start()
        return 202, begun

    def _run(self, asked: Rollout) -> None:
        result = _outcome(self._rollout, asked)
        with self._changed:
            self._asked.pop(asked.id, None)
            if not asked.cancelled.is_set():
                self._known[asked.id] = result
            for old in [id for id in self._known if id not in self._asked][:-KEPT]:
                del self._known[old]
            self._changed.notify_all()
        if not asked.cancelled.is_set():
            _call_back(asked, result)

    def _look(self, id: str, wait_s: float) -> tuple[int, Any]:
        def is_over() -> bool:
            return self._known.get(id, {}).get("status") != "running"

        with self._changed:
            self._changed.wait_for(is_over, wait_s)
            if id not in self._known:
                return 404, {"error": f"no rollout {id}"}
            return 200, self._known[id]

    def _cancel(self, id: str) -> tuple[int, Any]:
        with self._changed:
            if id in self._asked:
                self._asked[id].cancelled.set()
            self._known.pop(id, None)
            self._changed.notify_all()
        return 204, None


def pull(gateway: str, token: str, rollout: Callable[[Rollout], Result]) -> bool:
    """Work the other way round: claim one session at a gateway, run it and send the result. Returns
    False if there was none. Call it in as many threads as you have room for."""
    answer = _post(f"{gateway}/v1/sessions", {"wait_s": MAX_WAIT_S}, token, 2 * MAX_WAIT_S)
    if not answer:
        return False
    asked = Rollout.from_json(json.loads(answer))
    _call_back(asked, _outcome(rollout, asked))
    return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, method: str, path: str, query: Mapping[str, str], body: bytes) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        if size > MAX_BODY_BYTES:
            self.close_connection = True
            self.say(413, {"error": f"more than {MAX_BODY_BYTES} bytes"})
            return
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.answer(self.command, url.path, query, self.rfile.read(size))

    do_POST = do_DELETE = do_GET

    def say(self, status: int, value: Any) -> None:
        data = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *line: object) -> None:
        pass


def _outcome(rollout: Callable[[Rollout], Result], asked: Rollout) -> dict[str, Any]:
    try:
        result = rollout(asked).to_json()
    except Exception as e:  # any exception is a failure
        result = {"status": "failed", "error": f"{type(e).__name__}: {e}"}
    return {"id": asked.id, **result}


def _post(url: str, value: object, token: str, timeout_s: float) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return bytes(answer.read())


def _call_back(asked: Rollout, result: Mapping[str, Any]) -> None:
    """Send the result to the gateway, waiting for one that is away. If the gateway rejects the
    result (400), send a failure instead, so that the run need not wait for the deadline. If it
    rejects the request itself, give up: Etude will ask for the result."""
    if asked.callback_url is None or asked.callback_token is None:
        return
    refusals, given_up = 0, time.monotonic() + AWAY_S
    while time.monotonic() < given_up and refusals < CALLBACK_TRIES:
        try:
            _post(asked.callback_url, result, asked.callback_token, timeout_s=10.0)
            return
        except urllib.error.HTTPError as e:
            if e.code == 400 and result["status"] != "failed":
                said = f"the gateway rejected the result: {e.read().decode(errors='replace')}"
                result = {"id": asked.id, "status": "failed", "error": said}
                continue
            if e.code not in (404, 503):
                return
            refusals += 1
        except OSError:
            pass
        time.sleep(RETRY_S)
