"""The answers required of any service that implements the protocol of environments by URL. The
service under test runs rollouts that ask the model once and earn 1 if it says "aei"; the task
"broken" fails, and "slow" waits until it is cancelled."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from etude.core.remote import RemoteTask, RolloutRequest, RolloutResult, ServiceHealth, TaskPage
from etude.store.decoding import decode_known


@contextlib.contextmanager
def model(answer: str = "aei") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A base URL at which every request gets this answer, and a record of what arrived: requests by
    `Authorization`, and callbacks."""
    heard: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            heard.append({"path": self.path, "by": self.headers["Authorization"], **body})
            said = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
            data = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *line: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/s/x/v1", heard
        server.shutdown()


def ask(method: str, url: str, body: object = None, token: str = "secret") -> tuple[int, bytes]:
    data = None if body is None else msgspec.json.encode(body)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


def rollout(id: str, base_url: str, task: str = "1", **more: Any) -> RolloutRequest:
    return RolloutRequest(
        id=id,
        task=RemoteTask(id=task, prompt=f"sing {task}"),
        base_url=base_url,
        token="key",
        seed=7,
        deadline=time.time() + 60,
        temperature=0.5,
        max_tokens=9,
        **more,
    )


def result(url: str, id: str) -> RolloutResult:
    """The result of a rollout once it is over."""
    while True:
        status, body = ask("GET", f"{url}/rollouts/{id}?wait_s=10")
        assert status == 200, body
        found = decode_known(body, RolloutResult)
        if found.status != "running":
            return found


def running(url: str) -> int:
    return msgspec.json.decode(ask("GET", f"{url}/health")[1], type=ServiceHealth).running


def until(what: Any) -> None:
    while not what():
        time.sleep(0.01)


def check_service(url: str, *, capacity: int) -> None:
    """Check the service at `url` that is described above. It accepts requests with the token
    "secret", has the tasks 0 to 6 for training, and none held out."""
    assert ask("GET", f"{url}/health", token="wrong")[0] == 401
    health = msgspec.json.decode(ask("GET", f"{url}/health")[1], type=ServiceHealth)
    assert (health.status, health.capacity, health.running) == ("ok", capacity, 0)
    _check_tasks(url)
    with model() as (base_url, heard):
        _check_one_rollout(url, base_url, heard)
        _check_failures(url, base_url)
        _check_room(url, base_url, capacity)
    with model() as (base_url, heard):
        callback = base_url.replace("/s/x/v1", "/score")
        told = {"callback_url": callback, "callback_token": "key of the score"}
        ask("POST", f"{url}/rollouts", rollout("called", base_url, **told))
        until(lambda: heard and heard[-1]["path"] == "/score")
        assert [each["by"] for each in heard] == ["Bearer key", "Bearer key of the score"]
        assert (heard[-1]["id"], heard[-1]["score"]["reward"]) == ("called", 1.0)


def _check_tasks(url: str) -> None:
    found: list[str] = []
    after = ""
    while True:
        status, body = ask("GET", f"{url}/tasks?split=train&limit=3{after}")
        assert status == 200
        page = msgspec.json.decode(body, type=TaskPage)
        assert all(task.to_task().prompt for task in page.tasks) and len(page.tasks) <= 3
        found += [task.id for task in page.tasks]
        if page.next is None:
            break
        after = f"&after={page.next}"
    assert found == [str(n) for n in range(7)]
    assert (
        msgspec.json.decode(ask("GET", f"{url}/tasks?split=heldout")[1], type=TaskPage).tasks == ()
    )


def _check_one_rollout(url: str, base_url: str, heard: list[dict[str, Any]]) -> None:
    status, body = ask("POST", f"{url}/rollouts", rollout("a", base_url))
    assert status in (200, 202)
    assert msgspec.json.decode(body, type=RolloutResult).id == "a"
    done = result(url, "a")
    assert done.status == "done" and done.score is not None and done.score.reward == 1.0
    assert [(part.name, part.value) for part in done.score.parts] == [("vowels", 3.0)]
    assert [(artifact.name, artifact.text) for artifact in done.artifacts] == [("song", "aei")]
    (asked,) = heard
    assert asked["path"] == "/s/x/v1/chat/completions" and asked["by"] == "Bearer key"
    assert (asked["temperature"], asked["max_tokens"], asked["seed"]) == (0.5, 9, 7)
    again, body = ask("POST", f"{url}/rollouts", rollout("a", base_url))
    assert again == 200 and msgspec.json.decode(body, type=RolloutResult) == done
    assert len(heard) == 1, "the same id is the same rollout"


def _check_failures(url: str, base_url: str) -> None:
    assert ask("GET", f"{url}/rollouts/unknown")[0] == 404
    assert ask("POST", f"{url}/rollouts", {"id": "b"})[0] == 400
    assert ask("GET", f"{url}/nothing")[0] == 404
    ask("POST", f"{url}/rollouts", rollout("b", base_url, task="broken"))
    failed = result(url, "b")
    assert (failed.status, failed.score) == ("failed", None) and "out of order" in failed.error


def _check_room(url: str, base_url: str, capacity: int) -> None:
    begun = [f"slow-{n}" for n in range(capacity)]
    for id in begun:
        assert ask("POST", f"{url}/rollouts", rollout(id, base_url, task="slow"))[0] == 202
    assert running(url) == capacity
    assert ask("POST", f"{url}/rollouts", rollout("more", base_url))[0] in (429, 503)
    assert ask("GET", f"{url}/rollouts/more")[0] == 404, "it was not begun"
    for id in begun:
        assert ask("DELETE", f"{url}/rollouts/{id}")[0] == 204
        assert ask("DELETE", f"{url}/rollouts/{id}")[0] == 204
    until(lambda: running(url) == 0)
    assert ask("GET", f"{url}/rollouts/{begun[0]}")[0] == 404
    ask("POST", f"{url}/rollouts", rollout("more", base_url))
    assert result(url, "more").status == "done"
