"""Check that no bit of a log-prob depends on what is computed with it: the engine against itself
and the trainer.

`test_batch_invariance` checks small models on the CPU; on a machine with a GPU run `python -m
tests.engine.invariance_checks`, which checks dense models there, also in FP8, experts and latent
attention.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from etude.core.sampling import Request, Sample
from etude.engine.batch import ForwardBatch, Ints, ModelRunner, SamplerOutput
from etude.engine.batch_invariant import BatchInvariantTorchRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.config import ExpertsConfig, LatentConfig, ModelConfig
from etude.model.numerics import INVARIANT, Arithmetic
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.small_model import Asked, add, request

Bits = NDArray[np.int32]
Sessions = dict[str, tuple[Request, Sample]]
TEMPERATURE = 0.7


def bits(values: object) -> Bits:
    return np.asarray(values, np.float32).view(np.int32)


class Watching:
    """A runner that records the shape of every pass: the number of new tokens and the length of
    each sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.overlaps = runner.overlaps
        self.num_blocks = runner.num_blocks
        self.num_windowed_blocks = runner.num_windowed_blocks
        self.block_size = runner.block_size
        self.routed_experts = runner.routed_experts
        self.prepare_weights = runner.prepare_weights
        self.weights = runner.weights
        self.seen: set[tuple[tuple[int, int], ...]] = set()

    def launch(self, plan: ForwardBatch) -> Callable[[], SamplerOutput]:
        counts_B: Ints = np.diff(np.append(plan.query_starts_B, len(plan.tokens_N)))
        self.seen.add(tuple(zip(counts_B.tolist(), plan.seq_lens_B.tolist(), strict=True)))
        return self._runner.launch(plan)


def random_request(rng: Random, id: int, scale: int = 1) -> Asked:
    """Build a request; many share a prefix, so that later ones find cached blocks of earlier
    ones."""
    shared, own = rng.randrange(70 * scale), rng.randrange(1, 20 * scale)
    prompt = [1 + i % 7 for i in range(shared)] + [rng.randrange(1, 60) for _ in range(own)]
    priority = rng.choice(("standard", "standard", "standard", "interactive"))
    return request(
        str(id), prompt, max_tokens=rng.randrange(1, 9 * scale), temperature=TEMPERATURE,
        stop_token_ids=(), priority=priority,
    )  # fmt: skip


def serve(
    model: Transformer, runner: Watching, rng: Random, compositions: int, *, max_num_seqs: int = 6,
    max_batched_tokens: int = 16, scale: int = 1,
) -> Sessions:  # fmt: skip
    """Serve random requests, some of them aborted or preempted, until this many different passes
    were run."""
    engine = Engine(
        model, max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens, runner=runner
    )
    asked: dict[str, Asked] = {}
    done: dict[str, Sample] = {}
    while len(runner.seen) < compositions or not engine.idle:
        while (
            len(runner.seen) < compositions
            and rng.random() < 0.5
            and engine.num_waiting < max_num_seqs
        ):
            new = random_request(rng, len(asked), scale)
            asked[new.id] = new
            add(engine, new)
        if asked and rng.random() < 0.02:
            engine.abort(rng.choice(list(asked)))
        done |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    assert engine.stats().cached_tokens
    return {id: (asked[id], sample) for id, sample in done.items()}


def alone(engine: Engine, asked: Asked) -> Sample:
    add(engine, asked)
    while True:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                return event.sample


def trained(model: Transformer, sessions: Sessions, rng: Random) -> dict[str, Bits]:
    """Run the trainer's pass over rows of any lengths, one after the other."""
    order, found = rng.sample(sorted(sessions), len(sessions)), {}
    device = model.model.embed_tokens.weight.device
    while order:
        group = [order.pop() for _ in range(min(len(order), rng.randrange(1, 12)))]
        rows = [sessions[id][0].prompt + sessions[id][1].tokens for id in group]
        masks = [
            [False] * len(sessions[id][0].prompt) + [True] * len(sessions[id][1].tokens)
            for id in group
        ]
        packed = pack_batch([TokenSequence(*each) for each in zip(rows, masks, strict=True)])
        temperature_N = torch.full((packed.num_loss_tokens,), TEMPERATURE)
        with torch.no_grad():
            logp_N, _ = token_logprobs(
                model, replace(packed, temperature_N=temperature_N).to(device)
            )
        parts = logp_N.cpu().split([sum(mask) for mask in masks])
        found |= {id: bits(part) for id, part in zip(group, parts, strict=True)}
    return found


