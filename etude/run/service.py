"""An environment by URL: the user's own service runs the sessions, against the gateway, and scores
them (docs/environments-by-url.md).

    GET    /health            its status, and the number of rollouts that it can run at once
    GET    /tasks             ?split=train&limit=100&after=..
    POST   /rollouts          starts one; 200 with its result, or 202 and the result is polled
    GET    /rollouts/{id}     ?wait_s=20: its result, as soon as there is one
    DELETE /rollouts/{id}     nobody needs it any more

A failure at a service is never a result. If a service is away, its clients wait for it; a service
that no longer knows a rollout was restarted, and the attempt is repeated in another session, so
that nothing from the first one can get into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import aiohttp
import msgspec

from etude.core.errors import EtudeError, Interrupted, RolloutFailure
from etude.core.remote import (
    Callback,
    RemoteTask,
    RolloutRequest,
    RolloutResult,
    ServiceHealth,
    SessionOffer,
    TaskPage,
)
from etude.core.sandbox import Sandbox, SandboxSpec
from etude.core.types import Attempt, Score, Task, Transcript
from etude.run.remote_tasks import read_task_file
from etude.run.rollout import SessionDesk
from etude.sandbox.fake import FakeSandboxPool
from etude.store.decoding import decode_json, decode_known

TOKEN_VARIABLE = "ETUDE_SERVICE_TOKEN"
"""The variable with the token that our requests to a service carry."""
RETRY_S = 0.5
WAIT_S = 20.0
"""The time that we ask a service to wait with its answer while a rollout is running."""
ASK_S = 30.0
"""Time for any answer except that to `POST /rollouts`, which may be the result."""
PAGE = 500
GRACE_S = 5.0
"""The time after its deadline within which a rollout may still be answered."""
CANCEL_S = 2.0
ARTIFACT_CHARS = 64 << 10
BUSY = (429, 503)
SAID_CHARS = 500

T = TypeVar("T")


class ServiceClient:
    """A client of a service: `async with ServiceClient(url) as service`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        token = os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._nonce = secrets.token_hex(4)
        self._capacity = 0
        self._taken = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> ServiceClient:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._http.close()

    def rollout_id(self, session: str) -> str:
        """An id that differs from those of other runs, and of other launches of this one, at the
        same service."""
        return f"{session}-{self._nonce}"

    def tasks(self, split: str, limit: int) -> list[Task]:
        """At most `limit` tasks. Blocks: this happens before anything else runs."""
        found: list[RemoteTask] = []
        after: str | None = None
        while len(found) < limit:
            asked = {"split": split, "limit": str(min(PAGE, limit - len(found)))}
            query = urlencode(asked | ({"after": after} if after else {}))
            page = self._page(f"{self.url}/tasks?{query}")
            found += page.tasks
            after = page.next
            if after is None or not page.tasks:
                break
        return [task.to_task() for task in found[:limit]]

    def _page(self, url: str) -> TaskPage:
        try:
            with urlopen(Request(url, headers=self._headers), timeout=ASK_S) as answer:
                return decode_json(answer.read(), TaskPage)
        except (URLError, OSError) as e:
            raise EtudeError(
                f"the service at {self.url} returns no tasks ({e}): start it, or set tasks.path "
                "to a file of tasks"
            ) from e
        except msgspec.MsgspecError as e:
            raise EtudeError(f"{url} returned something other than a page of tasks: {e}") from e

    @contextlib.asynccontextmanager
    async def place(self, wait_s: float) -> AsyncIterator[None]:
        """Wait until the service answers and has room for a rollout; take a place for the block."""
        try:
            async with asyncio.timeout(wait_s):
                await self._health()
                async with self._changed:
                    await self._changed.wait_for(lambda: self._taken < self._capacity)
                    self._taken += 1
        except TimeoutError as e:
            raise RolloutFailure(
                f"no answer or no room at the service at {self.url} for {wait_s:g} s "
                "(tasks.timeout_s): is it running?"
            ) from e
        try:
            yield
        finally:
            async with self._changed:
                self._taken -= 1
                self._changed.notify()

    async def _health(self) -> None:
        while True:
            status, body = await self._ask("GET", "/health")
            if status == 200:
                health = self._decoded(body, ServiceHealth)
                async with self._changed:
                    self._capacity = max(1, health.capacity)
                    self._changed.notify_all()
                return
            if status < 500 and status not in BUSY:
                raise RolloutFailure(self._refusal("GET /health", status, body))
            await asyncio.sleep(RETRY_S)

    async def rollout(self, asked: RolloutRequest) -> RolloutResult:
        """Run a rollout and return its result. Interrupted if the service has lost it."""
        try:
            result = await self._begin(asked)
            while result.status == "running":
                result = await self._look(asked.id)
        except asyncio.CancelledError:
            await self._cancel(asked.id)
            raise
        return result

    async def _begin(self, asked: RolloutRequest) -> RolloutResult:
        headers = {"Idempotency-Key": asked.id, "Content-Type": "application/json"}
        body = msgspec.json.encode(asked)
        while True:
            try:
                status, answer = await self._send("POST", "/rollouts", data=body, headers=headers)
            except aiohttp.ClientConnectorError:  # the request did not reach it
                await asyncio.sleep(RETRY_S)
                continue
            except aiohttp.ClientError:
                return await self._look(asked.id)
            if status in (200, 201, 202):
                return self._decoded(answer, RolloutResult, decode_known)
            if status in BUSY:
                await asyncio.sleep(RETRY_S)
            elif status >= 500:
                raise Interrupted(self._refusal("POST /rollouts", status, answer))
            else:
                raise RolloutFailure(self._refusal("POST /rollouts", status, answer))

    async def _look(self, id: str) -> RolloutResult:
        while True:
            status, body = await self._ask("GET", f"/rollouts/{id}", params={"wait_s": f"{WAIT_S}"})
            if status == 200:
                return self._decoded(body, RolloutResult, decode_known)
            if status == 404:
                raise Interrupted(
                    f"the service at {self.url} no longer knows the rollout {id}: was it restarted?"
                )
            if status < 500 and status not in BUSY:
                raise RolloutFailure(self._refusal("GET /rollouts", status, body))
            await asyncio.sleep(RETRY_S)

    async def _cancel(self, id: str) -> None:
        """Cancel a rollout, if that is possible quickly; otherwise the service ends it at its
        deadline."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                await self._send("DELETE", f"/rollouts/{id}")

    async def _ask(self, method: str, path: str, **more: Any) -> tuple[int, bytes]:
        """Send a request until there is any answer: a service may be away for a while."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with asyncio.timeout(ASK_S):
                    return await self._send(method, path, **more)
            await asyncio.sleep(RETRY_S)

    async def _send(self, method: str, path: str, **more: Any) -> tuple[int, bytes]:
        patient = aiohttp.ClientTimeout(total=None, sock_connect=ASK_S)
        async with self._http.request(method, self.url + path, timeout=patient, **more) as answer:
            return answer.status, await answer.read()

    def _decoded(
        self, body: bytes, kind: type[T], decode: Callable[[bytes, type[T]], T] = decode_json
    ) -> T:
        try:
            return decode(body, kind)
        except msgspec.MsgspecError as e:
            raise RolloutFailure(
                f"the service at {self.url} did not return a {kind.__name__}: {e}"
            ) from e

    def _refusal(self, what: str, status: int, body: bytes) -> str:
        said = body[:SAID_CHARS].decode(errors="replace").strip()
        return f"the service at {self.url} answered {status} to {what}: {said}"


