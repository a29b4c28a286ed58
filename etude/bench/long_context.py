"""Benchmark of one long session on a CUDA device: read, continued and trained on.

The model has random weights in the shape of a public one, and the session has `TOKENS` tokens. The
engine reads all but the last `NEW` of them and samples those; the trainer then takes a step of rl
on the whole session, with gradient checkpointing:

    prompt_s               time to the first sampled token
    decode_tokens_per_s    rate of the tokens after it
    engine_peak_gib        peak memory of the device in this time
    train_s                time of the second step; the first one compiles
    train_peak_gib         peak memory of the device, optimizer included

Imports torch and numpy only: python -m etude.bench.long_context --json [--shape qwen3-0.6b]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import replace

import torch

from etude.bench.engine_cuda import SHAPES, random_model
from etude.core.sampling import Request, version_spans
from etude.core.types import Batch, Row
from etude.engine.cuda import CudaRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.config import ModelConfig
from etude.train.learner import Learner
from etude.train.start import compile_layers

TOKENS, NEW = 131_072, 256
CHUNK = 8192


def run(shape: str = "qwen3-0.6b") -> dict[str, float]:
    config = replace(SHAPES[shape], max_position_embeddings=TOKENS)
    rng = random.Random(0)
    prompt = tuple(rng.randrange(config.vocab_size) for _ in range(TOKENS - NEW))
    tokens, figures = _decoded(config, prompt)
    print(figures, file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return figures | _trained(config, prompt, tokens)


def _decoded(
    config: ModelConfig, prompt: tuple[int, ...]
) -> tuple[tuple[int, ...], dict[str, float]]:
    torch.cuda.reset_peak_memory_stats()
    model = random_model(config)
    runner = CudaRunner(model, TOKENS // CudaRunner.block_size + 8, 1)
    engine = Engine(model, max_num_seqs=1, max_batched_tokens=CHUNK, runner=runner)
    engine.add(Request(prompt=prompt[:512], max_tokens=8, seed=0), "warm-up")
    while not any(isinstance(event, FinishedRequest) for event in engine.step()):
        pass
    before = engine.stats().generation_tokens
    began = time.perf_counter()
    engine.add(Request(prompt=prompt, max_tokens=NEW, seed=1), "session")
    first_s: float | None = None
    tokens: tuple[int, ...] = ()
    while not tokens:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                tokens = event.sample.tokens
        if first_s is None and engine.stats().generation_tokens > before:
            first_s = time.perf_counter() - began
    assert first_s is not None
    torch.cuda.synchronize()
    decode_s = time.perf_counter() - began - first_s
    return tokens, {
        "prompt_s": first_s,
        "decode_tokens_per_s": (NEW - 1) / decode_s,
        "engine_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _trained(
    config: ModelConfig, prompt: tuple[int, ...], tokens: tuple[int, ...]
) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    model = compile_layers(random_model(config).float().requires_grad_(True))
    model.gradient_checkpointing = True
    learner = Learner(model, compute_dtype=torch.bfloat16)
    seconds = 0.0
    for step in (1, 2):
        began = time.perf_counter()
        row = Row(
            sample=f"s{step}",
            tokens=prompt + tokens,
            mask=(False,) * len(prompt) + (True,) * len(tokens),
            logprobs=(0.0,) * len(prompt) + (-11.0,) * len(tokens),
            advantages=(0.0,) * len(prompt) + (1.0,) * len(tokens),
            versions=version_spans([step - 1] * len(tokens)),
        )
        learner.rl_step(Batch(step=step, rows=(row,), oldest=0), lr=1e-6, microbatch_tokens=TOKENS)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return {
        "train_s": seconds,
        "train_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Decode and train on one session of 131,072 tokens on a CUDA device."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    options = parser.parse_args()
    figures = run(options.shape)
    print(json.dumps(figures, indent=2) if options.json else figures)


if __name__ == "__main__":
    main()
