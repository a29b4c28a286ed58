"""Arguments of a step or a stage reach the code that uses them: rates, decay, temperatures, weights
of a mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from etude.model.experts import Routing
from etude.model.transformer import init_from_scratch
from etude.train.learner import MICROBATCH_TOKENS, Learner
from etude.train.loss import token_logprobs
from etude.train.objective import RlObjective
from etude.train.packing import PackItem, RolloutSequence, TokenSequence, pack_batch, pack_rollouts
from etude.train.routers import balance_loss
from etude.train.schedule import learning_rate
from etude.train.stages import dpo, midtrain, sft
from etude.train.stats import SupervisedStats
from etude.train.stream import TokenizedDocuments
from etude.train.supervised import PreferencePair, dpo_loss, pack_pairs
from tests.train import test_routers
from tests.train.test_learner import batch, equal, learner, texts, through_bytes
from tests.train.test_stages import (
    EOS,
    documents,
    dpo_stage,
    midtrain_stage,
    preferences,
    sessions,
    sft_stage,
)
from tests.train.test_stages import learner as small_learner

UNEQUAL = [texts(0)[0], TokenSequence(texts(1)[0].tokens[:4], [True] * 4)]


def test_a_step_takes_probabilities_at_the_temperature_of_sampling() -> None:
    one, rows = learner(), batch(1).rows
    sequences = [RolloutSequence.from_row(row, 0, temperature=0.5) for row in rows]
    found = [token_logprobs(one.model, pack_rollouts([s]), with_stats=True) for s in sequences]
    stats = one.rl_step(batch(1), lr=1e-3, temperature=0.5, microbatch_tokens=64)
    for told, (logp_N, _) in zip(stats.recomputed, found, strict=True):
        assert told.logprobs == pytest.approx(logp_N.tolist(), abs=1e-5)
    entropy_N = torch.cat([others.entropy_N for _, others in found])
    assert stats.entropy == pytest.approx(entropy_N.mean().item(), rel=1e-5)


def test_what_a_step_tells_of_its_batch() -> None:
    lesson = batch(1)
    stats = learner().rl_step(lesson, lr=1e-3, microbatch_tokens=64)
    assert (stats.lr, stats.num_rows, stats.num_loss_tokens) == (
        1e-3,
        6,
        sum(sum(row.mask) for row in lesson.rows),
    )
    assert stats.num_forward_tokens == sum(len(row.tokens) - 1 for row in lesson.rows), (
        "all but the last, which counts"
    )
    old = [
        p
        for row in lesson.rows
        for p, sampled in zip(row.logprobs, row.mask, strict=True)
        if sampled
    ]
    new = [p for row in stats.recomputed for p in row.logprobs]
    assert stats.mismatch.k1 == pytest.approx(
        sum(o - n for o, n in zip(old, new, strict=True)) / len(old), rel=1e-4
    )


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is its own microbatch."""
    monkeypatch.setitem(MICROBATCH_TOKENS, "cpu", 0)


def test_a_supervised_step_is_the_mean_over_all_tokens_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = learner(), learner()
    counts = [text.num_loss_tokens for text in UNEQUAL]
    apart = [other.evaluate([text]) for text in UNEQUAL]
    mean = sum(c * loss for c, loss in zip(counts, apart, strict=True)) / sum(counts)
    assert other.evaluate(UNEQUAL) == pytest.approx(mean, rel=1e-6)
    stats = one.supervised_step(UNEQUAL, lr=1e-3)
    assert stats.loss == pytest.approx(mean, rel=1e-5) and (stats.num_loss_tokens, stats.lr) == (
        sum(counts),
        1e-3,
    )
    one_by_one(monkeypatch)
    assert other.evaluate(UNEQUAL) == pytest.approx(mean, rel=1e-6)
    again = other.supervised_step(UNEQUAL, lr=1e-3)
    assert again.loss == pytest.approx(mean, rel=1e-5)
    assert again.grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)


def test_the_loss_that_balances_counts_by_tokens_in_a_supervised_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def balancing(text: TokenSequence) -> float:
        routing = Routing(None, keep_scores=True)
        plain = init_from_scratch(test_routers.SPARSE, 0)
        with torch.no_grad():
            for p in plain.parameters():
                p.copy_(p.bfloat16())
            token_logprobs(plain, pack_batch([text]), routing=routing)
        return float(0.1 * balance_loss(routing.scores, routing.chosen()))

    one_by_one(monkeypatch)
    losses = [
        Learner(init_from_scratch(test_routers.SPARSE, 0))
        .supervised_step(UNEQUAL, lr=1e-3, router_balance=b)
        .loss
        for b in (False, True)
    ]
    counts, alone = (
        [text.num_loss_tokens for text in UNEQUAL],
        [balancing(text) for text in UNEQUAL],
    )
    expected = sum(c * loss for c, loss in zip(counts, alone, strict=True)) / sum(counts)
    assert expected != pytest.approx(sum(alone) / len(alone), rel=1e-2)
    assert losses[1] - losses[0] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["supervised", "rl"])
