"""Benchmark of a swap on a CUDA device: new weights for an 8B model while it serves.

The model has the shape of a public one and random weights; 64 requests are always under way. Each
new version differs from the last in one weight of a hundred and is in host memory, as in a worker
that has applied a delta. While one thread prepares the version, another continues the engine's
steps; then the version is swapped in between two steps. Figures are medians over the versions:

    pause_ms               from the end of the last step until the weights are in place on the
                           device; also the longest, pause_ms_max
    prepare_s              duration of the preparation, during serving
    serving_share          tokens per second during the preparation over those without
    extra_gib              peak memory on the device beyond that of serving, the maximum
    differing              tensors that differ from those sent: every version is read back and
                           compared bit by bit

Imports torch and numpy only:

    python -m etude.bench.swap --json [--shape qwen3-8b]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor

from etude.bench.engine_cuda import NEW, PROMPT, SHAPES, random_model
from etude.core.sampling import Request
from etude.engine.cuda import CudaRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.files import hf_tensors

BATCH = 64
VERSIONS = 4
CHANGED = 0.01


class Serving:
    """An engine whose `BATCH` requests are replaced as they finish."""

    def __init__(self, shape: str) -> None:
        self.model = random_model(SHAPES[shape])
        blocks = 2 * BATCH * ((PROMPT + NEW) // CudaRunner.block_size + 1) + 64
        self.engine = Engine(
            self.model,
            max_num_seqs=BATCH,
            max_batched_tokens=BATCH + 1024,
            prefix_cache=False,
            runner=CudaRunner(self.model, blocks, BATCH),
        )
        self._rng = np.random.default_rng(0)
        self._added = 0
        for i in range(BATCH):
            self._add(1 + i * NEW // BATCH)

    def _add(self, new: int) -> None:
        prompt = tuple(self._rng.integers(0, self.engine.vocab_size, PROMPT).tolist())
        self._added += 1
        self.engine.add(Request(prompt=prompt, max_tokens=new, seed=self._added), str(self._added))

    def until(self, over: Callable[[], bool]) -> float:
        """Serve until the condition holds. Return the tokens per second in this time."""
        began = time.perf_counter()
        before = self.engine.stats().generation_tokens
        while not over():
            for event in self.engine.step():
                if isinstance(event, FinishedRequest):
                    self._add(NEW)
        torch.cuda.synchronize()
        tokens = self.engine.stats().generation_tokens - before
        return tokens / (time.perf_counter() - began)


def run(shape: str = "qwen3-8b") -> dict[str, float]:
    serving = Serving(shape)
    weights = {name: view.cpu() for name, view in hf_tensors(serving.model).items()}
    serving.until(_after(20.0))  # graphs are captured
    found = []
    for version in range(1, VERSIONS + 1):
        _change(weights, seed=version)
        found.append(_swap(serving, version, weights))
        print(f"version {version}", found[-1], file=sys.stderr, flush=True)
    return {
        "pause_ms": median(f["pause_ms"] for f in found),
        "pause_ms_max": max(f["pause_ms"] for f in found),
        "prepare_s": median(f["prepare_s"] for f in found),
        "serving_share": median(f["serving_share"] for f in found),
        "extra_gib": max(f["extra_gib"] for f in found),
        "differing": sum(f["differing"] for f in found),
    }


def _swap(serving: Serving, version: int, weights: dict[str, Tensor]) -> dict[str, float]:
    alone = serving.until(_after(5.0))
    torch.cuda.reset_peak_memory_stats()
    in_use = torch.cuda.memory_allocated()
    prepared: list[Callable[[], None]] = []
    thread = threading.Thread(
        target=lambda: prepared.append(serving.engine.prepare_weights(weights))
    )
    began = time.perf_counter()
    thread.start()
    beside = serving.until(lambda: not thread.is_alive())
    prepare_s = time.perf_counter() - began
    began = time.perf_counter()
    serving.engine.swap_weights(version, prepared.pop())
    torch.cuda.synchronize()
    pause_ms = 1e3 * (time.perf_counter() - began)
    extra = torch.cuda.max_memory_allocated() - in_use
    own = hf_tensors(serving.model)
    differing = sum(
        not torch.equal(own[name].cpu().view(torch.int16), new.view(torch.int16))
        for name, new in weights.items()
    )
    return {
        "pause_ms": pause_ms,
        "prepare_s": prepare_s,
        "serving_share": beside / alone,
        "extra_gib": extra / 2**30,
        "differing": float(differing),
    }


def _change(weights: dict[str, Tensor], seed: int) -> None:
    """Flip the last bit of one weight in a hundred, like a small step of an optimizer."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        count = max(1, int(CHANGED * len(bits)))
        places = torch.randint(len(bits), (count,), generator=generator)
        bits[places] ^= 1


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the pause of a weight swap on a CUDA device."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shape", default="qwen3-8b", choices=list(SHAPES))
    options = parser.parse_args()
    figures = run(options.shape)
    print(json.dumps(figures, indent=2) if options.json else figures)


if __name__ == "__main__":
    main()
