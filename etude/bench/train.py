"""Benchmark of the trainer's throughput: steps of rl as in a run, on a CUDA device if there is one
and on the CPU otherwise.

Models have the shapes of public ones and random weights; rows are random, a quarter of each a
prompt. A layout of 8x2048 is one step on 8 * 2,048 tokens in rows of mixed lengths, from a quarter
of 2,048 to the whole, in one microbatch. For each shape and layout:

    tokens_per_s          all tokens of the rows, prompts included
    mfu                   the model's arithmetic (6ND and attention) over the matrix rate measured
                          in this run
    peak_gib              peak memory of the device
    plain.*               the same for a plain compiled decoder of that shape, on whole rows
                          (`bench._plain_decoder`)
    share_of_plain        our mfu over that of the plain decoder

`matrix_tflops` is that rate; `cudnn_attention` is 1 if our layers attend by cuDNN and 0 if not
(ETUDE_CUDNN_ATTENTION=0 in the environment switches it off). Imports torch and numpy only, so that
it runs on a bare CUDA image:

    python -m etude.bench.train --json --shapes qwen3-0.6b --layouts 8x2048

A number after a shape is the number of layers to keep: `qwen3-30b-a3b-6` is the sparse model with 6
of its 48, `qwen3-8b-12` the dense one with 12 of its 36. The plain decoder does not support
experts.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from etude.bench import _plain_decoder
from etude.core.sampling import version_spans
from etude.core.types import Batch, Row
from etude.model import cudnn_attention
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, init_from_scratch
from etude.train.flops import matrix_flops, step_flops
from etude.train.learner import Learner
from etude.train.start import compile_layers

STEPS = 8
WARM_UP = 3
"""First steps, which compile and are not counted."""
SMOLLM2 = ModelConfig(
    vocab_size=49_152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, intermediate_size=1536, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip
ON_CUDA = ("qwen3-0.6b", "qwen3-1.7b"), ("8x2048", "4x8192")
ON_CPU = ("smollm2-135m",), ("16x128",)


def run(
    shapes: Sequence[str] = (), layouts: Sequence[str] = (), compare: bool = True
) -> dict[str, float]:
    there = torch.cuda.is_available()
    device, (all_shapes, all_layouts) = (
        torch.device("cuda" if there else "cpu"),
        ON_CUDA if there else ON_CPU,
    )
    rate = matrix_flops(device, _compute_dtype(), size=8192 if there else 1024)
    cudnn = float(cudnn_attention.available(device))
    figures = {"matrix_tflops": rate / 1e12, "cudnn_attention": cudnn}
    for shape in shapes or all_shapes:
        for layout in layouts or all_layouts:
            rows, length = map(int, layout.split("x"))
            found = _measured(partial(_ours, shape, rows, length), rate)
            if compare and there and not _config(shape).experts:
                plain = _measured(partial(_plain_decoder.steps, _config(shape), rows, length), rate)
                found |= {f"plain.{name}": value for name, value in plain.items()}
                found["share_of_plain"] = found["mfu"] / plain["mfu"]
            print(
                shape,
                layout,
                *(f"{n} {v:.4g}" for n, v in found.items()),
                file=sys.stderr,
                flush=True,
            )
            figures |= {f"{shape}.{layout}.{name}": value for name, value in found.items()}
    return figures


Step = Callable[[], tuple[int, float]]
"""Takes one step, and returns its number of tokens and of FLOPs."""


def _measured(prepare: Callable[[], Step], rate: float) -> dict[str, float]:
    there = torch.cuda.is_available()
    if there:
        torch.cuda.reset_peak_memory_stats()
    step = prepare()
    speeds = []
    shares = []
    for _ in range(STEPS):
        began = time.perf_counter()
        num_tokens, flops = step()
        if there:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        speeds.append(num_tokens / seconds)
        shares.append(flops / seconds / rate)
    found = {
        "tokens_per_s": statistics.median(speeds[WARM_UP:]),
        "mfu": statistics.median(shares[WARM_UP:]),
    }
    if there:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del step
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
    return found


def _ours(shape: str, rows: int, length: int) -> Step:
    learner = Learner(compile_layers(_model(shape)), compute_dtype=_compute_dtype())
    vocabulary = learner.model.config.vocab_size
    batches = [_batch(number + 1, rows, length, vocabulary) for number in range(STEPS)]
    flops = [step_flops(learner.model.config, batch.rows) for batch in batches]

    def step() -> tuple[int, float]:
        learner.rl_step(batches.pop(0), lr=1e-6, microbatch_tokens=rows * length)
        return rows * length, flops.pop(0)

    return step


def _compute_dtype() -> torch.dtype:
    """The default dtype of a run."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _config(shape: str) -> ModelConfig:
    if shape == "smollm2-135m":
        return SMOLLM2
    from etude.bench.engine_cuda import SHAPES  # imports Triton

    if shape in SHAPES:
        return SHAPES[shape]
    whole, _, layers = shape.rpartition("-")
    config, kept = SHAPES[whole], int(layers)
    experts = config.experts and replace(config.experts, layers=tuple(range(kept)))
    return replace(config, num_hidden_layers=kept, experts=experts)


def _model(shape: str) -> Transformer:
    if not torch.cuda.is_available():
        return init_from_scratch(_config(shape), 0)
    from etude.bench.engine_cuda import random_model

    return random_model(_config(shape)).float().requires_grad_(True)


def _batch(step: int, rows: int, length: int, vocab_size: int) -> Batch:
    """A batch of rows of mixed lengths, with `rows * length` tokens in all."""
    rng = random.Random(step)
    left = rows * length
    found: list[Row] = []
    while left:
        size = min(left, rng.randint(length // 4, length))
        left -= size
        mask = (False,) * max(1, size // 4) + (True,) * (size - max(1, size // 4))
        row = Row(
            sample=f"{step}-{len(found)}",
            tokens=tuple(rng.randrange(vocab_size) for _ in range(size)),
            mask=mask,
            logprobs=tuple(-11.0 if said else 0.0 for said in mask),
            advantages=tuple((-1.0) ** len(found) if said else 0.0 for said in mask),
            versions=version_spans([step - 1] * sum(mask)),
        )
        found.append(row)
    return Batch(step=step, rows=tuple(found), oldest=step - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how fast the trainer is.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shapes", nargs="+", default=())
    parser.add_argument("--layouts", nargs="+", default=())
    parser.add_argument("--alone", action="store_true", help="skip the plain decoder")
    options = parser.parse_args()
    figures = run(options.shapes, options.layouts, compare=not options.alone)
    print(
        json.dumps(figures, indent=2)
        if options.json
        else "\n".join(f"{n:44} {v:,.4g}" for n, v in figures.items())
    )


if __name__ == "__main__":
    main()
