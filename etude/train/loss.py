"""Policy losses: the contribution of each sampled token to the objective. To add one, add a
function and an entry in `LOSS`.

A ratio may involve three policies, and papers on these losses use "old" for different ones:

    engine     the weights that sampled the token, often some steps old, with the engine's numerics;
               recorded with the token
    proximal   the learner's weights before this step
    new        the learner's weights now, with respect to which the gradient is taken

new / engine = (new / proximal) x (proximal / engine). The second factor is the effect of off-policy
data, and `train.correction` handles it; the first is the progress of this step, which a loss clips.
Here a batch is one optimizer step: new *is* proximal when the gradient is taken, so after a
correction the ratio of every loss is 1, clipping has no effect, and the losses differ only in their
aggregation of tokens. With `correction = "none"` the engine's policy is used as the proximal one:
the loss then sees the whole ratio new / engine and clips that, which is how GRPO, DAPO, GSPO and
CISPO are used on slightly stale data. Each loss has the correction of its paper by default.

Every loss is linear in the advantage as long as its sign does not change. So a correction, which is
a nonnegative weight, is simply multiplied into the advantage before the loss is computed.

Shapes: T tokens, E hidden size; N the tokens that the loss counts, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from etude.model.attention import CausalAttention
from etude.model.tiled_attention import TiledCausalAttention
from etude.model.transformer import Routing, Transformer
from etude.train.context_parallel import ContextParallelAttention, ContextShare
from etude.train.head import TokenDistributionStats, head_logprobs
from etude.train.packing import PackedMicrobatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a policy loss: the N sampled tokens of some whole rows. The advantages already
    include the KL penalty."""

    logp_N: Tensor
    """Log-probs under the new policy, with gradient."""
    old_logp_N: Tensor
    """Log-probs under the policy that the ratio is relative to: the proximal one, or without a
    correction the engine's."""
    adv_N: Tensor
    row_N: Tensor
    """The index of the token's row."""

    @property
    def ratio_N(self) -> Tensor:
        return (self.logp_N - self.old_logp_N).exp()


@dataclass(frozen=True, slots=True)
class Clip:
    """The clip range of a ratio: 1 - low to 1 + high."""

    low: float
    high: float

    def __call__(self, ratio_N: Tensor) -> Tensor:
        return ratio_N.clamp(1 - self.low, 1 + self.high)


LossFunction = Callable[[LossInputs, Clip], Tensor]
"""A function of the tokens and the clip range that returns loss_N, one number for each token."""


def reinforce(tokens: LossInputs, clip: Clip) -> Tensor:
    """REINFORCE: each token's log-prob is raised in proportion to its advantage."""
    return -tokens.adv_N * tokens.logp_N


def ppo_clip(tokens: LossInputs, clip: Clip) -> Tensor:
    """PPO: a token that has already moved out of the clip range in the direction of its advantage
    has zero gradient."""
    ratio_N = tokens.ratio_N
    return -torch.minimum(ratio_N * tokens.adv_N, clip(ratio_N) * tokens.adv_N)


def gspo(tokens: LossInputs, clip: Clip) -> Tensor:
    """GSPO: `ppo_clip` with one ratio for a whole row, the geometric mean of its tokens' ratios:
    the reward was given to the whole answer, and the noise of single tokens' ratios averages out.
    The range is narrow because a mean moves little."""
    log_ratio_N = tokens.logp_N - tokens.old_logp_N
    size_N = sum_by_row(torch.ones_like(log_ratio_N), tokens.row_N)
    ratio_N = (sum_by_row(log_ratio_N, tokens.row_N) / size_N).exp()
    return -torch.minimum(ratio_N * tokens.adv_N, clip(ratio_N) * tokens.adv_N)


def cispo(tokens: LossInputs, clip: Clip) -> Tensor:
    """CISPO: the ratio is clipped as a weight that is constant for the gradient: no token ever has
    zero gradient, not even the rare ones that turn a session around and move far in one step."""
    return -clip(tokens.ratio_N.detach()) * tokens.adv_N * tokens.logp_N


