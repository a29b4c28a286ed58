"""An engine as a `Policy`.

The engine runs on a thread of its own, because a step may take long and the server must answer
meanwhile. The event loop hands it closures to run between two steps, and receives the results of
the steps. New weights are fetched and checked on a third thread while the engine serves, and are
swapped in between two steps.

The engine handles only tokens. After every token it asks a `StopStringChecker` whether a stop
string is complete, so that nothing is sampled past it, and a `GrammarMatcher` which tokens the
grammar allows next.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from statistics import median

from torch import Tensor

from etude.core.lending import SlotPolicy
from etude.core.sampling import Request, Sample, Token
from etude.engine.engine import Engine, ExpiredRequest, FinishedRequest, StreamedToken
from etude.model.detokenizer import IncrementalDetokenizer, StopStringFilter
from etude.model.tokenizer import ChatTokenizer
from etude.serve.grammar_matcher import GrammarCompiler, GrammarMatcher
from etude.serve.http import DeadlineExceeded, Unavailable

LEND_EVERY_S = 1.0
REST_S = 0.001
"""Pause after a step that had nothing to do because all waiting requests are of the class batch and
none may have a slot now. Without the pause the thread would take the event loop's time from
users."""

FetchWeights = Callable[[int], Mapping[str, Tensor]]
Event = Token | Sample
Inbox = asyncio.Queue[Event | Unavailable | None]
"""None: the deadline of the request has passed."""


class EngineThread:
    """An engine on its own thread, as a `Policy`. Everything except `_run` and its callees belongs
    to the event loop."""

    def __init__(
        self,
        engine: Engine,
        fetch: FetchWeights,
        files: Mapping[str, bytes],
        lending: SlotPolicy | None = None,
    ) -> None:
        """`lending`: decides how many slots the class batch may have, given the users' traffic."""
        self.engine = engine
        self.lending = lending
        self.tokenizer = ChatTokenizer(files)
        self.busy_s = 0.0
        self.num_tokens = 0
        self.users_only = False
        self.slot_s = {"users": 0.0, "batch": 0.0}
        """Time that slots were held, by the class batch and by all other requests."""
        self.pauses_s: deque[float] = deque(maxlen=1000)
        """Time that each of the latest weight swaps held up the engine."""
        self.started = time.monotonic()
        self._fetch = fetch
        self._tokenizer_json = files["tokenizer.json"]
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._inboxes: dict[str, Inbox] = {}
        self._batch: dict[str, Inbox] = {}
        """Those of `_inboxes` that belong to requests of the class batch."""
        self._batch_at = -math.inf  # when one of them last had a slot; inf: one has it now
        self._began: float | None = None  # start of the present work; None while there is none
        self._counted = self.started  # the time up to which `slot_s` is counted
        self._between_steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loading = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def max_context(self) -> int:
        return self.engine.max_context

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def step_s(self) -> float:
        """Seconds since the engine began its present step, or the closure that it runs between
        two."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    async def sample(self, request: Request) -> Sample:
        if self.lending is not None and request.priority != "batch":
            return await self._sample_for_user(request)
        deadline = _deadline(request)
        matcher = await self._guide(request)
        with self._submitted(request, matcher, deadline, stream=False) as inbox:
            sample = await _next(inbox)
        assert isinstance(sample, Sample)
        return _checked(sample, matcher)

    async def _sample_for_user(self, request: Request) -> Sample:
        """Sample with the time to the first token, which nobody else would measure for an answer
        that is not streamed."""
        began, first_s = time.monotonic(), 0.0
        stream = self.stream(request)
        async with aclosing(stream):  # type: ignore[type-var]
            async for event in stream:
                first_s = first_s or time.monotonic() - began
                if isinstance(event, Sample):
                    return replace(event, first_token_s=first_s)
        raise AssertionError("a stream ends with its sample")

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        deadline = _deadline(request)
        matcher = await self._guide(request)
        began = time.monotonic()
        since_rl_s = max(0.0, began - self._batch_at)
        is_first = self.lending is not None and request.priority != "batch"
        with self._submitted(request, matcher, deadline, stream=True) as inbox:
            while isinstance(event := await _next(inbox), Token):
                if is_first and self.lending:
                    self.lending.first_token(time.monotonic() - began, since_rl_s=since_rl_s)
                    is_first = False
                yield event
        yield _checked(event, matcher)

    async def lend(self) -> None:
        """Limit the class batch to the slots that the policy lends it; runs until it is
        cancelled."""
        while self.lending is not None:
            allowed = self.lending.decide(now := time.time())
            self.limit_batch(allowed)
            self.users_only = not self.lending.is_open(now)
            for inbox in self._batch.values() if self.users_only else ():
                inbox.put_nowait(Unavailable("this worker is reserved for users at the moment"))
            await asyncio.sleep(LEND_EVERY_S)

    async def load(self, version: int) -> None:
        async with self._loading:  # of two calls for one version, the second finds it loaded
            if version == self.engine.version:
                return
            ready = await asyncio.to_thread(
                lambda: self.engine.prepare_weights(self._fetch(version))
            )
            swapped = asyncio.Event()

            def swap() -> None:
                began = time.monotonic()
                self.engine.swap_weights(version, ready)
                self.pauses_s.append(time.monotonic() - began)
                self._loop.call_soon_threadsafe(swapped.set)

            self._between_steps.put(swap)
            await swapped.wait()

    def limit_batch(self, max_batch_seqs: int) -> None:
        """Limit how many requests of the class batch run at once."""
        self._between_steps.put(partial(self.engine.limit_batch, max_batch_seqs))

    async def weights(self) -> tuple[int, dict[str, Tensor]]:
        """The served version, and a copy of the live tensors that the engine computes with."""
        async with self._loading:
            return self.engine.version, await asyncio.to_thread(self.engine.weights)

    def gauges(self) -> dict[str, float]:
        stats = {f"engine_{name}": value for name, value in asdict(self.engine.stats()).items()}
        stats |= {"engine_busy_seconds": self.busy_s, "weight_version": self.engine.version}
        stats |= {f"engine_slot_seconds_{who}": held for who, held in self.slot_s.items()}
        if self.pauses_s:
            stats |= {
                "swap_pause_seconds_p50": median(self.pauses_s),
                "swap_pause_seconds_max": max(self.pauses_s),
            }
        return stats

    def close(self) -> None:
        self._between_steps.put(None)
        self._thread.join()

    @contextmanager
    def _submitted(
        self, request: Request, matcher: GrammarMatcher | None, deadline: float, *, stream: bool
    ) -> Iterator[Inbox]:
        """Submit a request for the length of the context. If the caller leaves before the answer is
        complete, the engine aborts the request."""
        if self.engine.version < 0:
            raise Unavailable(
                "this worker has no weights yet; try again once it has joined the gateway"
            )
        self.engine.check(request)
        id = str(next(self._ids))
        stop_check = StopStringChecker(self.tokenizer, request.stop) if request.stop else None
        inbox = self._inboxes[id] = Inbox()
        if request.priority == "batch":
            self._batch[id] = inbox
        self._between_steps.put(
            partial(
                self.engine.add,
                request,
                id,
                stream=stream,
                constraint=matcher,
                stop_check=stop_check,
                deadline=deadline,
            )  # fmt: skip
        )
        try:
            yield inbox
        finally:
            self._batch.pop(id, None)
            if self._inboxes.pop(id, None) is not None:
                self._between_steps.put(partial(self.engine.abort, id))

    async def _guide(self, request: Request) -> GrammarMatcher | None:
        """Compile the request's grammar, which takes from a millisecond to a second."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        return await asyncio.to_thread(self._guides.compile, grammar)

    @cached_property
    def _guides(self) -> GrammarCompiler:
        return GrammarCompiler(
            self._tokenizer_json, vocab_size=self.engine.vocab_size, eos=self.tokenizer.eos_token_id
        )

    def _deliver(self, events: list[tuple[str, Event | None]]) -> None:
        for id, event in events:
            if (inbox := self._inboxes.get(id)) is not None:
                inbox.put_nowait(event)
                if not isinstance(event, Token):
                    del self._inboxes[id]
                if isinstance(event, Sample):
                    self.num_tokens += len(event.tokens)

    def _run(self) -> None:
        while self._serve_once():
            pass

    def _serve_once(self) -> bool:
        """Run what the event loop has handed over, then one step. Returns False once the thread is
        to end."""
        while not self._between_steps.empty() or self.engine.idle:
            self._began = None
            act = self._between_steps.get()
            if act is None:
                return False
            self._began = time.monotonic()
            if self.engine.idle:
                self._counted = self._began
            act()
        self._began = began = time.monotonic()
        done = [*self.engine.expire(began), *self.engine.step()]
        events = [(event.id, _told(event)) for event in done]
        self.busy_s += time.monotonic() - began
        self._count_slots()
        if events:
            self._loop.call_soon_threadsafe(self._deliver, events)
        elif not self.engine.num_running:
            time.sleep(REST_S)
        return True

    def _count_slots(self) -> None:
        """Count slots as held from one step to the next."""
        held_s, self._counted = time.monotonic() - self._counted, time.monotonic()
        num_batch = self.engine.num_batch
        if num_batch:
            self._batch_at = math.inf
        elif self._batch_at == math.inf:
            self._batch_at = self._counted
        self.slot_s["batch"] += held_s * num_batch
        self.slot_s["users"] += held_s * (self.engine.num_running - num_batch)


