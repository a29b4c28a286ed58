"""Collective operations of the ranks of a trainer that publish together; a failure on one rank is a
failure on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch

from etude.core.errors import EtudeError
from etude.store.codec import from_json, to_json
from etude.weights.delta_format import Array
from etude.weights.layout import Extent, Layout, build_layout
from etude.weights.peers import Peers
from etude.weights.records import hash_of
from etude.weights.snapshot import Arrays
from etude.weights.tensors import Slab, State, digests

T = TypeVar("T")

_DONE, _FAILED = b"+", b"-"


class PeerGroup:
    def __init__(self, peers: Peers) -> None:
        self.rank = peers.rank
        self._peers = peers
        self._layout: tuple[list[bytes], Layout] | None = None

    def all_gather(self, find: Callable[[], T], type: type[T]) -> list[T]:
        """Gather the results of `find` on all ranks. If it raises on one, it raises on all."""
        failed: EtudeError | None = None
        try:
            message = _DONE + to_json(find())
        except EtudeError as e:
            failed = e
            message = _FAILED + str(e).encode()
        answers = self._peers.all_to_all([message] * self._peers.world_size)
        if failed is not None:
            raise failed
        for rank, answer in enumerate(answers):
            if answer[:1] == _FAILED:
                raise EtudeError(f"rank {rank} could not publish: {answer[1:].decode()}")
        return [
            from_json(answer[1:], type, f"the answer of rank {rank}")
            for rank, answer in enumerate(answers)
        ]

    def broadcast(self, find: Callable[[], T], type: type[T]) -> T:
        """Broadcast the result of `find` on rank 0 to all."""
        found = self.all_gather(lambda: [find()] if self.rank == 0 else [], list[type])  # type: ignore[valid-type]
        return found[0][0]

    def build_layout(self, extents: Sequence[Extent]) -> Layout:
        """The layout of the ranks. It is computed once, since the ranks hold the same parts at
        every step; later calls return the same object."""
        prints = self.all_gather(lambda: hash_of(to_json(extents)), str)
        known = [print.encode() for print in prints]
        if self._layout is None or self._layout[0] != known:
            self._layout = known, build_layout(self.all_gather(lambda: list(extents), list[Extent]))
        return self._layout[1]

    def gather(self, layout: Layout, extents: Sequence[Extent], arrays: Arrays) -> dict[str, Slab]:
        """The chunks that this rank owns: its own bytes, joined with those that other ranks hold of
        them."""
        starts = {extent.entry.name: extent.start for extent in extents}

        def held(name: str, start: int, stop: int) -> Array:
            data: Array = arrays[name].view(torch.uint8).numpy()
            return data[start - starts[name] : stop - starts[name]]

        received = self._send_transfers(layout, held) if layout.transfers else {}
        own: dict[str, Slab] = {}
        for entry in layout.table:
            for owner, chunks in layout.owners[entry.name]:
                if owner == self.rank:
                    start = chunks.start * entry.chunk_bytes
                    stop = min(chunks.stop * entry.chunk_bytes, entry.bytes)
                    rest = received.get(entry.name, [])
                    data = held(entry.name, start, stop - sum(map(len, rest)))
                    own[entry.name] = Slab(chunks, np.concatenate([data, *rest]) if rest else data)
        return own

    def state(self, layout: Layout, own: Mapping[str, Slab], pool: Executor) -> State:
        """All tensors, with the digests of their chunks."""
        mine = [entry for entry in layout.table if entry.name in own]
        found = zip(
            mine, pool.map(lambda entry: digests(entry, own[entry.name]), mine), strict=True
        )
        shared = self.all_gather(
            lambda: {entry.name: each for entry, each in found}, dict[str, tuple[str, ...]]
        )
        return tuple(
            replace(
                e,
                digests=tuple(d for rank, _ in layout.owners[e.name] for d in shared[rank][e.name]),
            )
            for e in layout.table
        )

    def _send_transfers(
        self, layout: Layout, held: Callable[[str, int, int], Array]
    ) -> dict[str, list[Array]]:
        """Send pieces to their owners; return those for this rank, by tensor and in order."""
        mine = [piece for piece in layout.transfers if piece.source == self.rank]
        sent = [
            b"".join(
                held(piece.name, piece.start, piece.stop).data
                for piece in mine
                if piece.owner == to
            )
            for to in range(self._peers.world_size)
        ]
        parcels = [np.frombuffer(data, np.uint8) for data in self._peers.all_to_all(sent)]
        received: dict[str, list[Array]] = {}
        for piece in layout.transfers:
            if piece.owner == self.rank:
                size = piece.stop - piece.start
                received.setdefault(piece.name, []).append(parcels[piece.source][:size])
                parcels[piece.source] = parcels[piece.source][size:]
        return received
