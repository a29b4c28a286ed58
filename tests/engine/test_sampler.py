from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.core.sampling import SamplingParams
from etude.engine.batch import SamplerOutput, SamplingBatch
from etude.engine.sampler import CHUNK, filter_top_k_top_p, inverse_cdf, sample, uniforms


def drawn(logits_RV: Tensor, u: list[float], **options: Any) -> SamplerOutput:
    allowed, top = options.pop("allowed", {}), options.pop("top", 0)
    history = options.pop("history", None)
    batch = SamplingBatch(
        params_R=[SamplingParams(**options)] * len(u),
        u_R=np.array(u),
        token_masks=allowed,
        histories={} if history is None else dict.fromkeys(range(len(u)), history),
        num_top_logprobs=top,
    )
    return sample(logits_RV.clone(), batch)


def one(logits: list[float], u: float, **options: Any) -> tuple[int, float]:
    result = drawn(torch.tensor([logits]), [u], **options)
    return result.tokens[0], result.logprobs[0]


def test_by_hand() -> None:
    """Probabilities 1/4, 1/2, 1/4: the unit interval is cut at 1/4 and 3/4."""
    logits = np.log([1.0, 2.0, 1.0]).tolist()
    assert [one(logits, u)[0] for u in (0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2**-53)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    assert np.exp(one(logits, 0.5)[1]) == pytest.approx(1 / 2)
    # At temperature 1/2 the odds are squared: 1/6, 4/6, 1/6.
    assert np.exp(one(logits, 0.5, temperature=0.5)[1]) == pytest.approx(4 / 6)
    # Greedy: the likeliest, with the model's own log-prob, whatever the other parameters are.
    token, logprob = one(logits, 0.99, temperature=0.0, top_k=1)
    assert (token, np.exp(logprob)) == (1, pytest.approx(1 / 2))


def test_cuts_by_hand() -> None:
    """Probabilities 0.1, 0.4, 0.2, 0.3. Tokens that are cut off are never sampled, and the rest sum
    to 1."""
    logits = np.log([1.0, 4.0, 2.0, 3.0]).tolist()
    every = [i / 100 for i in range(100)]
    assert dict(one(logits, u, top_k=2) for u in every) == pytest.approx(
        {1: np.log(4 / 7), 3: np.log(3 / 7)}
    )
    assert {one(logits, u, top_p=0.65)[0] for u in every} == {1, 3}
    assert {one(logits, u, top_p=0.75)[0] for u in every} == {1, 2, 3}
    assert {one(logits, u, top_p=1e-6)[0] for u in every} == {1}
    # Top-p is a share of what top-k leaves: 4/9, 3/9, 2/9.
    assert {one(logits, u, top_p=0.7, top_k=3)[0] for u in every} == {1, 3}
    # At least 0.6 times as likely as the likeliest: 4/7 and 3/7 are left.
    assert dict(one(logits, u, min_p=0.6) for u in every) == pytest.approx(
        {1: np.log(4 / 7), 3: np.log(3 / 7)}
    )
    assert {one(logits, u, min_p=1.0)[0] for u in every} == {1}
    # Min-p comes first: of the 9/9 that it leaves, 4/9 and 3/9 make up 0.7.
    assert {one(logits, u, min_p=0.4, top_p=0.7)[0] for u in every} == {1, 3}
    assert one(logits, 0.99, min_p=1.0, temperature=0.0) == (1, pytest.approx(np.log(0.4)))
    # After the temperature: at 1/2 the odds are squared, 9/16 is less than 0.6.
    assert {one(logits, u, min_p=0.6, temperature=0.5)[0] for u in every} == {1}
    allowed = {0: np.array([True, False, False, True])}
    assert dict(one(logits, u, allowed=allowed) for u in every) == pytest.approx(
        {0: np.log(1 / 4), 3: np.log(3 / 4)}
    )
    result = drawn(torch.tensor([logits]), [0.5], top_k=2, top=3)
    assert [token for token, _ in result.top_logprobs[0]] == [1, 3]


def test_repetition_by_hand() -> None:
    """Logits 2, -1, 2, -1. Tokens seen, once or more often, are lowered, whatever their sign."""
    logits = [2.0, -1.0, 2.0, -1.0]
    moved = torch.log_softmax(torch.tensor([1.0, -2.0, 2.0, -1.0]), -1).tolist()
    every = [i / 1000 for i in range(1000)]
    options = {"history": [0, 1, 1, 0, 0], "repetition_penalty": 2.0}
    assert dict(one(logits, u, **options) for u in every) == pytest.approx(dict(enumerate(moved)))
    # The penalty comes before the temperature.
    colder = torch.log_softmax(torch.tensor([2.0, -4.0, 4.0, -2.0]), -1).tolist()
    assert one(logits, 0.5, temperature=0.5, **options) == (2, pytest.approx(colder[2]))
    assert one(logits, 0.0, temperature=0.0, **options) == (2, pytest.approx(moved[2]))
    # A penalty below 1 does the opposite; 1 has no effect.
    assert one(logits, 0.99, temperature=0.0, history=[1], repetition_penalty=0.01)[0] == 0
    assert one(logits, 0.3, history=[0, 1], repetition_penalty=1.0) == one(logits, 0.3)
    # A row uses its own history only, and tokens that a grammar forbids stay forbidden.
    masked = {0: np.array([True, True, False, False])}
    assert {one(logits, u, allowed=masked, **options)[0] for u in every} == {0, 1}


@given(st.integers(1, 3000), st.integers(0, 2000), st.floats(1e-6, 1.0), st.integers(0, 9))
def test_a_cut_keeps_just_enough(size: int, top_k: int, top_p: float, seed: int) -> None:
    p_V = torch.softmax(2 * torch.randn(size, generator=torch.Generator().manual_seed(seed)), -1)
    kept_V = filter_top_k_top_p(p_V, top_k, top_p)
    assert float(kept_V.sum()) == pytest.approx(1.0, abs=1e-4)
    ordered = p_V.double().sort(descending=True).values[: top_k or size]
    ordered /= ordered.sum()
    enough = int((ordered.cumsum(0) < top_p * (1 - 1e-6)).sum()) + 1
    assert abs(int((kept_V > 0).sum()) - min(enough, len(ordered))) <= 1 or top_p > 0.999
    assert (
        float(p_V[kept_V > 0].min()) >= float(p_V[kept_V == 0].max())
        if (kept_V == 0).any()
        else True
    )


@given(
    st.lists(st.floats(-30, 30) | st.just(float("-inf")), min_size=1, max_size=40).filter(
        lambda x: max(x) > -30
    ),
    st.integers(1, 40),
    st.floats(0, 1, exclude_max=True),
)
def test_only_possible_tokens_are_drawn(logits: list[float], repeats: int, u: float) -> None:
    token, logprob = one(logits * repeats, u)
    assert 0 <= token < len(logits) * repeats
    assert logprob > float("-inf")


@pytest.mark.parametrize("size", [50, CHUNK, CHUNK + 1, 5000])
def test_pieces_change_nothing(size: int) -> None:
    p_RV = torch.softmax(torch.randn(200, size, generator=torch.Generator().manual_seed(0)), -1)
    u_R = torch.tensor(uniforms(3, 200))
    plain_R = torch.searchsorted(
        p_RV.double().cumsum(-1), (u_R * p_RV.double().sum(-1))[:, None], right=True
    )[:, 0]
    assert inverse_cdf(p_RV, u_R).tolist() == plain_R.tolist()


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    n = 200_000
    tokens = drawn(logits.expand(n, 50), uniforms(seed=1, max_tokens=n).tolist()).tokens
    shares = torch.bincount(torch.tensor(tokens), minlength=50) / n
    assert torch.allclose(shares, torch.softmax(logits, -1), atol=5e-3)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV, u_R = torch.randn(8, 30, generator=generator), uniforms(2, 8)
    params_R = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(temperature=2.0, top_p=0.9, top_k=4),
    ] * 2
    together = sample(logits_RV, SamplingBatch(params_R=params_R, u_R=u_R))
    for row in range(8):
        one_row = SamplingBatch(params_R=params_R[row : row + 1], u_R=u_R[row : row + 1])
        single = sample(logits_RV[row : row + 1], one_row)
        assert (single.tokens[0], single.logprobs[0]) == (
            together.tokens[row],
            together.logprobs[row],
        )


def test_fewer_draws_are_the_first_of_more() -> None:
    assert uniforms(7, 5).tolist() == uniforms(7, 50)[:5].tolist()
