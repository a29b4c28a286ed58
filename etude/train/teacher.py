"""On-policy distillation: advantages of the student's tokens from the log-probs of a teacher.

The advantage of a token is how much likelier it is for the teacher than for the student that
sampled it: log teacher - log student. Its mean over the student's samples is minus the KL of
student to teacher at that position, so a policy gradient step with it lowers that KL, with a signal
at every token and without a reward. A token's effect on later positions is left out: the teacher
gives its signal there again.

The student's samples may be some steps old. The advantage is first computed against the recorded
log-prob, which is known here; the objective replaces it by the learner's own
(`RlObjective.distills`), and its importance weights correct for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import torch

from etude.core.types import Batch, Row
from etude.model.transformer import Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import RolloutSequence, pack_rollouts, plan_microbatches


class Teacher:
    """A frozen model whose log-probs give the student's tokens their advantages."""

    def __init__(self, model: Transformer) -> None:
        self.model = model.requires_grad_(False)

    def compute_advantages(
        self, batch: Batch, *, temperature: float, microbatch_tokens: int
    ) -> tuple[Batch, float]:
        """The batch with the teacher's advantages, and an estimate of the KL of student to teacher
        per token. Both are compared at the sampling temperature of each token; `temperature`
        applies to rows that do not state it."""
        rows = list(batch.rows)
        total = 0.0
        num_loss_tokens = 0
        texts = [
            RolloutSequence.from_row(row, number, temperature=temperature)
            for number, row in enumerate(rows)
        ]
        device = next(self.model.parameters()).device
        for some in plan_microbatches([text.length for text in texts], microbatch_tokens)[0]:
            packed = pack_rollouts([texts[index] for index in some]).to(device)
            with torch.no_grad():
                scores = iter(token_logprobs(self.model, packed)[0].tolist())
            for index in some:
                rows[index] = with_teacher_advantages(
                    rows[index], list(islice(scores, texts[index].num_loss_tokens))
                )
                total -= sum(rows[index].advantages)
                num_loss_tokens += texts[index].num_loss_tokens
        return replace(batch, rows=tuple(rows)), total / num_loss_tokens


def with_teacher_advantages(row: Row, teacher: Sequence[float]) -> Row:
    """The row with the teacher's advantages. `teacher`: the log-prob of each sampled token, in
    order."""
    said = iter(teacher)
    gains = (
        next(said) - logp if sampled else 0.0
        for sampled, logp in zip(row.mask, row.logprobs, strict=True)
    )
    return replace(row, advantages=tuple(gains))
