"""Probe of packed attention by cuDNN on a device: `python3 probe_cudnn.py`, under 90 s.

Each probe is a process of its own, so that a crash ends only that one. Needs torch; what it asks
cuDNN's own frontend needs that too: installed, or its wheel as `cudnn_frontend.whl` beside this
file. Lines begin with the name of the probe.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
FRONTEND = HERE / ".cudnn_frontend"
sys.path[:0] = [str(HERE), str(FRONTEND)]

HEADS, KEYS, SIZE = 16, 8, 128
LAYOUTS = {"8x2048": (8, 2048), "4x8192": (4, 8192)}
NAME = sys.argv[1] if len(sys.argv) > 1 else ""
BUDGET = 95.0


def say(*words: object) -> None:
    print(f"[{NAME}]", *words, flush=True)


def lengths_of(layout: str, seed: int = 0) -> list[int]:
    rows, length = LAYOUTS[layout]
    rng, left, found = random.Random(seed), rows * length, []
    while left:
        found.append(min(left, rng.randint(length // 4, length)))
        left -= found[-1]
    return found


def borders_of(lengths, room: int = 0, dtype=None):
    import torch

    all_ = [0, *itertools.accumulate(lengths)]
    all_ += [all_[-1]] * (room - len(all_))
    return torch.tensor(all_, dtype=dtype or torch.int32, device="cuda")


def inputs(tokens: int, heads: int = HEADS, keys: int = KEYS, size: int = SIZE, seed: int = 0):
    import torch

    g = torch.Generator("cuda").manual_seed(seed)
    shapes = [(tokens, h, size) for h in (heads, keys, keys, heads)]
    return [torch.randn(s, device="cuda", generator=g).bfloat16() for s in shapes]


def reference(lengths, q, k, v, slope):
    """Float32, sequence by sequence: output, dq, dk, dv."""
    import torch
    from torch.nn import functional as F

    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(list(lengths)) for x in leaves), strict=True)
    outs = []
    for a, b, c in parts:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
            outs.append(
                F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0]
            )
    out = torch.cat(outs, 1).transpose(0, 1)
    out.backward(slope.float())
    return [out.detach(), *(x.grad for x in leaves)]


def compare(what: str, found, expected) -> None:
    errors = [
        float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)
    ]
    verdict = "right" if all(e < 0.02 for e in errors) else "WRONG"
    say(f"{what}: {verdict}", *(f"{n} {e:.4f}" for n, e in zip("o dq dk dv".split(), errors)))


def median_ms(f: Callable[[], object], times: int = 15) -> float:
    import torch

    for _ in range(3):
        f()
    found = []
    for _ in range(times):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        found.append(a.elapsed_time(b))
    return statistics.median(found)


def host_ms(f: Callable[[], object], sync: bool = True) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    f()
    if sync:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def flops(lengths, heads: int = HEADS) -> float:
    return 4.0 * heads * SIZE * sum(n * (n + 1) / 2 for n in lengths)


def report(what: str, lengths, forward, backward) -> None:
    """Device time by events; with the host's time of a call that is not waited for."""
    import torch

    f, b = median_ms(forward), median_ms(backward)
    hosts = [min(host_ms(x, sync=False) for _ in range(5)) for x in (forward, backward)]
    torch.cuda.synchronize()
    work = flops(lengths)
    say(
        f"{what}: forward {f:.3f} ms {work / f / 1e9:.0f} TFLOP/s,",
        f"backward {b:.3f} ms {2.5 * work / b / 1e9:.0f} TFLOP/s, together {f + b:.3f} ms;",
        f"host {hosts[0]:.3f} + {hosts[1]:.3f} ms",
    )


def flash(q, k, v, slope, borders, longest):
    import torch

    def forward():
        return torch.ops.aten._flash_attention_forward(
            q, k, v, borders, borders, longest, longest, 0.0, True, False
        )

    out, lse, rng, unused, _ = forward()

    def backward():
        return torch.ops.aten._flash_attention_backward(
            slope, q, k, v, out, lse, borders, borders, longest, longest, 0.0, True, rng, unused
        )

    return forward, backward


def aten(q, k, v, slope, borders, longest):
    """torch's own entry to cuDNN's packed form."""
    import torch

    def forward():
        return torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, borders, borders, longest, longest, True, 0.0, True, False
        )

    out, lse, *_, seed, offset, _ = forward()

    def backward():
        return torch.ops.aten._cudnn_attention_backward(
            slope, q, k, v, out, lse, seed, offset, None, borders, borders, longest, longest,
            0.0, True,
        )  # fmt: skip

    return forward, backward


def frontend(q, k, v, slope, borders, longest):
    """What `etude.model.cudnn_attention` asks cuDNN itself."""
    from etude.model import cudnn_attention as c

    scale = SIZE**-0.5
    out, lse = c._forward(q, k, v, borders, longest, scale)
    return (
        lambda: c._forward(q, k, v, borders, longest, scale),
        lambda: c._backward(q, k, v, out, lse, slope, borders, longest, scale),
    )


