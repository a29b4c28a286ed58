"""The workers as one policy: a request goes to one worker, and to another one if that worker dies
or falls silent.

`core.fleet` decides which worker gets a request. This module sends the requests, waits for the
answers, and notes for each session whether it was delayed by a worker, because that time must not
count against the session.
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
"""Time that a request waits for a worker to come up before it fails. While a worker is silent, the
wait goes on."""
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
        """`awaits_load`: no worker gets a request before `load` sets the version that may
        answer."""
        self.fleet = Fleet(live, heartbeat_timeout_s, awaits_floor=awaits_load)
        self._first_tokens = FirstTokens()
        self._http = http
        self._client = WorkerClient()
        self._clock = clock or AwakeClock(SystemClock())
        self._began = self._clock.now()
        self._changed = asyncio.Condition()
        self._requests: dict[str, SessionRequests] = {}
        self._tokens: dict[str, str] = {}
        # Waits for an answer, each with the worker that is to answer.
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
        """Tokens as they are sampled. If the worker dies on the way, another one continues after
        the tokens that were already yielded."""
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
        """Raise WorkerFailed if the worker was removed in the meantime: it may have continued with
        weights that are too old by now."""
        if not self.fleet.knows(worker):
            raise WorkerFailed(f"{worker.url} was removed from the fleet")

    @contextmanager
    def under_way(self, session: str) -> Iterator[None]:
        """Count a request of the session as under way while the block runs."""
        requests = self._requests.setdefault(session, SessionRequests())
        requests.pending += 1
        try:
            yield
        # the request gets no answer
        except (asyncio.CancelledError, ClientDisconnected, Unavailable):
            requests.disturbed = True
            raise
        finally:
            requests.pending -= 1

    def disturb(self, session: str) -> None:
        """Mark the session as delayed by a failure."""
        self._requests.setdefault(session, SessionRequests()).disturbed = True

    def disturbed(self, session: str, age_s: float = math.inf) -> bool:
        """True if the session may have been delayed by a failure. Also true while a request of it
        is under way, which may take any time; after a pause of this process, which may not have
        read all requests yet; and for a session older than this process, which did not see its
        first requests. `age_s`: seconds since the session began."""
        requests = self._requests.get(session, SessionRequests())
        began = self._clock.now() - age_s
        absent = self._clock.slept_since(began) or -math.inf < began < self._began
        return requests.disturbed or requests.pending > 0 or absent

    def forget(self, session: str) -> None:
        """Forget a session that is over."""
        self.fleet.forget(session)
        self._requests.pop(session, None)

    async def watch(self) -> None:
        """Remove workers that are silent; runs until it is cancelled."""
        while True:
            self.expire_silent()
            await asyncio.sleep(LIVENESS_CHECK_S)

    def expire_silent(self) -> None:
        """Remove silent workers and end all waits for them: a lost host closes no connection."""
        self.fleet.expire(self._clock.now())
        for wait, worker in list(self._waits.items()):
            if not self.fleet.knows(worker):
                del self._waits[wait]  # end each wait only once
                wait.in_vain = True
                wait.end()

    async def load(self, version: int) -> None:
        """Move the workers to a version; returns when no request is started with older weights any
        more. A slow worker does not delay this: it gets no requests until it has caught up, as its
        heartbeats will show. A worker that refuses to load is removed. If all of them refuse, this
        raises, and the old weights stay live."""
        refusals: dict[Worker, str] = {}
        loading: dict[Worker, asyncio.Task[str | None]] = {}
        try:
            while not self.fleet.may_raise_floor(version, self._clock.now(), refusals):
                for worker in self.fleet.behind(version):  # more may have joined meanwhile
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
        """Send the same message to other gateways, with the token of its sender. Raises if one of
        them does not accept it."""
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
                raise Unavailable(
                    f"the gateway at {url} cannot be reached: {type(e).__name__}"
                ) from e

        await asyncio.gather(*map(one, gateways))

    async def join(self, joining: JoinRequest, token: str = "") -> None:
        """Register a worker. `token`: the worker's own, used for all requests to it, so that no
        worker learns another one's token."""
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
            raise Unavailable(f"{worker.url} left while it was joining")
        await self.wake()

    async def regions(self) -> dict[str, WorkerStatus]:
        """The status of each region: its workers taken together."""
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
        """Returns as soon as a worker is up."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.fleet.up)

    async def _pick(self, session: str) -> Worker:
        while (worker := self.fleet.pick(session)) is None:
            try:
                async with asyncio.timeout(WORKER_WAIT_S):
                    await self.up()
            except TimeoutError as e:
                if not (self.fleet.suspects or self.fleet.up):
                    raise Unavailable(
                        f"no worker became available within {WORKER_WAIT_S:.0f} s"
                    ) from e
        return worker

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, worker: Worker, request: Request, *, stream: bool = False) -> WorkerAnswer:
        """Start a request to a worker; the answer is aborted if the worker falls silent. There is
        one wait for the whole answer, since a timeout for each read costs as much as the read."""
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
        """Load a version on a worker; returns its error message if it refuses. A worker that is
        gone is removed instead, and loads the version when it joins again."""
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
        """Abort the block's request to the worker if the worker falls silent."""
        wait = Wait(worker.url + path, lambda: limit.reschedule(0.0))
        with wait.failures(), self._kept(wait, worker):
            async with asyncio.timeout(None) as limit:
                yield

    @contextmanager
    def _kept(self, wait: Wait, worker: Worker) -> Iterator[None]:
        """Keep a wait registered during the block, so that it ends if the worker falls silent."""
        self._waits[wait] = worker
        try:
            yield
        finally:
            self._waits.pop(wait, None)

    async def _ask_all(self, path: str, type: type[T]) -> list[T]:
        """The workers' answers to a GET; workers that do not answer are left out."""

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
        raise WorkerFailed(f"its answer is not that of a worker: {e}") from e
