"""The layout of a version over ranks: the chunks that each rank publishes. Pure.

Ranks hold rows as their training requires; chunks are cut as the format defines. A chunk belongs to
the rank that holds its first byte, and the bytes of it that other ranks hold are sent there. Bytes
that several ranks hold count as the lowest rank's. So the bits of a version, its digests and its
root do not depend on the number of ranks; and if parts are large, nearly all bytes stay where they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.core.errors import EtudeError
from etude.weights.tensors import TensorEntry


@dataclass(frozen=True, slots=True)
class Extent:
    """A rank's part of a tensor: bytes `start` to `stop - 1` of the whole."""

    entry: TensorEntry
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Bytes of a tensor that one rank holds and another one publishes."""

    name: str
    start: int
    stop: int
    source: int
    owner: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout; the same on all ranks if it is built from the same extents."""

    table: tuple[TensorEntry, ...]
    """All tensors, sorted by name, without digests."""
    owners: Mapping[str, tuple[tuple[int, range], ...]]
    """Tensor -> (rank, chunks that it publishes), in the order of the chunks."""
    transfers: tuple[Transfer, ...]
    """All transfers, in the order in which they are sent."""

    def owned(self, rank: int) -> dict[str, range]:
        return {
            name: chunks
            for name, owners in self.owners.items()
            for owner, chunks in owners
            if owner == rank
        }


def build_layout(holdings: Sequence[Sequence[Extent]]) -> Layout:
    """Build the layout. `holdings`: the extents of each rank."""
    by_name: dict[str, list[tuple[int, Extent]]] = {}
    for rank, extents in enumerate(holdings):
        for extent in extents:
            by_name.setdefault(extent.entry.name, []).append((rank, extent))
    table: list[TensorEntry] = []
    owners: dict[str, tuple[tuple[int, range], ...]] = {}
    pieces: list[Transfer] = []
    for name, held in sorted(by_name.items()):
        entry, size = held[0][1].entry, held[0][1].entry.chunk_bytes
        for rank, extent in held:
            if extent.entry != entry:
                raise EtudeError(
                    f"ranks disagree on {name}: rank {held[0][0]} has {entry}, rank {rank} has "
                    f"{extent.entry}"
                )
        table.append(entry)
        runs = list(_runs(entry, held))
        cuts = [(rank, range(-(-start // size), -(-stop // size))) for rank, start, stop in runs]
        # An empty tensor is part of the version like any other.
        owners[name] = tuple((rank, chunks) for rank, chunks in cuts if chunks) or (
            (held[0][0], range(0)),
        )
        for rank, start, stop in runs:
            if start % size:
                owner = next(r for r, begin, end in runs if begin <= start // size * size < end)
                pieces.append(
                    Transfer(name, start, min(stop, -(-start // size) * size), rank, owner)
                )
    return Layout(tuple(table), owners, tuple(pieces))


def _runs(entry: TensorEntry, held: Sequence[tuple[int, Extent]]) -> Iterator[tuple[int, int, int]]:
    """Runs (rank, start, stop) in order: the rank from which each byte is taken."""
    at = 0
    while at < entry.bytes:
        covering = [(rank, extent) for rank, extent in held if extent.start <= at < extent.stop]
        if not covering:
            raise EtudeError(
                f"no rank has byte {at} of {entry.name}: together, the ranks must cover every "
                f"tensor"
            )
        rank, extent = min(covering, key=lambda pair: pair[0])
        yield rank, at, extent.stop
        at = extent.stop
