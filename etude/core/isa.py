"""Compiled code: where its libraries are, and the instruction sets that it may use: what the
processor has, or less.

    ETUDE_CPU_ISA=generic   amx, avx512, avx2 or generic: nothing above it is used by
                            `engine/native.c` and
                            `weights/delta.c`, as ONEDNN_MAX_CPU_ISA does it for torch's matrix
                            products

So a test suite can be run on one x86 processor as if it were another. ARM has one set only, and
nothing to take out.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from pathlib import Path

from etude.core.errors import EtudeError

VARIABLE = "ETUDE_CPU_ISA"


class Isa(IntEnum):
    """In the order in which one includes the other; the numbers are those of the C files."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3


def load_library(directory: Path, name: str) -> ctypes.CDLL | None:
    """A shared library that `pip install` built, if the machine had a compiler."""
    path = directory / f"{name}.abi3.so"
    return ctypes.CDLL(str(path)) if path.exists() else None


def chosen_isa(best: int) -> Isa:
    """`best`: what the processor has, as a C file knows it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Isa(best)
    try:
        return Isa(min(best, Isa[text.upper()]))
    except KeyError:
        known = ", ".join(isa.name.lower() for isa in reversed(Isa))
        raise EtudeError(f"{VARIABLE} is {text!r}: set it to one of {known}, or unset it") from None
