"""Sparse models in the trainer: the engine's experts are replayed, and no expert starves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from etude.core.errors import EtudeError
from etude.core.sampling import VersionSpan
from etude.core.types import Batch, Row
from etude.engine.engine import Engine
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LatentConfig, ModelConfig
from etude.model.experts import Router, Routing
from etude.model.files import hf_state_dict
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.learner import MICROBATCH_TOKENS, Learner
from etude.train.packing import RolloutSequence, TokenSequence, pack_batch, pack_rollouts
from etude.train.routers import ExpertRouters, balance_loss
from etude.train.stats import RlStats
from tests.small_model import add, config, drain, request, sharp

EXPERTS = ExpertsConfig(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    layers=(0, 1),
    router_aux_loss_coef=0.1,
)
SPARSE = replace(config(), model_type="qwen3_moe", experts=EXPERTS)
LATENT = LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
SIGMOID = replace(
    config(),
    model_type="deepseek_v3",
    latent=LATENT,
    experts=replace(EXPERTS, layers=(1,), sigmoid=True),
)


def sampled(model: Transformer) -> tuple[Batch, dict[str, bytes]]:
    """An engine's samples and its routing, as a batch and the objects that its rows name."""
    engine = Engine(model, max_num_seqs=4)
    asks = [request(str(n), [3 + n, 7, 11 + n], max_tokens=5 + 3 * n) for n in range(4)]
    for ask in asks:
        add(engine, ask)
    samples = drain(engine)
    rows, objects = [], {}
    for ask in asks:
        sample = samples[ask.id]
        assert sample.experts is not None
        objects[ask.id] = sample.experts
        size, behind = len(ask.prompt), len(sample.tokens)
        rows.append(
            Row(
                sample=f"s{ask.id}",
                tokens=ask.prompt + sample.tokens,
                mask=(False,) * size + (True,) * behind,
                logprobs=(0.0,) * size + sample.logprobs,
                advantages=(0.0,) * size + (1.0,) * behind,
                versions=sample.versions,
                experts=ask.id,
            )  # fmt: skip
        )
    return Batch(step=1, rows=tuple(rows), oldest=0), objects


