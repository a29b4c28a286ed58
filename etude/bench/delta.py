"""Benchmark of weight deltas: size, and speed of one core at encoding and applying them.

For each pair of versions (`NAME_before.npy`, `NAME_after.npy`, codes of bf16 numbers as uint16) and
each codec:

    NAME.CODEC.ratio         bytes of the tensor per byte of the delta
    NAME.CODEC.encode_gbps   bytes of the tensor per second on one core, in units of 1e9
    NAME.CODEC.apply_gbps

Bounds on the ratio are `NAME.bound_iid`, for a codec that knows only the frequency of each step,
and `NAME.bound_exponent`, for one that knows it for each exponent of the old number. `fast` and
`reference` are ours and produce the same bytes; the others reimplement published codecs:
`xor_zstd1` compresses the exclusive or, `gap_value_zstd1` the gaps between changes and the new
numbers, and `raw_index` sends a 4-byte index and a number for each change. Every round trip is
checked. Times are CPU time, so that other load on the machine counts little, and the best of a few
rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.core.errors import EtudeError
from etude.weights import codec, fast, reference
from etude.weights.delta_format import KINDS, Array

try:
    import zstandard
except ModuleNotFoundError as e:
    raise EtudeError("the codecs to compare with need zstandard: pip install 'etude[bench]'") from e

BF16 = KINDS["bfloat16"]
ROUNDS = 7
MADE_ELEMENTS = 2_000_000

Codec = tuple[Callable[[Array, Array], list[bytes]], Callable[[Array, list[bytes], Array], None]]
"""A pair of functions: (old, new) -> the delta in one or more parts, and (old, delta, out), which
writes the new version to `out`."""


def run(pairs: str | None = None) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, (old, new) in (read(Path(pairs)) if pairs else {"made": make()}).items():
        iid, exponent = bounds(old, new)
        figures |= {f"{name}.changed": float((old != new).mean())}
        figures |= {f"{name}.bound_iid": iid, f"{name}.bound_exponent": exponent}
        for kind, both in codecs().items():
            figures |= {
                f"{name}.{kind}.{figure}": value
                for figure, value in measure(both, old, new).items()
            }
    return figures


def read(folder: Path) -> dict[str, tuple[Array, Array]]:
    pairs = {}
    for before in sorted(folder.glob("*_before.npy")):
        name = before.name.removesuffix("_before.npy")
        try:
            old, new = (
                np.load(folder / f"{name}_{end}.npy", allow_pickle=False)
                for end in ("before", "after")
            )
        except (OSError, ValueError) as e:
            raise EtudeError(f"cannot read the pair {name} in {folder}: {e}") from e
        if (
            old.dtype != np.uint16
            or new.dtype != np.uint16
            or old.shape != new.shape
            or not old.size
        ):
            raise EtudeError(
                f"the pair {name} in {folder} must be two arrays of uint16 (bf16 codes) of the "
                "same shape"
            )
        pairs[name] = old.reshape(-1), new.reshape(-1)
    if not pairs:
        raise EtudeError(
            f"{folder} has no NAME_before.npy: pass a directory that has one with --pairs"
        )
    return pairs


def make() -> tuple[Array, Array]:
    """Make a layer typical of large models, before and after one step of Adam at a learning rate of
    1e-6."""
    random = np.random.default_rng(0)
    master = random.normal(0, 0.02, MADE_ELEMENTS).astype(np.float32)
    update = (1e-6 * 0.25 * random.normal(0, 1, MADE_ELEMENTS)).astype(np.float32)
    return to_bf16(master), to_bf16(master - update)


def to_bf16(values: NDArray[np.float32]) -> Array:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bounds(old: Array, new: Array) -> tuple[float, float]:
    """Ratios at the entropy of the steps, unconditional and given the old exponent."""
    steps = (
        reference.ranks(BF16, new).astype(np.int64) - reference.ranks(BF16, old).astype(np.int64)
    ) % (1 << 16)
    exponents = old >> BF16.shift & BF16.exponent

    def entropy(symbols: NDArray[np.int64]) -> float:
        counts = np.unique(symbols, return_counts=True)[1]
        return float(-(counts * np.log2(counts / counts.sum())).sum())

    given = sum(entropy(steps[exponents == exponent]) for exponent in np.unique(exponents))
    bits = 16.0 * len(old)
    return bits / max(entropy(steps), 1.0), bits / max(given, 1.0)


def measure(both: Codec, old: Array, new: Array) -> dict[str, float]:
    encode, apply = both
    out = np.zeros_like(old)
    encode_s, parts = best(lambda: encode(old, new))
    apply_s, _ = best(lambda: apply(old, parts, out))
    if not np.array_equal(out, new):
        raise EtudeError("a codec did not return the original weights: its figures are worthless")
    gigabytes = old.nbytes / 1e9
    return {
        "ratio": old.nbytes / max(1, sum(map(len, parts))),
        "encode_gbps": gigabytes / encode_s,
        "apply_gbps": gigabytes / apply_s,
    }


def best(act: Callable[[], Any]) -> tuple[float, Any]:
    least, result = float("inf"), None
    for _ in range(ROUNDS):
        began = time.thread_time()
        result = act()
        least = min(least, time.thread_time() - began)
    return max(least, 1e-9), result


def codecs() -> dict[str, Codec]:
    ours = {"reference": ours_by(reference.encode_delta, reference.apply_delta)}
    if fast.LIBRARY:
        ours["fast"] = ours_by(fast.encode_delta, fast.apply_delta)
    return ours | {
        "xor_zstd1": (xor_encode, xor_apply),
        "gap_value_zstd1": (gap_encode, gap_apply),
        "raw_index": (index_encode, index_apply),
    }


def ours_by(encode: Callable[..., bytes | None], apply: Callable[..., None]) -> Codec:
    def encode_all(old: Array, new: Array) -> list[bytes]:
        return [
            codec.encode(BF16, old[at], new[at], by=encode) for at in codec.chunks(BF16, len(old))
        ]

    def apply_all(old: Array, parts: list[bytes], out: Array) -> None:
        for at, part in zip(codec.chunks(BF16, len(old)), parts, strict=True):
            codec.apply(BF16, old[at], part, out[at], by=apply)

    return encode_all, apply_all


def xor_encode(old: Array, new: Array) -> list[bytes]:
    return [zstandard.ZstdCompressor(1).compress((old ^ new).tobytes())]


def xor_apply(old: Array, parts: list[bytes], out: Array) -> None:
    np.bitwise_xor(
        old, np.frombuffer(zstandard.ZstdDecompressor().decompress(parts[0]), np.uint16), out=out
    )


def gap_encode(old: Array, new: Array) -> list[bytes]:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=0)
    width = np.min_scalar_type(int(gaps.max())) if len(gaps) else np.dtype(np.uint8)
    press = zstandard.ZstdCompressor(1).compress
    return [width.str.encode(), press(gaps.astype(width).tobytes()), press(new[places].tobytes())]


def gap_apply(old: Array, parts: list[bytes], out: Array) -> None:
    expand = zstandard.ZstdDecompressor().decompress
    gaps = np.frombuffer(expand(parts[1]), np.dtype(parts[0].decode()))
    out[:] = old
    out[np.cumsum(gaps, dtype=np.int64)] = np.frombuffer(expand(parts[2]), np.uint16)


def index_encode(old: Array, new: Array) -> list[bytes]:
    places = np.flatnonzero(old != new)
    return [places.astype(np.int32).tobytes(), new[places].tobytes()]


def index_apply(old: Array, parts: list[bytes], out: Array) -> None:
    out[:] = old
    out[np.frombuffer(parts[0], np.int32)] = np.frombuffer(parts[1], np.uint16)
