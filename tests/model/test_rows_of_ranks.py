"""The rows of a model's parameters that ranks hold, by the names under which they are published."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from etude.model import files
from tests.engine.reference import FAMILIES
from tests.engine.test_served_families import random_model
from tests.small_model import sharp

OTHERS = ["mixtral", "qwen2_moe", "phi3", "gpt_oss", "gemma3_text"]
"""Families whose tensors have their own names or layouts."""


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_rows_of_ranks_make_up_the_published_tensors(family: str) -> None:
    """Parameters are cut into rows for three ranks, as in training, the last parts shorter or
    empty."""
    model = random_model(family) if family in OTHERS else sharp(FAMILIES[family], 3)
    state, world = model.state_dict(), 3
    size = {name: -(-len(tensor) // world) for name, tensor in state.items()}
    found: dict[str, list[files.Rows]] = {}
    for rank in range(world):
        held = {
            name: (rank * size[name], t[rank * size[name] :][: size[name]])
            for name, t in state.items()
        }
        for name, rows in files.hf_rows(model, held).items():
            found.setdefault(name, []).append(rows)
    published = files.hf_state_dict(model)
    assert found.keys() == published.keys()
    for name, parts in found.items():
        lengths = [len(part) for part, *_ in parts]
        assert [first for _, first, _, _ in parts] == [0, *accumulate(lengths)][:-1]
        assert {total for _, _, total, _ in parts} == {len(published[name])}
        assert all(dtype == published[name].dtype for *_, dtype in parts)
        assert torch.equal(
            torch.cat([part.to(dtype) for part, _, _, dtype in parts]), published[name]
        )
