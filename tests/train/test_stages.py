from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.core.stages import DpoConfig, MidtrainConfig, SftConfig
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.train import stages
from etude.train.learner import Learner
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from etude.train.schedule import learning_rate
from etude.train.stages import (
    Demonstration,
    OnStep,
    SupervisedStepReport,
    dpo,
    evaluations_since_best,
    midtrain,
    sft,
)
from etude.train.stream import TokenizedDocuments

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    max_position_embeddings=32,
)
EOS = 0


def learner() -> Learner:
    return Learner(init_from_scratch(CONFIG, 0))


def midtrain_stage(**table: Any) -> MidtrainConfig:
    return MidtrainConfig.model_validate({"kind": "midtrain", **table})


def sft_stage(**table: Any) -> SftConfig:
    return SftConfig.model_validate({"kind": "sft", "demonstrations": 1, **table})


def dpo_stage(**table: Any) -> DpoConfig:
    return DpoConfig.model_validate({"kind": "dpo", "path": "-", "warmup_steps": 0, **table})


def documents(count: int = 12) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, 16) for _ in range(rng.randint(3, 20))] for _ in range(count)]


def sessions(count: int, seed: int) -> list[Demonstration]:
    """Sessions in which the assistant repeats the user's words."""
    rng = random.Random(seed)
    words = [[rng.randrange(1, 16) for _ in range(rng.randint(1, 3))] for _ in range(count)]
    return [
        ([*word, EOS, *word, EOS], [False] * (len(word) + 1) + [True] * (len(word) + 1))
        for word in words
    ]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Killed(Exception):
    pass


class KillAt:
    """Keeps what a checkpoint would, and dies after step n."""

    def __init__(self, learner: Learner, step: int) -> None:
        self.learner = learner
        self.step = step

    def __call__(self, report: SupervisedStepReport) -> None:
        self.report = report
        self.state = {name: tensor.clone() for name, tensor in self.learner.state().items()}
        if report.step == self.step:
            raise Killed


def run_midtrain(
    one: Learner, start_step: int = 0, on_step: KillAt | None = None, seed: int = 0
) -> list[SupervisedStepReport]:
    seen: list[SupervisedStepReport] = []
    midtrain(
        one,
        midtrain_stage(steps=8, heldout_every=3, batch_tokens=100, lr=1e-2, warmup_steps=2),
        [
            (TokenizedDocuments.of(documents(), EOS), 2.0),
            (TokenizedDocuments.of([[3, 4] * 9], EOS), 1.0),
        ],
        TokenizedDocuments.of(documents(4), EOS),
        eos=EOS,
        seed=seed,
        start_step=start_step,
        on_step=on_step or seen.append,
    )
    return seen


def test_midtrain_learns_and_says_so() -> None:
    seen = run_midtrain(learner())
    assert [report.step for report in seen] == list(range(1, 9))
    assert seen[-1].stats.loss < seen[0].stats.loss
    # 3 whole rows of 32; the first token of a document does not count
    assert 3 * 24 < seen[0].stats.num_loss_tokens < 3 * 31
    exams = {report.step: report.metrics["heldout"] for report in seen if report.metrics}
    assert exams.keys() == {3, 6, 8} and exams[8] < exams[3]


@pytest.mark.parametrize("kill", [1, 4, 8])
def test_midtrain_goes_on_to_the_bit(kill: int) -> None:
    straight, first, second = learner(), learner(), learner()
    run_midtrain(straight)
    killer = KillAt(first, kill)
    with pytest.raises(Killed):
        run_midtrain(first, on_step=killer)
    second.load_state(killer.state)
    run_midtrain(second, start_step=killer.report.step)
    assert equal(second.state(), straight.state())


def test_documents_that_share_a_row_do_not_see_each_other() -> None:
    """The log-probs of a document within a row equal those of the document alone, at any
    position."""
    model = init_from_scratch(CONFIG, 0)
    docs = [[3, 7, 7, 2, EOS], [5, 1, EOS], [9, 9, 4, EOS]]
    row = np.array([[token for doc in docs for token in doc]])
    document_mask, joined = (pack_batch(stages.split_documents(row, eos)) for eos in (EOS, None))
    together, _ = token_logprobs(model, document_mask)
    alone = [
        token_logprobs(model, pack_batch(stages.split_documents(np.array([doc]), None)))[0]
        for doc in docs
    ]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert joined.num_loss_tokens == 11 and document_mask.num_loss_tokens == 9
    mixed, _ = token_logprobs(model, joined)
    assert not torch.allclose(mixed[5:7], alone[1], atol=1e-3)


