"""The replay benchmark, cut short: it runs, and replay brings the learner nearer to an engine in another precision."""

from __future__ import annotations

import pytest
import torch

from etude.bench import replay


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 16, "GROUPS": 8, "GROUP_SIZE": 4}.items():
        monkeypatch.setattr(replay, name, value)
    figures = replay.run()
    assert figures["k3_p99_share"] < 0.8
    assert figures["invariant.k3_max"] == 0.0
    assert 0.0 <= figures["own.reward_end"] <= 1.0 and 0.0 <= figures["replay.reward_end"] <= 1.0


def test_fp8_is_what_e4m3_can_say() -> None:
    weight = torch.tensor([[448.0, 431.0, 17.4], [-0.3, 1.06, 0.0]])
    assert torch.equal(replay.to_fp8(weight), torch.tensor([[448.0, 416.0, 18.0], [-0.3125, 1.0, 0.0]]))
