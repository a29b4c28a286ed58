"""The RL objective, composed of its parts: advantage minus KL, corrected, as a loss, aggregated.

    advantage                     given by the controller (`core.advantage`)
    - kl_coef x k1                the penalty on moving away from the reference
    x importance weight           for tokens that another policy sampled (`train.correction`)
    -> loss of each token         (`train.loss`)
    -> one number                 `AGGREGATE`

The KL is part of the reward and not of the loss: k1 = log-prob of the policy minus that of the
reference estimates the KL, but its derivative is 0 on average, so it would have no effect as a term
of the loss. As a reward for each token, its policy gradient is the gradient of the KL in the
visited contexts.

Shapes: N the sampled tokens of a microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.core.errors import EtudeError, user_code
from etude.core.types import Row
from etude.train.correction import CORRECTION
from etude.train.loss import LOSS, Clip, LossInputs, PolicyLoss

Aggregate = Callable[[Sequence[Row], int], tuple[list[float], float]]
"""An aggregation: (rows of the whole batch, tokens of the context) -> a weight for each row, and
the divisor of the weighted sum.

It takes the whole batch, so the division into microbatches and ranks changes nothing.
"""


def by_token(rows: Sequence[Row], context: int) -> tuple[list[float], float]:
    """The mean over all tokens: a long attempt counts more."""
    return [1.0] * len(rows), float(sum(sum(row.mask) for row in rows))


def by_sequence(rows: Sequence[Row], context: int) -> tuple[list[float], float]:
    """The mean over attempts of the mean over their tokens, all segments of an attempt together:
    every attempt counts the same."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.sample] += sum(row.mask)
    return [1.0 / sizes[row.sample] for row in rows], float(len(sizes))


def by_constant(rows: Sequence[Row], context: int) -> tuple[list[float], float]:
    """The sum over tokens, divided by attempts times context: the divisor does not depend on the
    answers, so no length is favoured."""
    return [1.0] * len(rows), float(len({row.sample for row in rows}) * context)


AGGREGATE: dict[str, Aggregate] = {
    "token": by_token,
    "sequence": by_sequence,
    "constant": by_constant,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The loss of each token, and which tokens were truncated or have zero gradient."""

    loss_N: Tensor
    corrected_N: Tensor
    """True where the correction changed the importance weight."""
    zero_grad_N: Tensor
    """True where a token has zero gradient although its advantage is not 0: masked, or clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlObjective:
    """The RL objective: KL penalty (on the advantages), importance-sampling correction, policy loss
    and aggregation. The default is `reinforce` with truncated importance weights and a mean over
    tokens."""

    loss: PolicyLoss = LOSS["reinforce"]
    aggregate: str = "token"
    clip: Clip = LOSS["reinforce"].clip
    correction: str = "truncated"
    correction_cap: float = 2.0
    kl_coef: float = 0.0
    distills: bool = False
    """On-policy distillation: the given advantages are log teacher - log engine (`train.teacher`);
    they are replaced by log teacher - log learner."""

    def token_losses(
        self,
        logp_N: Tensor,
        engine_logp_N: Tensor,
        adv_N: Tensor,
        row_N: Tensor,
        ref_logp_N: Tensor | None = None,
    ) -> TokenLosses:
        """The loss of each token. `row_N` numbers the row of each token; `ref_logp_N` is needed
        with a `kl_coef`."""
        own_N = logp_N.detach()
        if self.distills:
            adv_N = adv_N + (engine_logp_N - own_N)
        if self.kl_coef:
            assert ref_logp_N is not None
            adv_N = adv_N - self.kl_coef * (own_N - ref_logp_N)
        old_N = engine_logp_N
        weighed_N = adv_N
        corrected_N = torch.zeros_like(adv_N, dtype=torch.bool)
        if self.correction != "none":
            correction = CORRECTION[self.correction]
            ratio_N = correction.ratio(own_N - engine_logp_N, row_N)
            weight_N = correction.bound(ratio_N, self.correction_cap)
            old_N = own_N
            weighed_N = weight_N * adv_N
            corrected_N = weight_N != ratio_N

        def losses(logp_N: Tensor) -> Tensor:
            tokens = LossInputs(logp_N=logp_N, old_logp_N=old_N, adv_N=weighed_N, row_N=row_N)
            return _checked_losses(self.loss, tokens, self.clip)

        return TokenLosses(
            loss_N=losses(logp_N),
            corrected_N=corrected_N,
            zero_grad_N=(_gradient(losses, own_N) == 0) & (adv_N != 0),
        )


def _checked_losses(loss: PolicyLoss, tokens: LossInputs, clip: Clip) -> Tensor:
    """The loss of each token, with its shape checked: a scalar or a column would silently broadcast
    to another sum."""
    with user_code("the loss raised"):
        loss_N = loss.function(tokens, clip)
    wrong = None
    if not isinstance(loss_N, Tensor):
        wrong = f"a {type(loss_N).__name__}"
    elif loss_N.shape != tokens.logp_N.shape:
        wrong = f"a tensor of shape {tuple(loss_N.shape)} for {len(tokens.logp_N)} tokens"
    elif tokens.logp_N.requires_grad and not loss_N.requires_grad:
        wrong = "values that do not depend on tokens.logp_N, so nothing can be learnt from them"
    if wrong:
        raise EtudeError(
            f"the loss returned {wrong}: it must return a tensor of shape (N,), one value for "
            f"each token"
        )
    return loss_N


def _gradient(losses: Callable[[Tensor], Tensor], logp_N: Tensor) -> Tensor:
    """The gradient of the loss with respect to each log-prob, computed by autograd, so it is right
    for any loss. No model is involved."""
    with torch.enable_grad():
        leaf_N = logp_N.clone().requires_grad_()
        (slope_N,) = torch.autograd.grad(losses(leaf_N).sum(), leaf_N)
    return slope_N
