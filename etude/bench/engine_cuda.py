"""Benchmark of the engine on a CUDA device: tokens per second, and share of the roofline.

Models have the shapes of public ones and random weights. `batch` requests are always under way,
with prompts of 256 tokens and 128 new ones each, and with the priority `batch` like those of
rollouts. A finished request is replaced at once. The first ones have staggered lengths, so that
requests come and go in every part of the measurement. For each shape and batch:

    tokens_per_s               sampled tokens over wall time
    roofline_share             the time in which the device could have read the weights once per
                               pass and the keys and values of all sequences, by its measured
                               bandwidth, over the wall time minus the time that the device spent on
                               prompts (which is arithmetic)
    roofline_share_in_all      the same over the whole wall time
    limit_share                that time plus the time for the arithmetic of the prompts, at the
                               rate of a large product measured in this run, over the whole wall
                               time
    transformers_tokens_per_s  `generate` of transformers with the same number of rows, in the same
                               run
    transformers_continuous_tokens_per_s   its continuous batching

Imports torch and numpy only, so that it runs on a bare CUDA image: python -m
etude.bench.engine_cuda --json
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.sampling import Request
from etude.engine.batch import ForwardBatch, Ints, SamplerOutput
from etude.engine.blocks import num_windowed_blocks
from etude.engine.cuda import CudaRunner
from etude.engine.engine import CHUNK_TOKENS, Engine, FinishedRequest
from etude.engine.runner import block_size, kv_bytes, state_bytes
from etude.model.config import ExpertsConfig, LinearConfig, ModelConfig
from etude.model.lora import Adapter
from etude.model.rope import local_table, table
from etude.model.transformer import Transformer
from etude.train.flops import forward_flops, matrix_flops

PROMPT, NEW = 256, 128
CHUNK = CHUNK_TOKENS["cuda"]
"""Most prompt tokens in a pass."""


def _qwen3(
    hidden: int, layers: int, heads: int, keys: int, inner: int, tied: bool, **more: object
) -> ModelConfig:
    values: dict[str, object] = {
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys,
        "head_dim": 128, "intermediate_size": inner, "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": tied,
    }  # fmt: skip
    return ModelConfig(**(values | more))  # type: ignore[arg-type]


SHAPES = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288, tied=False),
    "qwen3-30b-a3b": _qwen3(
        2048,
        48,
        32,
        4,
        6144,
        tied=False,
        model_type="qwen3_moe",
        experts=ExpertsConfig(
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            layers=tuple(range(48)),
            norm_topk_prob=True,
        ),
    ),
    "windowed-0.6b": _qwen3(
        1024, 28, 16, 8, 3072, tied=True, sliding_window=128, sliding_layers=tuple(range(0, 28, 2))
    ),
    "gemma-0.6b": _qwen3(
        1024,
        28,
        16,
        8,
        3072,
        tied=True,
        model_type="gemma3_text",
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=128.0,
        local_rope_theta=1e4,
        sliding_window=128,
        sliding_layers=tuple(n for n in range(28) if n % 6 != 5),
    ),
    "hybrid-0.6b": _qwen3(
        1024,
        28,
        16,
        8,
        3072,
        tied=True,
        model_type="qwen3_next",
        partial_rotary_factor=0.25,
        linear=LinearConfig(
            num_key_heads=8,
            num_value_heads=16,
            key_head_dim=128,
            value_head_dim=128,
            conv_kernel_dim=4,
            layers=tuple(n for n in range(28) if n % 4 != 3),
        ),
    ),
    "gpt-oss-20b": _qwen3(
        2880,
        24,
        64,
        8,
        2880,
        tied=False,
        model_type="gpt_oss",
        head_dim=64,
        attention_bias=True,
        attention_out_bias=True,
        sliding_window=128,
        sliding_layers=tuple(range(0, 24, 2)),
        experts=ExpertsConfig(
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=2880,
            layers=tuple(range(24)),
            norm_topk_prob=True,
            router_bias=True,
            swiglu_limit=7.0,
        ),
    ),
}
"""Shapes of public models, and variants of the dense one of 0.6B: with windows in every second
layer, with the layers of Gemma 3, and with recurrent layers as in Qwen3-Next."""
BATCHES = (1, 64, 256)


def random_model(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda").requires_grad_(False)
    model.rope = table(config).cuda()
    if (local := local_table(config)) is not None:
        model.local_rope = local.cuda()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model


def bandwidth() -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    seconds = min(_timed(lambda: target.copy_(source)) for _ in range(10))
    return 2 * source.nbytes / seconds


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


class CountingRunner:
    """A runner that also counts the bytes that its passes must read."""

    overlaps = True

    def __init__(self, runner: CudaRunner, config: ModelConfig, *, fp8_kv: bool = False) -> None:
        self.runner = runner
        self.config = config
        self.fp8_kv = fp8_kv
        self.num_blocks = runner.num_blocks
        self.num_windowed_blocks = runner.num_windowed_blocks
        self.block_size = runner.block_size
        self.passes = self.bytes_read = 0
        self.slot_mapping: Ints = np.zeros(0, np.int64)

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        if batch.num_decode:
            self.passes += 1
            lengths_B = batch.seq_lens_B[: batch.num_decode]
            self.bytes_read += cache_bytes(self.config, lengths_B, fp8=self.fp8_kv)
            self.slot_mapping = batch.slot_mapping_N[: batch.num_decode]
        return self.runner.launch(batch)

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return self.runner.routed_experts(blocks, length)

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        return self.runner.prepare_weights(tensors)

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        return self.runner.prepare_adapter(slot, adapter)

    def weights(self) -> dict[str, Tensor]:
        return self.runner.weights()

    def reset(self) -> None:
        self.passes = self.bytes_read = 0
        self.runner.trace = []


def cache_bytes(c: ModelConfig, lengths_B: Ints, *, fp8: bool = False) -> int:
    """Bytes of keys and values that a pass with one new token per sequence reads, plus the bytes of
    states that it reads and writes."""
    windows = [
        c.layer_features(layer).window or c.max_position_embeddings for layer in c.cached_layers
    ]
    seen = sum(int(lengths_B.clip(max=window).sum()) for window in windows)
    token_bytes = kv_bytes(c, 2, fp8=fp8) // len(windows)
    return seen * token_bytes + 2 * len(lengths_B) * state_bytes(c, 2)


@dataclass(frozen=True, slots=True)
class Served:
    seconds: float
    tokens: int
    prompts: int
    """Number of prompts that were read."""
    prompt_seconds: float
    """Device time spent on prompts."""
    passes: int
    bytes_read: int
    """Bytes that all passes read, apart from the weights."""


def serve(
    engine: Engine,
    counting: CountingRunner,
    batch: int,
    num_tokens: int,
    prompt_tokens: int = PROMPT,
) -> Served:
    """Keep `batch` requests under way until all of the first ones have finished and `num_tokens`
    more were sampled."""
    rng = np.random.default_rng(0)
    vocabulary = engine.vocab_size
    added = 0

    def add(new: int) -> None:
        nonlocal added
        prompt = tuple(rng.integers(0, vocabulary, prompt_tokens).tolist())
        request = Request(
            prompt=prompt, max_tokens=new, seed=added, experts_from=0, priority="batch"
        )
        engine.add(request, str(added))
        added += 1

    for i in range(batch):
        add(1 + i * NEW // batch)
    finished = 0
    while finished < batch:
        done = sum(isinstance(event, FinishedRequest) for event in engine.step())
        finished += done
        for _ in range(done):
            add(NEW)
    counting.reset()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    before = engine.stats().generation_tokens
    first = added
    while engine.stats().generation_tokens - before < num_tokens:
        for event in engine.step():
            if isinstance(event, FinishedRequest):
                add(NEW)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    tokens = engine.stats().generation_tokens - before
    trace = counting.runner.trace or []
    prompts = (
        sum(start.elapsed_time(end) for size, start, end in trace if size.tiles and end is not None)
        / 1e3
    )
    return Served(seconds, tokens, added - first, prompts, counting.passes, counting.bytes_read)


def weight_bytes(model: Transformer, active: float) -> float:
    """Bytes of the weights that one pass reads, if it uses `active` experts of each layer that has
    experts."""
    embedding = model.model.embed_tokens.weight
    in_fp8 = {id(own.weight) for own in model.quantised_layers()}
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and model.lm_head is not None:
            continue  # a pass reads only a few of its rows
        share = active / len(parameter) if ".experts." in name else 1.0
        total += (parameter.numel() if id(parameter) in in_fp8 else parameter.nbytes) * share
    return total


def active_experts(counting: CountingRunner) -> float:
    """The number of experts that the last pass used, mean over the layers."""
    record = counting.runner.expert_ids
    if record is None:
        return 0.0
    used = record[torch.from_numpy(counting.slot_mapping).cuda()].cpu().numpy()
    return float(np.mean([len(np.unique(used[:, layer])) for layer in range(used.shape[1])]))


@dataclass(frozen=True, slots=True)
class Device:
    """The measured limits of a device."""

    bytes_per_s: float
    flops: float


def measured_device() -> Device:
    return Device(bandwidth(), matrix_flops(torch.device("cuda"), torch.bfloat16, size=8192))


def engine_figures(
    model: Transformer,
    batch: int,
    device: Device,
    num_tokens: int,
    prompt_tokens: int = PROMPT,
    chunk: int = CHUNK,
) -> dict[str, float]:
    size = max(CudaRunner.block_size, block_size(model.config))
    blocks = 2 * batch * ((prompt_tokens + NEW) // size + 1) + 64
    batched = batch + chunk
    window = model.config.sliding_window
    windowed = 0
    if window is not None:
        windowed = num_windowed_blocks(window, size, max_num_seqs=batch, max_batched_tokens=batched)
    runner = CudaRunner(
        model, blocks, batch, invariant=model.invariant, num_windowed_blocks=windowed
    )
    counting = CountingRunner(runner, model.config, fp8_kv=model.arithmetic.fp8_kv)
    engine = Engine(
        model,
        max_num_seqs=batch,
        max_batched_tokens=batched,
        prefix_cache=False,
        runner=counting,
    )
    served = serve(engine, counting, batch, num_tokens, prompt_tokens)
    total = served.passes * weight_bytes(model, active_experts(counting)) + served.bytes_read
    ideal = total / device.bytes_per_s
    arithmetic = served.prompts * forward_flops(model.config, prompt_tokens, 1) / device.flops
    return {
        "tokens_per_s": served.tokens / served.seconds,
        "roofline_share": ideal / (served.seconds - served.prompt_seconds),
        "roofline_share_in_all": ideal / served.seconds,
        "limit_share": (ideal + arithmetic) / served.seconds,
    }


def transformers_figures(config: ModelConfig, batches: Sequence[int]) -> dict[str, float]:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    said = AutoConfig.for_model(**json.loads(config.to_json()))
    with torch.device("cuda"):
        hf: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            said, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    hf.eval()
    found: dict[str, float] = {}
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    for batch in batches:
        prompts = torch.randint(0, config.vocab_size, (batch, PROMPT), device="cuda")
        settings: Any = GenerationConfig(max_new_tokens=NEW, min_new_tokens=NEW, **options)  # type: ignore[no-untyped-call]
        hf.generate(prompts[:1], generation_config=settings, max_new_tokens=4, min_new_tokens=4)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        hf.generate(prompts, generation_config=settings)
        torch.cuda.synchronize()
        found[f"b{batch}.transformers_tokens_per_s"] = batch * NEW / (time.perf_counter() - begin)
        if batch > 1:
            begin = time.perf_counter()
            done = hf.generate_batch(inputs=prompts.tolist(), generation_config=settings)
            drawn = sum(len(output.generated_tokens) for output in done.values())
            found[f"b{batch}.transformers_continuous_tokens_per_s"] = drawn / (
                time.perf_counter() - begin
            )
        _note(found, "transformers")
    return found


def run(
    shapes: Sequence[str],
    batches: Sequence[int],
    compare: bool,
    rounds: int = 2,
    prompt_tokens: int = PROMPT,
    chunk: int = CHUNK,
) -> dict[str, float]:
    device = measured_device()
    figures = {"copy_bytes_per_s": device.bytes_per_s, "matrix_tflops": device.flops / 1e12}
    for shape in shapes:
        model = random_model(SHAPES[shape])
        for batch in batches:
            drawn = rounds * NEW * batch
            found = engine_figures(model, batch, device, drawn, prompt_tokens, chunk)
            figures |= {f"{shape}.b{batch}.{name}": value for name, value in found.items()}
            _note(found, f"{shape}.b{batch}")
            free()
        del model
        free()
        if compare and not SHAPES[shape].experts:
            found = transformers_figures(SHAPES[shape], batches)
            figures |= {f"{shape}.{name}": value for name, value in found.items()}
            free()
    return figures


def _note(found: Mapping[str, float], what: str) -> None:
    print(
        what, *(f"{name} {value:.4g}" for name, value in found.items()), file=sys.stderr, flush=True
    )


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure tokens per second and roofline share of the engine on CUDA."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--alone", action="store_true", help="skip transformers")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="maximum prompt tokens in a pass")
    options = parser.parse_args()
    figures = run(
        options.shapes,
        options.batches,
        compare=not options.alone,
        prompt_tokens=options.prompt,
        chunk=options.chunk,
    )
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:48} {value:,.4g}")


if __name__ == "__main__":
    main()
