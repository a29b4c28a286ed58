"""Between the event loop and the engine: nothing of a question is lost, and nothing is left behind
of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest

from etude.core.protocols import Ask
from etude.core.types import Sample
from etude.engine.engine import Engine
from etude.engine.scheduler import Request
from etude.model.transformer import ModelConfig
from etude.serve.engine_thread import EngineThread
from etude.serve.http import Unavailable
from tests.serve.test_api import FILES
from tests.small_model import sharp

CONFIG = ModelConfig.from_json(FILES["config.json"])


@contextmanager
def thread(version: int = 0) -> Iterator[EngineThread]:
    made = EngineThread(
        Engine(sharp(CONFIG, 0), max_batch=4, version=version), lambda version: {}, FILES
    )
    yield made
    made.close()


async def test_the_engine_is_asked_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with thread() as one:
        asked: list[Request] = []
        add = one.engine.add
        monkeypatch.setattr(
            one.engine, "add", lambda request: (asked.append(request), add(request))[1]
        )
        ask = Ask(
            prompt=(5, 6, 7), max_tokens=3, seed=11, temperature=0.5, top_p=0.9, top_k=7,
            stop=(1, 2), stop_texts=("zz",), grammar='start: "a" | "b"', top_logprobs=2,
            experts_from=1, prediction=(8, 9), drafts=((3, 4), (5,)),
        )  # fmt: skip
        await one.sample(ask)
        same = {field.name for field in fields(Ask)} - {"stop", "stop_texts", "grammar"}
        assert {name: getattr(asked[0], name) for name in same} == {
            name: getattr(ask, name) for name in same
        }
        assert (
            asked[0].stop == frozenset({1, 2})
            and asked[0].stop_check is not None
            and asked[0].constraint is not None
        )
        assert not asked[0].stream
        plain = Ask(prompt=(5,), max_tokens=2, seed=1)
        streamed = [event async for event in one.stream(plain)]
        assert asked[1].stream and asked[1].stop_check is None and asked[1].constraint is None
        assert isinstance(streamed[-1], Sample) and len(streamed) == 1 + len(streamed[-1].tokens)
        assert asked[0].id != asked[1].id


async def test_a_worker_without_weights_says_so() -> None:
    with thread(version=-1) as one, pytest.raises(Unavailable, match="no weights yet"):
        await one.sample(Ask(prompt=(5,), max_tokens=2, seed=1))


async def test_what_can_never_be_answered_leaves_nothing_behind() -> None:
    with thread() as one:
        with pytest.raises(ValueError):
            await one.sample(
                Ask(prompt=(5,) * CONFIG.max_position_embeddings, max_tokens=2, seed=1)
            )
        assert not one._inboxes
        await one.sample(Ask(prompt=(5,), max_tokens=2, seed=1))
        assert not one._inboxes and one.engine.idle


async def test_what_there_is_to_see() -> None:
    with thread() as one:
        before = one.gauges()
        assert before["weight_version"] == 0 and "swap_pause_seconds_p50" not in before
        one.pauses_s.extend([1.0, 2.0, 9.0])
        shown: dict[str, Any] = one.gauges()
        assert (shown["swap_pause_seconds_p50"], shown["swap_pause_seconds_max"]) == (2.0, 9.0)
        assert shown["engine_busy_seconds"] == one.busy_s
