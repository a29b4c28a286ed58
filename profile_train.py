"""Where a step of the trainer goes, beside the plain decoder's: `python3 profile_train.py`, 90 s.

For each layout and both: wall time of a step, what the device did in one of them by kind of kernel,
how long it stood idle and behind which kernel, and the host's own time by part of the step.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
FRONTEND = HERE / ".cudnn_frontend"
if (wheel := HERE / "cudnn_frontend.whl").exists():
    zipfile.ZipFile(wheel).extractall(FRONTEND)
sys.path[:0] = [str(HERE), str(FRONTEND)]

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from etude.bench import _plain_decoder, train  # noqa: E402
from etude.train import learner as learner_module  # noqa: E402
from etude.train.learner import Learner  # noqa: E402
from etude.train.start import compile_layers  # noqa: E402

SHAPE, LAYOUTS = "qwen3-0.6b", ((8, 2048), (4, 8192))
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn", "mha"),
    "products": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "splitk"),
    "compiled": ("triton",),
    "optimizer": ("adam",),
    "many tensors": ("multi_tensor",),
    "copies, fills": ("memcpy", "memset", "copy"),
}
BEGAN = time.perf_counter()


def say(*words: object) -> None:
    print(f"{time.perf_counter() - BEGAN:5.1f}", *words, flush=True)


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(p in low for p in parts)), "others")


def timed(label: str, step, count: int = 4) -> None:
    found = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began, issued))
    walls, hosts = zip(*sorted(found), strict=True)
    say(label, "step", *(f"{1e3 * w:.1f}" for w in walls), "ms; host back after",
        *(f"{1e3 * h:.1f}" for h in hosts))  # fmt: skip


def breakdown(label: str, step) -> None:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start
    )
    by_kind, by_name = collections.Counter(), collections.Counter()
    counts = collections.Counter()
    gaps, end = [], kernels[0][0]
    for start, stop, name in kernels:
        by_kind[kind_of(name)] += stop - start
        by_name[name[:90]] += stop - start
        counts[name[:90]] += 1
        if start > end:
            gaps.append((start - end, name[:50], start - kernels[0][0]))
        end = max(end, stop)
    span, idle = end - kernels[0][0], sum(gap for gap, *_ in gaps)
    say(label, f"span {span / 1e3:.1f} ms, idle within {idle / 1e3:.1f}, {len(kernels)} kernels")
    say(label, "kinds:", *(f"{k} {t / 1e3:.1f}" for k, t in by_kind.most_common()))
    for name, t in by_name.most_common(22):
        say(label, f"  {t / 1e3:7.2f} ms x{counts[name]:4}", name)
    for gap, name, at in sorted(gaps, reverse=True)[:8]:
        say(label, f"  gap {gap / 1e3:.2f} ms at {at / 1e3:.1f} before {name}")
    waits = collections.Counter()
    for e in seen.events():
        if e.name.startswith(("cuda", "aten::item", "aten::_local_scalar")):
            waits[e.name] += e.cpu_time_total
    say(label, "calls:", *(f"{n} {t / 1e3:.1f}" for n, t in waits.most_common(6)))


HOST: collections.Counter[str] = collections.Counter()


def watch(owner, name: str) -> None:
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def wrapped(*args, **kwargs):
        began = time.perf_counter()
        try:
            return whole(*args, **kwargs)
        finally:
            HOST[name] += time.perf_counter() - began

    setattr(owner, name, wrapped)


def main() -> None:
    torch.manual_seed(0)
    for name in ("pack_rows", "mismatch_stats", "_by_row", "token_logprobs", "plan_microbatches"):
        watch(learner_module, name)
    for name in ("_weighed", "_backward", "_update", "_round"):
        watch(Learner, name)
    config = train._config(SHAPE)
    ours = Learner(compile_layers(train._model(SHAPE)), compute=torch.bfloat16)
    for rows, length in LAYOUTS:
        label, number = f"ours {rows}x{length}", iter(range(1, 100))
        batches = [train._batch(n, rows, length, config.vocab_size) for n in range(1, 14)]

        def step(batches=batches, rows=rows, length=length, number=number) -> None:
            ours.step(batches[next(number)], lr=1e-6, microbatch_tokens=rows * length)

        timed(f"{label} (first)", step, 3)
        HOST.clear()
        timed(label, step)
        say(label, "host, a step:", *(f"{n} {1e3 * t / 4:.2f}" for n, t in HOST.most_common()))
        breakdown(label, step)
    del ours
    torch.cuda.empty_cache()
    torch.compiler.reset()
    for rows, length in LAYOUTS:
        label, step = f"plain {rows}x{length}", _plain_decoder.steps(config, rows, length)
        timed(f"{label} (first)", step, 3)
        timed(label, step)
        breakdown(label, step)
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
