"""The sampler. R rows, V vocabulary, C chunks of it, S tokens that were seen before.

A token is the inverse of the cumulative distribution, in the order of token ids, at a number in [0,
1) that belongs to the request. Probabilities are float32. Their sums are float64, since over a
large vocabulary float32 would shift the boundaries by more than the width of a rare token. Float64
sums over all of it would cost more than a small model, so the vocabulary is cut into chunks that
are summed in float32, and float64 sums are taken within a single chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from etude.core.sampling import SamplingParams
from etude.engine.batch import SamplerOutput, SamplingBatch

CHUNK = 512
SHORTLIST = 1024
"""The number of likeliest tokens that top-p looks at first: they nearly always suffice, and sorting
all tokens takes longer than the model."""


def uniforms(seed: int, max_tokens: int) -> NDArray[np.float64]:
    """The random numbers of one request, fixed before it starts: neither the batch nor a weight
    swap changes them."""
    return np.random.Generator(np.random.PCG64(seed)).random(max_tokens)


def sample(logits_RV: Tensor, sampling: SamplingBatch) -> SamplerOutput:
    """Sample one token for each row, with its log-prob under the distribution that it was sampled
    from. Temperature 0 is greedy, and the log-prob is then that of temperature 1."""
    for row, allowed_V in sampling.token_masks.items():
        logits_RV[row].masked_fill_(~torch.from_numpy(allowed_V).to(logits_RV.device), -torch.inf)
    for row, history in sampling.histories.items():
        penalize_repetition(logits_RV[row], history, sampling.params_R[row].repetition_penalty)
    temperature_R = sampling.temperature_R
    greedy_R = temperature_R == 0
    divisor_R = np.where(greedy_R, np.float32(1), temperature_R)
    if (divisor_R != 1).any():
        logits_RV = logits_RV / torch.from_numpy(divisor_R).to(logits_RV.device)[:, None]
    p_RV = torch.softmax(logits_RV, -1)
    for row, params in enumerate(sampling.params_R):
        if cuts_off(params):
            p_RV[row] = filtered(p_RV[row], params)
    tokens_R = inverse_cdf(p_RV, torch.from_numpy(sampling.u_R).to(p_RV.device))
    if greedy_R.any():
        tokens_R = torch.where(
            torch.from_numpy(greedy_R).to(p_RV.device), logits_RV.argmax(-1), tokens_R
        )
    logprobs_R = p_RV.gather(1, tokens_R[:, None])[:, 0].log()
    return SamplerOutput(
        tokens=tokens_R.tolist(),
        logprobs=logprobs_R.tolist(),
        top_logprobs=_top_logprobs(p_RV, sampling.num_top_logprobs),
    )


def penalize_repetition(logits_V: Tensor, history: Sequence[int], penalty: float) -> None:
    """Apply a repetition penalty in place, before the temperature, as in vLLM: a penalty above 1
    lowers the logit of every token in the history, whatever its sign."""
    if penalty == 1:
        return
    seen_S = torch.tensor(sorted(set(history)), device=logits_V.device)
    logits_S = logits_V[seen_S]
    logits_V[seen_S] = torch.where(logits_S > 0, logits_S / penalty, logits_S * penalty)


def inverse_cdf(p_RV: Tensor, u_R: Tensor) -> Tensor:
    """Sample by the inverse of the cumulative distribution: the first token at which the sum of
    probabilities exceeds the share u of the total. It never has probability 0."""
    rows, size = p_RV.shape
    if size <= CHUNK:
        return _first_above(p_RV.double().cumsum_(-1), u_R)
    # Padding by nothing would still copy.
    p_RCP = (F.pad(p_RV, (0, -size % CHUNK)) if size % CHUNK else p_RV).view(rows, -1, CHUNK)
    ends_RC = p_RCP.sum(-1).double().cumsum_(-1)
    piece_R = _first_above(ends_RC, u_R)
    begin_R = F.pad(ends_RC, (1, 0)).gather(1, piece_R[:, None])[:, 0]
    sums_RP = p_RCP[torch.arange(rows, device=piece_R.device), piece_R].double().cumsum_(-1)
    rest_R = (u_R * ends_RC[:, -1] - begin_R) / sums_RP[:, -1]
    return piece_R * CHUNK + _first_above(sums_RP, rest_R)


def _first_above(sums_RC: Tensor, u_R: Tensor) -> Tensor:
    # Rounding may put the target at the very end, which no sum exceeds.
    end_R = sums_RC[:, -1]
    target_R = torch.minimum(
        u_R.clamp(min=0) * end_R, torch.nextafter(end_R, torch.zeros_like(end_R))
    )
    return torch.searchsorted(sums_RC, target_R[:, None], right=True)[:, 0]


def cuts_off(params: SamplingParams) -> bool:
    """True if top-k, top-p or min-p apply. They always keep the likeliest token."""
    return params.temperature != 0 and (
        params.top_k > 0 or bool(np.float32(params.top_p) < 1) or params.min_p > 0
    )


def filtered(p_V: Tensor, params: SamplingParams) -> Tensor:
    """The distribution after min-p, then top-k and top-p, as in vLLM."""
    if params.min_p > 0:
        p_V = torch.where(p_V >= params.min_p * p_V.max(), p_V, 0.0)
        p_V = p_V / p_V.sum()
    top_p = float(np.float32(params.top_p))
    return filter_top_k_top_p(p_V, params.top_k, top_p) if params.top_k or top_p < 1 else p_V


def filter_top_k_top_p(p_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the `top_k` likeliest tokens (0: all), and of these only the likeliest that together
    make up `top_p`, including the token that crosses it."""
    size = len(p_V)
    for count in (min(top_k or SHORTLIST, size), size):
        likely = p_V.topk(count)
        sums = likely.values.double().cumsum(0)
        whole = sums[-1] if top_k else p_V.sum(dtype=torch.float64)
        if top_k or float(sums[-1]) >= top_p * float(whole):
            break
    kept = int(torch.searchsorted(sums, top_p * whole)) + 1 if top_p < 1 else count
    values, indices = likely.values[:kept], likely.indices[:kept]
    return torch.zeros_like(p_V).index_copy_(0, indices, values / values.sum())


def _top_logprobs(p_RV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    if not count:
        return []
    values_RK, indices_RK = p_RV.topk(min(count, p_RV.shape[1]))
    return [
        [
            (token, logprob)
            for token, logprob in zip(tokens, logprobs, strict=True)
            if logprob > -float("inf")
        ]
        for tokens, logprobs in zip(indices_RK.tolist(), values_RK.log().tolist(), strict=True)
    ]
