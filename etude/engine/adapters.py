"""LoRA adapters in inference: several at once on one base, each request with its own.

An engine created with `AdapterLimits` has slots for adapters. Slot 0 is for the adapter that comes
with a version of the weights, if there is one; the others are for adapters that requests ask for by
name. A batch states the slot of each sequence. A slot's contribution to a token is computed from
that token alone, so requests with other adapters do not change it; if the model's arithmetic is
batch-invariant, not even its bits.

`TorchAdapters` is for runners on torch operators; `kernels.lora` has the CUDA counterpart. The
native CPU runner has only slot 0, and merges its adapter into the matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from etude.engine.batch import Ints, ModelRunner
from etude.engine.scheduler import LoadedAdapter
from etude.model.layers import Linear
from etude.model.lora import (
    Adapter,
    LoraConfig,
    Pair,
    adaptable_layers,
    layer_pairs,
    pair_tensors,
    split_tensors,
)
from etude.model.transformer import Transformer

OWN_SLOT = 0
"""Slot of the adapter that belongs to the weights' version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """The number of LoRA adapters that an engine has room for, and their largest rank."""

    own: LoraConfig | None = None
    """The config of the adapters that come with versions of the weights; None: versions have
    none."""
    num_named: int = 0
    max_rank: int = 16

    @property
    def num_slots(self) -> int:
        return 1 + self.num_named

    @property
    def rank(self) -> int:
        return max(self.max_rank, self.own.rank if self.own else 0)


class TorchAdapters:
    """LoRA adapters on torch operators: applied one after the other, each to the tokens that use
    it."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._slots: dict[int, dict[str, Pair]] = {}  # by the path of the layer
        self._rows: list[tuple[int, Tensor | slice]] = []  # of the pass in progress
        self.attach(model)

    def attach(self, model: Transformer) -> None:
        """Make the model apply the adapters of this object from now on."""
        for path, layer in adaptable_layers(model).items():
            layer.adapter = partial(self._add, path)

    def prepare(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        """Prepare to fill a slot, or to empty it. Call the result to put the change in place.
        Raises ValueError for an adapter that does not fit."""
        like = self._model.model.embed_tokens.weight
        pairs = {} if adapter is None else dict(layer_pairs(self._model, adapter, like))

        def put_in_place() -> None:
            self._slots[slot] = pairs

        return put_in_place

    def tensors(self, slot: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """A copy of the adapter in a slot, by its published names."""
        layers = adaptable_layers(self._model)
        return {
            name: tensor.to(dtype, copy=True)
            for path, pair in self._slots.get(slot, {}).items()
            for name, tensor in pair_tensors(path, layers[path], pair)
        }

    def use(self, slots_N: Ints) -> None:
        """Set the adapter slot of each token of the next pass."""
        device = self._model.model.embed_tokens.weight.device
        used = [slot for slot in np.unique(slots_N).tolist() if self._slots.get(slot)]
        self._rows = [
            (slot, slice(None))
            if (slots_N == slot).all()
            else (slot, torch.from_numpy(np.flatnonzero(slots_N == slot)).to(device))
            for slot in used
        ]

    def _add(self, path: str, layer: Linear, x_NC: Tensor, y_NM: Tensor) -> Tensor:
        for slot, rows in self._rows:
            if (pair := self._slots[slot].get(path)) is not None:
                y_NM[rows] = pair.added(layer.arithmetic.linear, x_NC[rows], y_NM[rows])
        return y_NM


class AdapterManager:
    """The LoRA manager of an engine: loads the adapter that comes with the weights, and those that
    requests name, into the slots of its runner. It never evicts an adapter: when all slots are
    taken, a load is refused."""

    def __init__(self, limits: AdapterLimits | None, runner: ModelRunner) -> None:
        self._limits = limits
        self._runner = runner
        self._named: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count(1)
        self._base: dict[str, Tensor] = {}  # the base in use under the adapter of the weights

    def find(self, name: str | None) -> LoadedAdapter | None:
        """Return the adapter of this name. Raises ValueError for an unknown name. Any thread may
        call it."""
        if name is None:
            return None
        if name not in self._named:
            there = ", ".join(self._named) or "none"
            raise ValueError(f"no adapter is named {name[:200]!r}; the adapters here: {there}")
        return self._named[name]

    def load(self, name: str, adapter: Adapter) -> None:
        most = self._limits.num_named if self._limits else 0
        loaded = self._named.get(name) or LoadedAdapter(1 + len(self._named), 0)
        if self._limits is None or loaded.slot > most:
            raise ValueError(
                f"no room for adapter {name}: this engine has room for {most} adapters"
            )
        if adapter.config.rank > self._limits.rank:
            raise ValueError(
                f"adapter {name} has rank {adapter.config.rank}, but this engine has room for "
                f"rank {self._limits.rank} at most"
            )
        self._runner.prepare_adapter(loaded.slot, adapter)()
        loaded.number = next(self._numbers)
        self._named[name] = loaded

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Like `Engine.prepare_weights`: prepare the base if it has changed, and the adapter of the
        version."""
        base, own = split_tensors(tensors)
        if self._limits is None or self._limits.own is None:
            if own:
                raise ValueError(
                    f"these weights contain an adapter ({next(iter(own))}), but this engine was "
                    f"started without room for one"
                )
            return self._runner.prepare_weights(tensors)
        stays = bool(own) and _same_memory(base, self._base)
        if not stays:
            self._base = {}  # a runner may add adapters to the base that it prepared last
        puts = [] if stays else [self._runner.prepare_weights(base)]
        adapter = Adapter(self._limits.own, own) if own else None
        puts.append(self._runner.prepare_adapter(OWN_SLOT, adapter))

        def put_in_place() -> None:
            for put in puts:
                put()
            self._base = base if own else {}

        return put_in_place


def _same_memory(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> bool:
    """True if both are views of the same bytes. The old tensors are held, so their memory cannot
    have been reused."""
    return new.keys() == old.keys() and all(
        tensor.data_ptr() == old[name].data_ptr() for name, tensor in new.items()
    )