class ServiceEnvironment:
    """A `core.protocols.Environment` whose sessions are run and scored by a service."""

    def __init__(
        self,
        service: ServiceClient,
        *,
        counts: Mapping[str, int],
        path: str | None,
        wait_s: float,
    ) -> None:
        """`path`: a file of tasks, instead of those of the service. `wait_s`: the time that a
        rollout waits for a place there."""
        self._service = service
        self._wait_s = wait_s
        self._counts = counts
        self._path = path

    def tasks(self, split: str) -> Sequence[Task]:
        if self._path is not None:
            return read_task_file(self._path, split, self._counts[split])
        return self._service.tasks(split, self._counts[split])

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        """A place at the service, with an empty sandbox: there is nothing to look at here."""
        async with (
            self._service.place(self._wait_s),
            FakeSandboxPool().open(SandboxSpec()) as nothing,
        ):
            yield nothing

    def own_agent(self, desk: SessionDesk | None, **limits: Any) -> ServiceAgent:
        return ServiceAgent(self._service, desk, **limits)

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        assert attempt.transcript.score is not None
        return attempt.transcript.score


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The run's settings that apply to a session that runs elsewhere."""

    max_tokens: int
    timeout_s: float
    temperature: float

    @classmethod
    def of(
        cls, *, max_tokens: int, timeout_s: float, temperature: float, **unused: Any
    ) -> SessionLimits:
        return cls(max_tokens, timeout_s, temperature)

    def request(
        self,
        task: Task,
        *,
        id: str,
        base_url: str,
        token: str,
        seed: int,
        callback: Callback | None,
        deadline: float = 0.0,
    ) -> RolloutRequest:
        return RolloutRequest(
            id=id,
            task=RemoteTask.of(task),
            base_url=base_url,
            token=token,
            seed=seed,
            deadline=deadline,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            callback_url=callback.url if callback else None,
            callback_token=callback.token if callback else None,
        )


