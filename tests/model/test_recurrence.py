"""The gated delta rule gives the same result token by token, in chunks, in pieces and side by
side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.utils._device
from torch import Tensor
from transformers.initialization import meta_device_safe_creation_ops

from etude.model.attention import CausalAttention
from etude.model.config import LinearConfig, ModelConfig
from etude.model.recurrence import CHUNK, DeltaRule, Recurrence, Span, StateCache
from etude.model.transformer import Transformer

LINEAR = LinearConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, conv_kernel_dim=3,
    layers=(0,),
)  # fmt: skip
CONFIG = ModelConfig(
    vocab_size=7, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=8, max_position_embeddings=512, model_type="qwen3_next", linear=LINEAR,
)  # fmt: skip


def drawn(count: int, seed: int = 0) -> tuple[DeltaRule, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(LINEAR.conv_dim, LINEAR.conv_kernel_dim, generator=g)
    rule = DeltaRule(weight, 2, 6, 5, torch.nn.functional.silu)
    mixed = torch.randn(count, LINEAR.conv_dim, generator=g)
    decay = -torch.rand(count, 4, generator=g)
    return rule, mixed, decay, torch.rand(count, 4, generator=g)


def one_by_one(rule: DeltaRule, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is defined, in float64, one head and one token after the other."""
    width = rule.weight_CW.shape[1]
    padded = torch.cat((mixed.new_zeros(width - 1, mixed.shape[1]), mixed)).double()
    read = []
    memory = torch.zeros(4, 6, 5, dtype=torch.float64)
    for n in range(len(mixed)):
        seen = (padded[n : n + width].T * rule.weight_CW.double()).sum(-1)
        q, k, v = torch.nn.functional.silu(seen).split((12, 12, 20))
        for h in range(4):
            query, key = (x.view(2, 6)[h // 2] for x in (q, k))
            query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
            memory[h] *= decay[n, h].double().exp()
            memory[h] += beta[n, h] * torch.outer(key, v.view(4, 5)[h] - key @ memory[h])
            read.append(query @ memory[h] / 6**0.5)
    return torch.stack(read).view(-1, 4, 5).float()


@pytest.mark.parametrize("lengths", [[1], [5, 1, 2], [CHUNK], [CHUNK + 1, 3, 2 * CHUNK + 7]])
def test_sequences_side_by_side_are_what_they_are_alone(lengths: list[int]) -> None:
    rule, mixed, decay, beta = drawn(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = [Span(s, e) for s, e in zip(starts, starts[1:], strict=False)]
    found = Recurrence(spans)(0, rule, mixed, decay, beta)
    parts = zip(*(x.split(lengths) for x in (mixed, decay, beta)), strict=True)
    expected = torch.cat([one_by_one(rule, *part) for part in parts])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_filter_of_one_token_needs_no_tail() -> None:
    rule, mixed, decay, beta = drawn(9)
    rule = replace(rule, weight_CW=rule.weight_CW[:, :1])
    found = Recurrence([Span(0, 9)])(0, rule, mixed, decay, beta)
    torch.testing.assert_close(found, one_by_one(rule, mixed, decay, beta), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pieces", [[30], [1] * 30, [7, 1, 1, 13, 8], [8, 8, 14], [3, 20, 7]])
def test_in_pieces_with_the_state_kept_by_block(pieces: list[int]) -> None:
    """The contents of a block do not depend on how it was filled, and another sequence may begin
    after it, even in the same pass."""
    rule, mixed, decay, beta = drawn(30)
    expected = one_by_one(rule, mixed, decay, beta)
    states, blocks, first = StateCache(CONFIG, 9, torch.zeros(())), [5, 2, 8, 1], 0
    for count in pieces:
        span = Span(0, count, first, blocks, 8)
        part = (x[first : first + count] for x in (mixed, decay, beta))
        found = Recurrence([span], states)(0, rule, *part)
        torch.testing.assert_close(found, expected[first : first + count], atol=2e-5, rtol=1e-4)
        first += count

    fresh = StateCache(CONFIG, 9, torch.zeros(()))
    both = [Span(0, 30, 0, blocks, 8), Span(30, 44, 16, [5, 2, 6, 4], 8)]
    twice = (torch.cat((x, x[16:])) for x in (mixed, decay, beta))
    found = Recurrence(both, fresh)(0, rule, *twice)
    torch.testing.assert_close(found, torch.cat((expected, expected[16:])), atol=2e-5, rtol=1e-4)
    pairs = zip(states.memories + states.tails, fresh.memories + fresh.tails, strict=True)
    for kept, other in pairs:
        torch.testing.assert_close(kept[blocks], other[blocks], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(other[[6, 4]], other[[8, 1]], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("attend", [CausalAttention(), CausalAttention([70, 1])])
def test_what_the_host_lays_out_goes_where_the_model_is(attend: CausalAttention) -> None:
    """Runs on a device without numbers, which refuses any tensor that is elsewhere."""
    with torch.device("meta"):
        model = Transformer(CONFIG)
        rows = torch.zeros((71,) if attend.lengths else (2, 71), dtype=torch.int64)
    model.model.layers = model.model.layers[:1]  # the other one has attention
    model._is_local = model._is_local[:1]
    assert model(rows, rows, attend).shape == (*rows.shape, 8)


def test_a_model_without_numbers_after_transformers_has_loaded_one() -> None:
    """While it loads, transformers replaces `torch.linspace`, and torch records at that time, once
    and for all, which functions get a device."""
    noted = torch.utils._device._device_constructors
    noted.cache_clear()
    try:
        with meta_device_safe_creation_ops():
            noted()
        with torch.device("meta"):
            model = Transformer(CONFIG)
    finally:
        noted.cache_clear()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
