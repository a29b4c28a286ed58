from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.engine.sampler import draws, sample


def one(logits: list[float], temperature: float, u: float) -> tuple[int, float]:
    tokens_B, logprobs_B = sample(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([u], dtype=torch.float64)
    )
    return int(tokens_B[0]), float(logprobs_B[0])


def test_by_hand() -> None:
    """Probabilities 1/4, 1/2, 1/4: the unit interval is cut at 1/4 and 3/4."""
    logits = np.log([1.0, 2.0, 1.0]).tolist()
    assert [one(logits, 1.0, u)[0] for u in (0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53)] == [0, 0, 1, 1, 2, 2]
    assert np.exp(one(logits, 1.0, 0.5)[1]) == np.float32(0.5) or abs(np.exp(one(logits, 1.0, 0.5)[1]) - 0.5) < 1e-6
    # At temperature 1/2 the odds are squared: 1/6, 4/6, 1/6.
    assert abs(np.exp(one(logits, 0.5, 0.5)[1]) - 4 / 6) < 1e-6
    # Greedy: the likeliest, with the model's own log-prob.
    assert one(logits, 0.0, 0.99)[0] == 1
    assert abs(np.exp(one(logits, 0.0, 0.99)[1]) - 0.5) < 1e-6


@given(
    st.lists(st.floats(-30, 30) | st.just(float("-inf")), min_size=1, max_size=40).filter(lambda x: max(x) > -30),
    st.floats(0, 1, exclude_max=True),
)
def test_only_possible_tokens_are_drawn(logits: list[float], u: float) -> None:
    token, logprob = one(logits, 1.0, u)
    assert 0 <= token < len(logits)
    assert logprob > float("-inf")


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    n = 200_000
    u_B = torch.tensor(draws(seed=1, max_tokens=n), dtype=torch.float64)
    tokens_B, _ = sample(logits.expand(n, 50), torch.ones(n), u_B)
    shares = torch.bincount(tokens_B, minlength=50) / n
    assert torch.allclose(shares, torch.softmax(logits, -1), atol=5e-3)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV, u_B = torch.randn(8, 30, generator=generator), torch.rand(8, generator=generator, dtype=torch.float64)
    temperature_B = torch.tensor([0.0, 0.5, 1.0, 2.0] * 2)
    tokens_B, logprobs_B = sample(logits_BV, temperature_B, u_B)
    for b in range(8):
        row = slice(b, b + 1)
        token_B, logprob_B = sample(logits_BV[row], temperature_B[row], u_B[row])
        assert (token_B[0], logprob_B[0]) == (tokens_B[b], logprobs_B[b])


def test_fewer_draws_are_the_first_of_more() -> None:
    assert draws(7, 5) == draws(7, 50)[:5]
