"""In invariant mode a token's log-prob has the same bits in any batch, chunk or cache, and in the
trainer's pass."""

from __future__ import annotations

from random import Random

import pytest
import torch

from etude.core.sampling import Sample
from etude.core.types import Batch, Row
from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.files import hf_state_dict
from etude.model.numerics import INVARIANT, PLAIN
from etude.model.transformer import Transformer
from etude.train.learner import Learner
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.engine.invariance_checks import (
    TEMPERATURE,
    Watching,
    alone,
    differing,
    random_request,
    serve,
    trained,
)
from tests.engine.reference import FAMILIES
from tests.small_model import Asked, add, drain, request, sharp

COMPOSITIONS = 1000


def small(name: str) -> Transformer:
    return sharp(FAMILIES[name], seed=0, factor=3.0).compute_with(INVARIANT)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_bit_depends_on_the_batch(name: str) -> None:
    model, rng = small(name), Random(name)
    runner = Watching(BatchInvariantTorchRunner(model, num_blocks=14))
    sessions = serve(model, runner, rng, -(-COMPOSITIONS // len(FAMILIES)))
    by_itself = Engine(model, max_num_seqs=1, prefix_cache=False)
    for id in rng.sample(sorted(sessions), 12):
        assert alone(by_itself, sessions[id][0]) == sessions[id][1]
    assert len(sessions) > 50 and differing(sessions, trained(model, sessions, rng)) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_nor_in_bf16(name: str) -> None:
    """Models that `native.c` does not support run operator by operator. In bf16 operators do not
    guarantee the same bits in other batches, on any processor; invariant mode does."""
    model, rng = small(name).to(torch.bfloat16), Random(name)
    engine = Engine(model, max_num_seqs=6, max_batched_tokens=16)
    asked = [random_request(rng, id) for id in range(12)]
    for each in asked:
        add(engine, each)
    done = drain(engine)
    sessions = {each.id: (each, done[each.id]) for each in asked}
    by_itself = Engine(model, max_num_seqs=1, prefix_cache=False)
    assert all(alone(by_itself, each) == done[each.id] for each in asked)
    assert differing(sessions, trained(model, sessions, rng)) == 0


def test_otherwise_bits_do_depend_on_it() -> None:
    """Shows that the test above can fail."""
    model, rng = small("llama").compute_with(PLAIN), Random(0)
    engine = Engine(model, max_num_seqs=6, max_batched_tokens=16)
    asked = [random_request(rng, id) for id in range(12)]
    for each in asked:
        add(engine, each)
    done = drain(engine)
    sessions = {each.id: (each, done[each.id]) for each in asked}
    assert differing(sessions, trained(model, sessions, rng)) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_across_a_swap_of_weights(name: str) -> None:
    """Both halves of an answer are computed by the two versions over the existing keys: a second
    run of the same requests, in another batch, gives the same bits."""
    other = hf_state_dict(sharp(small(name).config, seed=1, factor=3.0), torch.float32)

    def run(company: int) -> Sample:
        engine = Engine(small(name), max_num_seqs=4, max_batched_tokens=11)
        add(engine, request("0", [5, 9, 20] * 9, max_tokens=12, stop_token_ids=()))
        for id in range(1, 1 + company):
            add(engine, request(str(id), [3, id, 4] * 5 * id, max_tokens=3, stop_token_ids=()))
        done: dict[str, Sample] = {}
        while not engine.idle:
            done |= {
                event.id: event.sample
                for event in engine.step()
                if isinstance(event, FinishedRequest)
            }
            running = next((s for s in engine._scheduler.running if s.id == "0"), None)
            if engine.version == 0 and running and len(running.logprobs) == 5:
                engine.load_weights(1, other)
        return done["0"]

    first, second = run(company=0), run(company=3)
    assert first == second and [span.count for span in first.versions] == [5, 7]


def row(asked: Asked, sample: Sample) -> Row:
    blank, count = len(asked.prompt), len(sample.tokens)
    return Row(
        sample=asked.id,
        tokens=asked.prompt + sample.tokens,
        mask=(False,) * blank + (True,) * count,
        logprobs=(0.0,) * blank + sample.logprobs,
        advantages=(0.0,) * blank + (1.0,) * count,
        versions=sample.versions,
    )


def test_a_step_on_fresh_samples_finds_no_drift() -> None:
    model, rng = small("qwen3_moe"), Random(0)
    learner = Learner(model.requires_grad_())
    engine = Engine(model, max_num_seqs=4, max_batched_tokens=16)
    asked = [random_request(rng, id) for id in range(8)]
    for each in asked:
        add(engine, each)
    done = drain(engine)
    rows = tuple(row(each, done[each.id]) for each in asked)
    stats = learner.rl_step(
        Batch(step=1, rows=rows, oldest=0), lr=1e-4, temperature=TEMPERATURE, microbatch_tokens=300
    )
    assert (
        stats.mismatch.k1 == stats.mismatch.k3 == stats.mismatch.k3_p99 == 0.0
        and stats.grad_norm > 0
    )


def test_gradients_are_those_of_the_plain_arithmetic() -> None:
    packed = pack_batch([TokenSequence((5, 9, 20, 7, 3, 8, 11), (True,) * 7)])
    for name in FAMILIES:
        found = []
        for arithmetic in (PLAIN, INVARIANT):
            model = small(name).compute_with(arithmetic).requires_grad_()
            token_logprobs(model, packed)[0].sum().backward()
            found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        plain, invariant = found
        assert plain.keys() == invariant.keys()
        for key, grad in plain.items():
            assert torch.allclose(
                grad, invariant[key], rtol=1e-3, atol=1e-3 * float(grad.abs().max())
            ), (name, key)
