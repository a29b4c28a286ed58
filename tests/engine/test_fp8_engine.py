"""An engine in FP8 and a trainer in FP8 compute the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from etude.engine.engine import Engine
from etude.engine.runner import TorchRunner
from etude.engine.select import invariant_trainer_model, select_runner
from etude.model.files import hf_state_dict
from etude.model.numerics import Arithmetic
from etude.model.transformer import Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.small_model import Asked, add, config, drain, request, sharp

pytestmark = pytest.mark.filterwarnings("ignore:native.c")

SHAPE = replace(config(context=96), hidden_size=64, num_hidden_layers=3, intermediate_size=96)
ASKED = [
    request(
        str(number),
        [1 + (number * 7 + place * 3) % 50 for place in range(5 + 3 * number)],
        max_tokens=24,
        stop_token_ids=(),
    )
    for number in range(5)
]

Served = list[tuple[Asked, tuple[int, ...], Tensor]]
"""(request, tokens, log-probs)"""


def model(*, fp8: bool, invariant: bool = False, seed: int = 0) -> Transformer:
    arithmetic = Arithmetic.of(invariant=invariant, fp8=fp8)
    return sharp(SHAPE, seed, 2.0).compute_with(arithmetic)


def served(engine: Engine, requests: Sequence[Asked] = ASKED) -> Served:
    for asked in requests:
        add(engine, asked)
    done = drain(engine)
    samples = [done[asked.id] for asked in requests]
    return [
        (asked, sample.tokens, torch.tensor(sample.logprobs))
        for asked, sample in zip(requests, samples, strict=True)
    ]


@torch.no_grad()
def k3(trainer: Transformer, drawn: Served) -> float:
    rows = [
        TokenSequence(asked.prompt + tokens, [False] * len(asked.prompt) + [True] * len(tokens))
        for asked, tokens, _ in drawn
    ]
    logp_N, _ = token_logprobs(trainer, pack_batch(rows))
    log_ratio_N = (logp_N - torch.cat([logp for *_, logp in drawn])).double()
    return float((torch.expm1(log_ratio_N) - log_ratio_N).mean())


def test_a_trainer_in_fp8_is_near_an_engine_in_fp8() -> None:
    drawn = served(Engine(model(fp8=True), max_num_seqs=8))
    apart = k3(model(fp8=False), drawn)
    assert apart > 1e-5
    assert k3(model(fp8=True), drawn) < apart / 10


def test_with_batch_invariance_they_agree_to_the_bit() -> None:
    drawn = served(Engine(model(fp8=True, invariant=True), max_num_seqs=8))
    trainer = invariant_trainer_model(model(fp8=True), torch.float32)
    assert k3(trainer, drawn) == 0
    assert k3(model(fp8=False, invariant=True), drawn) > 1e-5


def test_new_weights_are_quantised_anew() -> None:
    new = hf_state_dict(model(fp8=False, seed=1), torch.float32)
    for invariant in (False, True):
        engine = Engine(model(fp8=True, invariant=invariant), max_num_seqs=8)
        engine.load_weights(1, new)
        fresh = Engine(model(fp8=True, invariant=invariant, seed=1), max_num_seqs=8)
        for (_, tokens, logp), (_, expected, expected_logp) in zip(
            served(engine, ASKED[:2]), served(fresh, ASKED[:2]), strict=True
        ):
            assert tokens == expected and torch.equal(logp, expected_logp)


def test_on_a_cpu_torch_computes_it_and_weights_are_given_back_as_published() -> None:
    runner = select_runner(model(fp8=True), 8, None)
    assert isinstance(runner, TorchRunner)
    held = runner.weights()
    assert all(
        torch.equal(tensor, held[name]) for name, tensor in hf_state_dict(model(fp8=False)).items()
    )
