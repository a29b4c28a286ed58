"""The replay benchmark, cut short: it runs, and replay brings the learner nearer to an engine in another precision."""

from __future__ import annotations

import pytest
import torch

from etude.bench import replay


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 10, "BEFORE": 2, "GROUPS": 8, "GROUP_SIZE": 4}.items():
        monkeypatch.setattr(replay, name, value)
    figures = replay.run()
    assert figures["replay.k3_start"] < figures["own.k3_start"]
    assert 0.0 <= figures["bf16.disagreement"] <= 1.0 and 0.0 <= figures["own.reward_end"] <= 1.0


def test_fp4_is_what_e2m1_can_say() -> None:
    weight = torch.tensor([[6.0, 5.1, 4.9, -0.2, 0.3, -2.4, 1.3], [-12.0, 12.0, 1.1, 0.4, 7.0, 3.1, 0.0]])
    expected = torch.tensor([[6.0, 6.0, 4.0, 0.0, 0.5, -2.0, 1.5], [-12.0, 12.0, 1.0, 0.0, 6.0, 3.0, 0.0]])
    assert torch.equal(replay.to_fp4(weight), expected)
