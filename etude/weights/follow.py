"""The reader's side: from published versions to tensors that may be served. Every result is
checked.

A follower holds the last version that it returned, and builds the next one alongside it: it
downloads the cheapest route, checks every object against its hash, applies the route, and checks
every tensor against its digest. Only then does the new version replace the old one. An error on the
way leaves the old version unchanged. A broken route is not taken again. If the result is wrong
although every object was right, then the held version must be damaged: it is discarded and rebuilt
from a whole version.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from etude.core.errors import EtudeError
from etude.core.types import Route, VersionRef
from etude.store.codec import to_json
from etude.store.objects import Missing, Objects
from etude.weights.cache import HostCache
from etude.weights.delta_format import Damaged
from etude.weights.manifest import Chain
from etude.weights.records import Lease, lease_key
from etude.weights.relay import Relay
from etude.weights.routes import RouteStep, plan_route
from etude.weights.shards import unpack
from etude.weights.signing import Corrupt
from etude.weights.tensors import Slab, State, TensorEntry, read_state, tensor_of, wrong_in

LEASE_S = 600.0
DOWNLOADS = 16

Progress = Callable[[int, int], None]
"""Bytes downloaded, bytes needed."""


class CorruptWeights(EtudeError):
    """The store does not contain what the manifest promises. The version must not be served."""


ChunkFilter = Callable[[TensorEntry], range | None]
"""The chunks of a tensor that a reader needs; None for a tensor of which it needs nothing.
`TensorEntry.holding` finds the chunks of rows. It is called for each version, and must return the
same for a tensor of the same name, dtype and shape."""


def all_chunks(entry: TensorEntry) -> range:
    return entry.chunks


@dataclass(frozen=True, slots=True)
class Image:
    """The checked bits of one version, or of a reader's part of it. Arrays are shared between
    images and never written to."""

    link: VersionRef
    state: State
    held: dict[str, Slab] = field(repr=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are held completely."""
        whole = [
            e for e in self.state if e.name in self.held and self.held[e.name].chunks == e.chunks
        ]
        return {
            entry.name: tensor_of(entry.dtype, entry.shape, self.held[entry.name].data)
            for entry in whole
        }

    def rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Rows `first` to `last - 1` of a tensor; their chunks must be held."""
        entry, slab = next(entry for entry in self.state if entry.name == name), self.held[name]
        row, start = entry.bytes // max(1, entry.shape[0]), slab.chunks.start * entry.chunk_bytes
        if last > first and not set(entry.holding(first, last)) <= set(slab.chunks):
            raise EtudeError(
                f"rows {first} to {last - 1} of {name} were not fetched: `only` must include "
                f"their chunks"
            )
        data = slab.data[first * row - start : last * row - start]
        return tensor_of(entry.dtype, (last - first, *entry.shape[1:]), data)


class Follower:
    """One reader. Its name is on its lease, which protects the objects that it needs; without a
    name it takes no lease. `only`: the part that it needs, as for a rank of a tensor- or
    expert-parallel group; the rest is not decoded, and not downloaded unless a shard holds both."""

    def __init__(
        self,
        chain: Chain,
        *,
        only: ChunkFilter = all_chunks,
        name: str | None = None,
        cache: HostCache | None = None,
        relay: Relay | None = None,
        threads: int = 1,
        progress: Progress | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.chain = chain
        self.name = name
        self._only = only
        self.held: Image | None = None
        self._base: Image | None = None  # of the adapter that is held
        self.rebuilt = 0
        """The number of times that the held version turned out wrong."""
        self._cache = cache
        self._relay = relay
        self._progress = progress
        self._now = now
        self._threads = threads

    def fetch(self, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a version, on the CPU; for an adapter those of its base too, which stay in
        the same memory. Blocks for download, decoding and digests: call it in a thread."""
        link, manifest = self.chain.find(version)
        base = manifest.adapter_of
        if base is None:
            self._base = None
        elif self._base is None or self._base.link != base:
            self._base = self.move_to(base)
        own = self.move_to(link).tensors()
        return own if self._base is None else self._base.tensors() | own

    def image(self, version: int) -> Image:
        """The bits of the version itself, without those of a base."""
        return self.move_to(self.chain.find(version)[0])

    def move_to(self, goal: VersionRef) -> Image:
        """Move to a version by the cheapest sound route."""
        broken: list[RouteStep] = []
        while self.held is None or self.held.link != goal:
            steps = plan_route(self.chain, self.held.link if self.held else None, goal, broken)
            if steps is None:
                raise CorruptWeights(self._refusal(goal.version, broken))
            start = steps[0].route.base
            self._lease(start.version if start else steps[0].target.version)
            try:
                self._apply_steps(steps)
            except _BrokenStep as e:
                broken.append(e.step)
            except _WrongOutcome:
                if start is None:
                    broken.append(steps[-1])
                else:
                    self.held, self.rebuilt = None, self.rebuilt + 1
        self._lease(goal.version)
        return self.held

    def apply_route(self, link: VersionRef, route: Route) -> None:
        """Apply exactly this route, from the base that is held."""
        assert route.base is None or (self.held and self.held.link == route.base)
        step = RouteStep(link, route)
        try:
            self._apply_steps([step])
        except (_BrokenStep, _WrongOutcome) as e:
            raise CorruptWeights(self._refusal(link.version, [step])) from e

    def close(self) -> None:
        if self.name:
            self.chain.objects.delete(lease_key(self.name))

    def _apply_steps(self, steps: Sequence[RouteStep]) -> None:
        image = self.held if steps[0].route.base is not None else None
        report = self._reporter(steps)
        with ThreadPoolExecutor(self._threads) as pool:
            for step in steps:
                try:
                    state = self._state(step.target)
                    wanted = {
                        entry.name: chunks
                        for entry in state
                        if (chunks := self._only(entry)) is not None
                    }
                    shards = []
                    for data in self._download(step, wanted):
                        shards.append(data)
                        report(len(data))
                    base, old = (image.state, image.held) if image else ((), {})
                    made = unpack(state, shards, base, old, wanted, pool)
                except (Missing, Corrupt, Damaged) as e:
                    raise _BrokenStep(step) from e
                image = Image(step.target, state, made)
            assert image is not None
            # Intermediate states need no check of their own: the digests of the last state cover
            # the whole route.
            if wrong_in(image.state, image.held, pool):
                raise _WrongOutcome
        self.held = image

    def _reporter(self, steps: Sequence[RouteStep]) -> Callable[[int], None]:
        total = sum(step.route.bytes for step in steps)
        done = 0

        def report(more: int) -> None:
            nonlocal done
            done += more
            if self._progress:
                self._progress(done, total)

        return report

    def _download(self, step: RouteStep, wanted: Collection[str]) -> Iterator[bytes]:
        """Download the shards that may contain wanted tensors. A shard names only its first and its
        last tensor, so it may turn out to contain none."""
        needed = [
            shard
            for shard in step.route.shards
            if any(shard.first <= name <= shard.last for name in wanted)
        ]
        with ThreadPoolExecutor(DOWNLOADS) as downloads:
            yield from downloads.map(lambda shard: self._shard(step.target, shard.hash), needed)

    def _state(self, target: VersionRef) -> State:
        manifest = self.chain.follow(target)
        data = self._shard(target, manifest.root)
        return read_state(data, manifest.bytes, f"the tensors of version {target.version}")

    def _shard(self, target: VersionRef, hash: str) -> bytes:
        def download() -> bytes:
            relayed = self._relay.shard(target, hash) if self._relay else None
            return self.chain.shard(target, hash) if relayed is None else relayed

        return download() if self._cache is None else self._cache.get(hash, download)

    def _lease(self, version: int) -> None:
        if self.name:
            lease = Lease(reader=self.name, version=version, until=self._now() + LEASE_S)
            # A reader may have no write access: then nothing is kept for it, and it starts from a
            # whole version if it falls behind.
            with contextlib.suppress(EtudeError):
                self.chain.objects.put_sealed(lease_key(self.name), to_json(lease))

    def _refusal(self, version: int, broken: Sequence[RouteStep]) -> str:
        tried = ", ".join(f"{_place(step.route.base)} to {step.target.version}" for step in broken)
        damaged = (
            f"; damaged: {', '.join(sorted(self.chain.damaged))}" if self.chain.damaged else ""
        )
        return (
            f"{self.chain.objects.url}: weight version {version} cannot be restored exactly as "
            f"published, and is not served (no intact route: "
            f"{tried or 'none is left'}{damaged}). Run `etude weights verify` to see which "
            f"objects to restore"
        )


class _WrongOutcome(Exception):
    """All objects were right, but the result is wrong."""


class _BrokenStep(Exception):
    """A route step that cannot be taken."""

    def __init__(self, step: RouteStep) -> None:
        self.step = step


def fetch(objects: Objects, version: int) -> dict[str, torch.Tensor]:
    """All tensors of a version, for callers that need a single version."""
    return Follower(Chain(objects)).fetch(version)


def _place(link: VersionRef | None) -> str:
    return "nothing" if link is None else str(link.version)
