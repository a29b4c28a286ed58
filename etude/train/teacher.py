"""On-policy distillation: the student's own sessions, and for each of its tokens what a teacher thinks of it.

The advantage of a token is how much likelier the teacher holds it to be than the student that said it: log teacher -
log student. Its mean over what the student says is minus the KL of student to teacher at that place, so a step of
policy gradient with it makes that KL smaller, with a signal at every token and without a reward. What a token does to
the places after it is left out: the teacher speaks again there.

What the student said may be some steps old. The advantage is first taken against the recorded log-prob, which is known
here; the objective puts the learner's own in its place (`Objective.taught`), and its importance weights do the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from etude.core.types import Batch, Row
from etude.model.transformer import Transformer
from etude.train.loss import token_logprobs
from etude.train.rows import pack_text, plan


class Teacher:
    def __init__(self, model: Transformer) -> None:
        self.model = model.requires_grad_(False)

    def judge(self, batch: Batch, *, temperature: float, microbatch_tokens: int) -> tuple[Batch, float]:
        """The batch with the teacher's advantages, and an estimate of the KL of student to teacher a token. Both are
        compared at the temperature that the student was sampled with."""
        rows = list(batch.rows)
        texts = [(row.tokens, row.mask) for row in rows]
        order = [index for some in plan([len(row.tokens) for row in rows], microbatch_tokens) for index in some]
        scores: list[float] = []
        device = next(self.model.parameters()).device
        with torch.no_grad():
            for micro in pack_text(texts, microbatch_tokens=microbatch_tokens):
                micro = micro.to(device)
                scores += token_logprobs(self.model, micro.tokens_BT, micro.mask_BT, temperature)[0].tolist()
        total, num_tokens = 0.0, len(scores)
        for index in order:
            own, scores = scores[: sum(rows[index].mask)], scores[sum(rows[index].mask) :]
            rows[index] = credited(rows[index], own)
            total -= sum(rows[index].advantages)
        return replace(batch, rows=tuple(rows)), total / num_tokens


def credited(row: Row, teacher: Sequence[float]) -> Row:
    """`teacher`: the log-prob of each sampled token, in their order."""
    said = iter(teacher)
    gains = (next(said) - logp if sampled else 0.0 for sampled, logp in zip(row.mask, row.logprobs, strict=True))
    return replace(row, advantages=tuple(gains))
