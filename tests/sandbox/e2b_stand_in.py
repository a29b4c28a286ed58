"""A service with only the endpoints that E2B documents, written from its OpenAPI and protobuf files
and not from our host. Its sandboxes are a directory and a PID namespace of this machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.serve import process

KEY = "e2b_0123"


class StandIn:
    """State of the service, and the requests that it received."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Path] = {}
        self.created: list[dict[str, Any]] = []
        self.asked: set[str] = set()
        self.full = 0
        """Number of requests to be answered that there is no room."""
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._of: dict[int, str] = {}

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/sandboxes", self.create, methods=["POST"]),
                Route("/sandboxes/{name}", self.kill, methods=["DELETE"]),
                Route("/sandboxes/{name}/timeout", self.timeout, methods=["POST"]),
                Route("/files", self.upload, methods=["POST"]),
                Route("/process.Process/Start", self.start, methods=["POST"]),
                Route("/process.Process/SendInput", self.send_input, methods=["POST"]),
            ]
        )

    def _check_key(self, request: Request) -> None:
        self.asked.add(request.url.path.split("/")[1])
        assert request.headers["x-api-key"] == KEY

    def _root(self, request: Request) -> Path:
        self.asked.add(request.url.path.split("/")[1])
        name = request.headers["e2b-sandbox-id"]
        assert request.headers["x-access-token"] == f"token of {name}"
        return self.sandboxes[name]

    async def create(self, request: Request) -> Response:
        self._check_key(request)
        if self.full:
            self.full -= 1
            return JSONResponse({"code": 429, "message": "no room"}, 429)
        self.created.append(await request.json())
        name = f"i{len(self.created):019d}"
        self.sandboxes[name] = Path(tempfile.mkdtemp(prefix="stand-in-"))
        self.sandboxes[name].chmod(0o755)
        token = f"token of {name}"
        answer = {"sandboxID": name, "templateID": "t", "clientID": "c", "envdVersion": "0.4.0"}
        return JSONResponse({**answer, "envdAccessToken": token}, 201)

    async def timeout(self, request: Request) -> Response:
        self._check_key(request)
        return Response(status_code=204)

    async def kill(self, request: Request) -> Response:
        self._check_key(request)
        name = request.path_params["name"]
        for pid in [pid for pid, owner in self._of.items() if owner == name]:
            # when its first process is killed, all others end before its parent notices
            with contextlib.suppress(OSError):  # it has ended
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
            await self._processes.pop(pid).wait()
            del self._of[pid]
        shutil.rmtree(self.sandboxes.pop(name))
        return Response(status_code=204)

    def _inside(self, root: Path, text: str) -> str:
        return text.replace("/run/", f"{root}/")

    async def upload(self, request: Request) -> Response:
        root = self._root(request)
        assert request.query_params["username"] in ("root", "user")
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        (part,) = message_from_bytes(head + await request.body()).get_payload()
        target = Path(self._inside(root, request.query_params["path"]))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(part.get_payload(decode=True))
        return JSONResponse([{"path": str(target), "name": target.name, "type": "file"}])

    async def start(self, request: Request) -> Response:
        root = self._root(request)
        user = base64.b64decode(request.headers["authorization"].removeprefix("Basic "))
        assert user == b"root:" and request.headers["content-type"] == "application/connect+json"
        body = await request.body()
        told = json.loads(body[5 : 5 + struct.unpack(">BI", body[:5])[1]])
        config = told["process"]
        ordinary = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        started = await asyncio.create_subprocess_exec(
            *("unshare", *ordinary, "--pid", "--fork", "--kill-child", "--mount-proc"),
            config["cmd"],
            *(self._inside(root, each) for each in config["args"]),
            cwd=config["cwd"],
            env={"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", **config["envs"]},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        self._processes[started.pid] = started
        self._of[started.pid] = request.headers["e2b-sandbox-id"]
        return StreamingResponse(_events(started), media_type="application/connect+json")

    async def send_input(self, request: Request) -> Response:
        self._root(request)
        told = await request.json()
        stdin = self._processes[told["process"]["pid"]].stdin
        assert stdin is not None
        stdin.write(base64.b64decode(told["input"]["stdin"]))
        await stdin.drain()
        return JSONResponse({})


async def _events(started: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
    yield _framed({"event": {"start": {"pid": started.pid}}})
    yield _framed({"event": {"keepalive": {}}})
    assert started.stdout is not None
    while data := await started.stdout.read(1 << 15):
        yield _framed({"event": {"data": {"stdout": base64.b64encode(data).decode()}}})
    code = await started.wait()
    yield _framed({"event": {"end": {"exited": True, "exitCode": code, "status": f"{code}"}}})
    yield _framed({}, 2)


def _framed(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


@contextlib.contextmanager
def stand_in() -> Iterator[tuple[str, StandIn]]:
    """The URL and state of a service that runs in a thread of its own."""
    listener = process.bind("127.0.0.1", 0, None)
    service = StandIn()
    config = uvicorn.Config(service.app(), ws="none", lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield process.url_of(listener), service
    finally:
        server.should_exit = True
        thread.join()
