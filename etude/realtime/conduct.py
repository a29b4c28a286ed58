"""Reward hacks that users' feedback teaches, and the bounds on the reward that make them worthless.

Each was seen in a product that learnt from its users. Feedback alone cannot distinguish them from
good work, so the reward is bounded by the model's conduct in the session itself (`Conduct`).

    broken tool calls         hard requests were answered with calls that fail, because such
                              sessions were excluded from training; here they get the worst reward
    questions, no edit        clarifying questions avoid edits that might be undone; a session
                              without the requested edit earns nothing and costs a little
    short obvious             a completion of a character or two is accepted more often than a whole
                              line; the reward depends on the number of characters kept
    suppressed lints          `noqa` and `type: ignore` silence complaints; they are never paid
    the user's own edit       a suggestion restores text that the user just deleted; it gets the
                              worst reward
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORST = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """The model's conduct in a session, as the product or the harness observed it."""

    broken_tool_calls: int = 0
    """Calls that did not parse or did not name a known tool."""
    edit_requested: bool = False
    edited: bool = False
    questions: int = 0
    """Clarifying questions to the user."""
    kept_chars: int | None = None
    """Characters of the model that were kept; None if the reward does not depend on them."""
    suppressed_lints: int = 0
    """Comments added that silence a linter or a type checker, minus those removed."""
    reverted_chars: int = 0
    """Characters of the user's own last edit that the model undid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductRules:
    """Costs and bounds, in units of reward."""

    question_cost: float = 0.05
    no_edit: float = -0.1
    """Reward of a session in which an edit was requested and none was made."""
    full_chars: int = 40
    """Number of kept characters from which a positive reward is paid in full."""
    lint_cost: float = 0.25


RULES = ConductRules()


def judged(reward: float | None, conduct: Conduct, rules: ConductRules = RULES) -> float | None:
    """Bound the reward of a session by its conduct. None if there was no feedback and the conduct
    shows nothing to penalize."""
    if conduct.broken_tool_calls or conduct.reverted_chars:
        return WORST
    avoided = conduct.edit_requested and not conduct.edited
    cost = rules.question_cost * conduct.questions + rules.lint_cost * max(
        0, conduct.suppressed_lints
    )
    if reward is None:
        return max(WORST, rules.no_edit - cost) if avoided else None
    if reward > 0:
        if avoided:
            reward = rules.no_edit
        elif conduct.suppressed_lints > 0:
            reward = 0.0
        elif conduct.kept_chars is not None:
            reward *= min(1.0, math.sqrt(conduct.kept_chars / rules.full_chars))
    return max(WORST, reward - cost)
