"""Expected results of the adapter kernels, in plain float64 torch; for `kernel_checks`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from etude.engine.adapters import AdapterLimits
from etude.engine.graph_inputs import ADAPTER_FIELDS, adapter_inputs
from etude.engine.kernels.lora import AdapterTiles, LinearAdapters
from etude.model.lora import Pair
from tests.engine.kernel_inputs import Inputs


def check_adapters(
    new: Inputs, slots: list[int], parts: dict[str, int], inputs: int, rank: int
) -> dict[str, float]:
    """Check rows of these slots; slot 0 is empty and slot 2 lacks a pair; the first two parts are a
    gated pair too. `company`: how many numbers change when a row is computed alone."""
    weight = new.normal(sum(parts.values()), inputs)
    layer = LinearAdapters(parts, weight, AdapterLimits(num_named=max(slots), max_rank=rank))
    scales = torch.zeros(1 + max(slots), device=new.device)
    pairs: dict[int, Pair] = {}
    for slot in range(1, 1 + max(slots)):
        widths = tuple((size, slot != 2 or n > 0) for n, size in enumerate(parts.values()))
        own = [size for size, has_pair in widths if has_pair]
        a, b = new.normal(len(own) * rank, inputs, scale=0.1), new.normal(sum(own), rank)
        pairs[slot] = Pair(a, b, 0.5 + slot, widths)
        scales[slot] = pairs[slot].scale
        layer.fill(slot, pairs[slot])
    x, y = new.normal(len(slots), inputs), new.normal(len(slots), sum(parts.values()))

    def tiles(of: list[int]) -> AdapterTiles:
        made = adapter_inputs(np.array(of))
        return AdapterTiles(*(new.ints(made[name].tolist() + [0]) for name in ADAPTER_FIELDS))

    def added(x_NC: Tensor, y_NM: Tensor, of: list[int]) -> Tensor:
        out = y_NM.clone()
        layer.add(x_NC, out, tiles(of), scales, pdl=False)
        return out

    expected = y.double()
    for row, slot in enumerate(slots):
        if slot:
            pair = pairs[slot]
            exact = Pair(pair.a.double(), pair.b.double(), pair.scale, pair.widths)
            one = slice(row, row + 1)
            expected[one] = exact.added(F.linear, x[one].double(), y[one].double())
    found = added(x, y, slots)
    gated = layer.gated(x, y, tiles(slots), scales, pdl=False)
    gate, up = expected.chunk(2, -1)
    alone = torch.cat([added(x[n : n + 1], y[n : n + 1], [s]) for n, s in enumerate(slots)])
    return {
        "added": _error(found, expected),
        "gated": _error(gated, F.silu(gate) * up),
        "company": float((alone != found).sum()),
    }


def _error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())