def preferences(count: int) -> list[tuple[Demonstration, Demonstration]]:
    """Pairs of answers to a word, in which the answer that repeats it is the better one."""
    rng = random.Random(2)
    pairs = []
    for good, _ in sessions(count, 5):
        size = len(good) // 2
        bad = [*good[:size], *[rng.randrange(1, 16) for _ in range(rng.randint(1, 4))], EOS]
        pairs.append(
            (
                (good, [False] * size + [True] * size),
                (bad, [False] * size + [True] * (len(bad) - size)),
            )
        )
    return pairs


def run_dpo(one: Learner, start_step: int = 0, on_step: OnStep = lambda report: None) -> None:
    dpo(
        one,
        dpo_stage(epochs=3, batch_pairs=4, beta=0.5, lr=1e-2),
        preferences(12),
        seed=0,
        start_step=start_step,
        on_step=on_step,
    )


def test_dpo_learns_what_is_preferred() -> None:
    seen: list[SupervisedStepReport] = []
    run_dpo(learner(), on_step=seen.append)
    assert [report.step for report in seen] == list(range(1, 10)) and seen[0].total == 9
    # Before the first step the weights are the reference: nothing is preferred.
    assert (
        seen[0].stats.loss == pytest.approx(math.log(2), rel=1e-5)
        and seen[0].metrics["margin"] == 0.0
    )
    assert (
        seen[-1].stats.loss < 0.5
        and seen[-1].metrics["accuracy"] == 1.0
        and seen[-1].metrics["margin"] > 0.5
    )


def test_two_sessions_together_may_be_longer_than_the_context() -> None:
    long, short = ([1] * 30, [False] + [True] * 29), ([2] * 4, [False] + [True] * 3)
    seen: list[SupervisedStepReport] = []
    pairs = [
        (long, short),
        (short, long),
        (long, ([3] * 30, long[1])),
        (short, ([2, 5], [False, True])),
    ]
    stage = dpo_stage(batch_pairs=4, beta=0.5, lr=1e-2)
    dpo(learner(), stage, pairs, seed=0, on_step=seen.append)
    assert seen[0].stats.loss == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize("kill", [1, 5, 9])
def test_dpo_goes_on_to_the_bit(kill: int) -> None:
    straight, first, second = learner(), learner(), learner()
    run_dpo(straight)
    killer = KillAt(first, kill)
    with pytest.raises(Killed):
        run_dpo(first, on_step=killer)
    second.load_state(killer.state)
    run_dpo(second, start_step=kill)
    assert equal(second.state(), straight.state())


def test_another_seed_is_another_run() -> None:
    first, second = learner(), learner()
    run_midtrain(first)
    run_midtrain(second, seed=1)
    assert not equal(first.state(), second.state())


def run_sft(
    one: Learner,
    *,
    start_step: int = 0,
    losses: Sequence[float] = (),
    on_step: OnStep,
    lr: float = 3e-2,
) -> tuple[float, ...]:
    return sft(
        one,
        sft_stage(max_epochs=6, patience=1, batch_tokens=100, lr=lr),
        sessions(40, 0),
        sessions(20, 1),
        seed=0,
        start_step=start_step,
        heldout_losses=losses,
        on_step=on_step,
    )


def test_since_best() -> None:
    assert [
        evaluations_since_best(losses)
        for losses in ([], [3.0], [3.0, 2.0], [3.0, 2.0, 2.0], [1.0, 2.0, 3.0])
    ] == [
        0,
        0,
        0,
        1,
        2,
    ]


