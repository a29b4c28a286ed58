"""Sandboxes of other machines: the controller's side of sandbox hosts (`host_app`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import TIERS, SandboxSpec, Tier
from etude.sandbox.called import CalledSandbox, failed
from etude.sandbox.host import LEASE_S
from etude.sandbox.limits import COPY_BYTES, files_in
from etude.sandbox.link import REPLY_TIMEOUT_S
from etude.sandbox.served import LOOK_S
from etude.sandbox.spec import check_env, to_message

T = TypeVar("T")
TOKEN_VARIABLE = "ETUDE_SANDBOX_TOKEN"
_RENEW_S = LEASE_S / 6
_FULL_S = 600.0
"""Seconds for which a sandbox is requested from hosts that are full."""
_ROOM_S = 1.0
_PROBE_S = 10.0


class RemoteSandboxPool:
    """A `core.sandbox.SandboxPool` of sandboxes on other hosts."""

    def __init__(
        self,
        urls: Sequence[str],
        isolation: str,
        *,
        places: Sequence[str] = (),
        token: str | None = None,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        """`places`: paths at which sandboxes must show directories of their host. Raises EtudeError
        if a host does not answer, does not show them, or has no sandboxes of this isolation."""
        self._headers = {"X-API-Key": token} if token else {}
        self._isolation = isolation
        self.reply_timeout_s = reply_timeout_s
        self._hosts = [_Host(url.rstrip("/")) for url in urls]
        tiers = [self._ask_tier(host.url, places) for host in self._hosts]
        self.tier: Tier = min(tiers, key=TIERS.index)
        self._session: aiohttp.ClientSession | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._closed = False

    def _ask_tier(self, url: str, places: Sequence[str]) -> Tier:
        request = urllib.request.Request(f"{url}/host", headers=self._headers)
        directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with directly.open(request, timeout=_PROBE_S) as response:
                told = json.load(response)
                tiers, shown = told["tiers"], told["mounts"]
        except urllib.error.HTTPError as e:
            raise EtudeError(
                f"sandbox.hosts: {url} rejects the request: {_message(e.read(), e)}"
            ) from e
        except (OSError, ValueError, KeyError) as e:
            raise EtudeError(
                f"sandbox.hosts: no sandbox host answers at {url} ({e}); start one there with "
                f"`etude sandboxes serve`"
            ) from e
        if self._isolation not in tiers:
            raise EtudeError(
                f"sandbox.hosts: {url} has no sandboxes of isolation {self._isolation}, only "
                f"{', '.join(tiers)}; run `etude doctor` there to see what is missing"
            )
        if missing := [place for place in places if place not in shown]:
            raise EtudeError(
                f"sandbox.hosts: the sandboxes of {url} have no {missing[0]}: start the host "
                f"with --mount FOLDER:{missing[0]}, or remove the setting that needs it "
                f"(/opt/servers: harness.code.diagnostics; other paths: tasks.path)"
            )
        tier: Tier = tiers[self._isolation]
        return tier

    def check(self, spec: SandboxSpec) -> None:
        """Check only the variables: a host refuses what it cannot provide when a sandbox is
        opened."""
        check_env(spec.env)

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[CalledSandbox]:
        size = spec.limits.disk_bytes or COPY_BYTES
        message = await to_message(spec, max_bytes=size, max_entries=files_in(size))
        body = {"templateID": self._isolation, "timeout": LEASE_S, "etude": message}
        sandbox = await _once_there_is_room(lambda: self._open(body))
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _open(self, body: dict[str, Any]) -> CalledSandbox:
        """Open a sandbox at the host with the fewest of ours."""
        host = min(self._hosts, key=lambda each: each.wanted)
        host.wanted += 1
        try:
            made = await self.post(host, "/sandboxes", body)
            return self.adopt(host, made["sandboxID"])
        finally:
            host.wanted -= 1

    def adopt(self, host: _Host, name: str) -> CalledSandbox:
        """A sandbox of that host, with its lease renewed from now on."""
        host.names.add(name)
        host.wanted += 1
        if self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew())
        return CalledSandbox(_RemoteCaller(self, host, name))

    async def forget(self, host: _Host, name: str) -> None:
        if name in host.names:
            host.names.discard(name)
            host.wanted -= 1
            with contextlib.suppress(RolloutFailure):  # its lease ends it then
                await self._request("DELETE", host, f"/sandboxes/{name}", None, 0.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            await asyncio.gather(*(self._renew_at(host) for host in self._hosts if host.names))

    async def _renew_at(self, host: _Host) -> None:
        host.asked = host.asked or asyncio.get_running_loop().time()
        with contextlib.suppress(RolloutFailure):
            body = {"sandboxIDs": list(host.names), "duration": LEASE_S}
            await self.post(host, "/sandboxes/refreshes", body)
            host.asked = None

    async def post(
        self, host: _Host, path: str, body: dict[str, Any], working_s: float = 0.0
    ) -> Any:
        return await self._request("POST", host, path, body, working_s)

    async def _request(
        self, method: str, host: _Host, path: str, body: Any, working_s: float
    ) -> Any:
        if self._closed:
            raise RolloutFailure("sandbox: the pool is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=working_s + LOOK_S + self.reply_timeout_s)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, host.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                content = await response.read()
        except TimeoutError as e:
            raise RolloutFailure(f"sandbox: {host.url} did not answer in time") from e
        except aiohttp.ClientError as e:
            raise RolloutFailure(f"sandbox: {host.url} does not answer: {e}") from e
        return _answer(host.url, response.status, content)

    def owing(self) -> dict[str, float]:
        now = asyncio.get_running_loop().time()
        return {
            f"sandbox host {host.url}": now - host.asked
            for host in self._hosts
            if host.asked is not None
        }

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        open_now = [(host, name) for host in self._hosts for name in host.names]
        await asyncio.gather(*(self.forget(host, name) for host, name in open_now))
        self._closed = True
        if self._session is not None:
            await self._session.close()


class _Host:
    """One sandbox host, as this pool uses it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.names: set[str] = set()
        self.wanted = 0
        """Number of our sandboxes that are open there or about to be."""
        self.asked: float | None = None
        """Time of the request to renew leases that the host has not answered yet."""


