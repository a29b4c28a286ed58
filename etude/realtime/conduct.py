"""What is never paid, whatever users said: the tricks that reward from users teaches.

Each was seen in a product that learnt from its users. Feedback alone cannot tell them from good
work, so the session itself says what the model did (`Conduct`), and the reward is bounded by it.

    broken tool calls         hard requests were answered by calls that fail, since such sessions
                              were left out: they are judged, as the worst
    questions, no edit        clarifying questions avoid edits that might be undone: a session
                              without the edit that was asked for earns nothing, and costs a little
    short obvious             a completion of a character or two is accepted more often than a whole
                              line: what counts is how many characters stayed
    suppressed lints          `noqa` and `type: ignore` make complaints go away: never paid
    the user's own edit       a suggestion that puts back what the user just deleted: as the worst
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WORST = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """What the model did in a session, as the product or the harness saw it."""

    broken_tool_calls: int = 0
    """Calls that did not parse, or named no tool."""
    edit_requested: bool = False
    edited: bool = False
    questions: int = 0
    """Asked of the user."""
    kept_chars: int | None = None
    """New characters of the model's that stayed; None where the reward is not about characters."""
    suppressed_lints: int = 0
    """Comments added that silence a linter or a type checker, less those removed."""
    reverted_chars: int = 0
    """Of the user's own last edit, undone by the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductRules:
    """Costs and bounds, in units of reward."""

    question_cost: float = 0.05
    no_edit: float = -0.1
    """Of a session in which an edit was asked for and none was made."""
    full_chars: int = 40
    """Characters kept from which on a positive reward is paid in full."""
    lint_cost: float = 0.25


RULES = ConductRules()


def judged(reward: float | None, conduct: Conduct, rules: ConductRules = RULES) -> float | None:
    """The reward of a session after its conduct; None if nobody has said anything and there is
    nothing to hold against it."""
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