def served(model_config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """A model with the published values, in the engine's precision."""
    model = sharp(model_config, 0)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model.to(dtype)


def step(
    model_config: ModelConfig, batch: Batch, objects: dict[str, bytes] | None, **options: float
) -> RlStats:
    learner = Learner(sharp(model_config, 0).requires_grad_(True))
    fetch = objects.__getitem__ if objects is not None else None
    return learner.rl_step(batch, lr=1e-3, fetch_experts=fetch, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("model_config", [SPARSE, SIGMOID], ids=["qwen3_moe", "deepseek_v3"])
def test_what_the_engine_routed_is_what_the_learner_routes(model_config: ModelConfig) -> None:
    batch, objects = sampled(served(model_config, torch.float32))
    stats = step(model_config, batch, objects, router_replay_min_score=1.0)
    assert stats.router_mismatch_frac == 0.0 and stats.experts_replaced_frac == 0.0
    assert stats.mismatch.k3 < 1e-9
    assert step(model_config, batch, None).router_mismatch_frac is None


def test_replay_brings_a_learner_in_another_precision_near_the_engine() -> None:
    """Every token is routed differently than the router would choose, so that the test does not
    depend on luck."""
    batch, objects = sampled(served(SPARSE, torch.bfloat16))
    without, replayed = step(SPARSE, batch, None), step(SPARSE, batch, objects)
    assert replayed.mismatch.k3 <= without.mismatch.k3
    turned = {name: bytes(5 - expert for expert in ids) for name, ids in objects.items()}
    wrong = step(SPARSE, batch, turned)
    assert wrong.router_mismatch_frac is not None and wrong.router_mismatch_frac > 0.5
    assert wrong.mismatch.k3 > 10 * replayed.mismatch.k3
    guarded = step(SPARSE, batch, turned, router_replay_min_score=1.0)
    assert guarded.experts_replaced_frac is not None and 0.3 < guarded.experts_replaced_frac <= 1.0
    # as if nothing had been replayed
    assert guarded.mismatch.k3 == pytest.approx(without.mismatch.k3, rel=0.01)


def test_how_rows_are_cut_changes_only_rounding() -> None:
    batch, objects = sampled(served(SPARSE, torch.bfloat16))
    one, other = (step(SPARSE, batch, objects, microbatch_tokens=size) for size in (0, 4096))
    assert one.router_mismatch_frac == other.router_mismatch_frac
    assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_tokens_that_nobody_reported_are_left_to_the_router() -> None:
    batch, objects = sampled(served(SPARSE, torch.float32))
    short = {name: ids[: len(ids) // 2 // 4 * 4] for name, ids in objects.items()}
    micro = pack_rollouts(
        [RolloutSequence.from_row(row, number) for number, row in enumerate(batch.rows)],
        lambda row: torch.tensor(list(short[row.experts or ""])).view(-1, 2, 2),
    )
    assert micro.experts_TLk is not None
    for row, told in zip(batch.rows, micro.experts_TLk.split(micro.lengths), strict=True):
        ids = short[row.experts or ""]
        assert (
            told[: len(ids) // 4].flatten().tolist() == list(ids)
            and (told[len(ids) // 4 :] == -1).all()
        )
    assert step(SPARSE, batch, short).mismatch.k3 < 1e-9


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (b"\0" * 5, "row of s2 do not fit this model: 5 bytes"),
        (b"\7" * 40, "row of s2 do not fit this model: .* expert 7"),
        (b"\0" * 4000, "row of s2 belong to another row: they are for 1000 tokens"),
    ],
)
def test_experts_that_do_not_fit_are_named(ids: bytes, message: str) -> None:
    batch, objects = sampled(served(SPARSE, torch.float32))
    with pytest.raises(EtudeError, match=message):
        step(SPARSE, batch, objects | {"2": ids})
    with pytest.raises(EtudeError, match="row of s. has recorded experts, but the model has none"):
        step(config(), batch, objects)


def test_the_loss_that_balances_is_that_of_the_family() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(50, 6, generator=generator, requires_grad=True) for _ in range(3)]
    is_real = torch.arange(50) < 40
    theirs = load_balancing_loss_func(tuple(logits), 6, 2, is_real.view(1, 50))
    scores = [each.softmax(-1)[is_real] for each in logits]
    ours = balance_loss(scores, torch.stack([each.topk(2).indices for each in scores], 1))
    torch.testing.assert_close(ours, theirs)
    expected = torch.autograd.grad(theirs, logits)
    for mine, yours in zip(torch.autograd.grad(ours, logits), expected, strict=True):
        torch.testing.assert_close(mine, yours)


TEXT_BT = torch.randint(3, 61, (8, 33), generator=torch.Generator().manual_seed(0))
TEXTS = [TokenSequence(tokens, [True] * 33) for tokens in TEXT_BT.tolist()]


@torch.no_grad()
def most_loaded(model: Transformer, routing: Routing) -> float:
    """The load of the busiest expert divided by the average load, all layers taken together."""
    model(TEXT_BT[:, :-1], torch.arange(32).expand(8, 32), CausalAttention(), routing)
    counts = routing.chosen().flatten().bincount(minlength=6)
    return float(counts.max() / counts.float().mean())


def test_biases_are_nudged_until_the_load_is_even() -> None:
    model = init_from_scratch(SIGMOID, 0)
    (router,) = [module for module in model.modules() if isinstance(module, Router)]
    assert router.e_score_correction_bias is not None
    router.e_score_correction_bias[:2] += 0.1
    loads = []
    for _ in range(150):
        routers = ExpertRouters(model, router_balance=True)
        routing = routers.begin_microbatch(pack_batch(TEXTS))
        assert routing is not None
        loads.append(most_loaded(model, routing))
        assert routers.end_microbatch(routing, pack_batch(TEXTS)) == 0.0
        routers.end_step()
    assert loads[0] > 1.6 and loads[-1] < 1.05


def test_a_nudge_is_published() -> None:
    learner = Learner(init_from_scratch(SIGMOID, 0))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    learner.supervised_step(TEXTS, lr=1e-3)
    assert not learner.weights()[name].any()
    learner.supervised_step(TEXTS, lr=1e-3, router_balance=True)
    published = learner.weights()[name]
    assert torch.equal(published, hf_state_dict(learner.model)[name])
    assert published.abs().max() == published.abs()[published != 0].min() == pytest.approx(1e-3)


def test_the_loss_makes_the_load_even() -> None:
    strong = replace(SPARSE, experts=replace(EXPERTS, router_aux_loss_coef=5.0))
    ends = {}
    for router_balance in (False, True):
        learner = Learner(init_from_scratch(strong, 0))
        for _ in range(25):
            learner.supervised_step(TEXTS, lr=3e-3, router_balance=router_balance)
        ends[router_balance] = most_loaded(learner.model, Routing())
    assert ends[True] < 1.15 < ends[False], ends


def test_the_balance_of_a_batch_is_the_mean_over_its_tokens() -> None:
    """The division does not matter: each microbatch has the weight of its tokens, and an unrewarded
    batch has no other loss."""
    sizes = (5, 25)
    rows = [
        Row(
            sample=f"s{size}",
            tokens=tuple(TEXT_BT[size % 8, : 3 + size].tolist()),
            mask=(False,) * 3 + (True,) * size,
            logprobs=(-1.0,) * (3 + size),
            advantages=(0.0,) * (3 + size),
            versions=(VersionSpan(0, size),),
        )
        for size in sizes
    ]
    batch = Batch(step=1, rows=tuple(rows), oldest=0)
    alone = [
        step(SPARSE, replace(batch, rows=(row,)), None, router_balance=True).loss for row in rows
    ]
    assert alone[0] != pytest.approx(alone[1], rel=1e-3) and min(alone) > 0.05
    together = step(SPARSE, batch, None, router_balance=True, microbatch_tokens=0)
    assert together.loss == pytest.approx(
        (sizes[0] * alone[0] + sizes[1] * alone[1]) / sum(sizes), rel=1e-4
    )


def test_the_balance_of_a_text_is_the_mean_over_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MICROBATCH_TOKENS, "cpu", 0)  # each text is a microbatch
    texts = [TokenSequence(TEXT_BT[0, :9].tolist(), [True] * 9), TEXTS[2]]

    def price(texts: list[TokenSequence]) -> float:
        losses = [
            Learner(sharp(SPARSE, 0).requires_grad_(True))
            .supervised_step(texts, lr=1e-3, router_balance=b)
            .loss
            for b in (True, False)
        ]
        return losses[0] - losses[1]

    counts, alone = [text.num_loss_terms for text in texts], [price([text]) for text in texts]
    assert alone[0] != pytest.approx(alone[1], rel=1e-2) and min(alone) > 0.05
    assert price(texts) == pytest.approx(
        sum(n * p for n, p in zip(counts, alone, strict=True)) / sum(counts), rel=1e-3
    )


def test_a_microbatch_without_loss_tokens_only_keeps_company() -> None:
    """It belongs to a rank without work; its routing counts for nothing."""
    batch, objects = sampled(served(SPARSE, torch.float32))
    model = served(SPARSE, torch.float32)
    row = replace(batch.rows[0], mask=(False,) * len(batch.rows[0].tokens))
    for rows, counts in (((row,), False), (batch.rows, True)):
        micro = pack_rollouts(
            [RolloutSequence.from_row(each, number) for number, each in enumerate(rows)],
            lambda row: torch.tensor(list(objects[row.experts or ""])).view(-1, 2, 2),
        )
        routers = ExpertRouters(model, router_balance=True)
        assert routers.mismatch_frac is None and routers.replaced_frac is None
        routing = routers.begin_microbatch(micro)
        model(micro.tokens_T, micro.positions_T, CausalAttention(micro.lengths), routing)
        loss = routers.end_microbatch(routing, micro)
        assert (float(loss) > 0, routers.num_replayed > 0) == (counts, counts)
        assert bool(routers.loads_LX.any()) is counts
        # each token is at two experts in each layer
        assert set(routers.loads_LX.sum(1).tolist()) == {2 * counts * len(micro.tokens_T)}
