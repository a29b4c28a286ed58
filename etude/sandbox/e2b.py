"""Sandboxes of a service that speaks E2B's API: E2B's own, or a compatible server.

Only documented features of E2B are used: a sandbox is created, kept alive and killed over the API;
in it, a file is uploaded and one process started (envd). That process serves a sandbox in
namespaces (`nested`). So everything that the API lacks (`diff`, `patch`, a report, a fork of files)
is available, and the service's claims about its isolation and its network need not be trusted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import SandboxSpec
from etude.sandbox.host import LEASE_S
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.nested_caller import NestedCaller, python_arguments
from etude.sandbox.service import PROGRAM, Send, ServiceMachine, ServicePool
from etude.sandbox.spec import check_machine

_ENVD_PORT = 49983
_LIMITS = ("memory_bytes", "disk_bytes", "processes")


@dataclass(frozen=True, slots=True)
class E2bService:
    """Address and key of a service, from the variables that E2B's SDKs read."""

    api_url: str
    api_key: str
    domain: str
    sandbox_url: str
    """One address for the daemons of all sandboxes; empty: each has its own, below the domain."""

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


class E2bSandboxPool(ServicePool):
    """A `core.sandbox.SandboxPool`."""

    def __init__(
        self, reply_timeout_s: float = REPLY_TIMEOUT_S, service: E2bService | None = None
    ) -> None:
        self.service = service or E2bService.from_environment()
        super().__init__("e2b", reply_timeout_s)

    def check(self, spec: SandboxSpec) -> None:
        """Check a spec; its image is a template of the service."""
        check_machine(spec, backend="e2b", limits=_LIMITS, gives={"image"})

    def machine(self, spec: SandboxSpec) -> NestedCaller:
        return _Sandbox(self, spec)

    def inner(self, spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, image="")


class _Sandbox(ServiceMachine):
    """One sandbox of the service, and the process in it."""

    def __init__(self, pool: E2bSandboxPool, spec: SandboxSpec) -> None:
        super().__init__(pool, spec)
        self._service_pool = pool
        self._service = pool.service
        self._name = ""
        self._url = ""
        self._headers: dict[str, str] = {}

    async def create(self) -> None:
        body = {
            "templateID": self._spec.image or "base",
            "timeout": int(LEASE_S),
            "secure": True,
            "allow_internet_access": False,
        }
        made = await self._api("POST", "/sandboxes", body)
        self._name = made["sandboxID"]
        domain = made.get("domain") or self._service.domain
        self._url = self._service.sandbox_url or f"https://{_ENVD_PORT}-{self._name}.{domain}"
        self._headers = {
            "E2b-Sandbox-Id": self._name,
            "E2b-Sandbox-Port": str(_ENVD_PORT),
            "Authorization": f"Basic {base64.b64encode(b'root:').decode()}",  # the process's user
        }
        if token := made.get("envdAccessToken"):
            self._headers["X-Access-Token"] = token

    async def renew(self) -> None:
        await self._api("POST", f"/sandboxes/{self._name}/timeout", {"timeout": int(LEASE_S)})

    async def delete(self) -> None:
        if self._name:
            await self._api("DELETE", f"/sandboxes/{self._name}")

    async def prepare(self) -> None:
        form = aiohttp.FormData()
        form.add_field("file", self._service_pool.program, filename=PROGRAM)
        where = {"path": PROGRAM, "username": "root"}
        await self._envd("files", params=where, data=form)

    async def converse(self, started: asyncio.Future[Send]) -> None:
        """Start the process, by Connect's protocol in JSON, and pass on its output."""
        has_image = bool(self._spec.image)
        args = python_arguments(PROGRAM, mounts=[], image=has_image, probe=False)
        config = {"cmd": "python3", "args": args, "cwd": "/", "envs": {}}
        message = json.dumps({"process": config, "stdin": True}).encode()
        headers = {"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
        async with self._service_pool.session.post(
            f"{self._url}/process.Process/Start",
            data=struct.pack(">BI", 0, len(message)) + message,
            headers={**self._headers, **headers},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as response:
            if response.status >= 400:
                raise RolloutFailure(f"sandbox: could not start a process: {await response.text()}")
            while True:
                flags, length = struct.unpack(">BI", await response.content.readexactly(5))
                told = json.loads(await response.content.readexactly(length))
                if flags & 2:  # the last message of the stream
                    self.hear(errors=json.dumps(told.get("error", "")).encode())
                    break
                event = told.get("event", {})
                if "start" in event:
                    started.set_result(self._input_of(event["start"]["pid"]))
                data = event.get("data", {})
                said = (base64.b64decode(data.get(name, "")) for name in ("stdout", "stderr"))
                self.hear(*said)

    def _input_of(self, pid: int) -> Send:
        async def send(data: bytes) -> None:
            told = {"stdin": base64.b64encode(data).decode()}
            body = {"process": {"pid": pid}, "input": told}
            await self._envd("process.Process/SendInput", json=body)

        return send

    async def _api(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"X-API-Key": self._service.api_key}
        url = self._service.api_url + path
        return await self._service_pool.ask(method, url, headers, json=body)

    async def _envd(self, path: str, **more: Any) -> None:
        await self._service_pool.ask("POST", f"{self._url}/{path}", self._headers, **more)
