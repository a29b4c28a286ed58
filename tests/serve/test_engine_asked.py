"""Between event loop and engine, no part of a request is lost, and nothing of an answer is left
behind."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.sampling import Request, Sample, SamplingParams
from etude.engine.engine import Engine
from etude.model.transformer import ModelConfig
from etude.serve.engine_thread import EngineThread, exit_on_engine_failure
from etude.serve.http import DeadlineExceeded, Unavailable
from tests.serve.test_api import FILES
from tests.small_model import sharp

CONFIG = ModelConfig.from_json(FILES["config.json"])


@contextmanager
def thread(version: int = 0) -> Iterator[EngineThread]:
    made = EngineThread(
        Engine(sharp(CONFIG, 0), max_num_seqs=4, version=version), lambda version: {}, FILES
    )
    yield made
    made.close()


async def test_the_engine_is_asked_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with thread() as one:
        asked: list[tuple[Request, str, dict[str, Any]]] = []
        add = one.engine.add

        def noted(request: Request, id: str, **told: Any) -> None:
            asked.append((request, id, told))
            add(request, id, **told)

        monkeypatch.setattr(one.engine, "add", noted)
        params = SamplingParams(temperature=0.5, top_p=0.9, top_k=7, grammar='start: "a" | "b"')
        full = Request(
            prompt=(5, 6, 7), max_tokens=3, seed=11, params=params, stop_token_ids=(1, 2),
            stop=("zz",), top_logprobs=2, experts_from=1, prediction=(8, 9), drafts=((3, 4), (5,)),
        )  # fmt: skip
        await one.sample(full)
        plain = Request(prompt=(5,), max_tokens=2, seed=1)
        streamed = [event async for event in one.stream(plain)]
        (first, id, told), (second, other_id, told_beside) = asked
        assert first is full and second is plain and id != other_id
        assert told["stop_check"] is not None and told["constraint"] is not None
        assert not told["stream"]
        assert told_beside == {
            "stream": True, "stop_check": None, "constraint": None, "deadline": math.inf
        }  # fmt: skip
        assert isinstance(streamed[-1], Sample) and len(streamed) == 1 + len(streamed[-1].tokens)


async def test_a_deadline_ends_an_answer_and_leaves_nothing_behind() -> None:
    with thread() as one:
        late = Request(prompt=(5,), max_tokens=50, seed=1, deadline_s=1e-9)
        with pytest.raises(DeadlineExceeded):
            await one.sample(late)
        with pytest.raises(DeadlineExceeded):
            [event async for event in one.stream(late)]
        assert not one._inboxes and one.engine.idle
        stats = one.engine.stats()
        assert stats.blocks_free == stats.blocks
        in_time = Request(prompt=(5,), max_tokens=2, seed=1, deadline_s=600.0)
        assert len((await one.sample(in_time)).tokens) == 2


async def test_a_worker_without_weights_says_so() -> None:
    with thread(version=-1) as one, pytest.raises(Unavailable, match="no weights yet"):
        await one.sample(Request(prompt=(5,), max_tokens=2, seed=1))


async def test_what_can_never_be_answered_leaves_nothing_behind() -> None:
    with thread() as one:
        with pytest.raises(ValueError):
            await one.sample(
                Request(prompt=(5,) * CONFIG.max_position_embeddings, max_tokens=2, seed=1)
            )
        assert not one._inboxes
        await one.sample(Request(prompt=(5,), max_tokens=2, seed=1))
        assert not one._inboxes and one.engine.idle


async def test_what_there_is_to_see() -> None:
    with thread() as one:
        before = one.gauges()
        assert before["weight_version"] == 0 and "swap_pause_seconds_p50" not in before
        one.pauses_s.extend([1.0, 2.0, 9.0])
        shown: dict[str, Any] = one.gauges()
        assert (shown["swap_pause_seconds_p50"], shown["swap_pause_seconds_max"]) == (2.0, 9.0)
        assert shown["engine_busy_seconds"] == one.busy_s


async def test_it_is_known_how_long_ago_rl_had_a_slot() -> None:
    seen: list[float] = []
    lending: Any = SimpleNamespace(first_token=lambda s, since_rl_s: seen.append(since_rl_s))
    user = Request(prompt=(5,), max_tokens=3, seed=1, priority="interactive")
    with thread() as one:
        one.lending = lending
        for request in (user, replace(user, priority="batch"), user):
            await one.sample(request)
    assert seen[0] == math.inf and 0.0 < seen[1] < math.inf


async def test_whoever_leaves_early_is_forgotten() -> None:
    with thread() as one:
        long = Request(prompt=(5,), max_tokens=CONFIG.max_position_embeddings - 1, seed=1)
        aborted: list[str] = []
        abort = one.engine.abort

        def noted(id: str) -> None:
            aborted.append(id)
            abort(id)

        one.engine.abort = noted  # type: ignore[method-assign]
        stream = one.stream(long)
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await one.sample(Request(prompt=(5,), max_tokens=1, seed=1))
        assert not one._inboxes and aborted == ["0"]
        async with asyncio.timeout(60):
            while not one.engine.idle:
                await asyncio.sleep(0.001)


async def test_a_closed_thread_has_ended() -> None:
    with thread() as one:
        assert one._thread.is_alive()
    assert not one._thread.is_alive()


async def test_a_version_that_is_there_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched: list[int] = []
    with thread() as one:
        monkeypatch.setattr(one, "_fetch", lambda version: fetched.append(version) or {})
        monkeypatch.setattr(one.engine, "prepare_weights", lambda tensors: lambda: None)
        await one.load(0)
        assert fetched == [] and not one.pauses_s
        await asyncio.gather(one.load(3), one.load(3))
        assert fetched == [3] and one.engine.version == 3 and len(one.pauses_s) == 1


def test_a_thread_that_fails_is_told_of_and_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: happened.append(args.exc_type))
    monkeypatch.setattr(os, "_exit", happened.append)
    exit_on_engine_failure()
    failing = threading.Thread(target=lambda: 1 / 0)
    failing.start()
    failing.join()
    assert happened == [ZeroDivisionError, 1]