class _Full(RolloutFailure):
    """This host has no room for another sandbox at the moment."""


class _RemoteCaller:
    """A `called.Caller` over HTTP."""

    def __init__(self, pool: RemoteSandboxPool, host: _Host, name: str) -> None:
        self._pool = pool
        self._host = host
        self._name = name

    async def call(self, operation: str, working_s: float = 0.0, **told: Any) -> Any:
        body = {"operation": operation, "told": told}
        answer = await self._pool.post(self._host, f"/sandboxes/{self._name}/call", body, working_s)
        if "error" in answer:
            raise failed(answer["error"])
        return answer["ok"]

    async def fork(self) -> CalledSandbox:
        name = await _once_there_is_room(lambda: self.call("fork"))
        return self._pool.adopt(self._host, name)

    async def close(self) -> None:
        await self._pool.forget(self._host, self._name)


async def _once_there_is_room(attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat an attempt until there is room. RolloutFailure if that takes too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _FULL_S
    while True:
        try:
            return await attempt()
        except _Full as e:
            if loop.time() > deadline:
                raise RolloutFailure(f"sandbox: {e}") from e
        await asyncio.sleep(_ROOM_S)


def _answer(url: str, status: int, content: bytes) -> Any:
    if status == 204:
        return None
    if status == 429:
        raise _Full(_message(content, status))
    if status >= 400:
        if (error := _field(content, "error")) is not None:
            raise failed(error)
        raise RolloutFailure(f"sandbox: {url} returned {status}: {_message(content, status)}")
    try:
        return json.loads(content)
    except ValueError as e:
        raise RolloutFailure(f"sandbox: {url} returned invalid JSON: {content[:80]!r}") from e


def _message(content: bytes, otherwise: object) -> str:
    return str(_field(content, "message") or otherwise)


def _field(content: bytes, name: str) -> Any:
    """A field of a host's answer; None if it is absent, or if the answer is not from a host."""
    try:
        return json.loads(content).get(name)
    except (ValueError, AttributeError):
        return None
