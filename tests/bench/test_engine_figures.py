"""The engine's benchmark ends, whichever request it waits for."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

from etude.bench import engine


def test_transformers_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(model: object, prompts: list[list[int]]) -> None:
        for _ in itertools.count():
            pass

    monkeypatch.setattr(engine, "PATIENCE_S", 0.05)
    monkeypatch.setattr(engine, "generate", never)
    before, threads = signal.getsignal(signal.SIGALRM), torch.get_num_threads()
    figures = engine.their_rate(None, 16)
    torch.set_num_threads(threads)
    assert figures == {"transformers_tokens_per_s_at_most": pytest.approx(16 * engine.NEW / 0.05)}
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (
        0.0,
        0.0,
    )
