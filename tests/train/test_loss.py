from __future__ import annotations

import math

import pytest
import torch

from etude.model.attention import Causal
from etude.model.transformer import ModelConfig, fresh
from etude.train.loss import LOSS, drift, masked, token_logprobs, truncated

CONFIG = ModelConfig(
    vocab_size=13,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
)
TOKENS_BT = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]])
MASK_BT = torch.tensor([[False, False, True, True, False, True], [False, True, False, True, False, False]])


def test_truncated_by_hand() -> None:
    new, old = (
        torch.tensor([math.log(0.5), math.log(0.9), math.log(0.2)]),
        torch.tensor([math.log(p) for p in (0.25, 0.1, 0.4)]),
    )
    adv = torch.tensor([1.0, -2.0, 3.0])
    # ratios 2, 9 (cut to 3) and 0.5
    expected = [-2 * 1 * math.log(0.5), -3 * -2 * math.log(0.9), -0.5 * 3 * math.log(0.2)]
    assert truncated(new, old, adv, 3.0).tolist() == pytest.approx(expected, rel=1e-5)


def test_masked_by_hand() -> None:
    new, old = (
        torch.tensor([math.log(0.5), math.log(0.9), math.log(0.1)]),
        torch.tensor([math.log(p) for p in (0.25, 0.1, 0.4)]),
    )
    adv = torch.tensor([1.0, -2.0, 3.0])
    # ratios 2, 9 (above 3) and 0.25 (below 1/3)
    assert masked(new, old, adv, 3.0).tolist() == pytest.approx([-2 * math.log(0.5), 0.0, 0.0], rel=1e-5)


@pytest.mark.parametrize("name", LOSS)
def test_the_gradient_is_the_weight_times_the_advantage(name: str) -> None:
    """The weight is a constant to autograd: d loss / d logp = -min(ratio, cap) * adv, checked in float64."""
    torch.manual_seed(0)
    new = torch.randn(20, dtype=torch.float64, requires_grad=True)
    old, adv = torch.randn(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    LOSS[name](new, old, adv, 1.5).sum().backward()
    ratio = (new - old).exp().detach()
    weight = ratio.clamp(max=1.5) if name == "truncated" else ratio * ((ratio <= 1.5) & (ratio >= 1 / 1.5))
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -weight * adv, rtol=1e-12, atol=1e-12)


def test_token_logprobs_are_those_of_the_plain_softmax_before_each_token() -> None:
    model = fresh(CONFIG, 0).double()
    hidden = model(TOKENS_BT, torch.arange(6).expand(2, -1), Causal())
    plain = torch.log_softmax(model.logits(hidden).double() / 0.7, -1)
    expected = [plain[b, t - 1, TOKENS_BT[b, t]].item() for b in range(2) for t in range(6) if MASK_BT[b, t]]
    logp_N, entropy_N = token_logprobs(model, TOKENS_BT, MASK_BT, 0.7, with_entropy=True)
    assert logp_N.tolist() == pytest.approx(expected, rel=1e-5)
    entropies = -(plain.exp() * plain).sum(-1)
    expected = [entropies[b, t - 1].item() for b in range(2) for t in range(6) if MASK_BT[b, t]]
    assert entropy_N.tolist() == pytest.approx(expected, rel=1e-5)


def test_padding_and_company_change_nothing() -> None:
    model = fresh(CONFIG, 0)
    together = token_logprobs(model, TOKENS_BT, MASK_BT)[0]
    alone = token_logprobs(model, TOKENS_BT[1:, :4], MASK_BT[1:, :4])[0]
    torch.testing.assert_close(together[3:], alone, rtol=1e-5, atol=1e-6)


def test_tokens_that_do_not_count_get_no_gradient() -> None:
    """Without the head's share (untied), a token after the last counted one cannot move anything."""
    model = fresh(
        ModelConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | {"tie_word_embeddings": False}), 0
    )
    tokens, mask = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[False, False, True, False, False]])
    token_logprobs(model, tokens, mask)[0].sum().backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    moved = gradient.abs().sum(-1).nonzero().flatten().tolist()
    assert moved == [1, 2]  # token 3 is predicted, never read; 4 and 5 come after it


def test_drift_by_hand() -> None:
    d = [0.0, math.log(2), math.log(4), -math.log(2)]
    old = torch.full((4,), -3.0)
    got = drift(old + torch.tensor(d), old, 3.0)
    k3 = [math.exp(x) - 1 - x for x in d]
    assert got.k1 == pytest.approx(-sum(d) / 4, abs=1e-6)
    assert got.k3 == pytest.approx(sum(k3) / 4, abs=1e-5)
    assert got.k3_p99 == pytest.approx(max(k3), abs=1e-5)
    assert got.capped == 0.25


def test_drift_p99_leaves_out_the_hundredth() -> None:
    log_ratio = torch.zeros(100)
    log_ratio[17] = 5.0
    assert drift(log_ratio, torch.zeros(100), 2.0).k3_p99 == 0.0
    log_ratio[18] = 5.0
    assert drift(log_ratio, torch.zeros(100), 2.0).k3_p99 > 100


def test_the_head_in_parts_gives_the_same_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(max_logits: int) -> list[torch.Tensor]:
        monkeypatch.setattr("etude.train.head.MAX_LOGITS", max_logits)
        model = fresh(CONFIG, 0).double()
        logp_N, entropy_N = token_logprobs(model, TOKENS_BT, MASK_BT, 0.7, with_entropy=True)
        (logp_N * torch.arange(5)).sum().backward()
        return [logp_N.detach(), entropy_N, *(p.grad for p in model.parameters() if p.grad is not None)]

    whole = run(10**9)
    for parts in (run(2 * CONFIG.vocab_size), run(1)):
        for tensor, expected in zip(parts, whole, strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)  # logits are computed in fp32
