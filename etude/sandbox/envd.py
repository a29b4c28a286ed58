"""E2B's API of the daemon in a sandbox: files, and processes by Connect's protocol in JSON. The
header `E2b-Sandbox-Id` names the sandbox. Directories cannot be watched.

Paths are those that commands use: absolute below /work, or relative to it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from email import message_from_bytes
from email.message import Message
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from etude.core.errors import RolloutFailure
from etude.core.sandbox import Process, Sandbox
from etude.sandbox.host import SandboxHost
from etude.sandbox.places import WORK

_LAST = 2
"""The flag of the last message of a stream."""
_KILL = "SIGNAL_SIGKILL"
ENVD_PATHS = ("/health", "/files", "/process.Process/", "/filesystem.Filesystem/")


def envd_routes(host: SandboxHost) -> list[Route]:
    api = _Envd(host)
    return [
        Route("/health", api.health),
        Route("/files", api.download, methods=["GET"]),
        Route("/files", api.upload, methods=["POST"]),
        Route("/process.Process/Start", api.start, methods=["POST"]),
        Route("/process.Process/Connect", api.connect, methods=["POST"]),
        Route("/process.Process/List", api.list_all, methods=["POST"]),
        Route("/process.Process/SendInput", api.send_input, methods=["POST"]),
        Route("/process.Process/CloseStdin", api.close_stdin, methods=["POST"]),
        Route("/process.Process/SendSignal", api.send_signal, methods=["POST"]),
        Route("/filesystem.Filesystem/Stat", api.stat, methods=["POST"]),
        Route("/filesystem.Filesystem/ListDir", api.list_directory, methods=["POST"]),
        Route("/filesystem.Filesystem/MakeDir", api.make_directory, methods=["POST"]),
        Route("/filesystem.Filesystem/Remove", api.remove, methods=["POST"]),
        Route("/filesystem.Filesystem/Move", api.move, methods=["POST"]),
    ]


class _Envd:
    def __init__(self, host: SandboxHost) -> None:
        self._host = host
        self._processes: dict[str, dict[int, _Started]] = {}

    def _sandbox(self, request: Request) -> Sandbox:
        return self._host.find(_name(request)).served.sandbox

    async def health(self, request: Request) -> Response:
        there = any(each.name == _name(request) for each in self._host.all())
        return Response(status_code=204 if there or not _name(request) else 502)

    async def download(self, request: Request) -> Response:
        content = await self._sandbox(request).read_bytes(_inner(request.query_params["path"]))
        return Response(content, media_type="application/octet-stream")

    async def upload(self, request: Request) -> Response:
        sandbox, path = self._sandbox(request), request.query_params.get("path")
        if "content-encoding" in request.headers:
            raise ValueError("send files uncompressed")
        kind = Message()
        body = await request.body()
        kind["content-type"] = request.headers.get("content-type", "")
        if boundary := kind.get_boundary():
            contents = [(path or name, content) for name, content in _parts(body, boundary)]
        else:
            contents = [(path or "", body)]
        for place, content in contents:
            await sandbox.write(_inner(place), content)
        written = [
            {"name": PurePosixPath(place).name, "path": place, "type": "file"}
            for place, _ in contents
        ]
        return JSONResponse(written)

    async def start(self, request: Request) -> Response:
        name, sandbox = _name(request), self._sandbox(request)
        told = _unframed(await request.body())
        config = told["process"]
        process = await sandbox.start(
            [config["cmd"], *config.get("args", [])],
            cwd=_directory(config.get("cwd") or WORK),
            env=config.get("envs") or {},
            pty="pty" in told,
        )
        if not told.get("stdin", True):
            await process.write(b"")
        mine = self._processes.setdefault(name, {})
        number = max(mine, default=0) + 1
        mine[number] = _Started(process, config, pty="pty" in told)
        return self._stream(name, number)

    async def connect(self, request: Request) -> Response:
        told = _unframed(await request.body())
        number, _ = self._find(request, told)
        return self._stream(_name(request), number)

    def _stream(self, name: str, number: int) -> Response:
        return StreamingResponse(self._events(name, number), media_type="application/connect+json")

    async def _events(self, name: str, number: int) -> AsyncIterator[bytes]:
        started = self._processes[name][number]
        yield _framed({"event": {"start": {"pid": number}}})
        stream = "pty" if started.pty else "stdout"
        try:
            while data := await started.process.read():
                text = base64.b64encode(data).decode()
                yield _framed({"event": {"data": {stream: text}}})
            code = await started.process.wait()
        except RolloutFailure as e:
            yield _framed({"error": {"code": "unavailable", "message": str(e)}}, _LAST)
            return
        finally:
            if name not in {each.name for each in self._host.all()}:
                self._processes.pop(name, None)
        self._processes.get(name, {}).pop(number, None)
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        ended = {"exited": code >= 0, "exitCode": code if code >= 0 else 128 - code, "status": how}
        yield _framed({"event": {"end": ended}})
        yield _framed({}, _LAST)

    async def list_all(self, request: Request) -> Response:
        mine = self._processes.get(_name(request), {})
        return JSONResponse(
            {"processes": [{"pid": pid, "config": each.config} for pid, each in mine.items()]}
        )

    async def send_input(self, request: Request) -> Response:
        told = await request.json()
        _, started = self._find(request, told)
        given = told.get("input", {})
        await started.process.write(base64.b64decode(given.get("stdin") or given.get("pty") or ""))
        return JSONResponse({})

    async def close_stdin(self, request: Request) -> Response:
        _, started = self._find(request, await request.json())
        await started.process.write(b"")
        return JSONResponse({})

    async def send_signal(self, request: Request) -> Response:
        """Kill a process. Other signals are not supported."""
        told = await request.json()
        _, started = self._find(request, told)
        if told.get("signal") not in (_KILL, "SIGNAL_SIGTERM"):
            return _connect_error("unimplemented", "only killing a process is supported")
        await started.process.kill()
        return JSONResponse({})

    def _find(self, request: Request, told: dict[str, Any]) -> tuple[int, _Started]:
        number = int(told.get("process", {}).get("pid", 0))
        return number, self._processes[_name(request)][number]

    async def stat(self, request: Request) -> Response:
        path = (await request.json())["path"]
        found = await self._entries(request, ["-maxdepth", "0"], path)
        if not found:
            return _connect_error("not_found", f"there is no {path}")
        return JSONResponse({"entry": found[0]})

    async def list_directory(self, request: Request) -> Response:
        told = await request.json()
        depth = ["-mindepth", "1", "-maxdepth", str(told.get("depth") or 1)]
        return JSONResponse({"entries": await self._entries(request, depth, told["path"])})

    async def _entries(self, request: Request, depth: list[str], path: str) -> list[dict[str, Any]]:
        place = f"./{_directory(path)}"
        argv = ["find", place, *depth, "-printf", "%y %s %P\\n"]
        ran = await self._sandbox(request).run(argv, timeout_s=30.0)
        if ran.exit_code != 0:
            return []
        top = PurePosixPath(WORK, _directory(path))
        entries = []
        for line in ran.output.splitlines():
            kind, size, below = line.split(" ", 2)
            whole = top / below
            entries.append(
                {
                    "name": whole.name,
                    "path": str(whole),
                    "type": "FILE_TYPE_DIRECTORY" if kind == "d" else "FILE_TYPE_FILE",
                    "size": size,
                }
            )
        return entries

    async def make_directory(self, request: Request) -> Response:
        path = (await request.json())["path"]
        return await self._changed(request, ["mkdir", "-p", _inner(path)], path)

    async def remove(self, request: Request) -> Response:
        path = (await request.json())["path"]
        return await self._changed(request, ["rm", "-rf", _inner(path)], None)

    async def move(self, request: Request) -> Response:
        told = await request.json()
        argv = ["mv", _inner(told["source"]), _inner(told["destination"])]
        return await self._changed(request, argv, told["destination"])

    async def _changed(self, request: Request, argv: list[str], path: str | None) -> Response:
        ran = await self._sandbox(request).run(argv, timeout_s=30.0)
        if ran.exit_code != 0:
            return _connect_error("not_found", ran.output.strip())
        if path is None:
            return JSONResponse({})
        return JSONResponse({"entry": (await self._entries(request, ["-maxdepth", "0"], path))[0]})


class _Started:
    """A process, and the configuration that it was started with."""

    def __init__(self, process: Process, config: dict[str, Any], *, pty: bool) -> None:
        self.process = process
        self.config = config
        self.pty = pty


def _name(request: Request) -> str:
    return request.headers.get("e2b-sandbox-id", "")


def _inner(path: str) -> str:
    """A path relative to the working copy. The sandbox refuses a path that is outside."""
    with contextlib.suppress(ValueError):
        return str(PurePosixPath(path).relative_to(WORK))
    return path


def _directory(path: str) -> str:
    return _inner(path) or "."


def _parts(body: bytes, boundary: str) -> list[tuple[str, bytes]]:
    """Name and content of the files in a form."""
    found = []
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary.encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = message_from_bytes(head.lstrip()).get_filename() or ""
        found.append((name, content))
    return found


def _framed(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def _unframed(body: bytes) -> dict[str, Any]:
    """The one message in the request of a stream."""
    _, length = struct.unpack(">BI", body[:5])
    return dict(json.loads(body[5 : 5 + length]))


def _connect_error(code: str, message: str) -> Response:
    return JSONResponse({"code": code, "message": message}, 404 if code == "not_found" else 501)
