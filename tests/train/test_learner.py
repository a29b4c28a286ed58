from __future__ import annotations

import copy
import gc
import json
import random
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Batch, Row
from etude.model.attention import CausalAttention
from etude.model.files import hf_tensors
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.train.checkpoint import from_bytes, to_bytes
from etude.train.learner import MAX_GRAD_NORM, Learner
from etude.train.loss import token_logprobs
from etude.train.masters import split
from etude.train.objective import RlObjective
from etude.train.optimizer import BETAS, MOMENTUM, OPTIMIZER
from etude.train.packing import PackedMicrobatch, TokenSequence
from etude.train.packing import pack_batch as pack_texts

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
)


def learner(seed: int = 0) -> Learner:
    return Learner(init_from_scratch(CONFIG, seed))


def batch(step: int, rows: int = 6) -> Batch:
    rng = random.Random(step)

    def row(number: int) -> Row:
        size = rng.randint(8, 30)
        mask = tuple(t >= 4 and rng.random() < 0.7 for t in range(size - 1)) + (True,)
        return Row(
            sample=f"{step}-{number}",
            tokens=tuple(rng.randrange(32) for _ in range(size)),
            mask=mask,
            logprobs=tuple(-3.4 - rng.random() if sampled else 0.0 for sampled in mask),
            advantages=tuple((-1.0) ** number if sampled else 0.0 for sampled in mask),
            versions=(),
        )

    return Batch(step=step, rows=tuple(row(number) for number in range(rows)), oldest=step - 1)


def texts(seed: int) -> list[TokenSequence]:
    tokens_BT = torch.randint(32, (4, 20), generator=torch.Generator().manual_seed(seed))
    return [TokenSequence(tokens, [True] * 20) for tokens in tokens_BT.tolist()]


def packed(row: Row) -> PackedMicrobatch:
    return pack_texts([TokenSequence(row.tokens, row.mask)])


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def through_bytes(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return from_bytes(to_bytes(state), "here")


def test_the_model_computes_with_what_is_published() -> None:
    one = learner()
    for step in (1, 2):
        one.rl_step(batch(step), lr=1e-2)
        published = one.weights()
        assert all(tensor.dtype == torch.bfloat16 for tensor in published.values())
        assert equal({n: t.float() for n, t in published.items()}, hf_tensors(one.model))


def test_steps_too_small_for_bf16_add_up() -> None:
    """A norm's gain is 1.0, and rounding it to another bf16 number takes a change of 0.002."""
    one, name = learner(), "model.norm.weight"
    one.rl_step(batch(1), lr=1e-3)
    assert torch.equal(one.weights()[name], torch.ones(32, dtype=torch.bfloat16))
    assert not torch.equal(one.state()[f"master.{name}"], torch.ones(32))
    for _ in range(9):
        one.rl_step(batch(1), lr=1e-3)
    assert not torch.equal(one.weights()[name], torch.ones(32, dtype=torch.bfloat16))


def test_a_learner_that_computes_in_bf16_keeps_masters_and_gradients_in_fp32() -> None:
    """Small steps and the gradients of many microbatches accumulate as before."""
    one, parts = (
        Learner(init_from_scratch(CONFIG, 0), compute_dtype=torch.bfloat16) for _ in range(2)
    )
    assert all(p.dtype == torch.bfloat16 for p in one.model.parameters())
    for name, p in init_from_scratch(CONFIG, 0).named_parameters():
        assert torch.equal(one.state()[f"master.{name}"], p)
    whole, cut = (
        one.rl_step(batch(1), lr=1e-3),
        parts.rl_step(batch(1), lr=1e-3, microbatch_tokens=0),
    )
    exact = learner().rl_step(batch(1), lr=1e-3)
    for stats in (whole, cut):
        assert stats.loss == pytest.approx(exact.loss, rel=0.02)
        assert stats.grad_norm == pytest.approx(exact.grad_norm, rel=0.02)
    assert all(p.grad is None for p in one.model.parameters())
    published = one.weights()
    assert equal(published, hf_tensors(one.model))
    masters = {
        n.removeprefix("master."): t for n, t in one.state().items() if n.startswith("master.")
    }
    assert all(torch.equal(split(masters[n])[0], p) for n, p in one.model.named_parameters())


def test_a_learner_that_nobody_needs_is_gone() -> None:
    one = learner()
    one.rl_step(batch(1), lr=1e-3)
    master = weakref.ref(next(iter(one.state().values())))
    del one
    gc.collect()
    assert master() is None


def test_published_weights_are_a_copy() -> None:
    one = learner()
    published = one.weights()
    copies = copy.deepcopy(published)
    one.rl_step(batch(1), lr=1e-2)
    assert equal(published, copies)


@pytest.mark.parametrize("microbatch_tokens", [0, 64])
def test_two_learners_take_the_same_steps_to_the_bit(microbatch_tokens: int) -> None:
    first, second = learner(), learner()
    for step in (1, 2, 3):
        stats = [
            one.rl_step(batch(step), lr=1e-3, microbatch_tokens=microbatch_tokens)
            for one in (first, second)
        ]
        assert stats[0] == stats[1]
    assert equal(first.state(), second.state())
    assert equal(first.weights(), second.weights())


def test_how_rows_are_cut_into_microbatches_changes_only_rounding() -> None:
    sizes = (0, 3, 40, 4096, None)  # 3: every row is longer, and taken alone
    stats = [learner().rl_step(batch(1), lr=1e-3, microbatch_tokens=size) for size in sizes]
    for other in stats[1:]:
        assert other.loss == pytest.approx(stats[0].loss, rel=1e-4)
        assert other.grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-4)
        assert other.mismatch.k3 == pytest.approx(stats[0].mismatch.k3, rel=1e-4)
        assert other.num_loss_tokens == stats[0].num_loss_tokens