class ServiceAgent:
    """A `core.protocols.Agent` that has the service run the whole session."""

    def __init__(self, service: ServiceClient, desk: SessionDesk | None, **limits: Any) -> None:
        """`desk`: the place that a result may be sent to without a request for it."""
        self._service = service
        self._desk = desk
        self._limits = SessionLimits.of(**limits)

    async def run(
        self, task: Task, sandbox: Sandbox, *, base_url: str, api_key: str, seed: int
    ) -> Transcript:
        session = session_of(base_url)
        asked = self._limits.request(
            task,
            id=self._service.rollout_id(session),
            base_url=base_url,
            token=api_key,
            seed=seed,
            deadline=time.time() + self._limits.timeout_s,
            callback=await self._desk.callback(session) if self._desk else None,
        )
        try:
            async with asyncio.timeout(self._limits.timeout_s + GRACE_S) as late:
                result = await self._result(asked, session)
        except TimeoutError as e:
            if not late.expired():
                raise
            raise RolloutFailure(
                f"the service at {self._service.url} returned no result within {GRACE_S:g} s "
                f"after the rollout's deadline (harness.timeout_s = {self._limits.timeout_s:g})"
            ) from e
        if result.status == "failed":
            raise RolloutFailure(f"the service reports that the rollout failed: {result.error}")
        if result.score is None:
            raise RolloutFailure(f"the service reports {result.status!r} without a score")
        return to_transcript(task, result)

    async def _result(self, asked: RolloutRequest, session: str) -> RolloutResult:
        """The result from the service's answer or from the desk, whichever comes first."""
        if self._desk is None:
            return await self._service.rollout(asked)
        offer = SessionOffer(request=asked, timeout_s=self._limits.timeout_s, claimed=True)
        await self._desk.offer(session, offer)
        answered = asyncio.ensure_future(self._service.rollout(asked))
        sent = asyncio.ensure_future(self._sent(self._desk, session, offer))
        try:
            await asyncio.wait({answered, sent}, return_when=asyncio.FIRST_COMPLETED)
            if answered.done() and answered.exception() is not None:
                # It may have been sent before the service was lost.
                outcome = await self._desk.outcome(session, 0.0)
                if outcome is not None and outcome.result is not None:
                    return outcome.result
            return answered.result() if answered.done() else sent.result()
        finally:
            for each in (answered, sent):
                each.cancel()
            await asyncio.wait({answered, sent})

    async def _sent(self, desk: SessionDesk, session: str, offer: SessionOffer) -> RolloutResult:
        while True:
            outcome = await desk.outcome(session, WAIT_S, claimed=True)
            if outcome is None:  # the gateway was restarted
                await desk.offer(session, offer)
            elif outcome.result is not None:
                return outcome.result


def session_of(base_url: str) -> str:
    """The name in `.../s/{session}/v1`."""
    return base_url.rstrip("/").split("/")[-2]


def to_transcript(task: Task, result: RolloutResult) -> Transcript:
    made = [
        {
            "role": "tool",
            "name": f"artifact {artifact.name}",
            "content": artifact.text[:ARTIFACT_CHARS] or artifact.url,
        }
        for artifact in result.artifacts
    ]
    return Transcript(
        messages=[*(result.messages or task.opening), *made],
        finished=result.status == "done",
        score=result.score,
    )
