"""The trainer on a CUDA device: the curve of the CPU, and the same bits again after a stop.

CI has no such device; run `python -m pytest tests/train/test_on_cuda.py` on a machine with one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.core.errors import EtudeError
from etude.core.sampling import SamplingParams, SamplingSpan
from etude.core.types import Batch
from etude.engine.engine import Engine
from etude.engine.select import invariant_trainer_model
from etude.model import cudnn_attention
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LatentConfig
from etude.model.fp8 import quantise_rows, rounded_kv
from etude.model.numerics import Arithmetic
from etude.model.transformer import ModelConfig, Transformer
from etude.run.trials import row_of
from etude.train.distributed import SINGLE_PROCESS
from etude.train.learner import Learner
from etude.train.optimizer import OPTIMIZER
from etude.train.start import compile_layers
from etude.trainer.trainer import Trainer
from tests.small_model import add, drain, request
from tests.train import distributed_work
from tests.train.test_learner import CONFIG, batch, equal, init_from_scratch, texts, through_bytes
from tests.trainer.lives import STAGES, fingerprint, live_briefly, prepared

EXPERTS = ExpertsConfig(
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    layers=(1,),
    router_aux_loss_coef=0.1,
)
LATENT = LatentConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_it_has_the_curve_of_the_cpu() -> None:
    here, there = (
        distributed_work.train_all(SINGLE_PROCESS, 5, device) for device in ("cpu", "cuda")
    )
    for case, own in here.items():
        for a, b in zip(own.steps, there[case].steps, strict=True):
            assert b.loss == pytest.approx(a.loss, rel=1e-4, abs=1e-5), case
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3), case
            assert b.mismatch.k3 == pytest.approx(a.mismatch.k3, rel=1e-3), case
        assert there[case].exam == pytest.approx(own.exam, rel=1e-4)
        for name, whole in own.state.items():
            np.testing.assert_allclose(
                there[case].state[name], whole, rtol=1e-2, atol=1e-4, err_msg=f"{case} {name}"
            )


SHAPES = {
    "dense": CONFIG,
    "wide": replace(CONFIG, head_dim=16),  # which cuDNN supports
    "moe": replace(CONFIG, model_type="qwen3_moe", experts=EXPERTS),
    "mla": replace(
        CONFIG, model_type="deepseek_v3", latent=LATENT, experts=replace(EXPERTS, sigmoid=True)
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_it_is_near_the_cpu(shape: str, compiled: bool) -> None:
    """Checks the log-prob of every token and the gradient of every parameter. Experts are replayed,
    because rounding decides between two that score nearly the same. Some are used by no token."""
    model = init_from_scratch(SHAPES[shape], 0).to("cuda")
    there = Learner(compile_layers(model) if compiled else model, compute_dtype=torch.bfloat16)
    here = Learner(init_from_scratch(SHAPES[shape], 0))
    given = batch(1)
    experts = {row.sample: bytes(n % 12 for n in range(2 * len(row.tokens))) for row in given.rows}
    if SHAPES[shape].experts:
        named = tuple(replace(row, experts=row.sample) for row in given.rows)
        given = replace(given, rows=named)
    for microbatch_tokens in (4096, 64):  # the second time other shapes, in several passes
        theirs, ours = (
            one.rl_step(
                given,
                lr=0.0,
                microbatch_tokens=microbatch_tokens,
                fetch_experts=experts.__getitem__,
            )
            for one in (there, here)
        )
        found, expected = (
            np.concatenate([row.logprobs for row in stats.recomputed]) for stats in (theirs, ours)
        )
        assert np.sqrt(np.mean((found - expected) ** 2)) < 0.03
        assert theirs.loss == pytest.approx(ours.loss, abs=0.02)
        assert theirs.entropy == pytest.approx(ours.entropy, rel=0.01)
        assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=0.05)
    for name, expected in here.state().items():
        if name.startswith("exp_avg."):
            error = there.state()[name].cpu() - expected
            assert error.norm() <= 0.1 * expected.norm(), name


ATTENTION = ["cudnn", "flash"]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "flash":
        monkeypatch.setenv(cudnn_attention.SWITCH, "0")
    elif not cudnn_attention.available(torch.device("cuda")):
        pytest.skip("needs nvidia-cudnn-frontend and a device that it knows")
    return name


@pytest.mark.parametrize("kernel", ATTENTION, indirect=True)
@pytest.mark.parametrize(
    ("heads", "keys", "size", "value"),
    [(4, 2, 64, 64), (4, 4, 48, 32), (2, 1, 128, 128), (16, 8, 128, 128)],
)
@pytest.mark.parametrize("lengths", [(70, 1, 300, 129), (5,), (1, 2000, 1), (64,) * 40])
def test_attention_of_all_sequences_at_once_is_that_of_each(
    lengths: tuple[int, ...], heads: int, keys: int, size: int, value: int, kernel: str
) -> None:
    inputs, slope = random_inputs(lengths, heads, keys, size, value)
    attend, outs = CausalAttention(lengths, torch.device("cuda")), []
    for leaves in (inputs, [x.detach().float().requires_grad_() for x in inputs]):
        out = attend(0, *leaves)
        out.backward(slope.to(out.dtype))
        outs.append([out, *(x.grad for x in leaves)])
    assert outs[0][0].dtype == torch.bfloat16
    for found, expected in zip(*outs, strict=True):
        assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("keys", [2, 4])
@pytest.mark.parametrize("kernel", ATTENTION, indirect=True)
def test_attention_is_compiled_once_for_all_lengths(kernel: str, keys: int) -> None:
    """All of them may be parts of one wider tensor, as values are in a layer."""

    def layer(qkv: torch.Tensor, attend: CausalAttention) -> torch.Tensor:
        return attend(0, *qkv.view(-1, 4 + 2 * keys, 64).split((4, keys, keys), 1))

    torch.compiler.reset()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    compiled_before = False
    plans = cudnn_attention._plan.cache_info().currsize
    for lengths in [(300, 129, 70), (400, 80, 30, 2), (290, 221)]:
        inputs, slope = random_inputs(lengths, 4, keys, 64, 64)
        rough = torch.cat(inputs, 1).flatten(1).detach().requires_grad_()
        exact = rough.detach().float().requires_grad_()
        attend = CausalAttention(lengths, torch.device("cuda"))
        with torch.compiler.set_stance("fail_on_recompile" if compiled_before else "default"):
            out = compiled(rough, attend)
        expected, compiled_before = layer(exact, attend), True
        out.backward(slope.bfloat16())
        expected.backward(slope)
        assert (out - expected).norm() < 0.02 * expected.norm()
        assert (rough.grad - exact.grad).norm() < 0.02 * exact.grad.norm()
    made = cudnn_attention._plan.cache_info().currsize - plans
    assert made == (2 if kernel == "cudnn" else 0)  # forward and backward


def random_inputs(
    lengths: Sequence[int], heads: int, keys: int, size: int, value: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator, tokens = torch.Generator("cuda").manual_seed(0), sum(lengths)
    shapes = [(tokens, heads, size), (tokens, keys, size), (tokens, keys, value)]
    inputs = [
        torch.randn(s, device="cuda", generator=generator).bfloat16().requires_grad_()
        for s in shapes
    ]
    return inputs, torch.randn(tokens, heads, value, device="cuda", generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_a_gradient_that_is_not_finite_moves_nothing(optimizer: str, dtype: torch.dtype) -> None:
    model = init_from_scratch(CONFIG, 0).to("cuda")
    one = Learner(model, optimizer=optimizer, compute_dtype=dtype)
    one.rl_step(batch(1), lr=1e-3)
    state = through_bytes(one.state())
    rows = tuple(replace(row, advantages=(math.inf,) * len(row.mask)) for row in batch(2).rows)
    with pytest.raises(EtudeError, match="not finite"):
        one.rl_step(replace(batch(2), rows=rows), lr=1e-3)
    assert equal(through_bytes(one.state()), state)


def test_a_state_goes_on_to_the_bit_and_to_the_other_kind_of_device() -> None:
    first = Learner(init_from_scratch(CONFIG, 0).to("cuda"))
    first.supervised_step(texts(0), lr=1e-3)
    first.snapshot()
    first.rl_step(batch(1), lr=1e-3, microbatch_tokens=0)
    state = through_bytes(first.state())
    second, on_cpu = (
        Learner(init_from_scratch(CONFIG, 1).to("cuda")),
        Learner(init_from_scratch(CONFIG, 1)),
    )
    second.load_state(state)
    on_cpu.load_state(state)
    stats = [one.rl_step(batch(2), lr=1e-3, microbatch_tokens=0) for one in (first, second, on_cpu)]
    assert stats[0] == stats[1] and stats[2].loss == pytest.approx(stats[0].loss, rel=1e-4)
    assert equal(first.state(), second.state())
    second.restore_snapshot()
    assert second.weights()["model.norm.weight"].is_cuda


@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize("resumed_in", [torch.float32, torch.bfloat16])
def test_split_masters_go_on_to_the_bit(optimizer: str, resumed_in: torch.dtype) -> None:
    model = init_from_scratch(CONFIG, 0).to("cuda")
    first = Learner(model, optimizer=optimizer, compute_dtype=torch.bfloat16)
    first.rl_step(batch(1), lr=1e-2)
    first.snapshot()
    first.rl_step(batch(2), lr=1e-2, microbatch_tokens=0)
    state = through_bytes(first.state())
    weights = through_bytes(first.weights())
    for device in ("cuda", "cpu"):
        model = init_from_scratch(CONFIG, 1).to(device)
        other = Learner(model, optimizer=optimizer, compute_dtype=resumed_in)
        other.load_state(state)
        assert equal(through_bytes(other.state()), state)
        assert equal(through_bytes(other.weights()), weights)


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_that_was_stopped_has_the_hash_of_one_that_was_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    whole, stopped = (prepared(tmp_path / name, kind) for name in ("whole", "stopped"))
    live_briefly(stopped, stopped.config(), steps=7, device="cuda")
    for run in (whole, stopped):
        trainer = Trainer(run, run.config(), lambda event: None, device=torch.device("cuda"))
        trainer.train()
        trainer.close()
    assert fingerprint(stopped) == fingerprint(whole)


SERVED = ModelConfig(
    model_type="qwen3",
    vocab_size=150,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=128,
)


def test_compiled_code_rounds_to_fp8_from_bf16() -> None:
    """Compiled code does not round from the digits that numbers had before bf16."""

    def work(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rounded_kv(x * y), *quantise_rows(x * y)

    inputs = [torch.randn(500, 2, 64, device="cuda").bfloat16() for _ in range(2)]
    torch.compiler.reset()
    found = torch.compile(work, fullgraph=True)(*inputs)
    for one, other in zip(found, work(*inputs), strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("name", ["dense", "fp8", "fp8-kv", "moe"])
def test_a_batch_invariant_engine_and_the_trainer_agree_to_the_bit(name: str) -> None:
    """Both use the same kernels, each token at its own temperature; experts, if any, are
    replayed."""
    config = SERVED
    if name == "moe":
        config = replace(SERVED, model_type="qwen3_moe", experts=EXPERTS)
    fp8, fp8_kv = name.startswith("fp8"), name == "fp8-kv"
    source = init_from_scratch(config, 0).to("cuda")
    source.compute_with(Arithmetic.of(invariant=False, fp8=fp8, fp8_kv=fp8_kv))
    model = invariant_trainer_model(source, torch.bfloat16)
    assert type(model).__name__ == "BatchInvariantTransformer"
    learner = Learner(model, compute_dtype=torch.bfloat16)
    served = Transformer(config).to("cuda", torch.bfloat16).requires_grad_(False)
    served.compute_with(Arithmetic.of(invariant=True, fp8=fp8, fp8_kv=fp8_kv))
    engine = Engine(served, max_num_seqs=4)
    engine.load_weights(0, learner.weights())
    temperatures = (0.6, 1.0, 1.4, 1.0, 0.6, 1.0)
    for number, temperature in enumerate(temperatures):
        prompt = [5 + number, 9, 20, 7]
        asked = request(
            str(number), prompt, temperature=temperature, stop_token_ids=(),
            experts_from=0 if config.experts else None,
        )  # fmt: skip
        add(engine, asked)
    done, rows, kept = drain(engine), [], {}
    for number, temperature in enumerate(temperatures):
        sample = done[str(number)]
        if sample.experts is not None:
            kept[str(number)] = sample.experts
        row = row_of(str(number), (5 + number, 9, 20, 7), sample)
        spans = (SamplingSpan(SamplingParams(temperature=temperature), len(sample.tokens)),)
        advantages = tuple(float(sampled) for sampled in row.mask)
        experts = str(number) if sample.experts is not None else None
        rows.append(replace(row, sampling=spans, advantages=advantages, experts=experts))
    assert bool(kept) == (name == "moe")
    lesson = Batch(step=1, rows=tuple(rows), oldest=0)
    for microbatch_tokens in (0, 200):
        stats = learner.rl_step(
            lesson, lr=0.0, microbatch_tokens=microbatch_tokens, fetch_experts=kept.__getitem__,
            router_replay_min_score=0.5,
        )  # fmt: skip
        assert stats.mismatch.k3_max == 0.0 and stats.mismatch.ratio_max == 1.0
        assert stats.grad_norm > 0 and (stats.router_mismatch_frac or 0.0) == 0.0


def test_a_batch_invariant_run_may_be_on_a_device(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run", "midtrain")
    config = run.config().model_copy(update={"batch_invariant": True, "deterministic": False})
    trainer = Trainer(run, config, lambda event: None, device=torch.device("cuda"))
    assert trainer.learner.model.invariant and not trainer.learner.model.fused
    trainer.close()