def test_sft_stops_by_its_rule_with_the_best_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out losses from a script: the second epoch is the best, and two more without progress
    end the stage."""
    one = learner()
    script = iter([2.0, 1.0, 1.5, 1.0, 0.1])
    best: list[dict[str, Tensor]] = []

    def scripted(exam: object) -> float:
        best.append(one.weights())
        return next(script)

    monkeypatch.setattr(one, "evaluate", scripted)
    seen: list[SupervisedStepReport] = []
    losses = sft(
        one,
        sft_stage(max_epochs=9, batch_tokens=100, lr=1e-2),
        sessions(40, 0),
        sessions(4, 1),
        seed=0,
        on_step=seen.append,
    )
    assert losses == (2.0, 1.0, 1.5, 1.0)
    assert seen[-1].step == 4 * seen[-1].total // 9 and seen[-1].heldout_losses == losses
    assert equal(one.weights(), best[1])
    assert not equal(one.weights(), best[3])


def test_sft_with_a_rate_that_hurts_ends_with_its_best_weights() -> None:
    one = learner()
    losses = run_sft(one, lr=0.5, on_step=lambda report: None)
    assert min(losses) < max(losses)
    exam = [TokenSequence(*session) for session in sessions(20, 1)]
    assert one.evaluate(exam) == pytest.approx(min(losses), rel=1e-6)


def test_sft_stops_early_when_what_it_imitates_is_not_what_it_is_examined_on() -> None:
    """Every demonstration has one answer and every held-out session another, so each epoch makes
    the held-out loss worse."""
    one = learner()
    seen: list[SupervisedStepReport] = []
    imitated, examined = (
        [([5, 3] * 6, [False, True] * 6)] * 20,
        [([5] * 12, [False] + [True] * 11)] * 4,
    )
    losses = sft(
        one,
        sft_stage(max_epochs=6, patience=1, batch_tokens=100, lr=1e-2),
        imitated,
        examined,
        seed=0,
        on_step=seen.append,
    )
    assert list(losses) == sorted(losses) and len(losses) == 2
    assert seen[-1].step < seen[-1].total


def test_sft_uses_every_demonstration_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = learner()
    counts: list[int] = []
    step = one.supervised_step
    monkeypatch.setattr(
        one,
        "supervised_step",
        lambda texts, **kw: (counts.append(len(texts)), step(texts, **kw))[1],
    )
    seen: list[SupervisedStepReport] = []
    losses = run_sft(one, on_step=seen.append)
    assert sum(counts) == 40 * len(losses)
    assert max(counts) - min(counts) <= 1


def test_sft_takes_no_step_without_a_session() -> None:
    """Holds however few tokens a step may have."""
    session = [5, 6, 7, 8] * 5, [False] * 10 + [True] * 10
    seen: list[SupervisedStepReport] = []
    sft(
        learner(),
        sft_stage(max_epochs=1, batch_tokens=2),
        [session] * 3,
        [session],
        seed=0,
        on_step=seen.append,
    )
    assert [report.total for report in seen] == [3, 3, 3]
    assert all(report.stats.num_loss_tokens == 10 for report in seen)


def test_sft_goes_on_to_the_bit_wherever_it_was_killed() -> None:
    straight = learner()
    seen: list[SupervisedStepReport] = []
    losses = run_sft(straight, on_step=seen.append)
    for kill in {1, seen[-1].total // 6, seen[-1].total // 6 + 1, seen[-1].step}:
        first, second = learner(), learner()
        killer = KillAt(first, kill)
        with pytest.raises(Killed):
            run_sft(first, on_step=killer)
        second.load_state(killer.state)
        assert (
            run_sft(
                second, start_step=kill, losses=killer.report.heldout_losses, on_step=seen.append
            )
            == losses
        )
        assert equal(second.weights(), straight.weights())


def test_what_cannot_be_trained_on_is_refused() -> None:
    with pytest.raises(ValueError, match="no held-out demonstrations"):
        sft(learner(), sft_stage(), sessions(4, 0), [], seed=0)
    with pytest.raises(ValueError, match="longest of the demonstrations has 33 tokens"):
        sft(learner(), sft_stage(), [([1] * 33, [True] * 33)], sessions(1, 0), seed=0)


def test_the_rate_by_hand() -> None:
    def rates(decay: str) -> list[float]:
        return [learning_rate(step, lr=1.0, warmup=1, total=5, decay=decay) for step in range(6)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 0.75, 0.5, 0.25, 0]
    assert rates("cosine") == pytest.approx([0.5, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-6)
