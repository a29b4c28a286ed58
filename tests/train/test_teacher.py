"""Advantages from a teacher for the student's tokens, against loops and exact sums in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Row
from etude.model.attention import CausalAttention
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.learner import Learner
from etude.train.objective import RlObjective
from etude.train.teacher import Teacher, with_teacher_advantages
from tests.small_model import config, plain_logprobs, sharp


@torch.no_grad()
def next_logprobs(model: Transformer, context: tuple[int, ...]) -> Tensor:
    hidden_BTE = model(torch.tensor([context]), torch.arange(len(context))[None], CausalAttention())
    return torch.log_softmax(model.logits(hidden_BTE)[0, -1], -1)


def sampled(seed: int, prompts: list[tuple[int, ...]], size: int, model: Transformer) -> list[Row]:
    """A student's answers to the prompts: `size` tokens each, sampled at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, prompt in enumerate(prompts):
        tokens, logps = prompt, [0.0] * len(prompt)
        for _ in range(size):
            logp_V = next_logprobs(model, tokens)
            tokens += (int(torch.multinomial(logp_V.exp(), 1, generator=generator)),)
            logps.append(float(logp_V[tokens[-1]]))
        said = (False,) * len(prompt) + (True,) * size
        rows.append(
            Row(
                sample=f"g.{number}",
                tokens=tokens,
                mask=said,
                logprobs=tuple(logps),
                advantages=tuple(map(float, said)),
                versions=(VersionSpan(0, size),),
            )
        )
    return rows


def test_the_advantage_is_the_difference_of_log_probs() -> None:
    row = Row(
        sample="g.0",
        tokens=(5, 6, 7, 8),
        mask=(False, True, False, True),
        logprobs=(0.0, -1.0, 0.0, -2.0),
        advantages=(0.0, 1.0, 0.0, 1.0),
        versions=(VersionSpan(0, 2),),
    )
    assert with_teacher_advantages(row, [-0.5, -4.0]).advantages == (0.0, 0.5, 0.0, -2.0)


@pytest.mark.parametrize("microbatch_tokens", [0, 16, 1000])
def test_every_token_is_judged_in_its_own_context(microbatch_tokens: int) -> None:
    student, teacher = init_from_scratch(config(), 1), init_from_scratch(config(), 2)
    rows = sampled(0, [(3,), (4, 5, 6), (7, 8)], 2, student)
    batch = Batch(step=1, rows=tuple(rows), oldest=0)
    judged, kl = Teacher(teacher).compute_advantages(
        batch, temperature=0.7, microbatch_tokens=microbatch_tokens
    )
    gains = []
    for row, seen in zip(rows, judged.rows, strict=True):
        prompt = tuple(t for t, said in zip(row.tokens, row.mask, strict=True) if not said)
        logps = plain_logprobs(teacher, prompt, row.tokens[len(prompt) :], 0.7)
        expected = (logps - torch.tensor(row.logprobs[len(prompt) :])).tolist()
        assert seen.advantages[len(prompt) :] == pytest.approx(expected, abs=1e-5)
        assert not any(seen.advantages[: len(prompt)])
        gains += expected
    assert kl == pytest.approx(-sum(gains) / 6, abs=1e-5)


def test_its_gradient_is_that_of_the_reverse_kl_also_if_an_older_student_spoke() -> None:
    """Summed over all tokens that the older student might have sampled, with their probability."""
    generator = torch.Generator().manual_seed(0)
    logits, older, teacher = (
        torch.randn(9, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    logits.requires_grad_()
    logp_V, older_V, teacher_V = (torch.log_softmax(each, -1) for each in (logits, older, teacher))
    (exact,) = torch.autograd.grad(
        (logp_V.exp() * (logp_V - teacher_V)).sum(), logits, retain_graph=True
    )
    objective, row_V = RlObjective(distills=True, correction_cap=math.inf), torch.arange(9)
    loss_V = objective.token_losses(logp_V, older_V, teacher_V - older_V, row_V).loss_N
    (ours,) = torch.autograd.grad((older_V.exp() * loss_V).sum(), logits)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def test_steps_bring_the_student_to_the_teacher() -> None:
    learner, teacher = (
        Learner(init_from_scratch(config(), 1)),
        Teacher(sharp(config(), 2, factor=3.0)),
    )

    def distance() -> float:
        """The exact KL of student to teacher after either prompt."""
        pairs = [
            [next_logprobs(model, (prompt,)) for model in (learner.model, teacher.model)]
            for prompt in (3, 4)
        ]
        return sum(float((student.exp() * (student - other)).sum()) for student, other in pairs)

    before = distance()
    for step in range(20):
        rows = sampled(step, [(3,), (4,)] * 12, 1, learner.model)
        batch = Batch(step=step + 1, rows=tuple(rows), oldest=step)
        judged, _ = teacher.compute_advantages(batch, temperature=1.0, microbatch_tokens=1000)
        learner.rl_step(judged, lr=5e-3, objective=RlObjective(distills=True))
    assert distance() < 0.5 * before
