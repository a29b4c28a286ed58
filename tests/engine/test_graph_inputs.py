"""The inputs of a graph in one buffer: each is read where it was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.engine.graph_inputs import NOWHERE, GraphShape, InputLayout, as_words

TOKENS = ("tokens", "positions", "slot_mapping")
PREFILL = ("ends", "logits_indices", "sequence", "first")


@pytest.mark.parametrize("shape", [GraphShape(5, 5, 5), GraphShape(9, 3, 2, tiles=4)])
def test_what_is_filled_in_is_read_by_its_name(shape: GraphShape) -> None:
    names = [*TOKENS, "lengths", *(PREFILL if shape.tiles else ())]
    values = as_words({name: np.array([10 * n, 10 * n + 1]) for n, name in enumerate(names, 1)})
    sampling = {"temperature": np.array([0.5], np.float32), "u": np.array([0.25], np.float64)}
    blocks_BM = np.arange(6, dtype=np.int32).reshape(2, 3)
    words = np.full(200, 99, np.int32)

    count = InputLayout(shape).fill(words, values | sampling, blocks_BM)
    found = InputLayout(shape).views(torch.from_numpy(words))

    padding = dict.fromkeys(names, 0) | {"slot_mapping": -1, "first": NOWHERE}
    for name, value in values.items():
        assert found[name][:2].tolist() == value.tolist()
        assert set(found[name][2:].tolist()) <= {padding[name]}
    assert (found["temperature"][0], found["u"][0]) == (0.5, 0.25)
    assert not found["temperature"][1:].any() and not found["u"][1:].any()
    assert found["stride"].tolist() == [3]
    assert found["blocks"][:6].tolist() == [0, 1, 2, 3, 4, 5] and (words[count:] == 99).all()
    sizes = {name: len(each) for name, each in found.items()}
    assert all(sizes[name] == shape.tokens for name in TOKENS)
    assert sizes["lengths"] == shape.sequences and sizes["u"] == sizes["temperature"] == shape.rows
    if shape.tiles:
        assert sizes["sequence"] == sizes["first"] == shape.tiles
        assert sizes["ends"] == shape.sequences and sizes["logits_indices"] == shape.rows
    assert all(each.storage_offset() * each.element_size() % 16 == 0 for each in found.values())
