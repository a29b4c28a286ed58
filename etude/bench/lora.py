"""Benchmark of adapters (LoRA) in the engine: how fast requests decode that have many of them.

Random weights in the shape of a public model. `--batch` requests, 64 by default, with prompts of 32
tokens decode together, and every one has an adapter on all matrices of attention and MLP. For each
number of different adapters among them:

    base.tokens_per_s          by an engine that was made without adapters
    none.tokens_per_s          with room for adapters, and none in use
    aN.tokens_per_s            N adapters in turn, for N of 1, 8 and 64
    aN.share                   of `base`
    aN.adapter_gib             what the adapters in use weigh on the device
    aN.share_by_reads          the share that would be left if adapters cost nothing but their reads
                               at the measured bandwidth (CUDA)

Only steps in which all requests decode are counted. Imports torch and numpy only, so that it runs
on a bare CUDA image: python -m etude.bench.lora --json --device cuda --shape qwen3-0.6b --rank 16
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence

import torch

from etude.core.sampling import Request
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine
from etude.model.config import ModelConfig
from etude.model.files import hf_tensors
from etude.model.lora import Adapter, LoraConfig, adaptable_layers, add_adapter, split_tensors
from etude.model.transformer import Transformer, init_from_scratch

PROMPT = 32
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
    batch: int = 64,
    steps: int = 96,
    counts: Sequence[int] = COUNTS,
) -> dict[str, float]:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(device, shape or ("small" if device == "cpu" else "qwen3-0.6b"))
    lora = LoraConfig(rank=rank, alpha=2.0 * rank, targets=_targets(model.config))
    bytes_per_s = _bandwidth() if device == "cuda" else None
    figures = {"base.tokens_per_s": _decoded(_engine(model, batch, steps, None), batch, steps, [])}
    _note(figures)
    for count in (0, *counts):
        limits = AdapterLimits(num_named=count, max_rank=rank)
        engine = _engine(model, batch, steps, limits)
        names = [f"adapter {number}" for number in range(count)]
        for number, name in enumerate(names):
            engine.load_adapter(name, _random(model.config, lora, number, device))
        speed = _decoded(engine, batch, steps, names)
        of = f"a{count}" if count else "none"
        found = {f"{of}.tokens_per_s": speed, f"{of}.share": speed / figures["base.tokens_per_s"]}
        if count:
            weigh = count * _bytes(model.config, lora)
            found[f"{of}.adapter_gib"] = weigh / 2**30
            if bytes_per_s:
                pass_s = batch / figures["base.tokens_per_s"]
                found[f"{of}.share_by_reads"] = pass_s / (pass_s + weigh / bytes_per_s)
        _note(found)
        figures |= found
        del engine
        _free(model)
    return figures


def _targets(config: ModelConfig) -> tuple[str, ...]:
    return TARGETS[:4] if config.experts else TARGETS


def _model(device: str, shape: str) -> Transformer:
    if shape == "small":
        return init_from_scratch(SMALL, 0).requires_grad_(False).to(device)
    from etude.bench.engine_cuda import SHAPES, random_model

    return random_model(SHAPES[shape])


def _bandwidth() -> float:
    from etude.bench.engine_cuda import bandwidth  # brings Triton

    return bandwidth()


def _engine(model: Transformer, batch: int, steps: int, adapters: AdapterLimits | None) -> Engine:
    token_bytes = 2 * 4 * len(model.config.cached_layers)
    token_bytes *= model.config.num_key_value_heads * model.config.head_dim
    return Engine(
        model,
        max_num_seqs=batch,
        max_batched_tokens=batch * PROMPT,
        prefix_cache=False,
        kv_cache_bytes=2 * batch * (PROMPT + 4 * steps) * token_bytes,
        adapters=adapters,
    )


def _random(config: ModelConfig, lora: LoraConfig, seed: int, device: str) -> Adapter:
    """On the host, in the type that adapters are published in."""
    with torch.device("meta"):
        shell = add_adapter(Transformer(config), lora, seed)
    shapes = split_tensors(hf_tensors(shell))[1]
    generator = torch.Generator(device).manual_seed(seed)
    return Adapter(
        lora,
        {
            name: torch.randn(t.shape, device=device, generator=generator).mul_(0.02).bfloat16()
            for name, t in shapes.items()
        },
    )


def _bytes(config: ModelConfig, lora: LoraConfig) -> int:
    with torch.device("meta"):
        shell = add_adapter(Transformer(config), lora, 0)
    return sum(2 * tensor.numel() for tensor in split_tensors(hf_tensors(shell))[1].values())


def _decoded(engine: Engine, batch: int, steps: int, names: Sequence[str]) -> float:
    """Tokens per second while all requests decode."""
    for number in range(batch):
        prompt = tuple((7 * number + place) % engine.vocab_size for place in range(PROMPT))
        adapter = names[number % len(names)] if names else None
        engine.add(
            Request(prompt=prompt, max_tokens=2 * steps, seed=number, adapter=adapter), str(number)
        )
    for _ in range(steps // 2):  # prompts, and what is compiled
        engine.step()
    _wait()
    began, before = time.perf_counter(), engine.stats().generation_tokens
    for _ in range(steps):
        engine.step()
    _wait()
    seconds = time.perf_counter() - began
    assert engine.num_running == batch, "requests ended within the measurement"
    return (engine.stats().generation_tokens - before) / seconds


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free(model: Transformer) -> None:
    for layer in adaptable_layers(model).values():
        layer.adapter = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _note(found: dict[str, float]) -> None:
    print(*(f"{name} {value:.4g}" for name, value in found.items()), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="tokens per second with many adapters")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shape", help="small, or a shape of engine_cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=96)
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
