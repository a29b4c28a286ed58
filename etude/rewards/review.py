"""Steps that complete a score after the environment has given it: the detector, judges, credit for
failed calls, and an expression that turns all parts into one reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from etude.core.expression import Expression
from etude.core.types import ENVIRONMENT_PART, Json, Part, Score, Segment, Task, plain_text
from etude.rewards.detector import detect, flagged
from etude.rewards.failed_calls import failed_calls
from etude.rewards.judge import Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    detector: bool = False
    judge: Judge | None = None
    failed_call: float = 0.0
    """Penalty on a turn with a failed call."""
    reward: Expression | None = None

    async def complete(
        self,
        task: Task,
        messages: Sequence[Mapping[str, Json]],
        segments: Sequence[Segment],
        diff: str,
        score: Score,
    ) -> Score:
        """The completed score. `diff`: the agent's changes. RolloutFailure or ValueError if the
        worth of the attempt cannot be determined."""
        if self.detector:
            said = "\n".join(part.evidence for part in score.parts)
            score = flagged(score, await asyncio.to_thread(detect, messages, diff, said))
        if self.judge is not None:
            judged = await self.judge.parts(work(task, messages, diff))
            score = replace(score, parts=(*score.parts, *judged))
        if self.failed_call:
            credit = failed_calls(task, messages, segments, self.failed_call)
            score = replace(score, credit=(*score.credit, *credit))
        return score if self.reward is None else composed(score, self.reward)


def composed(score: Score, reward: Expression) -> Score:
    """The score with the reward that the expression computes from its parts. The environment's own
    reward becomes a part, too.

    If the environment's reward is 0, parts that it did not compute are 0 as well: otherwise an
    attempt could fail, instead of earning 0, by breaking its grader.
    """
    own = Part(ENVIRONMENT_PART, score.reward, f"reward = {reward.text}")
    parts = (*score.parts, own)
    if score.reward == 0.0:
        missing = sorted(reward.names - {part.name for part in parts})
        told = "missing: counts as 0, since the environment's reward is 0"
        parts = (*score.parts, *(Part(name, 0.0, told) for name in missing), own)
    values = {part.name: part.value for part in parts}
    return replace(score, reward=reward.value(values), parts=parts)


def work(task: Task, messages: Sequence[Mapping[str, Json]], diff: str) -> str:
    """The text that a judge is shown: the task, the changes, and the agent's last words."""
    asked = "\n\n".join(plain_text(message.get("content")) for message in task.opening)
    words = [plain_text(m.get("content")) for m in messages if m.get("role") == "assistant"]
    last = next(filter(None, reversed(words)), "(nothing)")
    return (
        f"# What was asked for\n{asked}\n\n# What was changed\n{diff or '(nothing)'}\n\n"
        f"# What the author says\n{last}"
    )
