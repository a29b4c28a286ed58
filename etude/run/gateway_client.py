"""The controller's client of the gateway: a session is opened for an attempt, read after the
attempt, and then forgotten."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from etude.core.errors import EtudeError
from etude.core.events import RegionStatus, StoreUsed
from etude.core.patience import when_back
from etude.core.remote import Callback, SessionOffer, SessionOutcome
from etude.core.types import Segment, SessionAccess
from etude.serve.process import authorization, token
from etude.serve.tokens import MAX_SESSION_S, Scope, new_session_id
from etude.store.decoding import decode_json, decode_msgpack

START_S = 60.0
RETRY_S = 0.05

NO_SEGMENTS = msgspec.msgpack.encode(())


class GatewayClient:
    """The controller's client of the gateway: `async with GatewayClient(url) as gateway`. It has an
    admin's token. `http` is the one connection pool, which the harness uses too, with the token of
    its session.

    At the gateway a session has an id that nobody can guess; here it is named by its sample."""

    def __init__(self, url: str, public_url: str | None = None) -> None:
        """`public_url`: the gateway's URL for harnesses, if it is a different one."""
        self.url = url
        self._public_url = (public_url or url).rstrip("/")
        self.headers = authorization(token())
        self._ids: dict[str, str] = {}
        self._live = -1
        self.quarantined: list[str] = []
        self._busy_s: dict[str, tuple[float, float]] = {}
        self.store_used: list[StoreUsed] = []
        """Requests of the gateway and the workers to the run's store, as of the last poll."""

    async def __aenter__(self) -> GatewayClient:
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.http.close()

    async def ready(self) -> None:
        """Return when the gateway answers. It was started together with us, so a refused connection
        means nothing for a while."""
        try:
            async with asyncio.timeout(START_S):
                while not await self._answers():
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as e:
            raise EtudeError(
                f"no answer from the gateway at {self.url} for {START_S:.0f} s: read its log"
            ) from e

    async def _answers(self) -> bool:
        try:
            async with self.http.get(f"{self.url}/health", headers=self.headers) as response:
                return response.ok
        except aiohttp.ClientConnectionError:
            return False

    async def up(self) -> None:
        """Return as soon as a worker is up. A session that would wait for one in vain need not
        start."""
        await self._ask("GET", "/up", "cannot tell whether a worker is up")

    async def load(self, version: int) -> None:
        """Return when every request is started with `version` or newer weights, and in no region
        that is `quarantined`."""
        told = {"version": version, "quarantined": self.quarantined}
        await self._ask("POST", "/load", f"the workers cannot load version {version}", json=told)
        self._live = max(self._live, version)

    async def open_session(self, session: str) -> SessionAccess:
        id = new_session_id()
        key = await self._token(Scope.SESSION, id, session)
        self._ids[session] = id
        return SessionAccess(base_url=f"{self._public_url}/s/{id}/v1", api_key=key)

    async def _token(self, scope: Scope, id: str, session: str) -> str:
        """A token that ends with its session. It must not expire earlier just because a process was
        stopped for long."""
        told = {"scope": scope, "subject": id, "lifetime_s": MAX_SESSION_S}
        what = f"session {session} cannot be opened"
        made = msgspec.json.decode(await self._ask("POST", "/tokens", what, json=told))
        return str(made["token"])

    async def segments(self, session: str, *, experts: bool) -> tuple[Segment, ...]:
        if session not in self._ids:
            return ()
        told = {"experts": "true"} if experts else None
        what = f"session {session} cannot be read"
        path = f"/s/{self._ids[session]}/segments"
        answer = await self._ask("GET", path, what, unknown=NO_SEGMENTS, params=told)
        return decode_msgpack(answer, tuple[Segment, ...])

    async def callback(self, session: str) -> Callback:
        url = f"{self._public_url}/v1/sessions/{session}/score"
        return Callback(url=url, token=await self._token(Scope.SCORE, session, session))

    async def offer(self, session: str, offer: SessionOffer) -> None:
        what = f"session {session} cannot be offered"
        told = {"data": msgspec.json.encode(offer)}
        await self._ask("PUT", f"/v1/sessions/{session}", what, **told)

    async def outcome(
        self, session: str, wait_s: float, *, claimed: bool = False
    ) -> SessionOutcome | None:
        told = {"wait_s": str(wait_s), "claimed": "true" if claimed else "false"}
        what = f"session {session} cannot be queried"
        answer = await self._ask("GET", f"/v1/sessions/{session}", what, unknown=b"", params=told)
        return decode_json(answer, SessionOutcome) if answer else None

    async def disturbed(self, session: str, age_s: float) -> bool:
        told = {"age_s": str(age_s)}
        what = f"session {session} cannot be queried"
        path = f"/s/{self._ids[session]}/disturbed"
        answer = await self._ask("GET", path, what, params=told)
        return decode_json(answer, bool)

    async def forget(self, session: str) -> None:
        if (id := self._ids.pop(session, None)) is not None:
            await self._ask("DELETE", f"/s/{id}", f"session {session} cannot be deleted")

    async def regions(self) -> tuple[dict[str, RegionStatus], list[str]]:
        """The regions that answer, and the names of those in which a worker is silent."""
        status = msgspec.json.decode(await self._ask("GET", "/status", "no status"))
        if status["version"] < self._live:  # it was restarted, and knows of no weights
            await self.load(self._live)
        answering = status["regions"].items()
        told = [*status.get("store", ()), *(e for _, w in answering for e in w.get("store", ()))]
        self.store_used = [StoreUsed(**each) for each in told]
        return {name: self._region(name, worker) for name, worker in answering}, status["silent"]

    async def _ask(
        self, method: str, path: str, what: str, *, unknown: bytes | None = None, **more: Any
    ) -> bytes:
        """Send a request and return the answer. `unknown`: the value of a 404 answer, if that is
        not an error. All these requests may be repeated without harm."""

        async def ask() -> bytes:
            async with self.http.request(
                method, self.url + path, headers=self.headers, **more
            ) as response:
                if response.status == 404 and unknown is not None:
                    return unknown
                if not response.ok:
                    said = (await response.text())[:500]
                    raise EtudeError(f"{what}: the gateway answered {response.status}: {said}")
                return await response.read()

        return await when_back(ask, aiohttp.ClientConnectionError)

    def _region(self, name: str, worker: dict[str, float]) -> RegionStatus:
        """The status of a region. Workers count their busy seconds from their start; the share is
        of the time since our last poll."""
        now, busy_s = asyncio.get_running_loop().time(), float(worker["busy_s"])
        then, before_s = self._busy_s.get(name, (now, busy_s))
        self._busy_s[name] = (now, busy_s)
        share = min(1.0, max(0.0, (busy_s - before_s) / (now - then))) if now > then else 0.0
        return RegionStatus(
            version=int(worker["version"]),
            busy=share,
            running=int(worker["running"]),
            waiting=int(worker["waiting"]),
            quarantined=name in self.quarantined,
        )