def test_rows_are_what_is_published_and_stay_as_they_are() -> None:
    one = learner()
    rows, whole = one.hf_rows(), one.weights()
    one.rl_step(batch(1), lr=1e-2)
    assert (
        all(torch.equal(data, whole[name]) for name, (data, *_) in rows.items())
        and rows.keys() == whole.keys()
    )
    assert any(not torch.equal(one.hf_rows()[name][0], whole[name]) for name in whole)


@pytest.mark.parametrize("microbatch_tokens", [0, 64])
def test_a_step_tells_what_it_found_for_each_token_of_each_row(microbatch_tokens: int) -> None:
    one, rows = learner(), batch(1).rows
    expected = [token_logprobs(one.model, packed(row), with_stats=True) for row in rows]
    found = one.rl_step(batch(1), lr=1e-3, microbatch_tokens=microbatch_tokens).recomputed
    for each, (logp_N, others) in zip(found, expected, strict=True):
        assert each.logprobs == pytest.approx(logp_N.tolist(), abs=1e-5)
        assert each.argmax == tuple(others.argmax_N.tolist()) and each.router_mismatch is None


def test_a_step_is_one_adamw_step_on_the_formula() -> None:
    """The whole step against plain autograd and an AdamW of a few lines, in float64."""
    one, rows = learner(), batch(1).rows
    model = init_from_scratch(CONFIG, 0)
    masters = {name: p.detach().double() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    model = model.double()
    total = sum(sum(row.mask) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        mask = torch.tensor([row.mask])
        logp = token_logprobs(model, packed(row))[0].double()
        ratio = (logp.detach() - torch.tensor([row.logprobs], dtype=torch.float64)[mask]).exp()
        loss -= (
            ratio.clamp(max=1.1) * torch.tensor([row.advantages], dtype=torch.float64)[mask] * logp
        ).sum() / total
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    stats = one.rl_step(
        batch(1), lr=1e-2, objective=RlObjective(correction_cap=1.1), weight_decay=0.1
    )
    assert stats.loss == pytest.approx(loss.item(), rel=1e-4)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    state = one.state()
    for name, p in model.named_parameters():
        assert p.grad is not None
        gradient = p.grad * min(1.0, 1.0 / (norm.item() + 1e-6))
        decayed = masters[name] * (1 - 1e-2 * 0.1) if p.ndim == 2 else masters[name]
        # the first step: the moments are the gradient
        expected = decayed - 1e-2 * gradient / (gradient.abs() + 1e-8)
        clear = gradient.abs() > 1e-5  # where rounding cannot change the sign of a step
        torch.testing.assert_close(
            state[f"master.{name}"].double()[clear], expected[clear], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_a_gradient_is_no_longer_than_allowed(scale: float, optimizer: str) -> None:
    """The size of a first step does not depend on the gradient, so the optimizer's state is
    checked."""
    one = Learner(init_from_scratch(CONFIG, 0), optimizer=optimizer)
    rows = [
        replace(row, advantages=tuple(scale * adv for adv in row.advantages))
        for row in batch(1).rows
    ]
    stats = one.rl_step(replace(batch(1), rows=tuple(rows)), lr=1e-3)
    assert (stats.grad_norm > 10) == (scale > 1)
    remembered = {"exp_avg": 1 - BETAS[0], "momentum": 1 - MOMENTUM}
    parts = [(name.partition(".")[0], tensor) for name, tensor in one.state().items()]
    moments = [tensor.norm() / remembered[part] for part, tensor in parts if part in remembered]
    assert torch.stack(moments).norm().item() == pytest.approx(
        min(stats.grad_norm, MAX_GRAD_NORM), rel=1e-3
    )


def test_the_reference_is_computed_at_the_temperature_of_the_policy() -> None:
    """Its weights are still those of the policy: at one temperature they agree, and the KL costs
    nothing."""
    free, held = learner(), learner()
    held.snapshot()
    stats = [
        one.rl_step(batch(1), lr=1e-3, temperature=0.5, objective=RlObjective(kl_coef=kl_coef))
        for one, kl_coef in ((free, 0.0), (held, 10.0))
    ]
    assert stats[1].loss == pytest.approx(stats[0].loss, abs=1e-4)
    assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-4)


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_a_step_adds_up_over_the_whole_batch_as_the_objective_says(aggregate: str) -> None:
    """Two segments of one attempt are in different microbatches; compared with the sum written out
    in float64."""
    rows = [
        replace(row, sample="same") if number < 2 else row
        for number, row in enumerate(batch(1).rows)
    ]
    model = init_from_scratch(CONFIG, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    losses = []
    for row in rows:
        mask = torch.tensor([row.mask])
        logp = token_logprobs(model, packed(row))[0].double()
        ratio = (logp - torch.tensor([row.logprobs])[mask].double()).exp().clamp(max=2.0)
        losses.append((-ratio * torch.tensor([row.advantages])[mask].double() * logp).tolist())
    attempts = [losses[0] + losses[1], *losses[2:]]
    expected = {
        "token": sum(map(sum, attempts)) / sum(map(len, attempts)),
        "sequence": sum(sum(losses) / len(losses) for losses in attempts) / len(attempts),
        "constant": sum(map(sum, attempts)) / len(attempts) / CONFIG.max_position_embeddings,
    }
    for microbatch_tokens in (0, 64):
        lesson = replace(batch(1), rows=tuple(rows))
        stats = learner().rl_step(
            lesson,
            lr=1e-3,
            objective=RlObjective(aggregate=aggregate),
            microbatch_tokens=microbatch_tokens,
        )
        assert stats.loss == pytest.approx(expected[aggregate], rel=1e-4)


def test_the_reference_is_what_was_kept_and_survives_a_checkpoint() -> None:
    """At the snapshot's weights the KL costs nothing; once the policy has moved it does, and pulls
    it back."""
    priced = RlObjective(kl_coef=0.5)
    free, held = learner(), learner()
    held.snapshot()
    assert (
        held.rl_step(batch(1), lr=1e-2, objective=priced).loss
        == free.rl_step(batch(1), lr=1e-2).loss
    )
    assert (
        held.rl_step(batch(2), lr=1e-2, objective=priced).loss
        != free.rl_step(batch(2), lr=1e-2).loss
    )

    resumed = learner(seed=9)
    resumed.load_state(through_bytes(held.state()))
    assert resumed.rl_step(batch(3), lr=1e-2, objective=priced) == held.rl_step(
        batch(3), lr=1e-2, objective=priced
    )

    def gap(row: Row) -> float:
        """Mean distance of the row's log-probs from the reference's."""
        own, kept = (token_logprobs(one.model, packed(row))[0] for one in (held, learner()))
        return (own - kept).abs().mean().item()

    unrewarded = tuple(replace(row, advantages=(0.0,) * len(row.mask)) for row in batch(4).rows)
    before = sum(map(gap, unrewarded))
    for _ in range(20):
        held.rl_step(
            replace(batch(4), rows=unrewarded),
            lr=2e-3,
            objective=RlObjective(correction="none", kl_coef=1.0),
        )
    assert sum(map(gap, unrewarded)) < before / 2


def test_shares_of_what_a_correction_did() -> None:
    stats = learner().rl_step(
        batch(1), lr=1e-3, objective=RlObjective(correction="masked", correction_cap=1.01)
    )
    assert 0.5 < stats.corrected_frac == stats.zero_grad_frac <= 1.0
    stats = learner().rl_step(batch(1), lr=1e-3, objective=RlObjective(correction_cap=1.0))
    assert 0.0 < stats.corrected_frac < 1.0 and stats.zero_grad_frac == 0.0


def test_a_resumed_learner_is_the_same_to_the_bit() -> None:
    straight = learner()
    for step in (1, 2, 3, 4):
        straight.rl_step(batch(step), lr=1e-3)
    first = learner()
    first.rl_step(batch(1), lr=1e-3)
    first.rl_step(batch(2), lr=1e-3)
    second = learner(seed=9)
    second.load_state(through_bytes(first.state()))
    assert equal(second.weights(), first.weights())
    second.rl_step(batch(3), lr=1e-3)
    second.rl_step(batch(4), lr=1e-3)
    assert equal(second.state(), straight.state())
    assert equal(second.weights(), straight.weights())


def test_a_checkpoint_holds_what_is_never_trained() -> None:
    shape = {
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
    }
    shape |= {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "head_dim": None,
    }
    shape |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 0}
    config = ModelConfig.from_json(json.dumps(json.loads(CONFIG.to_json()) | shape))
    first, second = Learner(init_from_scratch(config, 0)), Learner(init_from_scratch(config, 1))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    hf_tensors(first.model)[bias].normal_()
    before = first.weights()[bias]
    first.rl_step(batch(1), lr=1e-3)
    second.load_state(through_bytes(first.state()))
    assert equal(second.weights(), first.weights())
    assert (
        torch.equal(second.weights()[bias], before)
        and before.any()
        and before.dtype == torch.float32
    )


def test_a_new_stage_takes_the_masters_and_nothing_else() -> None:
    first = learner()
    first.supervised_step(texts(0), lr=1e-3)
    first.snapshot()
    masters = {
        name: tensor.clone() for name, tensor in first.state().items() if name.startswith("master.")
    }
    first.begin_stage()
    state = first.state()
    assert equal({name: tensor for name, tensor in state.items() if name in masters}, masters)
    assert not any(tensor.any() for name, tensor in state.items() if name not in masters)
    assert len(state) == len(learner().state())


def test_kept_weights_survive_steps_and_checkpoints() -> None:
    one = learner()
    one.supervised_step(texts(0), lr=1e-2)
    best = one.weights()
    one.snapshot()
    one.supervised_step(texts(1), lr=1e-2)
    assert not equal(one.weights(), best)
    other = learner(seed=3)
    other.load_state(through_bytes(one.state()))
    other.restore_snapshot()
    one.restore_snapshot()
    assert equal(one.weights(), best)
    assert equal(other.weights(), best)


def test_learning_raises_what_was_rewarded() -> None:
    one, lesson = learner(), batch(1)
    good, bad = lesson.rows[0], lesson.rows[1]

    def mean_logp(row: Row) -> float:
        return token_logprobs(one.model, packed(row))[0].mean().item()

    before = mean_logp(good), mean_logp(bad)
    for step in range(5):
        one.rl_step(replace(lesson, step=step + 1), lr=3e-3)
    assert mean_logp(good) > before[0] and mean_logp(bad) < before[1]


def test_fit_is_cross_entropy_and_evaluate_changes_nothing() -> None:
    one, lesson = learner(), texts(0)
    tokens_BT = torch.tensor([text.tokens for text in lesson])
    logits = one.model.logits(
        one.model(tokens_BT[:, :-1], torch.arange(19).expand(4, -1), CausalAttention())
    )
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens_BT[:, 1:].flatten()
    ).item()
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    assert one.evaluate(lesson) == pytest.approx(expected, rel=1e-5)
    assert equal(one.state(), state)
    assert one.supervised_step(lesson, lr=1e-2).loss == pytest.approx(expected, rel=1e-5)
    assert one.evaluate(lesson) < expected


def test_a_batch_without_sampled_tokens_is_refused() -> None:
    rows = tuple(replace(row, mask=(False,) * len(row.mask)) for row in batch(1).rows)
    with pytest.raises(ValueError, match="step 1 has no sampled token"):
        learner().rl_step(Batch(step=1, rows=rows, oldest=0), lr=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_the_masters(
    optimizer: str,
) -> None:
    one = Learner(init_from_scratch(CONFIG, 0), optimizer=optimizer)
    state = {name: tensor.clone() for name, tensor in one.state().items()}
    rows = tuple(
        replace(row, advantages=tuple(float("inf") for _ in row.mask)) for row in batch(1).rows
    )
    with pytest.raises(EtudeError, match="the gradient of this step is not finite"):
        one.rl_step(Batch(step=1, rows=rows, oldest=0), lr=1e-3)
    assert equal(one.state(), state)


def test_a_state_of_another_shape_is_refused() -> None:
    wider = Learner(init_from_scratch(replace(CONFIG, hidden_size=64), 0))
    with pytest.raises(
        ValueError,
        match=r"does not fit the model: master\.model\.embed_tokens\.weight is \(32, 64\)",
    ):
        learner().load_state(wider.state())
    with pytest.raises(ValueError, match="missing"):
        learner().load_state({})


def test_an_adapter_learns_beside_the_base_as_it_was_published() -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
    model = add_adapter(init_from_scratch(CONFIG, 0), lora, 1)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    rounded = {name: p.to(torch.bfloat16).float() for name, p in base.items()}
    assert not equal(base, rounded)
    adapted = Learner(model)
    adapted.rl_step(batch(1), lr=1e-2)
    after = {name: p.detach() for name, p in model.named_parameters() if name in base}
    assert equal(after, rounded), "what engines serve, before a step and behind it"
