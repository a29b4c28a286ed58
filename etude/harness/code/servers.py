"""Language servers in the sandbox, which check texts before these are written to a file.

Each server is a process that speaks LSP over its standard streams: JSON-RPC, with a header that
contains the length of each message. Diagnostics are pulled, so an answer belongs to the text that
was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sysconfig
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from etude.core.harness_config import SERVERS
from etude.core.sandbox import Process, Sandbox
from etude.core.types import Json
from etude.harness.code.diagnostics import Diagnostic

START_S = 30.0
_ERRORS_AND_WARNINGS = 2
_NOT_FOUND = 127
_NOT_LSP = "it does not speak LSP"
_MAX_MESSAGE = 16 << 20
_START = f"""
PATH="$PATH:{SERVERS}:$1"
shift
command -v "$1" > /dev/null || exit {_NOT_FOUND}
home=$(dirname "$(dirname "$(command -v python)")")
if [ -f "$home/pyvenv.cfg" ]; then export VIRTUAL_ENV="$home"; fi
pwd
exec "$@" 2> /dev/null
"""
_ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TY_MAX_PARALLELISM": "1"}


class ServerGone(Exception):
    """The server does not exist, has ended, or is not an LSP server. The message contains the
    reason."""


class LanguageServers:
    """A `diagnostics.DiagnosticSource`: language servers, each started on its first use."""

    def __init__(
        self, sandbox: Sandbox, servers: Mapping[str, Sequence[str]], *, timeout_s: float
    ) -> None:
        self._sandbox = sandbox
        self._commands = dict(servers)
        self._timeout_s = timeout_s
        self._running: dict[str, LanguageServer] = {}
        self._missing: dict[str, str] = {}

    async def check(self, path: str, text: str) -> Sequence[Diagnostic]:
        answers = await asyncio.gather(*(self._ask(name, path, text) for name in self._commands))
        return [each for answer in answers for each in answer]

    def missing(self) -> Mapping[str, str]:
        told, self._missing = self._missing, {}
        return told

    async def _ask(self, name: str, path: str, text: str) -> Sequence[Diagnostic]:
        try:
            if name not in self._running:
                self._running[name] = await start_server(self._sandbox, name, self._commands[name])
            async with asyncio.timeout(self._timeout_s):
                return await self._running[name].check(path, text)
        except (ServerGone, TimeoutError) as e:
            reason = str(e) or f"it did not answer within {self._timeout_s:g} s"
            self._missing[name] = reason
            del self._commands[name]
            if server := self._running.pop(name, None):
                await server.kill()
            return ()


async def start_server(sandbox: Sandbox, name: str, argv: Sequence[str]) -> LanguageServer:
    """Start a server and wait until it is ready. Raises ServerGone if that fails."""
    command = ["sh", "-c", _START, "sh", sysconfig.get_path("scripts"), *argv]
    process = await sandbox.start(command, env=_ONE_THREAD)
    server = LanguageServer(name, process)
    try:
        async with asyncio.timeout(START_S):
            await server.initialize()
    except TimeoutError:
        await process.kill()
        raise ServerGone(f"it did not start within {START_S:g} s") from None
    except ServerGone as e:
        await process.kill()  # a program that is not a language server would keep running
        code = await process.wait()
        is_missing = code == _NOT_FOUND
        what = f"no program {argv[0]} in the sandbox" if is_missing else f"{e} (exit code {code})"
        raise ServerGone(what) from None
    return server


class LanguageServer:
    """A client of one language server."""

    def __init__(self, name: str, process: Process) -> None:
        self._name = name
        self._process = process
        self._pending = bytearray()
        self._ids = itertools.count(1)
        self._versions: dict[str, int] = {}
        self._root = ""
        self._turn = asyncio.Lock()

    async def initialize(self) -> None:
        while b"\n" not in self._pending:
            await self._more()
        line, _, rest = bytes(self._pending).partition(b"\n")
        self._root, self._pending = f"file://{line.decode(errors='replace')}", bytearray(rest)
        document: Json = {"diagnostic": {}, "synchronization": {}}
        await self._request(
            "initialize",
            {
                "processId": None,
                "rootUri": self._root,
                "workspaceFolders": [{"uri": self._root, "name": "work"}],
                "capabilities": {
                    "textDocument": document,
                    "general": {"positionEncodings": ["utf-16"]},
                },
            },
        )
        await self._notify("initialized", {})

    async def check(self, path: str, text: str) -> list[Diagnostic]:
        """Diagnostics of a file if it had this text."""
        async with self._turn:
            uri = f"{self._root}/{quote(path)}"
            await self._show(uri, text)
            document = {"textDocument": {"uri": uri}}
            answer = await self._request("textDocument/diagnostic", document)
        try:
            return [
                Diagnostic(
                    line=item["range"]["start"]["line"] + 1,
                    code=str(item.get("code", "")),
                    # hints follow in the next lines
                    message=str(item["message"]).partition("\n")[0],
                    source=self._name,
                )
                for item in (answer or {}).get("items", ())
                if (item.get("severity") or 1) <= _ERRORS_AND_WARNINGS
            ]
        except (AttributeError, KeyError, TypeError) as e:
            raise ServerGone(_NOT_LSP) from e

    async def kill(self) -> None:
        await self._process.kill()

    async def _show(self, uri: str, text: str) -> None:
        version = self._versions[uri] = self._versions.get(uri, 0) + 1
        document: dict[str, Json] = {"uri": uri, "version": version}
        if version == 1:
            document |= {"languageId": "python", "text": text}
            await self._notify("textDocument/didOpen", {"textDocument": document})
        else:
            told = {"textDocument": document, "contentChanges": [{"text": text}]}
            await self._notify("textDocument/didChange", told)

    async def _notify(self, method: str, params: Json) -> None:
        await self._send({"method": method, "params": params})

    async def _request(self, method: str, params: Json) -> Json:
        number = next(self._ids)
        await self._send({"id": number, "method": method, "params": params})
        while True:
            message = await self._receive()
            if message.get("id") == number and "method" not in message:
                if "error" in message:
                    raise ServerGone(f"it answered {str(message['error'])[:200]}")
                return message.get("result")
            if "id" in message and "method" in message:
                await self._answer(message)

    async def _answer(self, message: dict[str, Json]) -> None:
        """Answer a request of the server. A request for settings gets a null for each of them; any
        other gets null, which grants it."""
        is_settings = message["method"] == "workspace/configuration"
        params = message.get("params")
        items = params.get("items") if is_settings and isinstance(params, dict) else None
        result = [None for _ in items] if isinstance(items, list) else None
        await self._send({"id": message["id"], "result": result})

    async def _send(self, message: dict[str, Json]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        await self._process.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    async def _receive(self) -> dict[str, Json]:
        while b"\r\n\r\n" not in self._pending:
            await self._more()
        head, _, rest = bytes(self._pending).partition(b"\r\n\r\n")
        fields = dict(line.split(b":", 1) for line in head.split(b"\r\n") if b":" in line)
        try:
            size = int(fields[b"Content-Length"])
        except (KeyError, ValueError):
            raise ServerGone(_NOT_LSP) from None
        if not 0 <= size <= _MAX_MESSAGE:
            raise ServerGone("it says too much")
        self._pending = bytearray(rest)
        while len(self._pending) < size:
            await self._more()
        body = bytes(self._pending[:size])
        del self._pending[:size]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as e:
            raise ServerGone(_NOT_LSP) from e
        if not isinstance(message, dict):
            raise ServerGone(_NOT_LSP)
        return message

    async def _more(self) -> None:
        data = await self._process.read()
        if not data:
            raise ServerGone("it has ended")
        self._pending += data
        if len(self._pending) > 2 * _MAX_MESSAGE:
            raise ServerGone("it says too much")