def differing(sessions: Sessions, found: dict[str, Bits]) -> int:
    """The number of log-probs with any differing bit."""
    return sum(
        int((bits(sample.logprobs) != found[id]).sum()) for id, (_, sample) in sessions.items()
    )


SHAPE = ModelConfig(
    model_type="qwen3", vocab_size=32_000, hidden_size=1024, num_hidden_layers=4,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072,
    max_position_embeddings=1024,
)  # fmt: skip
EXPERTS = ExpertsConfig(
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    layers=(1, 2, 3),
    norm_topk_prob=True,
)
LATENT = LatentConfig(kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
MODELS = {
    "dense": SHAPE,
    "fp8": SHAPE,
    "fp8-kv": SHAPE,
    "experts": replace(SHAPE, model_type="qwen3_moe", experts=EXPERTS),
    "latent": replace(
        SHAPE, model_type="deepseek_v3", head_dim=0, latent=LATENT,
        experts=replace(EXPERTS, sigmoid=True, n_group=4, topk_group=2, n_shared_experts=1),
    ),
}  # fmt: skip
COMPANY = {"few": (6, 40), "some": (80, 300), "many": (300, 1300)}
"""Requests at once, and tokens of a pass."""


def on_device(name: str, company: str, compositions: int) -> dict[str, float]:
    from etude.engine.cuda import CudaRunner
    from etude.engine.kernels.trainable import BatchInvariantTransformer

    max_num_seqs, max_batched_tokens = COMPANY[company]
    source, rng = init_from_scratch(MODELS[name], seed=0), Random(name + company)
    model = (
        Transformer(source.config) if name == "latent" else BatchInvariantTransformer(source.config)
    )
    model.load_state_dict(source.state_dict())
    model = model.to("cuda", torch.bfloat16).requires_grad_(False)
    if name == "latent":
        model.compute_with(INVARIANT)
    if name.startswith("fp8"):  # the class of the model makes attention invariant
        model.compute_with(Arithmetic.of(invariant=False, fp8=True, fp8_kv=name == "fp8-kv"))
    blocks = 20 * max_num_seqs + 40

    def runner(max_num_seqs: int) -> ModelRunner:
        if name == "latent":
            return BatchInvariantTorchRunner(model, 4 * blocks)
        return CudaRunner(model, blocks, max_num_seqs, invariant=True)

    watching = Watching(runner(max_num_seqs))
    sessions = serve(
        model,
        watching,
        rng,
        compositions,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        scale=8,
    )
    by_itself = Engine(model, max_num_seqs=1, prefix_cache=False, runner=runner(1))
    chosen = rng.sample(sorted(sessions), 8)
    changed = sum(alone(by_itself, sessions[id][0]) != sessions[id][1] for id in chosen)
    found = differing(sessions, trained(model, sessions, rng))
    tokens = sum(len(sample.tokens) for _, sample in sessions.values())
    return {
        "compositions": len(watching.seen), "answers": len(sessions), "tokens": tokens,
        "answers_that_differ_alone": changed, "logprobs_that_differ_in_training": found,
    }  # fmt: skip


def products() -> dict[str, list[int]]:
    """Numbers of rows for which a product has other bits than among 1,100; there must be none."""
    from etude.engine.kernels import batch_invariant as invariant

    found: dict[str, list[int]] = {}
    for outputs, inner in ((4096, 1024), (1024, 2048), (1024, 3072), (512, 96)):
        x, w = torch.randn(1100, inner), torch.randn(2 * outputs, inner) * inner**-0.5
        x, w = x.to("cuda", torch.bfloat16), w.to("cuda", torch.bfloat16)
        for name, compute in (
            ("linear", lambda x, w=w: invariant.product(x, w)),
            ("gated", lambda x, w=w: invariant.gated(x, w)),
            ("split product", lambda x, w=w: sum(invariant.split_product(x, w))),
        ):
            whole = compute(x)
            wrong = [
                n
                for n in (1, 2, 16, 17, 63, 64, 65, 200, 255, 256, 900)
                if not torch.equal(compute(x[:n]), whole[:n])
            ]
            found[f"{name} {outputs} {inner}"] = wrong
    return found


def main() -> None:
    print(products(), flush=True)
    for name in sys.argv[1:] or MODELS:
        for company in COMPANY:
            began = time.perf_counter()
            print(
                name,
                company,
                on_device(name, company, 112),
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
