"""The engine's benchmark ends, whoever it waits for."""

from __future__ import annotations

import itertools
import signal

import pytest
import torch

from etude.bench import engine


def test_a_side_that_does_not_answer_is_given_what_it_reaches_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PATIENCE_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)

    def never(prompts: list[list[int]]) -> None:
        for _ in itertools.count():
            pass

    assert engine.rate(torch.get_num_threads(), 16, never) == pytest.approx(16 * engine.NEW / 0.05)
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
