"""An engine in FP8 and a trainer in FP8 compute the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.engine import Engine
from etude.engine.runner import TorchRunner, kv_bytes
from etude.engine.select import invariant_trainer_model, kv_cache_size, select_runner
from etude.model.attention import KVCache
from etude.model.files import hf_state_dict
from etude.model.numerics import Arithmetic
from etude.model.transformer import Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.engine.invariance_checks import Watching, alone, differing, serve, trained
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


def model(
    *, fp8: bool = False, fp8_kv: bool = False, invariant: bool = False, seed: int = 0
) -> Transformer:
    arithmetic = Arithmetic.of(invariant=invariant, fp8=fp8, fp8_kv=fp8_kv)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_with_keys_and_values_in_fp8_is_near_an_engine_that_keeps_them_so(
    dtype: torch.dtype,
) -> None:
    """On a CPU with bf16 units, the engine's layers are prepacked in bf16."""
    drawn = served(Engine(model(fp8_kv=True).to(dtype), max_num_seqs=8))
    without = served(Engine(model().to(dtype), max_num_seqs=8))
    near, apart = (k3(model(fp8_kv=on).to(dtype), drawn) for on in (True, False))
    assert apart > 1e-5 and near < apart / 4
    assert k3(model(fp8_kv=True).to(dtype), without) > 1e-5, "on the trainer's side alone"


@pytest.mark.parametrize("fp8", [False, True])
def test_no_bit_of_keys_and_values_in_fp8_depends_on_the_batch(fp8: bool) -> None:
    """There are few blocks: prefixes are shared, and sequences are preempted and computed again."""
    own, rng = model(fp8=fp8, fp8_kv=True, invariant=True), Random(0)
    runner = Watching(BatchInvariantTorchRunner(own, num_blocks=14))
    sessions = serve(own, runner, rng, 120)
    by_itself = Engine(own, max_num_seqs=1, prefix_cache=False)
    for id in rng.sample(sorted(sessions), 12):
        assert alone(by_itself, sessions[id][0]) == sessions[id][1]
    trainer = invariant_trainer_model(model(fp8=fp8, fp8_kv=True), torch.float32)
    assert differing(sessions, trained(trainer, sessions, rng)) == 0
    other = model(fp8=fp8, invariant=True)
    assert differing(sessions, trained(other, sessions, rng)) > 0


def test_a_prefix_that_is_found_is_the_one_that_would_be_computed() -> None:
    long = request("0", [5, 9, 20] * 16, max_tokens=1, stop_token_ids=())
    again = request("1", [*long.prompt, 7, 3], max_tokens=12, stop_token_ids=())
    found = []
    for prefix_cache in (True, False):
        own = model(fp8_kv=True, invariant=True)
        engine = Engine(own, max_num_seqs=4, prefix_cache=prefix_cache)
        served(engine, [long])
        found += served(engine, [again])
        assert bool(engine.stats().cached_tokens) == prefix_cache
    (_, tokens, logp), (_, expected, expected_logp) = found
    assert tokens == expected and torch.equal(logp, expected_logp)


def test_keys_and_values_in_fp8_take_a_byte_and_a_scale() -> None:
    tokens = 512
    room = tokens * kv_bytes(SHAPE, 4)
    assert kv_cache_size(model(), 64, room).tokens == tokens
    size = SHAPE.head_dim
    in_fp8 = kv_cache_size(model(fp8_kv=True), 64, room).tokens
    assert in_fp8 == tokens * 4 * size // (size + 4)
    cache = KVCache(SHAPE, 5, 16, torch.zeros(1), fp8=True)
    held = [part for rows in (*cache.k, *cache.v) for part in (rows.values, rows.scales)]
    assert sum(part.nbytes for part in held if part is not None) == 80 * kv_bytes(
        SHAPE, 4, fp8=True
    )


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


def test_new_weights_keep_keys_and_values_in_fp8() -> None:
    new = hf_state_dict(model(seed=1), torch.float32)
    for invariant in (False, True):
        engine = Engine(model(fp8_kv=True, invariant=invariant), max_num_seqs=8)
        engine.load_weights(1, new)
        fresh = Engine(model(fp8_kv=True, invariant=invariant, seed=1), max_num_seqs=8)
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
