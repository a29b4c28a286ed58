"""Benchmark of FP8 against bf16 on a CUDA device: decoding, the trainer's forward pass, and the
train/inference mismatch.

Random weights in the shape of Qwen3-8B (`decode`: whole; `forward`: `LAYERS` of its layers, without
the head; `k3`: a smaller model of many layers):

    decode.KIND.tokens_per_s     64 requests that come and go, prompts of 256 tokens, 128 new ones
    decode.KIND_over_bf16        the same over that of bf16
    forward.KIND.tokens_per_s    8 rows of 2,048 tokens, compiled as in a run, recording for the
                                 backward pass
    forward.KIND_over_bf16
    k3.TRAINER.ENGINE            mean over tokens that the engine sampled
    k3.KIND_over_bf16            the trainer of this kind over the one in bf16, both against the
                                 engine of this kind

KIND, TRAINER and ENGINE are bf16, fp8, or fp8-kv (FP8 with keys and values in FP8 too); the last
two also exist with the suffix -invariant, for batch-invariant arithmetic.
Imports torch and numpy only, so that it runs on a bare CUDA image: python -m etude.bench.fp8 --json
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from etude.bench import engine_cuda
from etude.core.sampling import Request, Sample
from etude.engine.cuda import CudaRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.engine.select import invariant_trainer_model
from etude.model.attention import CausalAttention
from etude.model.numerics import Arithmetic
from etude.model.tiled_attention import TiledCausalAttention
from etude.model.transformer import Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from etude.train.start import compile_layers

KINDS = {
    "bf16": Arithmetic.of(invariant=False, fp8=False),
    "fp8": Arithmetic.of(invariant=False, fp8=True),
    "fp8-kv": Arithmetic.of(invariant=False, fp8=True, fp8_kv=True),
    "fp8-invariant": Arithmetic.of(invariant=True, fp8=True),
    "fp8-kv-invariant": Arithmetic.of(invariant=True, fp8=True, fp8_kv=True),
}
PARTS = ("decode", "forward", "k3")
SHAPE = engine_cuda.SHAPES["qwen3-8b"]
LAYERS = 8
BATCH = 64
ROWS, LENGTH = 8, 2048
SMALL = replace(
    engine_cuda.SHAPES["qwen3-0.6b"],
    num_hidden_layers=16,
    vocab_size=32_768,
    tie_word_embeddings=False,
)
SESSIONS, PROMPT, NEW = 16, 64, 128


def run(parts: Sequence[str] = PARTS, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, float]:
    found: dict[str, float] = {}
    kinds = [kind for kind in KINDS if kind in kinds or kind == "bf16"]
    for part in parts:
        measure = {"decode": _decode, "forward": _forward, "k3": _k3}[part]
        for name, value in measure(kinds).items():
            found[f"{part}.{name}"] = value
            print(f"{part}.{name} {value:.4g}", file=sys.stderr, flush=True)
        engine_cuda.free()
    return found


def _decode(kinds: Sequence[str]) -> dict[str, float]:
    model, device = engine_cuda.random_model(SHAPE), engine_cuda.measured_device()
    found: dict[str, float] = {}
    for kind in kinds:
        model.compute_with(KINDS[kind])
        figures = engine_cuda.engine_figures(model, BATCH, device, 2 * engine_cuda.NEW * BATCH)
        found[f"{kind}.tokens_per_s"] = figures["tokens_per_s"]
        engine_cuda.free()
    return found | _over_bf16(found, ".tokens_per_s")


def _forward(kinds: Sequence[str]) -> dict[str, float]:
    plain = engine_cuda.random_model(replace(SHAPE, num_hidden_layers=LAYERS))
    found: dict[str, float] = {}
    for kind in kinds:
        found[f"{kind}.tokens_per_s"] = _forward_speed(_trainer(plain, kind))
        torch.compiler.reset()
        engine_cuda.free()
    return found | _over_bf16(found, ".tokens_per_s")


def _forward_speed(model: Transformer) -> float:
    model.requires_grad_(True)
    if not model.invariant:
        compile_layers(model)
    device = torch.device("cuda")
    tokens = torch.randint(0, SHAPE.vocab_size, (ROWS * LENGTH,), device=device)
    positions = torch.arange(LENGTH, device=device).repeat(ROWS)
    attention = TiledCausalAttention if model.invariant else CausalAttention
    attend = attention([LENGTH] * ROWS, device)
    return ROWS * LENGTH / _median_seconds(lambda: model(tokens, positions, attend))


def _k3(kinds: Sequence[str]) -> dict[str, float]:
    plain = engine_cuda.random_model(SMALL)
    found: dict[str, float] = {}
    for engine in kinds:
        drawn = _drawn(copy.deepcopy(plain).compute_with(KINDS[engine]))
        for trainer in dict.fromkeys(("bf16", engine)):
            found[f"{trainer}.{engine}"] = _mean_k3(_trainer(plain, trainer), drawn)
            engine_cuda.free()
        if engine != "bf16":
            found[f"{engine}_over_bf16"] = found[f"{engine}.{engine}"] / found[f"bf16.{engine}"]
    return found


def _trainer(plain: Transformer, kind: str) -> Transformer:
    """The model with the arithmetic of a trainer of that kind."""
    arithmetic = KINDS[kind]
    model = copy.deepcopy(plain).compute_with(arithmetic.but(invariant=False))
    if not arithmetic.invariant:
        return model
    return invariant_trainer_model(model, torch.bfloat16).cast(torch.bfloat16)


def _drawn(model: Transformer) -> list[tuple[tuple[int, ...], Sample]]:
    """(prompt, answer) of sessions that are served together."""
    blocks = SESSIONS * ((PROMPT + NEW) // CudaRunner.block_size + 2)
    runner = CudaRunner(model, blocks, SESSIONS, invariant=model.invariant)
    engine = Engine(model, max_num_seqs=SESSIONS, prefix_cache=False, runner=runner)
    prompts = torch.randint(0, SMALL.vocab_size, (SESSIONS, PROMPT)).tolist()
    for number, prompt in enumerate(prompts):
        engine.add(Request(prompt=tuple(prompt), max_tokens=NEW, seed=number), str(number))
    found = []
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                found.append((tuple(prompts[int(event.id)]), event.sample))
    return found


@torch.no_grad()
def _mean_k3(model: Transformer, drawn: Sequence[tuple[tuple[int, ...], Sample]]) -> float:
    rows = [
        TokenSequence(prompt + sample.tokens, [False] * len(prompt) + [True] * len(sample.tokens))
        for prompt, sample in drawn
    ]
    logp_N, _ = token_logprobs(model, pack_batch(rows).to(torch.device("cuda")))
    engine_N = torch.tensor([logprob for _, sample in drawn for logprob in sample.logprobs])
    log_ratio_N = logp_N.double().cpu() - engine_N.double()
    return float((torch.expm1(log_ratio_N) - log_ratio_N).mean())


def _over_bf16(found: Mapping[str, float], end: str) -> dict[str, float]:
    return {
        f"{name.removesuffix(end)}_over_bf16": value / found["bf16" + end]
        for name, value in found.items()
        if name != "bf16" + end
    }


def _median_seconds(work: Callable[[], object], warm_up: int = 3, times: int = 7) -> float:
    taken = []
    for _ in range(warm_up + times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[warm_up:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare FP8 with bf16.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=tuple(KINDS))
    options = parser.parse_args()
    figures = run(options.parts, options.kinds)
    if options.json:
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
