"""Benchmark of adapters (LoRA) in the engine: decoding speed of requests with many adapters.

Random weights in the shape of a public model, in two engines: one without adapters, and one with as
many as are requested, each on all matrices of attention and MLP. B requests (`--batch`, 64 by
default) with prompts of 32 tokens decode together:

    bB.base.tokens_per_s          by the engine without adapters
    bB.none.tokens_per_s          by the engine with adapters, when no request uses one
    bB.aN.tokens_per_s            when the requests cycle through N different adapters, for N of
                                  `--counts`: 1, 8 and 64 by default, and at most B
    bB.none.share, bB.aN.share    as a share of `base`
    bB.aN.share_by_reads          the share to expect if adapters cost only their reads, one after
                                  the other, at the measured bandwidth (CUDA)
    aN.adapter_gib                size of N adapters, at `--rank`

Only steps in which all requests decode are counted. Each figure is printed as soon as it is known:
most of the time goes into capturing the graphs of the two engines, not into measuring. Imports
torch and numpy only, so that it runs on a bare CUDA image: python -m etude.bench.lora --json
--device cuda --shape qwen3-0.6b --rank 8 --batch 64 256 --counts 64
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from etude.core.sampling import Request
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine
from etude.model.config import ModelConfig
from etude.model.files import hf_tensors
from etude.model.lora import Adapter, LoraConfig, adaptable_layers, add_adapter, split_tensors
from etude.model.transformer import Transformer, init_from_scratch

PROMPT = 32
MAX_BATCHED_TOKENS = 2048
"""Size of the largest graph: a larger pass would be compiled during the measurement."""
SMALL = ModelConfig(
    vocab_size=2048,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=384,
    max_position_embeddings=512,
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
COUNTS = (1, 8, 64)


def run(
    device: str = "auto",
    shape: str | None = None,
    rank: int = 16,
    batches: Sequence[int] = (64,),
    steps: int = 96,
    counts: Sequence[int] = COUNTS,
) -> dict[str, float]:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(device, shape or ("small" if device == "cpu" else "qwen3-0.6b"))
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, targets=_targets(model.config))
    bytes_per_s = _bandwidth() if device == "cuda" else None
    figures: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        figures[name] = value
        print(f"{name} {value:.4g}", file=sys.stderr, flush=True)

    engine = _engine(model, max(batches), steps, None)
    for batch in batches:
        note(f"b{batch}.base.tokens_per_s", _decoded(engine, batch, steps, []))
    del engine
    _free(model)
    shapes = _shapes(model.config, lora)
    weigh = sum(2 * shape.numel() for shape in shapes.values())
    for count in counts:
        note(f"a{count}.adapter_gib", count * weigh / 2**30)
    limits = AdapterLimits(num_named=max(counts, default=0), max_rank=rank)
    engine = _engine(model, max(batches), steps, limits)
    names = _load(engine, lora, shapes, limits.num_named, device)
    for batch in batches:
        base = figures[f"b{batch}.base.tokens_per_s"]
        for count in (0, *(count for count in counts if count <= batch)):
            of = f"b{batch}.a{count}" if count else f"b{batch}.none"
            speed = _decoded(engine, batch, steps, names[:count])
            note(f"{of}.tokens_per_s", speed)
            note(f"{of}.share", speed / base)
            if count and bytes_per_s:
                pass_s = batch / base
                note(f"{of}.share_by_reads", pass_s / (pass_s + count * weigh / bytes_per_s))
    return figures


def _targets(config: ModelConfig) -> tuple[str, ...]:
    return TARGETS[:4] if config.experts else TARGETS


def _model(device: str, shape: str) -> Transformer:
    if shape == "small":
        return init_from_scratch(SMALL, 0).requires_grad_(False).to(device)
    from etude.bench.engine_cuda import SHAPES, random_model

    return random_model(SHAPES[shape])


def _bandwidth() -> float:
    from etude.bench.engine_cuda import bandwidth  # imports Triton

    return bandwidth()


def _engine(model: Transformer, batch: int, steps: int, adapters: AdapterLimits | None) -> Engine:
    token_bytes = 2 * 4 * len(model.config.cached_layers)
    token_bytes *= model.config.num_key_value_heads * model.config.head_dim
    return Engine(
        model,
        max_num_seqs=batch,
        max_batched_tokens=min(batch * PROMPT, MAX_BATCHED_TOKENS),
        prefix_cache=False,
        kv_cache_bytes=2 * batch * (PROMPT + 4 * steps) * token_bytes,
        adapters=adapters,
    )


def _load(
    engine: Engine, lora: LoraConfig, shapes: Mapping[str, torch.Size], count: int, device: str
) -> list[str]:
    """Load `count` random adapters, and return their names."""
    names = [f"adapter {number}" for number in range(count)]
    for number, name in enumerate(names):
        engine.load_adapter(name, _random(lora, shapes, number, device))
    return names


def _shapes(config: ModelConfig, lora: LoraConfig) -> dict[str, torch.Size]:
    """Shapes of an adapter's tensors, by their published names."""
    with torch.device("meta"):
        shell = add_adapter(Transformer(config), lora, 0)
    tensors = split_tensors(hf_tensors(shell))[1]
    return {name: tensor.shape for name, tensor in tensors.items()}


def _random(lora: LoraConfig, shapes: Mapping[str, torch.Size], seed: int, device: str) -> Adapter:
    """A random adapter in the dtype in which adapters are published."""
    generator = torch.Generator(device).manual_seed(seed)
    return Adapter(
        lora,
        {
            name: torch.randn(shape, device=device, generator=generator).mul_(0.02).bfloat16()
            for name, shape in shapes.items()
        },
    )


def _decoded(engine: Engine, batch: int, steps: int, names: Sequence[str]) -> float:
    """Tokens per second while all requests decode."""
    for number in range(batch):
        prompt = tuple((7 * number + place) % engine.vocab_size for place in range(PROMPT))
        adapter = names[number % len(names)] if names else None
        engine.add(
            Request(prompt=prompt, max_tokens=2 * steps, seed=number, adapter=adapter), str(number)
        )
    for _ in range(steps // 2):  # prompts and compilation
        engine.step()
    _wait()
    began = time.perf_counter()
    before = engine.stats().generation_tokens
    for _ in range(steps):
        engine.step()
    _wait()
    seconds = time.perf_counter() - began
    assert engine.num_running == batch, "requests ended during the measurement"
    tokens = engine.stats().generation_tokens - before
    for number in range(batch):
        engine.abort(str(number))
    while not engine.idle:
        engine.step()
    return tokens / seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free(model: Transformer) -> None:
    for layer in adaptable_layers(model).values():
        layer.adapter = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure tokens per second with many adapters.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shape", help="small, or a shape of engine_cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--batch", dest="batches", nargs="+", type=int, default=[64], help="concurrent requests"
    )
    parser.add_argument(
        "--counts", nargs="*", type=int, default=list(COUNTS), help="different adapters among them"
    )
    parser.add_argument("--steps", type=int, default=96, help="steps to measure")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    figures = run(**options)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:32} {value:,.4g}")


if __name__ == "__main__":
    main()
