"""Compiled code: loading its libraries, and the instruction set that it may use, which is the
processor's or a smaller one.

    ETUDE_CPU_ISA=generic   amx, avx512, avx2 or generic: `engine/native.c` and `weights/delta.c`
                            use nothing above it, as ONEDNN_MAX_CPU_ISA does for torch's matrix
                            products

So a test suite can run on one x86 processor as if it were another. On ARM there is only one set.
"""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from pathlib import Path

from etude.core.errors import EtudeError

VARIABLE = "ETUDE_CPU_ISA"


class Isa(IntEnum):
    """Instruction sets, each including the previous ones; the numbers are those in the C files."""

    GENERIC = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3


def load_library(directory: Path, name: str) -> ctypes.CDLL | None:
    """Load a shared library that `pip install` built; None if the machine had no compiler."""
    path = directory / f"{name}.abi3.so"
    return ctypes.CDLL(str(path)) if path.exists() else None


def chosen_isa(best: int) -> Isa:
    """The instruction set to use. `best`: the processor's own, as a C file reports it."""
    text = os.environ.get(VARIABLE)
    if not text:
        return Isa(best)
    try:
        return Isa(min(best, Isa[text.upper()]))
    except KeyError:
        known = ", ".join(isa.name.lower() for isa in reversed(Isa))
        raise EtudeError(f"{VARIABLE} is {text!r}: set it to one of {known}, or unset it") from None