def test_decay_pulls_matrices_and_leaves_gains(kind: str) -> None:
    """With equal gradients, the decayed learner has lost exactly lr x decay of its weights."""
    ends = []
    for decay in (0.0, 0.5):
        one = learner()
        before = {name: tensor.clone() for name, tensor in one.state().items()}
        if kind == "supervised":
            one.supervised_step(texts(0), lr=0.1, weight_decay=decay)
        else:
            one.rl_step(batch(1), lr=0.1, weight_decay=decay)
        ends.append(one.state())
    for name in (name for name in before if name.startswith("master.")):
        pulled = (
            0.1 * 0.5 * before[name] if before[name].ndim == 2 else torch.zeros_like(before[name])
        )
        torch.testing.assert_close(ends[0][name] - ends[1][name], pulled, rtol=1e-3, atol=1e-6)


def test_a_learner_with_muon_goes_on_to_the_bit_and_its_momentum_adds_up() -> None:
    first, second = (
        Learner(init_from_scratch(test_routers.SPARSE, seed), optimizer="muon") for seed in (0, 1)
    )
    states = []
    for seed in (0, 1):
        first.supervised_step(texts(seed), lr=1e-3)
        states.append({name: tensor.clone() for name, tensor in first.state().items()})
    second.load_state(through_bytes(states[0]))
    second.supervised_step(texts(1), lr=1e-3)
    assert equal(second.state(), states[1])
    momentum = [name for name in states[0] if name.startswith("momentum.")]
    assert momentum and all(not torch.equal(states[0][name], states[1][name]) for name in momentum)


