"""Fuzzer of the decoders with damaged payloads: they may only raise `Damaged`, and C and numpy must
agree.

    python -m tests.weights.fuzz --inputs 1000000 --sanitize

`--sanitize` builds the C codec with the address and undefined-behaviour sanitizers first and runs
under them, so that a read or write that is off by one byte ends the run. Old elements are at the
very end of their memory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etude.weights import fast, reference
from etude.weights.delta_format import BYTES, KINDS, Array, Damaged, Kind

COMPARED = 8
"""One in this many inputs is also given to the numpy decoder, which is slow."""


@dataclass(frozen=True, slots=True)
class Report:
    inputs: int
    refused: int
    applied: int


def fuzz(inputs: int, *, seed: int) -> Report:
    random = np.random.default_rng(seed)
    seeds = [made for kind in (*KINDS.values(), BYTES) for made in valid(kind, random)]
    refused = 0
    for number in range(inputs):
        kind, old, body = seeds[random.integers(len(seeds))]
        damaged = damage(body, random)
        out = np.empty_like(old)
        found = outcome(fast if fast.LIBRARY else reference, kind, old, damaged, out)
        refused += not found
        if fast.LIBRARY and number % COMPARED == 0:
            other = np.empty_like(old)
            assert outcome(reference, kind, old, damaged, other) == found, (
                kind,
                old.tobytes(),
                damaged,
            )
            assert not found or np.array_equal(out, other), (kind, old.tobytes(), damaged)
    return Report(inputs, refused, inputs - refused)


def outcome(decoder: object, kind: Kind, old: Array, body: bytes, out: Array) -> bool:
    try:
        decoder.apply_delta(kind, old, body, out)  # type: ignore[attr-defined]
    except Damaged:
        return False
    return True


def valid(kind: Kind, random: np.random.Generator) -> list[tuple[Kind, Array, bytes]]:
    made = []
    for count, share in ((1, 1.0), (70, 0.5), (300, 0.02), (300, 0.9), (1000, 0.1)):
        top = 16 if kind.nibbles else 1 << (8 * kind.width)
        old = random.integers(0, top, count, f"<u{kind.width}")
        steps = random.choice([1, 1, 1, 3, 100], count).astype(old.dtype)
        with np.errstate(over="ignore"):
            new = np.where(random.random(count) < share, old + steps, old)
        if body := reference.encode_delta(kind, old, new):
            made.append((kind, old, body))
    return made


def damage(body: bytes, random: np.random.Generator) -> bytes:
    data = bytearray(body)
    for _ in range(int(random.integers(1, 4))):
        # The header decides how the rest is read, so half of the damage is done there.
        at = (
            int(random.integers(len(data) if random.random() < 0.5 else min(40, len(data))))
            if data
            else 0
        )
        match int(random.integers(6)):
            case 0 if data:
                data[at] ^= 1 << int(random.integers(8))
            case 1 if data:
                data[at] = int(
                    random.choice([0, 1, 31, 32, 127, 128, 255, int(random.integers(256))])
                )
            case 2:
                del data[at:]
            case 3:
                data[at:at] = random.bytes(int(random.integers(1, 9)))
            case 4:
                del data[at : at + int(random.integers(1, 9))]
            case 5:
                data[at:at] = b"\xff" * int(random.integers(1, 11))
    return bytes(data)


def sanitized(argv: list[str]) -> int:
    """Run this script again, in a process whose C codec is built with the sanitizers."""
    source = Path(fast.__file__).with_name("delta.c")
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "delta.so"
        flags = [
            "-O1",
            "-g",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-shared",
            "-fPIC",
        ]
        subprocess.run(["cc", *flags, "-o", str(built), str(source)], check=True)
        preload = [
            subprocess.run(
                ["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
        settings = {
            "LD_PRELOAD": " ".join(preload),
            "ASAN_OPTIONS": "detect_leaks=0:max_allocation_size_mb=64",
        }
        command = [sys.executable, "-m", "tests.weights.fuzz", *argv, "--library", str(built)]
        return subprocess.run(command, env=os.environ | settings, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--library", help="a build of delta.c to use instead of the installed one")
    args = parser.parse_args()
    if args.sanitize:
        return sanitized([a for a in sys.argv[1:] if a != "--sanitize"])
    if args.library:
        fast.LIBRARY = fast.declared(ctypes.CDLL(args.library))
    print(fuzz(args.inputs, seed=args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
