from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from etude.core.stages import LOSSES
from etude.model.attention import CausalAttention
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.train.correction import CORRECTION
from etude.train.head import MAX_LOGITS
from etude.train.loss import LOSS, Clip, LossInputs, gspo, ppo_clip, token_logprobs
from etude.train.packing import PackedMicrobatch, TokenSequence, pack_batch

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
MASK_BT = torch.tensor(
    [[False, False, True, True, False, True], [False, True, False, True, False, False]]
)


def packed(tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> PackedMicrobatch:
    return pack_batch(
        [TokenSequence(*each) for each in zip(tokens_BT.tolist(), mask_BT.tolist(), strict=True)]
    )


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


ROW_N = torch.tensor([0, 0, 1])  # two tokens of one row, one of another


def slopes(
    name: str, new: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, clip: Clip
) -> list[float]:
    """d loss / d logp of every token, by autograd in float64."""
    leaf = new.clone().requires_grad_()
    LOSS[name].function(
        LossInputs(logp_N=leaf, old_logp_N=old, adv_N=adv, row_N=ROW_N), clip
    ).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_the_names_in_the_config_are_those_of_the_losses() -> None:
    assert tuple(LOSS) == LOSSES


@pytest.mark.parametrize(
    ("name", "clip", "expected"),
    [
        # Ratios 2, 0.5 and 1.25; advantages 1, -2 and 4. Slope of a token: -weight x advantage.
        ("reinforce", Clip(0.2, 0.2), [-1.0, 2.0, -4.0]),
        # 2 is above 1.2 and pushed up: zero gradient. 0.5 is below 0.8 and pushed down: zero
        # gradient. 1.25 is above 1.2: zero gradient.
        ("ppo_clip", Clip(0.2, 0.2), [0.0, 0.0, 0.0]),
        ("grpo", Clip(0.2, 0.3), [0.0, 0.0, -1.25 * 4]),
        ("dapo", Clip(0.6, 1.5), [-2.0, 1.0, -5.0]),
        ("dr_grpo", Clip(0.6, 0.2), [0.0, 1.0, 0.0]),
        # The weight is cut to 1.2 or 0.8, and no token has zero gradient.
        ("cispo", Clip(0.2, 0.2), [-1.2, 1.6, -4.8]),
        # The first row's ratio is sqrt(2 x 0.5) = 1, half of it from each token: both advantages, 1
        # - 2, act through both log-probs. The second row is one token.
        ("gspo", Clip(0.2, 0.3), [0.5, 0.5, -5.0]),
        ("gspo", Clip(0.2, 0.2), [0.5, 0.5, 0.0]),
    ],
)
def test_the_slope_of_every_loss_by_hand(name: str, clip: Clip, expected: list[float]) -> None:
    new, old = logs(0.5, 0.1, 0.5), logs(0.25, 0.2, 0.4)
    adv = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
    assert slopes(name, new, old, adv, clip) == pytest.approx(expected, rel=1e-12)


def test_the_value_of_the_clipped_losses_by_hand() -> None:
    new, old = logs(0.5, 0.1, 0.5), logs(0.25, 0.2, 0.4)
    tokens = LossInputs(
        logp_N=new, old_logp_N=old, adv_N=torch.tensor([1.0, -2.0, 4.0]).double(), row_N=ROW_N
    )
    # min(2, 1.2) x 1; min(0.5 x -2, 0.8 x -2) = -1.6; min(1.25, 1.2) x 4
    assert ppo_clip(tokens, Clip(0.2, 0.2)).tolist() == pytest.approx([-1.2, 1.6, -4.8])
    # Both tokens of the first row have the row's ratio, 1.
    assert gspo(tokens, Clip(0.2, 0.2)).tolist() == pytest.approx([-1.0, 2.0, -4.8])


def test_losses_are_set_as_their_papers_have_them() -> None:
    found = {
        name: ((loss.clip.low, loss.clip.high), loss.aggregate, loss.correction)
        for name, loss in LOSS.items()
    }
    assert found == {
        "reinforce": ((math.inf, math.inf), "token", "truncated"),
        "ppo_clip": ((0.2, 0.2), "token", "none"),
        "grpo": ((0.2, 0.2), "sequence", "none"),
        "dr_grpo": ((0.2, 0.2), "constant", "none"),
        "dapo": ((0.2, 0.28), "token", "none"),
        "gspo": ((3e-4, 4e-4), "sequence", "none"),
        "cispo": ((1.0, 4.0), "token", "none"),
    }


@pytest.mark.parametrize("name", LOSS)
def test_on_policy_all_losses_are_the_policy_gradient(name: str) -> None:
    """At ratio 1 no clip acts: d loss / d logp = -advantage, for equal advantages within a row."""
    new, adv = logs(0.5, 0.1, 0.5), torch.tensor([3.0, 3.0, -4.0], dtype=torch.float64)
    assert slopes(name, new, new, adv, LOSS[name].clip) == pytest.approx([-3.0, -3.0, 4.0])


@pytest.mark.parametrize("name", LOSS)
def test_a_weight_on_the_advantage_is_a_weight_on_the_loss(name: str) -> None:
    """This makes a correction independent of the loss."""
    new, old = logs(0.5, 0.1, 0.5), logs(0.3, 0.2, 0.4)
    adv, weight = torch.tensor([1.0, -2.0, 4.0]).double(), torch.tensor([0.5, 0.0, 3.0]).double()
    function, clip = LOSS[name].function, LOSS[name].clip
    inside = function(LossInputs(logp_N=new, old_logp_N=old, adv_N=weight * adv, row_N=ROW_N), clip)
    outside = weight * function(
        LossInputs(logp_N=new, old_logp_N=old, adv_N=adv, row_N=ROW_N), clip
    )
    torch.testing.assert_close(inside, outside)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Ratios 2 and 0.5 in the first row, 9 and 1.5 in the second: products 1 and 13.5. The cap
        # is 1.8.
        ("truncated", [1.8, 0.5, 1.8, 1.5]),
        ("masked", [0.0, 0.0, 0.0, 1.5]),
        ("sequence_truncated", [1.0, 1.0, 1.8, 1.8]),
        ("sequence_masked", [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_importance_weights_by_hand(name: str, expected: list[float]) -> None:
    log_ratio = logs(2.0, 0.5, 9.0, 1.5)
    correction = CORRECTION[name]
    weights = correction.bound(correction.ratio(log_ratio, torch.tensor([0, 0, 1, 1])), 1.8)
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", CORRECTION)
def test_a_ratio_that_overflows_gives_a_weight_that_is_finite(name: str) -> None:
    correction = CORRECTION[name]
    weights = correction.bound(
        correction.ratio(torch.tensor([1000.0, -1000.0]), torch.tensor([0, 1])), 2.0
    )
    assert weights.isfinite().all()


def at_temperature(packed: PackedMicrobatch, temperature: float) -> PackedMicrobatch:
    return replace(
        packed, temperature_N=torch.full((packed.num_loss_tokens,), temperature).double()
    )


def test_token_logprobs_are_those_of_the_plain_softmax_before_each_token() -> None:
    model = init_from_scratch(CONFIG, 0).double()
    hidden = model(TOKENS_BT, torch.arange(6).expand(2, -1), CausalAttention())
    plain = torch.log_softmax(model.logits(hidden).double() / 0.7, -1)
    expected = [
        plain[b, t - 1, TOKENS_BT[b, t]].item() for b in range(2) for t in range(6) if MASK_BT[b, t]
    ]
    logp_N, (entropy_N, likeliest_N) = token_logprobs(
        model, at_temperature(packed(TOKENS_BT, MASK_BT), 0.7), with_stats=True
    )
    assert logp_N.tolist() == pytest.approx(expected, rel=1e-5)
    entropies = -(plain.exp() * plain).sum(-1)
    expected = [entropies[b, t - 1].item() for b in range(2) for t in range(6) if MASK_BT[b, t]]
    assert entropy_N.tolist() == pytest.approx(expected, rel=1e-5)
    assert likeliest_N.tolist() == [
        plain[b, t - 1].argmax() for b in range(2) for t in range(6) if MASK_BT[b, t]
    ]


def test_padding_and_company_change_nothing() -> None:
    model = init_from_scratch(CONFIG, 0)
    together = token_logprobs(model, packed(TOKENS_BT, MASK_BT))[0]
    alone = token_logprobs(model, packed(TOKENS_BT[1:, :4], MASK_BT[1:, :4]))[0]
    torch.testing.assert_close(together[3:], alone, rtol=1e-5, atol=1e-6)


def test_tokens_that_do_not_count_get_no_gradient() -> None:
    """Without the head's share (untied), a token after the last counted one cannot move
    anything."""
    model = init_from_scratch(
        ModelConfig(
            **{name: getattr(CONFIG, name) for name in CONFIG.__slots__}
            | {"tie_word_embeddings": False}
        ),
        0,
    )
    tokens, mask = (
        torch.tensor([[1, 2, 3, 4, 5]]),
        torch.tensor([[False, False, True, False, False]]),
    )
    token_logprobs(model, packed(tokens, mask))[0].sum().backward()
    gradient = model.model.embed_tokens.weight.grad
    assert gradient is not None
    moved = gradient.abs().sum(-1).nonzero().flatten().tolist()
    assert moved == [1, 2]  # token 3 is predicted, never read; 4 and 5 come after it


def test_the_head_in_parts_gives_the_same_with_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(max_logits: int) -> list[torch.Tensor]:
        monkeypatch.setitem(MAX_LOGITS, "cpu", max_logits)
        model = init_from_scratch(CONFIG, 0).double()
        logp_N, (entropy_N, likeliest_N) = token_logprobs(
            model, at_temperature(packed(TOKENS_BT, MASK_BT), 0.7), with_stats=True
        )
        (logp_N * torch.arange(5)).sum().backward()
        return [
            logp_N.detach(),
            entropy_N,
            likeliest_N,
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]

    whole = run(10**9)
    for parts in (run(2 * CONFIG.vocab_size), run(1)):
        for tensor, expected in zip(parts, whole, strict=True):
            # logits are computed in fp32
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
