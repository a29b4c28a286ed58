"""Benchmark of a show-or-stay-silent policy: suggestions that users accept, reject or never see.

A small policy decides from features of a suggestion and its user whether to show it. It learns from
simulated users by the project's own policy-gradient objective (`train.objective`), with one
decision per context; 2 % of the decisions are made by a coin and corrected for. Three rewards:

    show      0.75 accepted, -0.25 rejected, 0 silent: showing pays at a probability above 0.25
    accepted  1 accepted, 0 otherwise: the number of acceptances
    rate      the rate of acceptance: 1 or 0, minus the mean of the suggestions shown; a suggestion
              that was not shown teaches nothing

Then each policy serves a population for a day. A user who has rejected several in a row (2 to 10,
by patience) turns suggestions off until tomorrow. Means over the seeds, with the worst one:

    show.threshold, .threshold_min, .threshold_max   the probability of acceptance above which it
                                                     shows suggestions
    show.wrong_max              share of wrong decisions among probabilities not within 0.03 of 0.25
    R.shown, R.accept_rate      share of suggestions shown, and of these the share accepted
    R.chars                     characters kept, per user and day
    show.chars_over_accepted_min, show.chars_over_rate_min
                                the first reward's characters over the others', worst seed
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.core.seeds import derive
from etude.realtime.population import Population
from etude.train.objective import RlObjective

SEEDS = 5
STEPS = 600
BATCH = 8192
USERS = 2000
OPPORTUNITIES = 60
"""Suggestions that a user could be shown in a day."""
EXPLORE = 0.02
BREAK_EVEN = 0.25
WITHIN = 0.03
REWARDS = ("show", "accepted", "rate")

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Contexts:
    """Suggestions that could be shown: the policy's features, and the outcomes hidden from it."""

    features: Array
    chance: Array
    """Probability that the user accepts it."""
    chars: Array


def draw_contexts(leniency: Array, draw: np.random.Generator) -> Contexts:
    """Draw a suggestion for each of these users. Longer ones are accepted less often."""
    signals = draw.standard_normal((len(leniency), 3))
    log_chars = 0.5 + 2.0 * draw.random(len(leniency)) + 0.5 * draw.standard_normal(len(leniency))
    odds = -1.1 + signals @ np.array([1.0, 0.7, -0.5]) - 0.8 * (log_chars - 1.5) + 0.7 * leniency
    features = np.column_stack([signals, log_chars - 1.5, leniency])
    return Contexts(features, 1 / (1 + np.exp(-odds)), np.ceil(np.exp(log_chars)))


