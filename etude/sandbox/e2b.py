"""Sandboxes of a service that speaks E2B's API: E2B's own, or a compatible server.

Only what E2B documents is asked for: a sandbox is created, kept alive and killed over the API; in
it, a file is uploaded and one process started (envd). That process serves a sandbox in namespaces
(`nested`), so that all that the API has not (`diff`, `patch`, a report, a fork of files) is there,
and nothing needs to be trusted that the service says of its walls or its network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec, Tier
from etude.sandbox.bundle import copy_program
from etude.sandbox.called import CalledSandbox
from etude.sandbox.host import LEASE_S
from etude.sandbox.lines import Lines
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.machines import Machines
from etude.sandbox.nested_caller import NestedCaller, open_nested
from etude.sandbox.spec import check_machine

_ENVD_PORT = 49983
_PROGRAM = "/run/etude/program.zip"
"""Where it is in a sandbox: commands are not shown /run."""
_START = (
    "import sys; sys.path.append(sys.argv[1]); from etude.sandbox.nested import main; "
    "main(sys.argv[2])"
)
_LIMITS = ("memory_bytes", "disk_bytes", "processes")
_RENEW_S = LEASE_S / 6
_FULL_S = 600.0
"""So long a sandbox is asked for at a service that has no room."""
_ROOM_S = 1.0
_INPUT_BYTES = 1 << 18
"""Of one message to the process."""
_WORDS_CHARS = 500


@dataclass(frozen=True, slots=True)
class E2bService:
    """Where a service is, by the variables that E2B's SDKs take."""

    api_url: str
    api_key: str
    domain: str
    sandbox_url: str
    """One address for what is in all sandboxes; empty: each has its own, below the domain."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> E2bService:
        if not (key := variables.get("E2B_API_KEY", "")):
            raise EtudeError("isolation e2b needs the key of the service: export E2B_API_KEY=...")
        domain = variables.get("E2B_DOMAIN", "e2b.app")
        return cls(
            api_url=variables.get("E2B_API_URL", f"https://api.{domain}").rstrip("/"),
            api_key=key,
            domain=domain,
            sandbox_url=variables.get("E2B_SANDBOX_URL", "").rstrip("/"),
        )


class E2bSandboxPool:
    """A `core.sandbox.SandboxPool`."""

    tier: Tier = "namespaces"
    """What we put up in there ourselves; what is around it, only the service knows."""

    def __init__(
        self, reply_timeout_s: float = REPLY_TIMEOUT_S, service: E2bService | None = None
    ) -> None:
        self.service = service or E2bService.from_environment()
        self.reply_timeout_s = reply_timeout_s
        self.machines: Machines[NestedCaller, None] = Machines("e2b")
        source = self.machines.home / "program"
        copy_program(source)
        self.program = Path(shutil.make_archive(str(source), "zip", source)).read_bytes()
        self._session: aiohttp.ClientSession | None = None

    def check(self, spec: SandboxSpec) -> None:
        """An image is a template of the service."""
        check_machine(spec, backend="e2b", limits=_LIMITS, gives={"image"})

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[CalledSandbox]:
        self.check(spec)
        return open_nested(self, spec)

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        return _Sandbox(self, spec)

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, image="")

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def owing(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        await self.machines.close()
        if self._session is not None:
            await self._session.close()


class _Sandbox(NestedCaller):
    """One sandbox of the service, and the process in it."""

    def __init__(self, pool: E2bSandboxPool, spec: SandboxSpec) -> None:
        super().__init__(pool, spec)
        self._service_pool = pool
        self._service = pool.service
        self._template = spec.image or "base"
        self._name = ""
        self._url = ""
        self._headers: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._words = ""
        self._pid = 0

    async def connect(self) -> Lines:
        await self._create()
        self._tasks.append(asyncio.create_task(self._renew()))
        form = aiohttp.FormData()
        form.add_field("file", self._service_pool.program, filename=_PROGRAM)
        where = {"path": _PROGRAM, "username": "root"}
        await self._ask("POST", f"{self._url}/files", self._headers, params=where, data=form)
        told = json.dumps({"mounts": [], "image": bool(self._spec.image), "probe": False})
        args = ["-B", "-s", "-S", "-P", "-X", "utf8", "-c", _START, _PROGRAM, told]
        answers = asyncio.StreamReader(limit=1 << 30)
        started = asyncio.get_running_loop().create_future()
        config = {"cmd": "python3", "args": args, "cwd": "/", "envs": {}}
        self._tasks.append(asyncio.create_task(self._listen(config, answers, started)))
        async with asyncio.timeout(self._pool.reply_timeout_s):
            self._pid = await started
        return Lines(answers, _Input(self._send_input))

    async def _create(self) -> None:
        body = {
            "templateID": self._template,
            "timeout": int(LEASE_S),
            "secure": True,
            "allow_internet_access": False,
        }
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _FULL_S
        made = None
        while made is None:
            try:
                made = await self._api("POST", "/sandboxes", body)
            except _Full:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(_ROOM_S)
        self._name = made["sandboxID"]
        domain = made.get("domain") or self._service.domain
        self._url = self._service.sandbox_url or f"https://{_ENVD_PORT}-{self._name}.{domain}"
        self._headers = {
            "E2b-Sandbox-Id": self._name,
            "E2b-Sandbox-Port": str(_ENVD_PORT),
            "Authorization": f"Basic {base64.b64encode(b'root:').decode()}",  # whose process it is
        }
        if token := made.get("envdAccessToken"):
            self._headers["X-Access-Token"] = token

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(RolloutFailure):
                await self._api(
                    "POST", f"/sandboxes/{self._name}/timeout", {"timeout": int(LEASE_S)}
                )

    async def _listen(
        self, config: dict[str, Any], answers: asyncio.StreamReader, started: asyncio.Future[int]
    ) -> None:
        """The events of the process, by Connect's protocol in JSON, until there are no more."""
        message = json.dumps({"process": config, "stdin": True}).encode()
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        try:
            async with self._service_pool.session.post(
                f"{self._url}/process.Process/Start",
                data=struct.pack(">BI", 0, len(message)) + message,
                headers={**self._headers, **headers},
                timeout=aiohttp.ClientTimeout(total=None),
            ) as response:
                if response.status >= 400:
                    raise RolloutFailure(f"sandbox: no process: {await response.text()}")
                while True:
                    flags, length = struct.unpack(">BI", await response.content.readexactly(5))
                    told = json.loads(await response.content.readexactly(length))
                    if flags & 2:  # the last one
                        self._words += json.dumps(told.get("error", ""))
                        break
                    event = told.get("event", {})
                    if "start" in event:
                        started.set_result(event["start"]["pid"])
                    data = event.get("data", {})
                    answers.feed_data(base64.b64decode(data.get("stdout", "")))
                    said = base64.b64decode(data.get("stderr", "")).decode(errors="replace")
                    self._words = (self._words + said)[-_WORDS_CHARS:]
        except (RolloutFailure, aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as e:
            self._words += str(e)
        finally:
            if not started.done():
                started.set_exception(RolloutFailure(f"sandbox: no process in it: {self._words}"))
            answers.feed_eof()

    async def _send_input(self, data: bytes) -> None:
        body = {
            "process": {"pid": self._pid},
            "input": {"stdin": base64.b64encode(data).decode()},
        }
        url = f"{self._url}/process.Process/SendInput"
        await self._ask("POST", url, self._headers, json=body)

    async def start(self) -> None:
        try:
            await super().start()
        except RolloutFailure as e:
            raise RolloutFailure(f"{e}; it said: {self._words or 'nothing'}") from e

    async def _api(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"X-API-Key": self._service.api_key}
        return await self._ask(method, self._service.api_url + path, headers, json=body)

    async def _ask(self, method: str, url: str, headers: dict[str, str], **more: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._pool.reply_timeout_s)
        try:
            async with self._service_pool.session.request(
                method, url, headers=headers, timeout=timeout, **more
            ) as response:
                content = await response.text()
        except (TimeoutError, aiohttp.ClientError) as e:
            raise RolloutFailure(f"sandbox: {url} does not answer: {e}") from e
        if response.status == 429:
            raise _Full(f"sandbox: {url} has no room: {content[:_WORDS_CHARS]}")
        if response.status >= 400:
            said = content[:_WORDS_CHARS]
            raise RolloutFailure(f"sandbox: {url} answered {response.status}: {said}")
        return json.loads(content) if content else None

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._name:
            with contextlib.suppress(RolloutFailure):  # its lease ends it then
                await self._api("DELETE", f"/sandboxes/{self._name}")


class _Full(RolloutFailure):
    """No sandbox more, for now."""


class _Input:
    """`lines.Requests`: what is written goes in messages, one after the other."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._waiting = bytearray()
        self._turn = asyncio.Lock()
        self._sending: set[asyncio.Task[None]] = set()

    def write(self, data: bytes) -> None:
        self._waiting += data
        task = asyncio.create_task(self._flush())
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _flush(self) -> None:
        with contextlib.suppress(RolloutFailure):  # whoever waits for an answer sees none come
            await self.drain()

    async def drain(self) -> None:
        async with self._turn:
            while self._waiting:
                data = bytes(self._waiting[:_INPUT_BYTES])
                del self._waiting[:_INPUT_BYTES]
                await self._send(data)

    def close(self) -> None:
        for task in self._sending:
            task.cancel()