def test_float32_weights_are_not_rounded() -> None:
    model = init_from_scratch(test_routers.SPARSE, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Learner(model, published_dtype=torch.float32)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    Learner(model)
    assert all(
        torch.equal(p, before[name].bfloat16().float()) for name, p in model.named_parameters()
    )


def test_rows_that_were_handed_out_keep_their_routers_biases() -> None:
    one = Learner(init_from_scratch(test_routers.SIGMOID, 0))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    handed = one.hf_rows()[name][0]
    one.supervised_step(test_routers.TEXTS, lr=1e-3, router_balance=True)
    assert not handed.any() and one.hf_rows()[name][0].any()


def test_kept_weights_do_not_leave_the_model_when_a_block_fails() -> None:
    one = learner()
    one.snapshot()
    one.supervised_step(texts(0), lr=1e-2)
    moved = one.weights()
    with pytest.raises(KeyError), one.using_snapshot():
        assert not equal(one.weights(), moved)
        raise KeyError
    assert equal(one.weights(), moved)


def test_a_price_of_moving_needs_weights_to_measure_from() -> None:
    with pytest.raises(AssertionError, match="a kl_coef needs a reference"):
        learner().rl_step(batch(1), lr=1e-3, objective=RlObjective(kl_coef=0.1))


def test_a_rate_without_steps_to_fall_over() -> None:
    assert [
        learning_rate(step, lr=1.0, warmup=3, total=3, decay="linear") for step in (2, 3, 4)
    ] == [0.75, 1.0, 0.0]
    assert learning_rate(9, lr=1.0, warmup=1, total=5, decay="cosine") == 0.0


class Noted:
    """Records supervised steps and their arguments without taking them."""

    def __init__(self, one: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.items: list[list[Any]] = []
        self.told: list[dict[str, Any]] = []
        monkeypatch.setattr(one, "supervised_step", self.supervised_step)

    def supervised_step(self, items: list[PackItem], **told: Any) -> SupervisedStats:
        self.items.append(items)
        self.told.append(told)
        return SupervisedStats(
            loss=1.0, grad_norm=1.0, lr=told["lr"], num_loss_tokens=1, metrics={}
        )

    def rates(self) -> list[float]:
        return [told["lr"] for told in self.told]


def run_midtrain(one: Learner, **table: Any) -> None:
    usual = {"steps": 4, "batch_tokens": 64, "lr": 0.5, "warmup_steps": 1, "weight_decay": 0.25}
    sources = [(TokenizedDocuments.of(documents(), EOS), 1.0)]
    midtrain(one, midtrain_stage(**(usual | table)), sources, eos=EOS, seed=0)


def test_midtrain_hands_on_rate_decay_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(one := small_learner(), monkeypatch)
    run_midtrain(one, seq_len=8)
    assert noted.rates() == [
        learning_rate(step, lr=0.5, warmup=1, total=4, decay="cosine") for step in range(4)
    ]
    assert {told["weight_decay"] for told in noted.told} == {0.25}
    for step in noted.items:
        ends = set(accumulate(len(text.tokens) for text in step))
        assert max(ends) == 64 and ends >= set(range(8, 65, 8)), "eight rows of eight tokens"
        assert all(EOS not in text.tokens[:-1] and all(text.mask) for text in step), (
            "documents stay apart"
        )


def test_midtrain_fills_the_context_and_may_join_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(one := small_learner(), monkeypatch)
    run_midtrain(one, batch_tokens=1, lr=1.0, document_mask=False)
    assert [[len(text.tokens) for text in step] for step in noted.items] == [[32]] * 4
    assert all(all(text.mask) for step in noted.items for text in step)


def test_a_step_is_cut_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one, read = small_learner(), list[int]()
    one.model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    monkeypatch.setitem(MICROBATCH_TOKENS, "cpu", 64)
    run_midtrain(one, steps=1, batch_tokens=3 * 64, document_mask=False)
    assert read == [2 * 31] * 3, "rows of 32 tokens, of which the last is only predicted"


def test_sft_hands_on_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(one := small_learner(), monkeypatch)
    stage = sft_stage(max_epochs=2, patience=9, batch_tokens=50, lr=0.5)
    sft(one, stage, sessions(20, 0), sessions(2, 1), seed=0)
    total = len(noted.told)
    assert total > 4 and noted.rates() == [
        learning_rate(step, lr=0.5, warmup=0, total=total, decay="linear") for step in range(total)
    ]
    assert noted.rates()[0] == 0.5 and all("weight_decay" not in told for told in noted.told)


def test_dpo_hands_on_rate_and_what_an_answer_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(one := small_learner(), monkeypatch)
    stage = dpo_stage(epochs=2, batch_pairs=4, beta=0.5, lr=0.5, warmup_steps=3)
    dpo(one, stage, preferences(12), seed=0)
    assert noted.rates() == [
        learning_rate(step, lr=0.5, warmup=3, total=6, decay="linear") for step in range(6)
    ]
    ends = {}
    for options in ((0.5, False), (0.5, True), (0.1, False)):
        one = small_learner()
        beta, length_normalised = options
        stage = dpo_stage(batch_pairs=4, beta=beta, lr=1e-2, length_normalised=length_normalised)
        dpo(one, stage, preferences(12), seed=0)
        ends[options] = one.state()
    assert not equal(ends[0.5, False], ends[0.5, True]) and not equal(
        ends[0.5, False], ends[0.1, False]
    )


@pytest.mark.parametrize("length_normalised", [False, True])
def test_the_reference_of_dpo_is_worth_what_the_answers_are(length_normalised: bool) -> None:
    """At the first step nothing has moved: however an answer is scored, no pair is preferred."""
    seen: list[float] = []
    dpo(
        small_learner(),
        dpo_stage(batch_pairs=12, beta=0.5, lr=1e-2, length_normalised=length_normalised),
        preferences(12),
        seed=0,
        on_step=lambda progress: seen.append(progress.metrics["margin"]),
    )
    assert seen == [pytest.approx(0.0, abs=1e-6)]


def test_weights_of_rows_and_experts_come_with_their_rows() -> None:
    rows = [replace(row, sample=str(number)) for number, row in enumerate(batch(1).rows)]
    for numbers in ((4, 2, 0), (1, 5), (2,)):
        micro = pack_rollouts(
            [RolloutSequence.from_row(rows[number], number, float(number)) for number in numbers],
            lambda row: torch.full((3, 1, 1), int(row.sample)) if row.sample != "2" else None,
        )
        assert micro.weights_N.tolist() == micro.row_ids_N.tolist()
        for number, tokens_T in zip(numbers, micro.tokens_T.split(micro.lengths), strict=True):
            assert tokens_T.tolist() == list(rows[number].tokens[:-1])
        if micro.experts_TLk is None:
            assert numbers == (2,)
            continue
        assert len(micro.experts_TLk) == len(micro.tokens_T)
        for number, ids in zip(numbers, micro.experts_TLk.split(micro.lengths), strict=True):
            assert ids.flatten().tolist() == [-1 if number == 2 else number] * 3 + [-1] * (
                len(ids) - 3
            )
    assert pack_rollouts(
        [RolloutSequence.from_row(row, 7) for row in rows]
    ).weights_N.unique().tolist() == [1.0]


def test_a_preference_balances_too() -> None:
    halves = [
        (TokenSequence(row[:16], [True] * 16), TokenSequence(row[16:], [True] * 17))
        for row in test_routers.TEXT_BT[:2].tolist()
    ]
    pairs = [PreferencePair(chosen, rejected) for chosen, rejected in halves]
    loss = dpo_loss(beta=0.1, length_normalised=True)
    plain, balanced = (
        Learner(init_from_scratch(test_routers.SPARSE, 0))
        .supervised_step(pairs, lr=1e-3, pack=pack_pairs, loss=loss, router_balance=router_balance)
        .loss
        for router_balance in (False, True)
    )
    assert 0.19 < balanced - plain < 0.3, (
        "the coefficient times the experts of a token, or a little more"
    )


def test_a_state_of_one_is_read_by_one() -> None:
    first, second = learner(), learner(seed=9)
    first.rl_step(batch(1), lr=1e-3)
    second.load_shards(1, lambda rank: through_bytes(first.state()))
    assert equal(second.state(), first.state()) and equal(second.weights(), first.weights())