def all_of(kind, lengths, x, room: int = 0, longest: int = 0):
    import torch

    forward, backward = kind(*x, borders_of(lengths, room), longest or max(lengths))
    found = [forward()[0], *backward()]
    torch.cuda.synchronize()
    return found


SMALL = [70, 1, 300, 129, 512, 36]


# The probes.


def where() -> None:
    import torch

    say("torch", torch.__version__, "cuda", torch.version.cuda, torch.cuda.get_device_name())
    say("torch's cuDNN", torch.backends.cudnn.version())
    for name in ("cudnn", "flash_attn", "flash_attn_interface", "transformer_engine", "cutlass"):
        say(name, "found" if importlib.util.find_spec(name) else "not found")
    try:
        import cudnn

        say("frontend", cudnn.__version__, "backend", cudnn.backend_version(), cudnn.__file__)
    except Exception as e:
        say("frontend", type(e).__name__, e)
    roots = ("/usr/include", "/usr/local", "/opt")
    found = subprocess.run(
        ["find", *roots, "-name", "cudnn_frontend.h"],
        capture_output=True, text=True, timeout=20,
    ).stdout.split()  # fmt: skip
    say("headers", *found[:5])


def aten_right() -> None:
    """Forward; then how long calls take whose shapes were seen, and others."""
    import torch

    x = inputs(sum(SMALL))
    expected = reference(SMALL, *x)
    for room, longest in ((0, 512), (16, 512), (16, 1024)):
        q, k, v, slope = x
        borders = borders_of(SMALL, room)
        out, lse, *_ = torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, borders, borders, longest, longest, True, 0.0, True, False
        )
        torch.cuda.synchronize()
        compare(f"forward, borders {len(borders)}, longest {longest}", [out], expected[:1])
    say("logsumexp", tuple(lse.shape), lse.dtype, "finite", bool(lse.isfinite().all()))
    forward, _ = aten(*x, borders_of(SMALL), 512)
    say("the same forward again, ms:", *(f"{host_ms(forward):.1f}" for _ in range(4)))


def aten_backward() -> None:
    x = inputs(sum(SMALL))
    compare("contiguous", all_of(aten, SMALL, x), reference(SMALL, *x))
    short = [70, 1, 128, 99]
    x = inputs(sum(short))
    compare("none longer than a head is wide", all_of(aten, short, x), reference(short, *x))


def right() -> None:
    for lengths, heads, keys in ((SMALL, HEADS, KEYS), (SMALL, 4, 4), ([1, 5], 2, 1)):
        x = inputs(sum(lengths), heads, keys)
        found = all_of(frontend, lengths, x, room=8)
        compare(f"{heads} heads, {keys} for keys", found, reference(lengths, *x))
    x = inputs(sum(SMALL))
    expected = reference(SMALL, *x)
    for room, longest in ((len(SMALL) + 1, 512), (32, 512), (32, 4096)):
        found = all_of(frontend, SMALL, x, room, longest)
        compare(f"borders {room}, longest {longest}", found, expected)
    again = all_of(frontend, SMALL, x, 8)
    first = all_of(frontend, SMALL, x, 8)
    same = [bool((a == b).all()) for a, b in zip(first, again, strict=True)]
    say("the same bits again (o dq dk dv):", *same)


def views() -> None:
    """Keys and values that are parts of a wider tensor."""
    import torch

    q, k, v, slope = inputs(sum(SMALL))
    expected = reference(SMALL, q, k, v, slope)
    wide = torch.cat((q, k, v), 1)
    parts = wide.split((HEADS, KEYS, KEYS), 1)
    found = all_of(frontend, SMALL, [q, k, parts[2], slope], 8)
    compare("values of a packed qkv", found, expected)
    compare("all of a packed qkv", all_of(frontend, SMALL, [*parts, slope], 8), expected)


def long() -> None:
    """Right at the lengths that count."""
    lengths = lengths_of("8x2048")
    x = inputs(sum(lengths))
    compare(f"{len(lengths)} sequences", all_of(frontend, lengths, x, 16), reference(lengths, *x))


def plans() -> None:
    """Time of the first forward and backward pass after each kind of change."""
    lengths = lengths_of("8x2048")
    x = inputs(sum(lengths))

    def both(lengths, room, longest, x=x):
        forward, backward = frontend(*x, borders_of(lengths, room), longest)
        forward()
        backward()

    say("sequences", len(lengths), "longest", max(lengths))
    for what, args in {
        "first": (lengths, 16, 2048),
        "the same": (lengths, 16, 2048),
        "other lengths": (lengths_of("8x2048", 1)[:15], 16, 2048),
        "room for 31": (lengths, 32, 2048),
        "longest 4096": (lengths, 16, 4096),
        "the first again": (lengths, 16, 2048),
    }.items():
        say(what, f"{host_ms(lambda args=args: both(*args)):.1f} ms")
    y = inputs(10_000)
    short = [*lengths_of("8x2048")[:6], 0]
    short[-1] = 10_000 - sum(short)
    say("fewer tokens", f"{host_ms(lambda: both(short, 16, 2048, y)):.1f} ms")


