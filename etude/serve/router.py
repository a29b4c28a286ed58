"""The workers as one policy: a request goes to one of them, and to another one if that dies or
falls silent.

Who may be asked is decided by `core.fleet`. Here is what follows: the asking, the waiting, and what
a session is to know of it, because time that it lost in waiting for a worker must not be held
against it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import aiohttp
import msgspec

from etude.core.clock import AwakeClock, SystemClock
from etude.core.fleet import Fleet, Worker
from etude.core.lending import FirstTokens
from etude.core.sampling import RegionSpan, Request, Sample, Token, region_spans
from etude.serve.http import ApiError, ClientDisconnected, Unavailable, deadline
from etude.serve.process import authorization
from etude.serve.shards import FORWARDED
from etude.serve.worker_answer import (
    Attempts,
    SessionRequests,
    Wait,
    WorkerAnswer,
    WorkerFailed,
)
from etude.serve.worker_client import WorkerClient, error_message
from etude.serve.worker_protocol import (
    GenerateRequest,
    JoinRequest,
    LoadRequest,
    WorkerStatus,
    WorkerWeights,
)
from etude.store.decoding import decode_json, decode_msgpack

WORKER_WAIT_S = 20.0
"""How long a request waits for a worker to come up before it fails. For one that is silent it waits
on."""
LIVENESS_CHECK_S = 0.5

T = TypeVar("T")


class Router:
    """The workers as one `Policy`."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        live: int = -1,
        heartbeat_timeout_s: float = math.inf,
        clock: AwakeClock | None = None,
        *,
        awaits_load: bool = False,
    ) -> None:
        """`awaits_load`: no worker is asked before `load` says which weights may answer."""
        self.fleet = Fleet(live, heartbeat_timeout_s, awaits_floor=awaits_load)
        self._first_tokens = FirstTokens()
        self._http = http
        self._client = WorkerClient()
        self._clock = clock or AwakeClock(SystemClock())
        self._began = self._clock.now()
        self._changed = asyncio.Condition()
        self._requests: dict[str, SessionRequests] = {}
        self._tokens: dict[str, str] = {}
        # each for an answer of this worker
        self._waits: dict[Wait, Worker] = {}

    async def sample(self, request: Request, session: str = "") -> Sample:
        came = self._clock.now()
        attempts = self._attempts(request, session)
        async with deadline(request.deadline_s):
            while True:
                with await attempts.next() as attempt:
                    with await self._ask(attempt.worker, attempt.request) as answer:
                        sample = await answer.sample()
                    self._check_known(attempt.worker)
                    if sample.gave_way:
                        self.disturb(session)
                    if sample.first_token_s:
                        self._first_tokens.add(attempt.asked + sample.first_token_s, came)
                    regions = (RegionSpan(attempt.worker.region, len(sample.tokens)),)
                    return replace(sample, regions=regions)

    async def stream(self, request: Request, session: str = "") -> AsyncIterator[Token | Sample]:
        """Tokens as they are sampled. If the worker dies on the way, another one goes on behind
        what was handed out."""
        begun: list[Token] = []
        regions: list[str] = []
        asked = self._clock.now()
        attempts = self._attempts(request, session)
        while True:
            with await attempts.next() as attempt:
                worker, left = attempt.worker, attempt.request
                if begun:
                    left = replace(left, begun=tuple(begun))
                with await self._ask(worker, left, stream=True) as answer:
                    while True:
                        for event in await answer.events():
                            self._check_known(worker)
                            if isinstance(event, Sample):
                                if event.gave_way:
                                    self.disturb(session)
                                regions += [worker.region] * (len(event.tokens) - len(begun))
                                yield replace(event, regions=region_spans(regions))
                                return
                            if not begun and request.priority != "batch":
                                self._first_tokens.add(self._clock.now(), asked)
                            begun.append(event)
                            regions.append(worker.region)
                            yield event

    def _attempts(self, request: Request, session: str) -> Attempts:
        requests = self._requests.get(session) or SessionRequests()
        return Attempts(request, requests, self.fleet, self._clock, lambda: self._pick(session))

    def _check_known(self, worker: Worker) -> None:
        """A worker that was taken out meanwhile may have gone on with weights that are too old by
        now."""
        if not self.fleet.knows(worker):
            raise WorkerFailed(f"{worker.url} was taken out")

    @contextmanager
    def under_way(self, session: str) -> Iterator[None]:
        """A request of the session is worked on in the block."""
        requests = self._requests.setdefault(session, SessionRequests())
        requests.pending += 1
        try:
            yield
        # it stays without an answer
        except (asyncio.CancelledError, ClientDisconnected, Unavailable):
            requests.disturbed = True
            raise
        finally:
            requests.pending -= 1

    def disturb(self, session: str) -> None:
        """Mark the session as delayed by a failure."""
        self._requests.setdefault(session, SessionRequests()).disturbed = True

    def disturbed(self, session: str, age_s: float = math.inf) -> bool:
        """Whether the session may have been delayed by a failure. True also while a request of it
        is under way, which may take any time; after a pause of this process, whose requests may
        still be unread; and if the session is older than this process, which did not see its first
        requests. `age_s`: how long ago the session began."""
        requests = self._requests.get(session, SessionRequests())
        began = self._clock.now() - age_s
        absent = self._clock.slept_since(began) or -math.inf < began < self._began
        return requests.disturbed or requests.pending > 0 or absent

    def forget(self, session: str) -> None:
        """The session is over."""
        self.fleet.forget(session)
        self._requests.pop(session, None)

    async def watch(self) -> None:
        """Takes workers out that are silent, until it is cancelled."""
        while True:
            self.expire_silent()
            await asyncio.sleep(LIVENESS_CHECK_S)

    def expire_silent(self) -> None:
        """Take silent workers out and end all waits for them: a lost host closes no connection."""
        self.fleet.expire(self._clock.now())
        for wait, worker in list(self._waits.items()):
            if not self.fleet.knows(worker):
                del self._waits[wait]  # once only
                wait.in_vain = True
                wait.end()

    async def load(self, version: int) -> None:
        """Returns when no request is begun with older weights any more. A slow worker does not hold
        that up: it is sent nothing until it has caught up, which its heartbeats see to. One that
        says that it cannot follow is taken out; if all say so, the promise is not made, and the old
        weights go on."""
        refusals: dict[Worker, str] = {}
        loading: dict[Worker, asyncio.Task[str | None]] = {}
        try:
            while not self.fleet.may_raise_floor(version, self._clock.now(), refusals):
                for worker in self.fleet.behind(version):  # some may have joined just now
                    if worker not in loading and worker not in refusals:
                        loading[worker] = asyncio.create_task(self._load_on(worker, version))
                await asyncio.wait(
                    loading.values(),
                    timeout=LIVENESS_CHECK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for worker in [worker for worker, task in loading.items() if task.done()]:
                    if (why := loading.pop(worker).result()) is not None:
                        refusals[worker] = why
        finally:
            for task in loading.values():
                task.cancel()
        if refusals and all(worker in refusals for worker in self.fleet.workers):
            reasons = "; ".join(
                f"{worker.region} ({worker.url}): {why}" for worker, why in refusals.items()
            )
            raise ApiError(
                f"no worker can serve version {version}: {reasons}", status=502, code="load_failed"
            )
        for worker in refusals:
            self.fleet.leave(worker)
        self.fleet.raise_floor(version)
        await self.wake()

    async def tell(
        self, gateways: Sequence[str], path: str, told: object, token: str = "",
        method: str = "POST",
    ) -> None:  # fmt: skip
        """Says the same to other gateways, with the token of who said it here; they must take
        it."""
        headers = {FORWARDED: "1", **authorization(token)}

        async def one(url: str) -> None:
            body = msgspec.json.encode(told)
            try:
                async with self._http.request(
                    method, url + path, data=body, headers=headers
                ) as answer:
                    if not answer.ok:
                        raise Unavailable(f"{url}{path}: {error_message(await answer.read())}")
            except aiohttp.ClientError as e:
                raise Unavailable(f"the gateway at {url} is away: {type(e).__name__}") from e

        await asyncio.gather(*map(one, gateways))

    async def join(self, joining: JoinRequest, token: str = "") -> None:
        """`token`: the worker's own, which it is asked with: no worker learns that of another."""
        self._tokens[joining.url] = token
        who = (joining.url, joining.region, joining.version)
        now = self._clock.now()
        worker = self.fleet.join(*who, now, is_closed=joining.users_only)
        if worker.joining:
            return
        worker.joining = True
        try:
            while self.fleet.knows(worker) and worker.version < self.fleet.floor:
                if (refusal := await self._load_on(worker, self.fleet.floor)) is not None:
                    raise ApiError(refusal, status=503, code="load_failed")
        finally:
            worker.joining = False
        if not self.fleet.knows(worker):
            raise Unavailable(f"{worker.url} went away while it joined")
        await self.wake()

    async def regions(self) -> dict[str, WorkerStatus]:
        """The workers of a region taken together."""
        regions: dict[str, WorkerStatus] = {}
        for status in await self._ask_all("/status", WorkerStatus):
            known = regions.get(status.region)
            regions[status.region] = status if known is None else known.joined_with(status)
        return regions

    async def weights(self) -> list[WorkerWeights]:
        return await self._ask_all("/weights", WorkerWeights)

    @property
    def users_ttft_p99_s(self) -> float | None:
        return self._first_tokens.p99(self._clock.now())

    async def up(self) -> None:
        """Returns as soon as a worker is."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.fleet.up)

    async def _pick(self, session: str) -> Worker:
        while (worker := self.fleet.pick(session)) is None:
            try:
                async with asyncio.timeout(WORKER_WAIT_S):
                    await self.up()
            except TimeoutError as e:
                if not (self.fleet.suspects or self.fleet.up):
                    raise Unavailable(f"no worker came up within {WORKER_WAIT_S:.0f} s") from e
        return worker

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, worker: Worker, request: Request, *, stream: bool = False) -> WorkerAnswer:
        """The answer of a worker, which is broken off if the worker falls silent. One wait for all
        of it: a limit for each read costs as much as the read."""
        url = worker.url + "/generate"
        if (connection := self._client.idle(url)) is None:
            async with self._while_heard(worker, "/generate"):
                connection = await self._client.connect(url)
        answer = WorkerAnswer(connection, url, worker, self._waits)
        try:
            asked = GenerateRequest(request, min_weight_version=self.fleet.floor, stream=stream)
            await answer.ask(asked, self._headers(worker))
        except BaseException:
            answer.close()
            raise
        return answer

    async def _load_on(self, worker: Worker, version: int) -> str | None:
        """Load a version on a worker; returns why, if it says that it cannot. One that is gone says
        nothing: it is taken out, and loads what was promised when it joins again."""
        try:
            status, body = await self._post(
                worker, "/load", msgspec.json.encode(LoadRequest(version))
            )
        except WorkerFailed:
            self.fleet.leave(worker)
            return None
        if status != 200:
            return error_message(body)
        worker.version = max(worker.version, version)
        return None

    async def _post(self, worker: Worker, path: str, body: bytes) -> tuple[int, bytes]:
        async with (
            self._while_heard(worker, path),
            self._http.post(
                worker.url + path, data=body, headers=self._headers(worker)
            ) as response,
        ):
            return response.status, await response.read()

    def _headers(self, worker: Worker) -> dict[str, str]:
        return authorization(self._tokens.get(worker.url))

    @asynccontextmanager
    async def _while_heard(self, worker: Worker, path: str) -> AsyncIterator[None]:
        """A worker is asked something in the block, which ends with the worker if that falls
        silent."""
        wait = Wait(worker.url + path, lambda: limit.reschedule(0.0))
        with wait.failures(), self._kept(wait, worker):
            async with asyncio.timeout(None) as limit:
                yield

    @contextmanager
    def _kept(self, wait: Wait, worker: Worker) -> Iterator[None]:
        """It ends if the worker falls silent."""
        self._waits[wait] = worker
        try:
            yield
        finally:
            self._waits.pop(wait, None)

    async def _ask_all(self, path: str, type: type[T]) -> list[T]:
        """What the workers say of themselves; those that do not answer are left out."""

        async def ask(worker: Worker) -> list[T]:
            with suppress(WorkerFailed):
                async with (
                    self._while_heard(worker, path),
                    self._http.get(worker.url + path, headers=self._headers(worker)) as response,
                ):
                    return [_decoded(await response.read(), type, decode_json)]
            return []

        return [
            answer
            for told in await asyncio.gather(*map(ask, self.fleet.workers))
            for answer in told
        ]


def _decoded(data: bytes, type: type[T], decode: Callable[..., T] = decode_msgpack) -> T:
    try:
        return decode(data, type=type)
    except msgspec.MsgspecError as e:
        raise WorkerFailed(f"it does not speak as a worker: {e}") from e
