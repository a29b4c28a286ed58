"""The answer of one worker to one request, and the attempts of a request at several workers in
turn.

Any failure between gateway and worker becomes a `WorkerFailed` here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import aiohttp
import msgspec

from etude.core.clock import AwakeClock
from etude.core.fleet import Fleet, Worker
from etude.core.sampling import Request, Sample, Token
from etude.serve.http import DeadlineExceeded, Unavailable, deadline
from etude.serve.worker_client import WorkerConnection, error_message
from etude.serve.worker_protocol import FrameReader, GenerateRequest
from etude.store.decoding import decode_msgpack

MAX_RETRIES = 3
MAX_SILENCES = 5
"""Number of workers that may fall silent over one request before it fails. Silence is seldom caused
by the request, but a request that hangs its worker, or takes down the whole host, closes no
connection."""


class WorkerFailed(Exception):
    """A worker did not answer, or not correctly."""


class WorkerSilent(WorkerFailed):
    """The worker stopped sending heartbeats and was removed; the request may not be the cause."""


@dataclass(slots=True, eq=False)
class Wait:
    """A wait for a worker's answer; `end` makes the waiting task fail."""

    url: str
    end: Callable[[], None]
    in_vain: bool = False
    """The worker fell silent, or was removed."""

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as e:
            raise self.failure(e) from e

    def failure(self, error: Exception) -> WorkerFailed:
        if isinstance(error, msgspec.MsgspecError):
            return WorkerFailed(f"{self.url}: its answer is not that of a worker: {error}")
        if self.in_vain:
            return WorkerSilent(f"{self.url}: it stopped responding")
        return WorkerFailed(f"{self.url}: {type(error).__name__} {error}")


class WorkerAnswer:
    """An answer on a connection of its own. Its methods are plain calls, without a generator in
    between, since each token of each session passes through here."""

    def __init__(
        self, connection: WorkerConnection, url: str, worker: Worker, waits: dict[Wait, Worker]
    ) -> None:
        """`waits`: all waits under way; this answer is among them until it is closed."""
        self._wait = Wait(url, connection.abort)
        self._waits = waits
        self._waits[self._wait] = worker
        self._connection = connection
        self._frames = FrameReader()

    def __enter__(self) -> WorkerAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._waits.pop(self._wait, None)
        self._connection.close()

    async def ask(self, asked: GenerateRequest, headers: Mapping[str, str]) -> None:
        """Send the request; returns when the worker begins to answer."""
        body = msgspec.msgpack.encode(asked)
        try:
            status = await self._connection.post(self._wait.url, body, headers)
            refusal = b"" if status == 200 else await self._connection.read_all()
        except OSError as e:
            raise self._wait.failure(e) from e
        if status != 200:
            _raise_refusal(status, error_message(refusal))

    async def sample(self) -> Sample:
        """The complete answer."""
        with self._wait.failures():
            return decode_msgpack(await self._connection.read_all(), Sample)

    async def events(self) -> Iterator[Token | Sample]:
        """The events that have arrived since; the sample comes last."""
        try:
            data = await self._connection.read()
            if not data:
                raise ConnectionError("the stream ended early")
        except OSError as e:
            raise self._wait.failure(e) from e
        return self._events(data)

    def _events(self, data: bytes) -> Iterator[Token | Sample]:
        try:
            for frame in self._frames.push(data):
                if frame.token is not None:
                    yield frame.token
                elif frame.sample is not None:
                    self._connection.finish()
                    yield frame.sample
                else:
                    _raise_refusal(frame.status, frame.error)
        except msgspec.MsgspecError as e:
            raise self._wait.failure(e) from e


@dataclass(slots=True)
class SessionRequests:
    """The pending requests of one session, and whether a failure delayed any of them."""

    pending: int = 0
    disturbed: bool = False
    """True if a request took longer than it would have on a healthy worker, or got no answer."""


class Attempts:
    """The attempts of one request, at one worker after the other. Each is a block:

        with await attempts.next() as attempt: ...

    A worker that fails in the block is removed, and the failure is not raised."""

    def __init__(
        self, request: Request, requests: SessionRequests, fleet: Fleet, clock: AwakeClock,
        pick: Callable[[], Awaitable[Worker]],
    ) -> None:  # fmt: skip
        """`pick`: waits for a worker that may serve the request."""
        self._request = request
        self._requests = requests
        self._fleet = fleet
        self._clock = clock
        self._pick = pick
        self._began = clock.now()
        self._failures: list[WorkerFailed] = []

    async def next(self) -> Attempt:
        """Begin the next attempt. Raises if too many have failed."""
        if self._failures:
            self._check_failures(self._failures)
        self._requests.disturbed |= not self._fleet.up
        left = _left(self._request, self._clock.now() - self._began)
        if left.deadline_s is None:
            worker = await self._pick()
        else:
            async with deadline(left.deadline_s):
                worker = await self._pick()
        return Attempt(self, worker, left, self._clock.now())

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """End an attempt; returns True if the request is to be tried again."""
        if failed := isinstance(error, WorkerFailed):
            self._fleet.leave(attempt.worker)
            self._failures.append(error)
        self._fleet.done(attempt.worker)
        stalled = self._fleet.has_stalled(attempt.worker, attempt.asked, self._clock.now())
        self._requests.disturbed |= failed or stalled
        return failed

    def _check_failures(self, failures: Sequence[WorkerFailed]) -> None:
        silences = sum(isinstance(failure, WorkerSilent) for failure in failures)
        if len(failures) - silences > MAX_RETRIES or silences >= MAX_SILENCES:
            raise Unavailable(
                f"{len(failures)} workers in a row failed, the last with: {failures[-1]}"
            )


@dataclass(slots=True)
class Attempt:
    """One attempt of a request at a worker."""

    attempts: Attempts
    worker: Worker
    request: Request
    """The request with the time that it has left."""
    asked: float
    """Start time."""

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return self.attempts.end(self, error)


def _left(request: Request, elapsed_s: float) -> Request:
    """The request after the given seconds: with a shorter deadline."""
    if request.deadline_s is None:
        return request
    if request.deadline_s <= elapsed_s:
        raise DeadlineExceeded()
    return replace(request, deadline_s=request.deadline_s - elapsed_s)


def _raise_refusal(status: int, message: str) -> NoReturn:
    """Raise the error that a worker answered with. A passed deadline, or a request that can never
    be answered, is not the worker's fault."""
    if status == 408:
        raise DeadlineExceeded()
    if 400 <= status < 500 and status not in (401, 403):
        raise ValueError(message)
    raise WorkerFailed(message)
