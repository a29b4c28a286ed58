"""The Python client for environments by URL follows the protocol."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from etude.core.remote import Artifact, RolloutResult
from etude.core.types import Credit, Part, Score
from etude.store.decoding import decode_known
from tests.clients.conformance import check_service

sys.path.append(str(Path(__file__).parents[2] / "clients" / "python"))
import etude_environment
from etude_environment import Result, Rollout, Service, pull


def rollout(asked: Rollout) -> Result:
    if asked.task["id"] == "broken":
        raise RuntimeError("out of order")
    if asked.task["id"] == "slow":
        assert asked.cancelled.wait(asked.remaining_s)
    song = asked.chat([{"role": "user", "content": asked.task["prompt"]}])["content"]
    return Result(
        reward=float(song == "aei"),
        parts=[{"name": "vowels", "value": len(song)}],
        artifacts=[{"name": "song", "text": song}],
    )


def test_it_keeps_to_the_protocol() -> None:
    tasks = {"train": [{"id": str(n), "prompt": f"sing {n}"} for n in range(7)]}
    service = Service(rollout, tasks=tasks, capacity=3, token="secret")
    with service.server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check_service(f"http://127.0.0.1:{server.server_port}", capacity=3)
        server.shutdown()


@contextlib.contextmanager
def gateway(
    *answers: int | None, results: list[dict[str, Any]] | None = None
) -> Iterator[tuple[str, list[int | None]]]:
    """A gateway that offers a session and answers scores with the given statuses in turn; None
    closes the connection. Yields its URL and the statuses that it has sent. `results` collects the
    scores that it receives."""
    given: list[int | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, data = 200, b""
            if self.path == "/v1/sessions":
                callback = {"callback_url": f"{url}/score", "callback_token": "key"}
                asked = {"id": "x", "task": {}, "base_url": "", "token": "", "seed": 0}
                data = json.dumps({**asked, "deadline": 0, **callback}).encode()
            else:
                given.append(answers[len(given)])
                if results is not None:
                    results.append(body)
                if given[-1] is None:
                    return  # closes the connection
                status = given[-1]
                data = b"no answer of the model" if status == 400 else b""
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *line: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield url, given
        server.shutdown()


@pytest.mark.parametrize(
    "answers",
    [(None,) * 8 + (404, 204), (204,), (401,), (409,), (404,) * 3, (None, 503, 503, 503)],
)
def test_a_result_waits_for_a_gateway_that_is_away(
    answers: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that the gateway does not want is not sent again."""
    monkeypatch.setattr(etude_environment, "RETRY_S", 0.001)
    with gateway(*answers) as (url, given):
        assert pull(url, "key", lambda asked: Result(reward=1.0))
        assert tuple(given) == answers


def test_all_that_a_score_may_say_is_sent() -> None:
    results: list[dict[str, Any]] = []
    said = Result(
        reward=1.0,
        parts=[{"name": "tests", "value": 0.5, "evidence": "3 of 6 pass"}],
        flags=["slow"],
        credit=[{"value": 0.5, "segment": 0, "turn": 2}],
        artifacts=[{"name": "diff", "text": "+"}],
        messages=[{"role": "user", "content": "sing"}],
    )
    with gateway(204, results=results) as (url, _):
        assert pull(url, "key", lambda asked: said)
    (sent,) = results
    read = decode_known(json.dumps(sent), RolloutResult)
    assert read.score == Score(
        1.0, (Part("tests", 0.5, "3 of 6 pass"),), ("slow",), (Credit(0.5, 0, 2),)
    )
    assert read.artifacts == (Artifact(name="diff", text="+"),)
    assert read.messages == ({"role": "user", "content": "sing"},)


@pytest.mark.parametrize("then", [204, 400])
def test_a_result_that_is_refused_has_failed(then: int) -> None:
    """The run learns of it at once, instead of waiting for the deadline."""
    results: list[dict[str, Any]] = []
    with gateway(400, then, results=results) as (url, given):
        assert pull(url, "key", lambda asked: Result(reward=1.0))
        assert given == [400, then]
    scored, failed = results
    assert scored["score"]["reward"] == 1.0
    assert failed == {
        "id": "x",
        "status": "failed",
        "error": "the gateway rejected the result: no answer of the model",
    }
