"""The codec in C, if it is built: `pip install` compiles `delta.c` if the machine has a compiler.

It is a plain shared library, not a Python extension, so that building it needs no Python headers.
Calls release the interpreter lock. `LIBRARY` is None if it is missing; then the reference is used,
with the same bytes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from etude.core.isa import Isa, chosen_isa, load_library
from etude.weights.delta_format import Array, Damaged, Kind, top_exponent

_TOO_LARGE, _NO_MEMORY = -1, -2


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    word, count, data = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    library.encode.argtypes = [*[word] * 7, data, data, count, data, count]
    library.apply.argtypes = [*[word] * 6, data, count, data, data, count]
    library.encode.restype = library.apply.restype = count
    return library


_found = load_library(Path(__file__).parent, "_delta")
LIBRARY = declared(_found) if _found else None
ISA = chosen_isa(LIBRARY.best_isa()) if LIBRARY else Isa.GENERIC


def encode_delta(kind: Kind, old: Array, new: Array, isa: int | None = None) -> bytes | None:
    assert LIBRARY and len(old) == len(new) and old.dtype == new.dtype
    old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
    room = kind.size(len(old)) - 1
    out = np.empty(max(room, 64), np.uint8)
    size = LIBRARY.encode(
        ISA if isa is None else isa, *_words(kind), top_exponent(kind, old),
        old.ctypes.data, new.ctypes.data, len(old), out.ctypes.data, len(out),
    )  # fmt: skip
    if size == _NO_MEMORY:
        raise MemoryError
    return None if size == _TOO_LARGE or size > room else out[:size].tobytes()


def apply_delta(
    kind: Kind, old: Array, body: bytes | memoryview, out: Array, isa: int | None = None
) -> None:
    assert LIBRARY and len(old) == len(out) and old.dtype == out.dtype
    assert old.flags.c_contiguous and out.flags.c_contiguous and out.flags.writeable
    data = np.frombuffer(body, np.uint8)
    code = LIBRARY.apply(
        ISA if isa is None else isa,
        *_words(kind),
        data.ctypes.data,
        len(data),
        old.ctypes.data,
        out.ctypes.data,
        len(old),
    )
    if code == _NO_MEMORY:
        raise MemoryError
    if code:
        raise Damaged("a payload is inconsistent, or does not fit the chunk that it is applied to")


def _words(kind: Kind) -> tuple[int, int, int, int, int]:
    return kind.width, kind.shift, kind.exponent, kind.contexts, int(kind.ordered)