def speed(layout: str) -> None:
    import torch

    from etude.model import cudnn_attention as c

    lengths = lengths_of(layout)
    x = inputs(sum(lengths))
    q, k, v, slope = x
    longest, room = max(lengths), c.room(len(lengths) + 1)
    say(len(lengths), "sequences of", min(lengths), "to", longest)
    report("flash, borders", lengths, *flash(*x, borders_of(lengths), longest))
    report("cuDNN, in room", lengths, *frontend(*x, borders_of(lengths, max(8, room)), longest))
    report("cuDNN, room for 31", lengths, *frontend(*x, borders_of(lengths, 32), longest))
    wide = torch.cat((q, k, v), 1).split((HEADS, KEYS, KEYS), 1)[2]
    try:
        mixed = frontend(q, k, wide, slope, borders_of(lengths, max(8, room)), longest)
        report("cuDNN, values a view", lengths, *mixed)
    except Exception as e:
        say("values a view:", type(e).__name__, e)
    group = HEADS // KEYS
    whole = [q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), slope]
    report("cuDNN, keys repeated", lengths, *frontend(*whole, borders_of(lengths, 32), longest))
    exact = c.room
    c.room = lambda count: count
    report("cuDNN, no room at all", lengths, *frontend(*x, borders_of(lengths), longest))
    c.room = exact
    rows, length = LAYOUTS[layout]
    dense = [y.view(rows, length, -1, SIZE).transpose(1, 2) for y in x]
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, _, _, _, _, seed, offset, _ = op(*dense[:3], None, True, 0.0, True, False)
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    report(
        "for comparison, cuDNN on whole rows", [length] * rows,
        lambda: op(*dense[:3], None, True, 0.0, True, False),
        lambda: back(
            dense[3], *dense[:3], out, lse, seed, offset, None, None, None, length, length, 0.0, True
        ),
    )  # fmt: skip
    say("GiB at most", f"{torch.cuda.max_memory_allocated() / 2**30:.1f}")


def compiled() -> None:
    """Through `CausalAttention`, compiled for any number of tokens, gradient and all."""
    import torch

    from etude.model.attention import CausalAttention

    device = torch.device("cuda")

    @torch.compile(dynamic=True, fullgraph=True)
    def layer(x, attend):
        q, k, v = (x * 1.5).view(-1, HEADS + 2 * KEYS, SIZE).split((HEADS, KEYS, KEYS), 1)
        return attend(0, q, k, v).flatten(1) * 2.0

    for n, lengths in enumerate((SMALL, [300, 200, 7], lengths_of("8x2048")[:5], SMALL[::-1])):
        q, k, v, slope = inputs(sum(lengths), seed=n)
        x = torch.cat((q, k, v), 1).flatten(1).requires_grad_()
        attend = CausalAttention(lengths, device)
        began = time.perf_counter()
        out = layer(x, attend)
        out.backward(slope.flatten(1))
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        leaf = x.detach().clone().requires_grad_()
        plain = (leaf * 1.5).view(-1, HEADS + 2 * KEYS, SIZE).split((HEADS, KEYS, KEYS), 1)
        rough = [y.detach() for y in plain]
        o, dq, dk, dv = reference(lengths, *rough, slope * 2.0)
        expected = [o.flatten(1) * 2.0, torch.cat((dq, dk, dv), 1).flatten(1) * 1.5]
        which = getattr(attend, "_cudnn", "?")
        compare(f"{len(lengths)} sequences, cuDNN {which}, {took:.2f} s", [out, x.grad], expected)
    say("kernels", _kernels(lambda: layer(x, attend).backward(slope.flatten(1))))


def _kernels(f: Callable[[], object]) -> str:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        f()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
    return "; ".join(f"{e.key[:60]} x{e.count} {e.device_time_total:.0f} us" for e in events[:8])


PROBES: dict[str, tuple[Callable[[], None], int]] = {
    "where": (where, 30),
    "right": (right, 30),
    "speed-8x2048": (lambda: speed("8x2048"), 30),
    "speed-4x8192": (lambda: speed("4x8192"), 30),
    "compiled": (compiled, 50),
    "plans": (plans, 20),
    "views": (views, 20),
    "long": (long, 20),
    "aten_right": (aten_right, 20),
    "aten_backward": (aten_backward, 20),
}


def main() -> None:
    began = time.perf_counter()
    if (wheel := HERE / "cudnn_frontend.whl").exists():
        zipfile.ZipFile(wheel).extractall(FRONTEND)
    for name, (_, limit) in PROBES.items():
        left = BUDGET - (time.perf_counter() - began)
        if left < 5:
            print(f"[{name}] left out: no time", flush=True)
            continue
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, __file__, name],
                timeout=min(limit, left),
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
            rc, errors = done.returncode, done.stderr
        except subprocess.TimeoutExpired as e:
            rc, errors = "timed out", (e.stderr or b"").decode(errors="replace")
        if rc:
            print("\n".join(f"[{name}] ! {line}" for line in errors.splitlines()[-8:]), flush=True)
        took = time.perf_counter() - start
        print(f"[{name}] ends with {rc} after {took:.1f} s", flush=True)


if __name__ == "__main__":
    PROBES[NAME][0]() if NAME else main()
