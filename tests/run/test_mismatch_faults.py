"""Faults planted in one side: `etude mismatch` names each, or reports that it cannot, in fp32 and
in bf16."""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etude.core.sampling import Request
from etude.engine import native, runner
from etude.engine.batch import SamplerOutput, SamplingBatch
from etude.engine.engine import Engine
from etude.engine.scheduler import Sequence
from etude.engine.select import select_runner
from etude.model.heads import AttentionBackend
from etude.model.rope import table
from etude.model.scoring import Scoring
from etude.model.transformer import Transformer
from etude.run.diagnose import Diagnosis
from etude.run.trials import RecordedAnswer, diagnose, diagnose_recorded, row_of
from tests.engine.reference import FAMILIES
from tests.slow import slow
from tests.small_model import add, drain, request, sharp

PROMPTS = [tuple(1 + (i * n) % 59 for i in range(1, 20 + 9 * n)) for n in (1, 2)]
FP32, BF16 = torch.float32, torch.bfloat16
KINDS = [slow(FP32), BF16]
"""A fault is harder to tell from rounding in bf16."""
Plant = Callable[[Transformer], None]


@pytest.fixture(autouse=True)
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine run the very model that it is given: on processors with bf16 units it would
    otherwise pack a copy."""
    monkeypatch.setattr(runner, "_prepacked", lambda model: model)


def sides(name: str, kind: torch.dtype) -> tuple[Transformer, Transformer]:
    """Weights large enough that the context matters, and small enough that the rounding of bf16
    does not drown everything."""
    trainer = sharp(FAMILIES[name], seed=0, factor=1.5)
    for parameter in trainer.parameters():
        parameter.copy_(parameter.bfloat16())
    return copy.deepcopy(trainer).to(kind), trainer


def look(
    name: str,
    kind: torch.dtype,
    plant: Plant = lambda engine: None,
    make_engine: Callable[..., Engine] = Engine,
) -> Diagnosis:
    engine, trainer = sides(name, kind)
    plant(engine)
    return diagnose(engine, trainer, PROMPTS, max_tokens=6, make_engine=make_engine)


def wrong_weight(engine: Transformer) -> None:
    engine.get_parameter("model.layers.1.self_attn.o_proj.weight").mul_(1.05)


def wrong_epsilon(engine: Transformer) -> None:
    engine.get_submodule("model.layers.1.post_attention_layernorm").eps = 0.02  # type: ignore[assignment]


def wrong_rope(engine: Transformer) -> None:
    engine.rope = table(replace(engine.config, rope_theta=20_000.0))


def late_position(engine: Transformer) -> None:
    plain = engine.forward

    def forward(tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return plain(tokens, positions + (positions >= len(PROMPTS[1])), *rest)

    engine.forward = forward  # type: ignore[method-assign]


def instead(engine: Transformer, name: str, forward: Callable[..., Tensor]) -> None:
    part = engine.get_submodule(name)
    part.forward = types.MethodType(forward, part)  # type: ignore[method-assign]


def dropped_residual(engine: Transformer) -> None:
    def forward(
        self: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionBackend, routing: object
    ) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), cos, sin, attend)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y

    instead(engine, "model.layers.1", forward)


def wrong_activation(engine: Transformer) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        y: Tensor = self.down_proj(F.relu(gate) * up)
        return y

    instead(engine, "model.layers.1.mlp", forward)


def scaled_scores(engine: Transformer) -> None:
    class Sharper:
        def __init__(self, attend: AttentionBackend) -> None:
            self._attend = attend
            self.latent = attend.latent

        def __call__(
            self,
            layer: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            scale: float | None = None,
            scoring: Scoring | None = None,
        ) -> Tensor:
            return self._attend(layer, q, k, v, 1.3 * (scale or q.shape[-1] ** -0.5), scoring)

    def forward(
        self: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionBackend
    ) -> Tensor:
        y: Tensor = type(self).forward(self, x, cos, sin, Sharper(attend))
        return y

    instead(engine, "model.layers.1.self_attn", forward)


def scaled_logits(engine: Transformer) -> None:
    plain = engine.logits
    engine.logits = lambda hidden: 1.25 * plain(hidden)  # type: ignore[method-assign]


def swapped_router_rows(engine: Transformer) -> None:
    weight = engine.get_parameter("model.layers.1.mlp.gate.weight")
    weight[[0, 3]] = weight[[3, 0]].clone()


def wrong_bias(engine: Transformer) -> None:
    engine.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias += torch.tensor(
        [0.5, 0, 0, 0, 0, 0]
    )


FAULTS: dict[str, tuple[str, Plant, str]] = {
    "weight": (
        "llama",
        wrong_weight,
        "operator: model.layers.1.self_attn.o_proj (other weights: weight)",
    ),
    "epsilon": (
        "llama",
        wrong_epsilon,
        "operator: model.layers.1.post_attention_layernorm (epsilon is 0.02",
    ),
    "rope": (
        "llama",
        wrong_rope,
        "operator: rope (its angles are not those of the trainer's table)",
    ),
    "position": (
        "llama",
        late_position,
        "operator: rope (5 of 42 tokens have other positions, the first one off",
    ),
    "residual": ("llama", dropped_residual, "operator: model.layers.1"),
    "activation": ("llama", wrong_activation, "operator: model.layers.1.mlp"),
    "scores": (
        "llama",
        scaled_scores,
        "operator: model.layers.1.self_attn (its attention scores are 1.",
    ),
    "scores of MLA": (
        "deepseek_v3",
        scaled_scores,
        "operator: model.layers.1.self_attn (its attention scores are 1.",
    ),
    "logits": ("llama", scaled_logits, "logits: the engine's are 1.2"),
    "router": (
        "qwen3_moe",
        swapped_router_rows,
        "operator: model.layers.1.mlp.gate (other weights: weight)",
    ),
    "bias of a router": ("deepseek_v3", wrong_bias, "operator: model.layers.1.mlp.gate"),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_model_is_named(fault: str, kind: torch.dtype) -> None:
    name, plant, expected = FAULTS[fault]
    found = look(name, kind, plant)
    assert any(cause.startswith(expected) for cause in found.causes), found.causes
    beside = (
        "operator: head",
        "precision: the engine computes",
        "router: the engine chooses other experts",
    )
    assert not [cause for cause in found.causes if not cause.startswith((expected, *beside))]
    assert found.unexplained == []


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_fault_there_is_rounding_only(name: str, kind: torch.dtype) -> None:
    found = look(name, kind)
    assert found.operators == () and found.unexplained == []
    assert [cause.partition(":")[0] for cause in found.causes] == (
        ["precision"] if kind == BF16 else []
    )
    assert all(found.rounding[setting].holds(gap) for setting, gap in found.gaps.items())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_temperature_on_one_side(kind: torch.dtype) -> None:
    class Cooler(Engine):
        def add(self, request: Request, id: str, **told: Any) -> None:
            params = replace(request.params, temperature=0.6)
            super().add(replace(request, params=params), id, **told)

    found = look("llama", kind, make_engine=Cooler)
    (cause,) = found.causes
    assert cause.startswith("temperature: the engine computes at 0.") and found.unexplained == []
    assert found.fits["alone"].fitted == pytest.approx(0.6, rel=0.02)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_log_probs_recorded_before_temperature(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runner.sample

    def sample(logits_RV: Tensor, draws: SamplingBatch) -> SamplerOutput:
        logp_RV = torch.log_softmax(logits_RV, -1)
        drawn = plain(logits_RV, draws)
        logprobs_R = logp_RV.gather(1, torch.tensor(drawn.tokens)[:, None])[:, 0]
        return replace(drawn, logprobs=logprobs_R.tolist())

    monkeypatch.setattr(runner, "sample", sample)
    found = look("llama", kind)
    assert any(cause.startswith("temperature:") and "before" in cause for cause in found.causes)
    assert found.unexplained == [] and found.fits["temperature"].fitted == pytest.approx(
        1.0, rel=0.02
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_recorded_experts_that_were_not_used(kind: torch.dtype) -> None:
    class Confused(Engine):
        def _experts(self, sequence: Sequence) -> bytes | None:
            ids = (
                np.frombuffer(super()._experts(sequence) or b"", np.uint8).reshape(-1, 2, 2).copy()
            )
            ids[:, 0] = np.array([3, 1, 2, 0, 4, 5])[ids[:, 0]]
            return ids.tobytes()

    found = look("qwen3_moe", kind, make_engine=Confused)
    (cause,) = [
        cause for cause in found.causes if not cause.startswith("precision: the engine computes")
    ]
    assert cause.startswith(
        "recorded experts: not the ones that the engine computed with, experts 0 and 3 are swapped"
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_cannot_be_explained_is_called_so(kind: torch.dtype) -> None:
    class Noisy(Engine):
        """An engine whose every third log-prob is that of another token, whatever it samples."""

        def _take(self, drawing: Any, rows: Any, version: int) -> Any:
            wrong = [(token, logprob - 1.5 * (token % 3 == 0), top) for token, logprob, top in rows]
            return super()._take(drawing, wrong, version)

    found = look("llama", kind, make_engine=Noisy)
    (told,) = found.unexplained
    assert (
        told.startswith("alone: k3 ")
        and "rounding causes up to" in told
        and "every operator agrees" in told
    )
    assert not [cause for cause in found.causes if not cause.startswith("precision")]


def test_tokens_that_are_too_unlikely_for_a_probability_have_a_bound() -> None:
    model, trainer = sides("llama", FP32)
    engine = Engine(model, max_num_seqs=1)
    add(engine, request("0", list(PROMPTS[0]), stop_token_ids=()))
    row = row_of("0", PROMPTS[0], drain(engine)["0"])
    # below float32 for all but the likeliest
    found = diagnose_recorded(trainer, [RecordedAnswer(row)], 1e-3, FP32)
    assert math.isfinite(found.rounding["recorded"].k3) and found.beyond("recorded")


def test_a_fault_in_the_kernels_is_not_called_batch() -> None:
    engine, trainer = sides("llama", FP32)
    wrong = copy.deepcopy(engine)
    wrong_weight(wrong)

    class WithKernels(Engine):
        def __init__(self, model: Transformer, *, max_num_seqs: int, **settings: Any) -> None:
            settings.setdefault(
                "runner", select_runner(wrong if max_num_seqs > 1 else model, 1, None)
            )
            super().__init__(model, max_num_seqs=max_num_seqs, **settings)

    (cause,) = diagnose(engine, trainer, PROMPTS, max_tokens=6, make_engine=WithKernels).causes
    assert cause.startswith("engine kernels")


def test_a_fault_in_the_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(
        FAMILIES["llama"], hidden_size=64, intermediate_size=64, head_dim=32, num_attention_heads=2
    )
    if native.unsupported(shape, FP32):
        pytest.skip("the native code is not built here")
    trainer = sharp(shape, seed=0, factor=1.5)
    for name, parameter in trainer.named_parameters():
        parameter.copy_(parameter.bfloat16() * (1.5 if "post_attention" in name else 1))
    layer = native.LAYER | {"norm": native.LAYER["mlp_norm"]}
    assert not diagnose(copy.deepcopy(trainer), trainer, PROMPTS, max_tokens=4).causes
    monkeypatch.setattr(native, "LAYER", layer)
    (cause,) = diagnose(copy.deepcopy(trainer), trainer, PROMPTS, max_tokens=4).causes
    assert cause.startswith("engine kernels")


def test_answers_whose_experts_were_not_recorded_are_judged_without_them() -> None:
    model, trainer = sides("qwen3_moe", FP32)
    engine = Engine(model, max_num_seqs=1)
    add(engine, request("0", list(PROMPTS[0]), max_tokens=4, stop_token_ids=()))
    row = row_of("0", PROMPTS[0], drain(engine)["0"])
    found = diagnose_recorded(trainer, [RecordedAnswer(row)], 1.0, FP32)
    assert found.experts == () and "replay" not in found.gaps
    assert not found.beyond("recorded")
