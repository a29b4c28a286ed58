"""Benchmark of batch invariance: its cost in time, at 1, 64 and 256 requests at once.

    cost_bN                    time with it over time without, minus 1: 0.05 is 5 % slower
    bN.tokens_per_s            new tokens per second without it, the time for prompts included
    bN.invariant_tokens_per_s  the same with it

On a CUDA device: the kernels of the engine on random weights of the shape of Qwen3-0.6B, with
prompts of 256 tokens and 128 new ones, requests that come and go. Otherwise: a small model on the
CPU. Both sides are measured alternately in one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from etude.core.sampling import Request
from etude.engine.engine import Engine
from etude.model.numerics import INVARIANT, PLAIN
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch

BATCHES = (1, 64, 256)
ROUNDS = 1
PROMPT, NEW = 48, 8
SMALL = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=768,
    max_position_embeddings=128,
)

Rate = Callable[[int, bool], float]
"""(requests at once, with invariant arithmetic) -> new tokens per second"""


def run() -> dict[str, float]:
    rate = on_device("qwen3-0.6b") if torch.cuda.is_available() else on_cpu()
    return metrics(rate)


def metrics(rate: Rate) -> dict[str, float]:
    found: dict[str, float] = {}
    for batch in BATCHES:
        rates = {mode: max(rate(batch, mode) for _ in range(ROUNDS)) for mode in (False, True)}
        found[f"cost_b{batch}"] = rates[False] / rates[True] - 1
        found[f"b{batch}.tokens_per_s"], found[f"b{batch}.invariant_tokens_per_s"] = (
            rates[False],
            rates[True],
        )
    return found


def on_device(shape: str) -> Rate:
    from etude.bench import engine_cuda
    from etude.engine.cuda import CudaRunner

    model = engine_cuda.random_model(engine_cuda.SHAPES[shape])

    def rate(batch: int, invariant: bool) -> float:
        blocks = (
            2 * batch * ((engine_cuda.PROMPT + engine_cuda.NEW) // CudaRunner.block_size + 1) + 64
        )
        counting = engine_cuda.CountingRunner(
            CudaRunner(model, blocks, batch, invariant=invariant), model.config
        )
        engine = Engine(
            model,
            max_num_seqs=batch,
            max_batched_tokens=batch + 1024,
            prefix_cache=False,
            runner=counting,
        )
        served = engine_cuda.serve(engine, counting, batch, 2 * engine_cuda.NEW * batch)
        return served.tokens / served.seconds

    return rate


def on_cpu() -> Rate:
    model = init_from_scratch(SMALL, seed=0).requires_grad_(False)

    def rate(batch: int, invariant: bool) -> float:
        engine = Engine(
            model.compute_with(INVARIANT if invariant else PLAIN), max_num_seqs=max(2, batch)
        )
        for number in range(batch):
            engine.add(_request(model, number), str(number))
        began = time.perf_counter()
        while not engine.idle:
            engine.step()
        return batch * NEW / (time.perf_counter() - began)

    return rate


def _request(model: Transformer, number: int) -> Request:
    prompt = tuple((number * 31 + place * 7) % model.config.vocab_size for place in range(PROMPT))
    return Request(prompt=prompt, max_tokens=NEW, seed=number)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
