"""The workers as one policy: a request goes to one of them, and to another one if that dies or
falls silent.

Who may be asked is decided by `core.fleet`. Here is what follows: the asking, the waiting, and what
a session is to know of it, because time that it lost in waiting for a worker must not be held
against it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import aiohttp
import msgspec

from etude.core.clock import AwakeClock, SystemClock
from etude.core.fleet import Fleet, Worker
from etude.core.lending import FirstTokens
from etude.core.sampling import RegionSpan, Request, Sample, Token, region_spans
from etude.serve.http import ApiError, ClientDisconnected, DeadlineExceeded, Unavailable, deadline
from etude.serve.process import authorization
from etude.serve.shards import FORWARDED
from etude.serve.worker_client import WorkerClient, WorkerConnection, error_message
from etude.serve.worker_protocol import (
    FrameReader,
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
MAX_RETRIES = 3
MAX_SILENCES = 5
"""Workers that fall silent over one request before it fails. Silence is seldom its fault, but one
that hangs its worker, or takes down the whole host, closes no connection."""
LIVENESS_CHECK_S = 0.5

T = TypeVar("T")


class WorkerFailed(Exception):
    """A worker did not answer, or not as it should."""


class WorkerSilent(WorkerFailed):
    """The worker stopped sending heartbeats and was taken out; the request may not be the cause."""


@dataclass(slots=True)
class SessionRequests:
    """The pending requests of one session, and whether a failure delayed any."""

    pending: int = 0
    disturbed: bool = False
    """True: a request took longer than it would have on a healthy worker, or got no answer."""


@dataclass(slots=True, eq=False)
class Wait:
    """A wait for the answer of a worker; `end` makes the waiting task fail."""

    url: str
    end: Callable[[], None]
    in_vain: bool = False
    """The worker fell silent, or was taken out."""

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as e:
            if self.in_vain:
                raise WorkerSilent(f"{self.url}: it fell silent") from e
            raise WorkerFailed(f"{self.url}: {type(e).__name__} {e}") from e
        except msgspec.MsgspecError as e:
            raise WorkerFailed(f"{self.url}: it does not speak as a worker: {e}") from e


@dataclass(slots=True)
class Attempt:
    """One try of a request at a worker; the next goes on behind the tokens handed out so far."""

    worker: Worker
    request: Request
    failure: WorkerFailed | None = None


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
        # for an answer of this worker
        self._waits: dict[Worker, set[Wait]] = {}

    async def sample(self, request: Request, session: str = "") -> Sample:
        came = self._clock.now()
        attempts = self._attempts(request, session)
        async with deadline(request.deadline_s), aclosing(attempts):
            async for attempt in attempts:
                asked = self._clock.now()
                with self._failures_of(attempt):
                    sample = await self._ask(attempt.worker, attempt.request)
                    self._check_known(attempt.worker)
                    if sample.gave_way:
                        self.disturb(session)
                    if sample.first_token_s:
                        self._first_tokens.add(asked + sample.first_token_s, came)
                    regions = (RegionSpan(attempt.worker.region, len(sample.tokens)),)
                    return replace(sample, regions=regions)
        raise AssertionError("attempts end with an answer or an error")

    async def stream(self, request: Request, session: str = "") -> AsyncIterator[Token | Sample]:
        """Tokens as they are sampled. If the worker dies on the way, another one goes on behind
        what was handed out."""
        begun: list[Token] = []
        regions: list[str] = []
        asked = self._clock.now()
        async with aclosing(self._attempts(request, session)) as attempts:
            async for attempt in attempts:
                worker = attempt.worker
                with self._failures_of(attempt):
                    left = attempt.request
                    if begun:
                        left = replace(left, begun=tuple(begun))
                    answer = self._stream_from(worker, left)
                    async with aclosing(answer):
                        async for event in answer:
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

    async def _attempts(self, request: Request, session: str) -> AsyncGenerator[Attempt]:
        """One after the other, each when the one before has failed. Raises when too many have."""
        requests = self._requests.get(session, SessionRequests())
        began, failures, silences, why = self._clock.now(), 0, 0, ""
        while failures - silences <= MAX_RETRIES and silences < MAX_SILENCES:
            requests.disturbed |= not self.fleet.up
            left = _left(request, self._clock.now() - began)
            async with deadline(left.deadline_s):
                worker = await self._pick(session)
            attempt, asked = Attempt(worker, left), self._clock.now()
            try:
                yield attempt
            finally:
                self.fleet.done(worker)
                requests.disturbed |= self.fleet.has_stalled(worker, asked, self._clock.now())
            failures += 1
            silences += isinstance(attempt.failure, WorkerSilent)
            why = str(attempt.failure)
            requests.disturbed = True
        raise Unavailable(f"{failures} workers in a row have failed, the last one with: {why}")

    @contextmanager
    def _failures_of(self, attempt: Attempt) -> Iterator[None]:
        """A worker that fails in the block is taken out, and the next attempt is made."""
        try:
            yield
        except WorkerFailed as e:
            self.fleet.leave(attempt.worker)
            attempt.failure = e

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
        for worker in [each for each in self._waits if not self.fleet.knows(each)]:
            for wait in self._waits.pop(worker):
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
        who, now = (joining.url, joining.region, joining.version), self._clock.now()
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

    async def _ask(self, worker: Worker, request: Request) -> Sample:
        asked = GenerateRequest(request, min_weight_version=self.fleet.floor)
        async with self._asked(worker, asked) as (connection, wait):
            with wait.failures():
                return decode_msgpack(await connection.read_all(), Sample)

    async def _stream_from(
        self, worker: Worker, request: Request
    ) -> AsyncGenerator[Token | Sample]:
        """The tokens that the worker adds, and the whole sample."""
        asked = GenerateRequest(request, min_weight_version=self.fleet.floor, stream=True)
        reader = FrameReader()
        async with self._asked(worker, asked) as (connection, wait):
            with wait.failures():
                while data := await connection.read():
                    for frame in reader.push(data):
                        if frame.token is not None:
                            yield frame.token
                        elif frame.sample is not None:
                            connection.finish()
                            yield frame.sample
                            return
                        else:
                            _raise_refusal(frame.status, frame.error)
                raise ConnectionError("it ended in the middle")

    @asynccontextmanager
    async def _asked(
        self, worker: Worker, asked: GenerateRequest
    ) -> AsyncIterator[tuple[WorkerConnection, Wait]]:
        """The answer of a worker, which is broken off if the worker falls silent. One wait for all
        of it: a limit for each read costs as much as the read."""
        url = worker.url + "/generate"
        if (connection := self._client.idle(url)) is None:
            async with self._while_heard(worker, "/generate"):
                connection = await self._client.connect(url)
        wait = Wait(url, connection.abort)
        try:
            with self._kept(wait, worker):
                with wait.failures():
                    body = msgspec.msgpack.encode(asked)
                    status = await connection.post(url, body, self._headers(worker))
                    refusal = b"" if status == 200 else await connection.read_all()
                if status != 200:
                    _raise_refusal(status, error_message(refusal))
                yield connection, wait
        finally:
            connection.close()

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
        waits = self._waits.setdefault(worker, set())
        waits.add(wait)
        try:
            yield
        finally:
            waits.discard(wait)
            if not waits:
                self._waits.pop(worker, None)

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


def _left(request: Request, elapsed_s: float) -> Request:
    """The request as it is after so many seconds."""
    if request.deadline_s is None:
        return request
    if request.deadline_s <= elapsed_s:
        raise DeadlineExceeded()
    return replace(request, deadline_s=request.deadline_s - elapsed_s)


def _raise_refusal(status: int, message: str) -> NoReturn:
    """What a worker says instead of an answer. A deadline and what can never be answered are not
    its fault."""
    if status == 408:
        raise DeadlineExceeded()
    if 400 <= status < 500 and status not in (401, 403):
        raise ValueError(message)
    raise WorkerFailed(message)
