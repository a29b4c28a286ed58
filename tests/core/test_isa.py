"""One variable disables instruction sets in all compiled code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from etude.core.errors import EtudeError
from etude.core.isa import VARIABLE, Isa, chosen_isa


@pytest.mark.parametrize(
    ("asked", "best", "chosen"),
    [
        ("", Isa.AMX, Isa.AMX),
        ("generic", Isa.AMX, Isa.GENERIC),
        ("avx2", Isa.AMX, Isa.AVX2),
        ("AVX512", Isa.AMX, Isa.AVX512),
        ("amx", Isa.AVX2, Isa.AVX2),
        ("avx512", Isa.GENERIC, Isa.GENERIC),
    ],
)
def test_no_more_than_is_asked_for_and_than_there_is(
    monkeypatch: pytest.MonkeyPatch, asked: str, best: Isa, chosen: Isa
) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    assert chosen_isa(best) is chosen


def test_what_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(EtudeError, match="sse9.*amx, avx512, avx2, generic"):
        chosen_isa(Isa.AMX)


def test_both_libraries_obey() -> None:
    code = (
        "from etude.engine import native; from etude.weights import fast; print(native.ISA.name, "
        "fast.ISA.name)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {VARIABLE: "generic"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["GENERIC", "GENERIC"]
