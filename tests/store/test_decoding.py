"""Types that several threads use for the first time at once."""

from __future__ import annotations

import subprocess
import sys

MANY = """
import sys, threading
from dataclasses import make_dataclass
from concurrent.futures import ThreadPoolExecutor

import msgspec

from etude.store.decoding import convert, decode_json, decode_msgpack

sys.setswitchinterval(1e-6)
value = {"inner": {f"x{n}": n for n in range(20)}, "y29": [1]}
ways = [
    lambda kind: convert(value, kind),
    lambda kind: decode_json(msgspec.json.encode(value), kind),
    lambda kind: decode_msgpack(msgspec.msgpack.encode(value), kind),
]


def decode(number):
    together.wait()
    return ways[number % 3](kind)


with ThreadPoolExecutor(12) as pool:
    for make in [make_dataclass, msgspec.defstruct] * 50:
        inner = make("Inner", [(f"x{n}", "int | None") for n in range(20)])
        more = [(f"y{n}", "list[int] | None", None) for n in range(30)]
        kind = make("Outer", [("inner", inner), *more])
        together = threading.Barrier(12)
        for found in pool.map(decode, range(12)):
            assert isinstance(found, kind) and found.inner.x19 == 19 and found.y29 == [1], found
"""


def test_threads_may_meet_a_type_at_once() -> None:
    """In a separate process, because the tested error kills the whole process."""
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MANY], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
