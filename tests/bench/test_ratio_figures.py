"""The figures of the benchmark of the cost of inference, from a fake engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from etude.bench import ratio
from etude.bench.ratio import Layout, Rollouts


class Event:
    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


class Played(Rollouts):
    """A fake in which twice as many sessions end as a batch needs, in 10 s with 5 s of prompts."""

    def __init__(self) -> None:
        self.layout = Layout(batch=4)
        self.now = 0.0
        self._runner: Any = SimpleNamespace(trace=None)
        stats = SimpleNamespace(prompt_tokens=0, cached_tokens=0)
        self._engine: Any = SimpleNamespace(stats=lambda: SimpleNamespace(**vars(stats)))
        self._stats = stats

    def until(self, count: int) -> list[Any]:
        if self._runner.trace is None:
            return []
        self.now += 10.0
        self._stats.prompt_tokens, self._stats.cached_tokens = 100, 75
        prompts, others = SimpleNamespace(tiles=1), SimpleNamespace(tiles=0)
        self._runner.trace += [
            (prompts, Event(0.0), Event(5000.0)),
            (others, Event(5000.0), Event(10_000.0)),
        ]
        return [object()] * 2 * count


def test_the_share_of_prompts_is_of_the_time_in_which_they_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = Played()
    monkeypatch.setattr(ratio.time, "perf_counter", lambda: played.now)
    sessions, figures = played.measured()
    assert len(sessions) == 4
    assert (figures["rollout_s"], figures["rollout_prompt_share"]) == (5.0, 0.5)
    assert figures["cached_share"] == 0.75