class StopStringChecker:
    """Checks the output of a request for stop strings, token by token; belongs to the engine's
    thread."""

    def __init__(self, tokenizer: ChatTokenizer, stop_texts: tuple[str, ...]) -> None:
        self._decoder = IncrementalDetokenizer(tokenizer.decode)
        self._finder = StopStringFilter(stop_texts)

    def __call__(self, token: int) -> bool:
        self._finder.push(self._decoder.push(token))
        return self._finder.found


def _told(event: StreamedToken | FinishedRequest | ExpiredRequest) -> Event | None:
    """The event to deliver to the event loop for an event of the engine; None for an expired
    request."""
    match event:
        case ExpiredRequest():
            return None
        case FinishedRequest():
            return event.sample
        case StreamedToken():
            return Token(event.token, event.logprob, event.version, event.top)


async def _next(inbox: Inbox) -> Event:
    if (event := await inbox.get()) is None:
        raise DeadlineExceeded()
    if isinstance(event, Unavailable):
        raise event
    return event


def _deadline(request: Request) -> float:
    return math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s


def _checked(sample: Sample, matcher: GrammarMatcher | None) -> Sample:
    if matcher is not None and matcher.error is not None:
        raise ValueError(f"the answer stopped following the grammar: {matcher.error}")
    return sample


def exit_on_engine_failure() -> None:
    """Make a failure of the engine's thread end the process: requests would wait for ever
    otherwise, and the launcher starts another process."""
    report = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        report(args)
        os._exit(1)

    threading.excepthook = end
