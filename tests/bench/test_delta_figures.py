"""The delta benchmark: every codec restores its input, and the bounds are bounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.bench import delta
from etude.core.errors import EtudeError
from etude.weights import fast


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "ROUNDS", 1)
    old, new = delta.make()
    for name, size in (("a", 40_000), ("b", 1)):
        np.save(tmp_path / f"{name}_before.npy", old[:size])
        np.save(tmp_path / f"{name}_after.npy", new[:size])
    figures = delta.run(str(tmp_path))
    codecs = {"reference", "xor_zstd1", "gap_value_zstd1", "raw_index"} | (
        {"fast"} if fast.LIBRARY else set()
    )
    for name in ("a", "b"):
        for codec in codecs:
            assert {
                f"{name}.{codec}.{f}" for f in ("ratio", "encode_gbps", "apply_gbps")
            } <= figures.keys()
    assert figures["a.bound_iid"] < figures["a.bound_exponent"]
    assert (
        figures["a.raw_index.ratio"] < figures["a.xor_zstd1.ratio"] < figures["a.reference.ratio"]
    )


def test_bounds_by_hand() -> None:
    old = np.array([0x3F80, 0x3F80, 0x4000, 0x4000], np.uint16)
    new = np.array([0x3F81, 0x3F80, 0x4000, 0x4000], np.uint16)
    iid, given = delta.bounds(old, new)
    quarter = -(np.log2(1 / 4) + 3 * np.log2(3 / 4))
    assert iid == pytest.approx(64 / quarter) and given == pytest.approx(64 / 2)


def test_pairs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="has no NAME_before.npy"):
        delta.run(str(tmp_path))
    np.save(tmp_path / "x_before.npy", np.zeros(3, np.float32))
    with pytest.raises(EtudeError, match="cannot read the pair x"):
        delta.run(str(tmp_path))
    np.save(tmp_path / "x_after.npy", np.zeros(3, np.float32))
    with pytest.raises(EtudeError, match="must be two arrays of uint16"):
        delta.run(str(tmp_path))
