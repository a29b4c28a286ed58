"""Days of users under virtual time: their exact waiting times with RL on the same engine."""

from __future__ import annotations

import math

import pytest

from etude.bench._borrowed_days import Day, PassCost, Work, gpu_cost
from etude.bench.borrowed import simulate_day
from etude.core.lending import SlotPolicy
from etude.model.transformer import ModelConfig

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_position_embeddings=512,
)
WORK = Work(prompt=16, answer=4, rollout=32, slots=4)
FLAT = PassCost(base_s=1.0, sequence_s=0.0, token_s=0.0)


def played(arrivals: list[float], *, rl: bool, cost: PassCost = FLAT) -> Day:
    day = Day(CONFIG, cost, WORK, SlotPolicy(slots=4, max_ttft_s=math.inf) if rl else None)
    day.play(arrivals, 50.0)
    return day


def test_a_user_has_the_very_next_pass() -> None:
    """Even if RL holds all slots and more of its requests wait."""
    alone, beside = (played([10.5], rl=rl).played for rl in (False, True))
    assert alone.ttft_s == [1.0] and alone.turn_s == [4.0] and alone.busy_s == 4.0
    assert beside.ttft_s == [1.5], "the pass that had begun, and its own"
    assert beside.turn_s == [4.5] and beside.preemptions == 1
    assert beside.rl_slot_s / (4 * beside.seconds - beside.users_slot_s) > 0.95


def test_a_burst_waits_for_itself_alone() -> None:
    """If rollouts do not make passes longer, eight users on four slots wait as long as without
    RL."""
    alone, beside = (played([10.0] * 8, rl=rl).played for rl in (False, True))
    assert beside.ttft_s == alone.ttft_s == [1.0] * 4 + [5.0] * 4


def test_rollouts_make_no_first_token_late() -> None:
    slow = PassCost(base_s=1.0, sequence_s=1.0, token_s=0.0)
    alone, beside = (played([10.0], rl=rl, cost=slow).played for rl in (False, True))
    assert beside.ttft_s[0] - alone.ttft_s[0] <= slow.of(4, 0), "the pass that had begun"
    assert beside.turn_s[0] > alone.turn_s[0]


def test_the_cost_on_a_gpu_is_that_of_reading_the_weights() -> None:
    cost = gpu_cost("h100", parameters=8e9, kv_bytes=147e3, context=120)
    assert cost.of(0, 0) == pytest.approx(16e9 / (0.6 * 3.35e12))
    assert cost.of(8, 0) < 1.01 * cost.of(1, 0) and cost.of(0, 1000) > 2 * cost.of(0, 0)


def test_the_figures_of_a_day() -> None:
    cost = gpu_cost("h100", parameters=8e9, kv_bytes=147e3, context=120)
    found = simulate_day(CONFIG, cost, 0, 30.0)
    assert found["lost"] == 0 and found["requests"] > 100
    assert found["idle_used"] > 0.0 and found["preemptions"] > 0
    assert found["users_ttft_p99_ratio"] <= 1.1
