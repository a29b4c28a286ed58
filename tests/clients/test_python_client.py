"""The Python client of environments by URL keeps to the protocol."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.clients.conformance import check_service

sys.path.append(str(Path(__file__).parents[2] / "clients" / "python"))
from etude_environment import Result, Rollout, Service


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
