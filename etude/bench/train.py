"""How fast the trainer is: steps of rl as a run takes them, on a CUDA device if there is one and on the CPU otherwise.

Random weights in the shape of Qwen3-0.6B, or of SmolLM2-135M on the CPU, and random rows, a quarter of each a prompt.
Products are computed in bf16.

    step_s         of one step: forward and backward pass, optimizer and rounding; the median
    tokens_per_s   all tokens of the rows, prompts included
    mfu            the model's arithmetic over what the device is said, or on a CPU found, to do in bf16
    memory_gb      at most in use on the device

Imports torch and numpy only, so that it runs on a bare CUDA image: python -m etude.bench.train
"""

from __future__ import annotations

import json
import random
import statistics
import time

import torch

from etude.core.types import Batch, Row, spans
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, fresh
from etude.train.flops import peak_flops, step_flops
from etude.train.learner import Learner
from etude.train.start import fused

STEPS = 5
SMOLLM2 = ModelConfig(
    vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    intermediate_size=1536, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip


def run() -> dict[str, float]:
    there = torch.cuda.is_available()
    num_rows, length, microbatch_tokens = (64, 2048, 16_384) if there else (16, 128, 1024)
    learner = Learner(fused(_model()))
    config, seconds = learner.model.config, []
    for step in range(STEPS + 1):  # the first one warms up
        batch = _batch(step + 1, num_rows, length, config.vocab_size)
        began = time.perf_counter()
        with torch.autocast(learner.device.type, torch.bfloat16, cache_enabled=False):
            learner.step(batch, lr=1e-6, microbatch_tokens=microbatch_tokens)
        seconds.append(time.perf_counter() - began)
    step_s = statistics.median(seconds[1:])
    peak = peak_flops(learner.device, torch.bfloat16)
    figures = {
        "step_s": step_s,
        "tokens_per_s": num_rows * length / step_s,
        "mfu": step_flops(config, batch.rows) / step_s / peak,
    }
    return figures | ({"memory_gb": torch.cuda.max_memory_allocated() / 1e9} if there else {})


def _model() -> Transformer:
    if not torch.cuda.is_available():
        return fresh(SMOLLM2, 0)
    from etude.bench.engine_cuda import SHAPES, random_model  # brings Triton

    return random_model(SHAPES["qwen3-0.6b"]).float().requires_grad_(True)


def _batch(step: int, num_rows: int, length: int, vocab_size: int) -> Batch:
    rng, num_prompt = random.Random(step), length // 4
    mask = (False,) * num_prompt + (True,) * (length - num_prompt)
    rows = tuple(
        Row(
            sample=f"{step}-{number}",
            tokens=tuple(rng.randrange(vocab_size) for _ in range(length)),
            mask=mask,
            logprobs=tuple(-11.0 if said else 0.0 for said in mask),
            advantages=tuple((-1.0) ** number if said else 0.0 for said in mask),
            versions=spans([step - 1] * sum(mask)),
        )
        for number in range(num_rows)
    )
    return Batch(step=step, rows=rows, oldest=step - 1)


if __name__ == "__main__":
    print(json.dumps(run()))
