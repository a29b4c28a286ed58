"""Benchmark of the engine's throughput, beside `transformers` and vLLM on the same weights and
machine, in one run.

On a CPU: a model of the shape of SmolLM2-135M in bf16 and fp32 (`--model DIR`: that one; otherwise
models/smollm2-135m if `make model` was run, else random weights), prompts of 40 tokens, 64 new
ones, for 1 and 16 requests at a time:

    smollm2.bN.tokens_per_s                new tokens a second, all requests together, the time for
                                           prompts included, and that for loading left out
    smollm2.bN.transformers_tokens_per_s   the same of `generate`
    smollm2.bN.vllm_tokens_per_s           the same of vLLM's offline engine in bf16, on all cores;
                                           where .venv-vllm has it (`make bench-vllm`)
    smollm2.bN.threads                     that gave the first figure; each side has the number of
                                           threads it likes best
    smollm2.ttft_cached_share              time to the first token behind 1,000 tokens that an
                                           earlier request had too,
                                           as a share of the time when nobody had them
    smollm2.fp32.bN...                     the same in fp32

`generate` is stopped if it has not answered after a minute; its figure is then called
`transformers_tokens_per_s_at_most`. Where a processor has no instructions for bf16, it needs a
quarter of an hour for what takes seconds here.

With a CUDA device: what `engine_cuda` measures.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from etude.bench._vllm_engine import NEW
from etude.core.errors import EtudeError
from etude.core.sampling import Request
from etude.engine.engine import Engine
from etude.model.files import build_model, hf_state_dict, read_directory, write_directory
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch

BATCHES = (1, 16)
PROMPT = 40
SHARED, OWN = 1000, 8
REPEATS = 2
PATIENCE_S = 60.0
MADE = Path("models/smollm2-135m")
VLLM_PYTHON = Path(".venv-vllm/bin/python")
SHAPE = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    max_position_embeddings=8192,
)


def run(model: str | None = None) -> dict[str, float]:
    if torch.cuda.is_available():
        from etude.bench import engine_cuda

        return engine_cuda.run(list(engine_cuda.SHAPES), engine_cuda.BATCHES, compare=True)
    threads = torch.get_num_threads()
    try:
        with model_directory(model) as directory:
            return on_cpu(directory)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def model_directory(model: str | None) -> Iterator[Path]:
    if model is not None or MADE.is_dir():
        yield Path(model or MADE)
        return
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        small = {"config.json": SHAPE.to_json().encode(), "tokenizer.json": b"{}"}
        write_directory(Path(scratch), small, hf_state_dict(init_from_scratch(SHAPE, seed=0)))
        yield Path(scratch)


def on_cpu(directory: Path) -> dict[str, float]:
    formats = {"smollm2": torch.bfloat16, "smollm2.fp32": torch.float32}
    return {
        f"{name}.{figure}": value
        for name, dtype in formats.items()
        for figure, value in in_format(directory, dtype).items()
    }


def in_format(directory: Path, dtype: torch.dtype) -> dict[str, float]:
    ours = build_model(*read_directory(directory)).to(dtype).requires_grad_(False)
    theirs = peer(directory, dtype)
    has_vllm = dtype == torch.bfloat16 and VLLM_PYTHON.exists()
    vllm = vllm_rates(directory) if has_vllm else {}
    figures: dict[str, float] = {}
    for batch in BATCHES:
        rates = {n: rate(n, batch, answers_of(ours, batch)) for n in thread_counts()}
        found = {"tokens_per_s": max(rates.values()), "threads": max(rates, key=rates.__getitem__)}
        found |= their_rate(theirs, batch)
        found |= {"vllm_tokens_per_s": vllm[batch]} if vllm else {}
        # the whole takes a quarter of an hour on a slow processor
        told = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{dtype}, {batch} at a time: {told}", file=sys.stderr, flush=True)
        figures |= {f"b{batch}.{name}": value for name, value in found.items()}
    torch.set_num_threads(int(figures["b1.threads"]))
    figures["ttft_cached_share"] = ttft_cached_share(ours)
    return figures


def thread_counts() -> list[int]:
    return sorted({1, len(os.sched_getaffinity(0))})


def their_rate(model: Any, batch: int) -> dict[str, float]:
    rates = []
    for threads in thread_counts():
        with suppress(TimeoutError):
            rates.append(rate(threads, batch, lambda prompts: generate(model, prompts), PATIENCE_S))
    if rates:
        return {"transformers_tokens_per_s": max(rates)}
    return {"transformers_tokens_per_s_at_most": batch * NEW / PATIENCE_S}


def vllm_rates(directory: Path) -> dict[int, float]:
    """New tokens a second in bf16 by the number of requests, measured as in `rate`. vLLM compiles
    for minutes first."""
    rounds = [random_tokens(n, batch, PROMPT) for batch in BATCHES for n in range(1 + REPEATS)]
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        out = Path(scratch) / "seconds.json"
        run_vllm(str(directory.absolute()), "bfloat16", str(out), rounds=rounds)
        seconds = iter(json.loads(out.read_text()))
    measured = {batch: [next(seconds) for _ in range(1 + REPEATS)] for batch in BATCHES}
    return {batch: batch * NEW / min(taken[1:]) for batch, taken in measured.items()}


def run_vllm(*arguments: str, rounds: list[list[list[int]]]) -> None:
    print("compiling vLLM first, which can take minutes", file=sys.stderr, flush=True)
    argv = [str(VLLM_PYTHON), "-m", "etude.bench._vllm_engine", *arguments]
    own = {
        "PYTHONPATH": str(Path(__file__).parents[2]),  # so that the other Python finds this package
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    done = subprocess.run(
        argv,
        env=os.environ | own,
        input=json.dumps(rounds),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stdout + done.stderr
        raise EtudeError(f"vLLM ended with code {done.returncode}: {said[-4000:]}")


def rate(
    threads: int,
    batch: int,
    answer: Callable[[list[list[int]]], None],
    patience_s: float | None = None,
) -> float:
    """New tokens a second, the best of a few times; the first time is for warming up. TimeoutError
    if one takes longer than `patience_s`."""
    torch.set_num_threads(threads)
    seconds = []
    for repeat in range(1 + REPEATS):
        prompts = random_tokens(repeat, batch, PROMPT)
        began = time.perf_counter()
        with time_limit(patience_s) if patience_s else nullcontext():
            answer(prompts)
        seconds.append(time.perf_counter() - began)
    return batch * NEW / min(seconds[1:])


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after so long, as soon as the main thread is back in Python."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def random_tokens(seed: int, rows: int, length: int) -> list[list[int]]:
    tokens: list[list[int]] = (
        np.random.default_rng(seed).integers(3, 40_000, (rows, length)).tolist()
    )
    return tokens


def answers_of(model: Transformer, batch: int) -> Callable[[list[list[int]]], None]:
    """Return a function that answers so many prompts at a time, with an engine and a prefix cache
    of its own. Making the engine rearranges the weights; that is loading, not answering."""
    engine = Engine(model, max_num_seqs=max(2, batch))

    def answer(prompts: list[list[int]]) -> None:
        for number, prompt in enumerate(prompts):
            engine.add(Request(prompt=tuple(prompt), max_tokens=NEW, seed=0), str(number))
        while not engine.idle:
            engine.step()

    return answer


def ttft_cached_share(model: Transformer) -> float:
    engine = Engine(model, max_num_seqs=2)
    shares = []
    for repeat in range(1 + REPEATS):
        (shared,) = random_tokens(100 + repeat, 1, SHARED)
        first, second = (
            time_to_one_token(engine, shared + own) for own in random_tokens(repeat, 2, OWN)
        )
        shares.append(second / first)
    return statistics.median(shares[1:])


def time_to_one_token(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.add(Request(prompt=tuple(prompt), max_tokens=1, seed=0), "0")
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def peer(directory: Path, dtype: torch.dtype) -> Any:
    try:
        import transformers
    except ImportError as e:
        raise EtudeError(
            "the comparison needs transformers: pip install -r requirements-dev.txt"
        ) from e
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def generate(model: Any, prompts: list[list[int]]) -> None:
    tokens = torch.tensor(prompts)
    with torch.inference_mode():
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, temperature=1.0,
            top_k=0, top_p=1.0, min_new_tokens=NEW, max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
