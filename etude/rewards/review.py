"""What is done about a score after its environment has given it: the detector looks, judges are
asked, and an expression makes one reward of all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from etude.core.expression import Expression
from etude.core.types import Json, Part, Score, Task
from etude.rewards.detector import detect, flagged
from etude.rewards.judge import Judge

ENVIRONMENT = "environment"
"""The part that holds what the environment said, where an expression says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    detector: bool = False
    judge: Judge | None = None
    reward: Expression | None = None

    async def complete(
        self, task: Task, messages: Sequence[Mapping[str, Json]], diff: str, score: Score
    ) -> Score:
        """`diff`: what the agent changed. RolloutFailure, or ValueError, where there is no telling
        what the attempt was worth."""
        if self.detector:
            said = "\n".join(part.evidence for part in score.parts)
            score = flagged(score, detect(messages, diff, said))
        if self.judge is not None:
            judged = await self.judge.parts(work(task, messages, diff))
            score = replace(score, parts=(*score.parts, *judged))
        return score if self.reward is None else composed(score, self.reward)


def composed(score: Score, reward: Expression) -> Score:
    """The score with the reward that the expression says, of its parts and of the environment's own
    reward, which becomes a part, too."""
    own = Part(ENVIRONMENT, score.reward, f"reward = {reward.text}")
    parts = (*score.parts, own)
    values = {part.name: part.value for part in parts}
    return replace(score, reward=reward.value(values), parts=parts)


def work(task: Task, messages: Sequence[Mapping[str, Json]], diff: str) -> str:
    """What a judge is shown: what was asked for, what was changed, and the agent's last words."""
    asked = "\n\n".join(str(message.get("content") or "") for message in task.opening)
    words = [m.get("content") for m in messages if m.get("role") == "assistant"]
    last = next((each for each in reversed(words) if isinstance(each, str) and each), "(nothing)")
    return (
        f"# What was asked for\n{asked}\n\n# What was changed\n{diff or '(nothing)'}\n\n"
        f"# What the author says\n{last}"
    )