def sum_by_row(x_N: Tensor, row_N: Tensor) -> Tensor:
    """The sum over all tokens of a row, for each of its tokens."""
    if not len(x_N):
        return x_N
    sums_B = torch.zeros(int(row_N.max()) + 1, dtype=x_N.dtype, device=x_N.device).index_add(
        0, row_N, x_N
    )
    return sums_B[row_N]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss with its default aggregation, clip range and correction. The values that a run
    uses are in `RlObjective`."""

    function: LossFunction
    aggregate: str = "token"
    """Aggregation of the token losses (`objective.AGGREGATE`)."""
    clip: Clip = Clip(math.inf, math.inf)
    correction: str = "none"


LOSS: dict[str, PolicyLoss] = {
    "reinforce": PolicyLoss(function=reinforce, correction="truncated"),
    "ppo_clip": PolicyLoss(function=ppo_clip, clip=Clip(0.2, 0.2)),
    # Each attempt counts the same, however long. Its paper uses it with advantage = "grpo".
    "grpo": PolicyLoss(function=ppo_clip, clip=Clip(0.2, 0.2), aggregate="sequence"),
    # A long wrong answer does not become cheaper per token; use it with advantage = "dr_grpo".
    "dr_grpo": PolicyLoss(function=ppo_clip, clip=Clip(0.2, 0.2), aggregate="constant"),
    # A wider range upwards, so that unlikely tokens can become likely. The paper's "dynamic
    # sampling" is built into the controller: a group without a difference in reward is dropped, and
    # another takes its slot.
    "dapo": PolicyLoss(function=ppo_clip, clip=Clip(0.2, 0.28)),
    "gspo": PolicyLoss(function=gspo, clip=Clip(3e-4, 4e-4), aggregate="sequence"),
    "cispo": PolicyLoss(function=cispo, clip=Clip(1.0, 4.0)),
}


def token_logprobs(
    model: Transformer,
    packed: PackedMicrobatch,
    routing: Routing | None = None,
    *,
    with_stats: bool = False,
) -> tuple[Tensor, TokenDistributionStats]:
    """The log-prob of each token that the loss counts, at its sampling temperature; with
    `with_stats` also the statistics of its distribution.

    Only positions that predict a counted token reach the head: every other token costs no logits
    and gets no gradient.
    """
    if (share := packed.share) is not None:
        return _divided_logprobs(model, packed, share, routing, with_stats=with_stats)
    hidden_NE, tokens_N = predicting_states(model, packed, routing)
    return head_logprobs(model, hidden_NE, tokens_N, packed.temperature_N, with_stats=with_stats)


def predicting_states(
    model: Transformer, packed: PackedMicrobatch, routing: Routing | None = None
) -> tuple[Tensor, Tensor]:
    """The hidden states that predict the tokens which the loss counts, and these tokens (NE, N)."""
    attend = (TiledCausalAttention if model.invariant else CausalAttention)(
        packed.lengths, packed.tokens_T.device
    )
    hidden_TE = model(packed.tokens_T, packed.positions_T, attend, routing)
    return hidden_TE.index_select(0, packed.logits_indices_N), packed.targets_N


def _divided_logprobs(
    model: Transformer,
    packed: PackedMicrobatch,
    share: ContextShare,
    routing: Routing | None,
    *,
    with_stats: bool,
) -> tuple[Tensor, TokenDistributionStats]:
    """`token_logprobs` of a microbatch whose tokens are divided among ranks (`context_parallel`):
    each rank computes the log-probs that its own tokens predict, and all ranks get all of them.
    `routing` is that of the rank's own tokens."""
    hidden_tE = model(
        share.take(packed.tokens_T),
        share.take(packed.positions_T),
        ContextParallelAttention(share.sharding, share.group),
        routing,
    )
    own_n, places_n = share.find(packed.logits_indices_N)
    temperature_N = packed.temperature_N
    logp_n, stats = head_logprobs(
        model,
        hidden_tE.index_select(0, own_n),
        packed.targets_N[places_n],
        None if temperature_N is None else temperature_N[places_n],
        with_stats=with_stats,
    )
    assemble = partial(share.group.assemble, places_n=places_n, count=packed.num_loss_tokens)
    logp_N = assemble(logp_n)
    if not with_stats:
        return logp_N, stats
    return logp_N, TokenDistributionStats(*map(assemble, stats))
