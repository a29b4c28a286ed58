"""The inputs of a graph in one buffer: each is read where it was written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.sampling import SamplingParams
from etude.engine.batch import ForwardBatch, SamplingBatch
from etude.engine.graph_inputs import (
    ADAPTER_FIELDS,
    ADAPTER_TILE_ROWS,
    BLOCKS,
    NOWHERE,
    SLOTS,
    GraphShape,
    InputLayout,
    PinnedBuffers,
    adapter_inputs,
    as_words,
    decode_inputs,
)

TOKENS = ("tokens", "positions", "slot_mapping")
PREFILL = ("ends", "logits_indices", "sequence", "first")


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("shape", [GraphShape(5, 5, 5), GraphShape(9, 3, 2, tiles=4)])
def test_what_is_filled_in_is_read_by_its_name(shape: GraphShape, num_groups: int) -> None:
    names = [*TOKENS, *SLOTS[1:num_groups], "lengths", *(PREFILL if shape.tiles else ())]
    values = as_words({name: np.array([10 * n, 10 * n + 1]) for n, name in enumerate(names, 1)})
    sampling = {"temperature": np.array([0.5], np.float32), "u": np.array([0.25], np.float64)}
    blocks_GBM = np.arange(6 * num_groups, dtype=np.int32).reshape(num_groups, 2, 3)
    words = np.full(300, 99, np.int32)

    layout = InputLayout(shape, 16, num_groups)
    written = layout.fill(words, values | sampling, blocks_GBM)
    found = layout.views(torch.from_numpy(words))

    padding = dict.fromkeys(names, 0) | dict.fromkeys(SLOTS, -1) | {"first": NOWHERE}
    for name, value in values.items():
        assert found[name][:2].tolist() == value.tolist()
        assert set(found[name][2:].tolist()) <= {padding[name]}
    assert (found["temperature"][0], found["u"][0]) == (0.5, 0.25)
    assert not found["temperature"][1:].any() and not found["u"][1:].any()
    assert found["stride"].tolist() == [3]
    for name, blocks_BM in zip(BLOCKS, blocks_GBM, strict=False):
        assert found[name][:6].tolist() == blocks_BM.flatten().tolist()
    touched = np.zeros(len(words), bool)
    for span in written:
        touched[span] = True
    assert (words[~touched] == 99).all() and (words[touched] != 99).all()
    assert (~touched).sum() == len(words) - layout.num_words + num_groups * (16 - 6)
    sizes = {name: len(each) for name, each in found.items()}
    assert all(sizes[name] == shape.tokens for name in TOKENS)
    assert sizes["lengths"] == shape.sequences and sizes["u"] == sizes["temperature"] == shape.rows
    if shape.tiles:
        assert sizes["sequence"] == sizes["first"] == shape.tiles
        assert sizes["ends"] == shape.sequences and sizes["logits_indices"] == shape.rows
    assert all(each.storage_offset() * each.element_size() % 16 == 0 for each in found.values())


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        # every row may have another adapter
        (GraphShape(5, 5, 5, adapter_slots=9), 5),
        # rows of one adapter share tiles; the last tile of each may have a single row
        (GraphShape(40, 40, 40, adapter_slots=3), 5),
        # each sequence has one
        (GraphShape(15, 3, 2, tiles=4, adapter_slots=9), 3),
        (GraphShape(32, 3, 2, tiles=4, adapter_slots=9), 5),
        (GraphShape(32, 3, 2, tiles=4, adapter_slots=1), 3),
    ],
)
def test_a_graph_has_room_for_the_adapters_of_any_batch(shape: GraphShape, tiles: int) -> None:
    layout = InputLayout(shape, 16)
    found = layout.views(torch.zeros(layout.num_words, dtype=torch.int32))
    rows, *of_tiles = (len(found[name]) for name in ADAPTER_FIELDS)
    assert rows == shape.tokens and of_tiles == [tiles] * 3
    without = InputLayout(replace(shape, adapter_slots=0), 16)
    assert not set(ADAPTER_FIELDS) & without.views(torch.zeros(300, dtype=torch.int32)).keys()


@given(
    slots=st.lists(st.integers(0, 4), min_size=1, max_size=80),
    has_prompts=st.booleans(),
)
def test_every_row_is_in_a_tile_of_its_slot(slots: list[int], has_prompts: bool) -> None:
    """The rows keep their order, and all tiles of a slot but the last are full: there are no more
    of them than a graph has room for."""
    made = {name: values.tolist() for name, values in adapter_inputs(np.array(slots)).items()}
    rows, *tiles = (made[name] for name in ADAPTER_FIELDS)
    found: dict[int, list[int]] = {slot: [] for slot in slots}
    for first, count, slot in zip(*tiles, strict=True):
        assert 0 < count <= ADAPTER_TILE_ROWS and len(found[slot]) % ADAPTER_TILE_ROWS == 0
        found[slot] += rows[first : first + count]
    for slot, of_slot in found.items():
        assert of_slot == [row for row, own in enumerate(slots) if own == slot]
    num_sequences = len(set(slots)) if has_prompts else len(slots)
    shape = GraphShape(len(slots), num_sequences, 1, tiles=int(has_prompts), adapter_slots=5)
    assert len(tiles[0]) <= shape.adapter_tiles


@pytest.mark.parametrize(
    ("changes", "filtered"),
    [
        ({}, []),
        ({"temperature": 0.0}, []),
        ({"top_k": 3}, [1]),
        ({"top_p": 0.9}, [1]),
        ({"min_p": 0.1}, [1]),
    ],
)
def test_rows_whose_distribution_is_filtered(changes: dict[str, Any], filtered: list[int]) -> None:
    params = [SamplingParams(temperature=0.5), SamplingParams(**changes)]
    batch = SamplingBatch(params_R=params, u_R=np.array([0.1, 0.2]))
    assert batch.filtered_rows == filtered
    masked = SamplingBatch(params_R=params[:1], u_R=np.zeros(1), token_masks={0: np.ones(3, bool)})
    assert masked.filtered_rows == [0]


def test_a_decode_graph_gets_the_sequences_that_have_one_new_token() -> None:
    """There are two of them, and a third that is still being read."""
    batch = ForwardBatch(
        tokens_N=np.array([7, 8, 9, 10]),
        positions_N=np.array([3, 5, 0, 1]),
        slot_mapping_GN=np.array([[33, 45, 64, 65], [1, 2, 3, 4]]),
        seq_ids_B=np.array([1, 2, 3]),
        query_starts_B=np.array([0, 1, 2]),
        seq_lens_B=np.array([4, 6, 2]),
        block_table_GBM=np.array([[[2], [3], [4]], [[5], [6], [7]]]),
        num_decode=2,
        adapters_B=np.array([0, 0, 0]),
        logits_indices_R=np.array([0, 1, 3]),
        sampling=SamplingBatch(
            params_R=[SamplingParams(temperature=t) for t in (0.5, 1.0, 0.0)],
            u_R=np.array([0.1, 0.2, 0.3]),
        ),
    )
    found = decode_inputs(batch, batch.tokens_N + 10)
    assert found is not None
    assert {name: value.tolist() for name, value in found.values.items()} == {
        "tokens": [17, 18],
        "positions": [3, 5],
        "slot_mapping": [33, 45],
        "windowed_slot_mapping": [1, 2],
        "lengths": [4, 6],
        "temperature": [0.5, 1.0],
        "u": [0.1, 0.2],
    }
    assert found.block_table_GBM.tolist() == [[[2], [3]], [[5], [6]]]
    assert (found.num_tokens, found.num_sequences, found.num_tiles) == (2, 2, 0)
    assert found.row_indices_R.tolist() == [0, 1]
    assert decode_inputs(replace(batch, num_decode=0), batch.tokens_N) is None


def test_results_are_read_in_the_order_of_the_rows() -> None:
    on_device = torch.zeros((2, 4), dtype=torch.int32)
    host = PinnedBuffers(torch.zeros(8, dtype=torch.int32), on_device)
    on_device[0] = torch.tensor([5, 6, 7, 8])
    on_device[1] = torch.tensor([-0.5, -1.0, -1.5, -2.0]).view(torch.int32)
    host.take(on_device)
    on_device.zero_()  # the next pass has begun
    found = host.read(np.array([3, 0]), [])
    assert (found.tokens, found.logprobs, found.top_logprobs) == ([8, 5], [-2.0, -0.5], [])