class ShowPolicy(nn.Module):
    """The log-odds of showing a suggestion."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(num_features, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layers(features).squeeze(-1)
        return logits

    def shows(self, contexts: Contexts) -> NDArray[np.bool_]:
        with torch.no_grad():
            logits = self(torch.from_numpy(contexts.features).float())
        return np.asarray(logits.numpy() > 0)


def train(reward: str, population: Population, seed: int) -> ShowPolicy:
    torch.manual_seed(derive(seed, "policy") % 2**32)
    draw = np.random.default_rng(derive(seed, "train"))
    leniency = np.array([user.leniency for user in population.users])
    policy = ShowPolicy(5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    objective = RlObjective()
    for _ in range(STEPS):
        contexts = draw_contexts(leniency[draw.integers(0, len(leniency), BATCH)], draw)
        logits = policy(torch.from_numpy(contexts.features).float())
        chance = (1 - EXPLORE) * torch.sigmoid(logits.detach()).double().numpy() + EXPLORE / 2
        shown = draw.random(BATCH) < chance
        accepted = shown & (draw.random(BATCH) < contexts.chance)
        advantage = ADVANTAGE[reward](shown, accepted)
        taken = torch.from_numpy(shown)
        losses = objective.token_losses(
            logp_N=nn.functional.logsigmoid(torch.where(taken, logits, -logits)),
            engine_logp_N=torch.from_numpy(np.log(np.where(shown, chance, 1 - chance))).float(),
            adv_N=torch.from_numpy(advantage).float(),
            row_N=torch.arange(BATCH),
        )
        optimizer.zero_grad()
        losses.loss_N.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        decay.step()
    return policy


def show(shown: NDArray[np.bool_], accepted: NDArray[np.bool_]) -> Array:
    return np.where(shown, np.where(accepted, 1 - BREAK_EVEN, -BREAK_EVEN), 0.0)


def count_accepted(shown: NDArray[np.bool_], accepted: NDArray[np.bool_]) -> Array:
    return accepted.astype(float)


def accept_rate(shown: NDArray[np.bool_], accepted: NDArray[np.bool_]) -> Array:
    mean = accepted.sum() / max(1, shown.sum())
    return np.where(shown, accepted - mean, 0.0)


ADVANTAGE: dict[str, Callable[[NDArray[np.bool_], NDArray[np.bool_]], Array]] = {
    "show": show,
    "accepted": count_accepted,
    "rate": accept_rate,
}


def threshold(policy: ShowPolicy, population: Population, seed: int) -> tuple[float, float]:
    """The probability of acceptance above which a policy shows suggestions, and the share of
    decisions that are wrong and not within `WITHIN` of 0.25."""
    draw = np.random.default_rng(derive(seed, "threshold"))
    leniency = np.array([user.leniency for user in population.users])
    contexts = draw_contexts(np.repeat(leniency, 20), draw)
    shown = policy.shows(contexts)
    clear = np.abs(contexts.chance - BREAK_EVEN) > WITHIN
    wrong = (shown != (contexts.chance >= BREAK_EVEN)) & clear
    # The cut for which "show above it" disagrees with the policy least often.
    order = np.argsort(contexts.chance)
    misses = np.cumsum(np.where(shown[order], 1.0, -1.0))
    at = int(np.argmin(np.concatenate([[0], misses])))
    chances = np.concatenate([contexts.chance[order], [1.0]])
    return float(chances[at]), float(wrong.mean())


def serve(policy: ShowPolicy, population: Population, seed: int) -> dict[str, float]:
    """Serve a population for a day with a policy."""
    draw = np.random.default_rng(derive(seed, "serve"))
    leniency = np.array([user.leniency for user in population.users])
    limit = np.array([2 + int(20 * (user.patience - 0.15)) for user in population.users])
    in_a_row = np.zeros(len(limit), dtype=np.int64)
    chars = shown_count = accepted_count = 0.0
    for _ in range(OPPORTUNITIES):
        contexts = draw_contexts(leniency, draw)
        luck = draw.random(len(limit))
        shown = policy.shows(contexts) & (in_a_row < limit)
        accepted = shown & (luck < contexts.chance)
        in_a_row = np.where(accepted, 0, in_a_row + shown)
        chars += float(contexts.chars[accepted].sum())
        shown_count += float(shown.sum())
        accepted_count += float(accepted.sum())
    return {
        "shown": shown_count / len(limit) / OPPORTUNITIES,
        "accept_rate": accepted_count / max(1.0, shown_count),
        "chars": chars / len(limit),
    }


def run() -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        population = Population.of(USERS, seed=seed)
        for reward in REWARDS:
            policy = train(reward, population, seed)
            figures = serve(policy, population, seed)
            if reward == "show":
                figures["threshold"], figures["wrong"] = threshold(policy, population, seed)
            for name, value in figures.items():
                found.setdefault(f"{reward}.{name}", []).append(value)
    over = {
        other: [
            ours / theirs
            for ours, theirs in zip(found["show.chars"], found[f"{other}.chars"], strict=True)
        ]
        for other in ("accepted", "rate")
    }
    return {
        "seeds": float(SEEDS),
        **{name: statistics.mean(values) for name, values in found.items()},
        "show.threshold_min": min(found["show.threshold"]),
        "show.threshold_max": max(found["show.threshold"]),
        "show.wrong_max": max(found["show.wrong"]),
        **{f"show.chars_over_{other}_min": min(values) for other, values in over.items()},
    }
