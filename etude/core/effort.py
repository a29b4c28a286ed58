"""Effort penalty: a price on tokens, calls and turns, subtracted from an attempt's reward.

The price is concave. The first tool call costs the most and the fiftieth nearly nothing, so the
policy learns to do a quick task quickly while a hard one is still worth a long session:

    C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q))        slope (1 + k x)^-q: 1 at the start, then
                                                        falling

`q = 0` is a linear price, `q = 1` the limit log(1 + k x) / k, and `q > 1` never exceeds 1 / (k (q -
1)).

Attempts that failed pay the price, too. Where nothing is ever solved it therefore teaches the
policy to fail quickly: use it with a policy that solves some of its tasks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from etude.core.types import Trajectory, turns


def concave(x: float, *, k: float, q: float) -> float:
    """C(x) as above. Also exact near q = 1, where the plain fraction is 0 / 0."""
    log = math.log1p(k * x)
    return log / k if q == 1 else math.expm1((1 - q) * log) / (k * (1 - q))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort penalty: `scale` times C of the weighted sum of what an attempt used."""

    scale: float
    k: float = 1.0
    q: float = 0.5
    tokens: float = 0.0
    """Weight of a sampled token."""
    calls: float = 0.0
    """Weight of a tool call."""
    turns: float = 0.0
    """Weight of an answer of the model."""

    def penalty(self, trajectory: Trajectory) -> float:
        x = (
            self.tokens * trajectory.num_sampled
            + self.calls * num_calls(trajectory)
            + self.turns * num_turns(trajectory)
        )
        return self.scale * concave(x, k=self.k, q=self.q)


def num_turns(trajectory: Trajectory) -> int:
    return sum(len(turns(segment)) for segment in trajectory.segments)


def num_calls(trajectory: Trajectory) -> int:
    calls = [message.get("tool_calls") for message in trajectory.messages]
    # A harness may put something other than a list there; it does not count as calls.
    return sum(len(some) for some in calls if isinstance(some, list))
