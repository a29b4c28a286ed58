"""The replay benchmark, cut short: it runs, and replay brings the learner closer to an engine with
a different precision."""

from __future__ import annotations

import pytest
import torch

from etude.bench import replay


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 16, "GROUPS": 8, "GROUP_SIZE": 4, "SEEDS": (0,)}.items():
        monkeypatch.setattr(replay, name, value)
    figures = replay.run()
    assert figures["k3_p99_share"] < 0.8
    assert figures["invariant.k3_max"] == 0.0
    assert 0.0 <= figures["own.reward_end"] <= 1.0 and 0.0 <= figures["replay.reward_end"] <= 1.0


def test_fp4_is_what_e2m1_can_say() -> None:
    weight = torch.tensor([[12.0, 6.9, -0.4], [-0.6, 0.26, 0.0], [0.0, 0.0, 0.0]])
    expected = torch.tensor([[12.0, 6.0, 0.0], [-0.6, 0.3, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(replay.to_fp4(weight), expected)
