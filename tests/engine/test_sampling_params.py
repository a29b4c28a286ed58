"""Every runner samples from the distribution that the sampling parameters describe, with drafts and
without: tokens and log-probs are those of the plain reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from etude.core.sampling import SamplingParams
from etude.engine import native, sampler
from etude.engine.batch import ModelRunner, SamplerOutput, SamplingBatch
from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.engine import Engine
from etude.engine.runner import TorchRunner
from etude.model.config import ModelConfig
from etude.model.numerics import INVARIANT
from etude.model.transformer import Transformer
from tests.engine.reference import Overlapping, check, distribution
from tests.small_model import Asked, add, drain, request, sharp

CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=64,
    max_position_embeddings=96,
)
RUNNERS: dict[str, Callable[[Transformer], ModelRunner]] = {
    "torch": lambda model: TorchRunner(model, 40),
    "overlapping": lambda model: Overlapping(TorchRunner(model, 40)),
    "native": lambda model: native.CpuRunner(model, 40),
    "invariant": lambda model: BatchInvariantTorchRunner(model, 40),
}
PARAMS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.05},
    "min_p, warm": {"min_p": 0.1, "temperature": 1.5},
    "min_p and top_k": {"min_p": 0.02, "top_k": 4},
    "min_p, greedy": {"min_p": 0.5, "temperature": 0.0},
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8, "temperature": 0.7},
    "penalty, greedy": {"repetition_penalty": 2.0, "temperature": 0.0},
    "penalty and both cuts": {"repetition_penalty": 1.2, "min_p": 0.01, "top_k": 6},
}


def requests(max_tokens: int = 40) -> list[Asked]:
    """One request for each sampling method, and a plain one."""
    ways = [{}, *PARAMS.values()]
    return [
        request(str(id), [5, 9, 20 + id], stop_token_ids=(), max_tokens=max_tokens, **way)
        for id, way in enumerate(ways)
    ]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("kind", RUNNERS)
def test_a_token_is_drawn_from_what_the_parameters_describe(kind: str, drafts: bool) -> None:
    model = sharp(CONFIG, seed=0, factor=2.0)
    if kind == "native" and native.LIBRARY is None:
        pytest.skip("the native code is not built here")
    if kind == "invariant":
        model.compute_with(INVARIANT)
    asked = requests()
    if drafts:
        said = {each.id: answer(model, each) for each in asked}
        asked = [
            replace(each, prediction=(*said[each.id][:9], 3, *said[each.id][10:])) for each in asked
        ]
    engine = Engine(model, max_num_seqs=4, runner=RUNNERS[kind](model))
    for each in asked:
        add(engine, each)
    done = drain(engine)
    for each in asked:
        check(model, each, done[each.id])
        assert not drafts or done[each.id].accepted_draft_tokens > 5


def check_on_kernels(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, *, max_tokens: int, invariant: bool
) -> None:
    """Compare the tokens sampled on a device with the reference for the same logits that the device
    computed, so that rounding of the model does not matter; with drafts too."""
    from etude.engine import cuda

    seen: list[tuple[Tensor, SamplingBatch, SamplerOutput]] = []

    def sample(logits_RV: Tensor, sampling: SamplingBatch) -> SamplerOutput:
        before = logits_RV.cpu()
        seen.append((before.clone(), sampling, drawn := sampler.sample(logits_RV, sampling)))
        return drawn

    monkeypatch.setattr(cuda, "sample", sample)
    asked = requests(max_tokens)
    max_num_seqs = len(asked)
    runner = cuda.CudaRunner(model, num_blocks=64, max_num_seqs=max_num_seqs, invariant=invariant)
    for drafts in (False, True):
        engine = Engine(model, max_num_seqs=max_num_seqs, runner=runner)
        for each in asked:
            add(engine, each)
        done = drain(engine)
        assert all(bool(sample.accepted_draft_tokens) == drafts for sample in done.values())
        asked = [replace(each, prediction=done[each.id].tokens) for each in asked]
    assert seen
    for logits_RV, sampling, drawn in seen:
        for row, params in enumerate(sampling.params_R):
            history = sampling.histories.get(row, ())
            assert bool(history) == (params.repetition_penalty != 1)
            p_V = distribution(logits_RV[row], params, history)
            check_row(p_V, params, float(sampling.u_R[row]), drawn, row)


def check_row(
    p_V: Tensor, params: SamplingParams, u: float, drawn: SamplerOutput, row: int
) -> None:
    token = drawn.tokens[row]
    assert drawn.logprobs[row] == pytest.approx(float(p_V[token].log()), abs=1e-4)
    if params.temperature == 0:
        assert token == int(p_V.argmax())
    else:
        ends_V = p_V.cumsum(0)
        assert float(ends_V[token] - p_V[token]) - 1e-5 <= u <= float(ends_V[token]) + 1e-5


def answer(model: Transformer, asked: Asked) -> tuple[int, ...]:
    engine = Engine(model, max_num_seqs=1, runner=TorchRunner(model, 40))
    add(engine, asked)
    return drain(engine)[asked.id].tokens
