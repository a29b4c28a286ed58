"""The publisher: from the trainer's tensors to a version that every region can load.

`publish` takes a snapshot and returns; hashing, encoding, uploading and the commit run on a
separate thread, one version after the other. `stalled_s` counts the time for which the trainer
waits.

A trainer of many ranks has a publisher on each, and all of them call `publish` with their parts of
the tensors. Each hashes, encodes and uploads its own chunks (given by `layout`); rank 0 gathers the
results and commits. If one fails, all do, and nothing is committed.

The first version is stored whole, every later one as the delta to the previous one. When the deltas
since the last whole version add up to half of its size, or to 64 deltas, the version gets a
snapshot as its second route.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from etude.core.errors import EtudeError
from etude.core.types import Manifest, Route, Shard, VersionRef
from etude.store.objects import Missing, Objects
from etude.weights.follow import Follower, Image
from etude.weights.layout import Extent, Layout
from etude.weights.manifest import Chain, End, VersionGone
from etude.weights.peer_group import PeerGroup
from etude.weights.peers import Peers, SinglePeer
from etude.weights.records import Epoch, ExtraRoute, manifest_key, route_key
from etude.weights.shards import ChangeStats, pack
from etude.weights.signing import Corrupt, Signer, signer_from_environment
from etude.weights.snapshot import Arrays, Part, Snapshots
from etude.weights.tensors import Slab, State, TensorEntry, state_json


class Fenced(EtudeError):
    """Another trainer has taken over; versions published by this one would not be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPolicy:
    """The conditions under which a version gets a snapshot in addition to its delta."""

    max_chain: int = 64
    max_share: float = 0.5
    """Share of a whole version's size that the deltas since the last one may have."""

    def wants_snapshot(self, links: int, bytes: int, whole_bytes: int) -> bool:
        return links >= self.max_chain or bytes > self.max_share * whole_bytes


@dataclass(frozen=True, slots=True)
class _Order:
    """The order of rank 0 to all ranks: publish the delta to `base`; or nothing, if the version is
    already stored."""

    epoch: int
    base: VersionRef | None
    there: VersionRef | None = None
    is_same: bool = True
    """The version that is there has our weights."""


@dataclass(frozen=True, slots=True)
class _Receipt:
    """The shards that a rank has uploaded."""

    shards: tuple[Shard, ...]
    census: ChangeStats


class Publisher:
    """Publishes the versions of a trainer, or one rank's part of them. It claims an epoch with its
    first new version."""

    def __init__(
        self,
        chain: Chain,
        *,
        peers: Peers | None = None,
        name: str = "trainer",
        policy: SnapshotPolicy | None = None,
        signer: Signer | None = None,
        threads: int = 1,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.chain = chain
        self.policy = policy or SnapshotPolicy()
        self.name = f"{name}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.stalled_s = 0.0
        self._ranks = PeerGroup(peers or SinglePeer())
        self._sign = signer or signer_from_environment()
        self._now = now
        self._epoch: int | None = None
        self._last: Image | None = None  # our part of the last version, if we hold it
        self._layout: Layout | None = None  # of that part
        self._snapshots = Snapshots()
        self._arrays = Arrays()
        # since the last whole version
        self._links = 0
        self._bytes = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._pending: Future[Manifest] | None = None

    def publish(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor | Part],
        *,
        stage: str,
        step: int,
        adapter_of: int | None = None,
    ) -> None:
        """Copy the tensors, or this rank's parts of them, and return. Waits until the previous
        version is published, and raises its error if it failed. `adapter_of`: the published version
        that is the base of this adapter; None: the tensors are a whole model."""
        self.prepare(version, tensors, stage=stage, step=step, adapter_of=adapter_of)()

    def prepare(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor | Part],
        *,
        stage: str,
        step: int,
        adapter_of: int | None = None,
        given: bool = False,
        exact: bool = True,
    ) -> Callable[[], None]:
        """Take the copy now; call the result, on any thread, to publish it. This is `publish` in
        two parts, for a trainer that has something to write in between. Tensors that are `given`
        belong to the publisher: they will not change, and are not copied. If the version is already
        published with other weights, that is an error if `exact`; otherwise it stays as it is."""
        parts = {
            name: given if isinstance(given, Part) else Part(given)
            for name, given in tensors.items()
        }
        extents = [part.extent(name) for name, part in parts.items()]
        with self._counted():
            taken = self._snapshots.take(parts, given=given)

        def start() -> None:
            with self._counted():
                self.wait()
            self._pending = self._worker.submit(
                self._publish, version, extents, taken, stage, step, adapter_of, exact
            )

        return start

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.stalled_s += time.monotonic() - began

    def wait(self) -> Manifest | None:
        """Wait until everything handed over is published, and return the last manifest."""
        return self._pending.result() if self._pending else None

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._pool.shutdown()

    def _publish(
        self,
        version: int,
        extents: Sequence[Extent],
        taken: Callable[[], Arrays],
        stage: str,
        step: int,
        adapter_of: int | None,
        exact: bool,
    ) -> Manifest:
        ranks, arrays = self._ranks, taken()
        layout = ranks.build_layout(extents)
        own = ranks.gather(layout, extents, arrays)
        state = ranks.state(layout, own, self._pool)
        order = ranks.broadcast(lambda: self._order(version, state, exact), _Order)
        if order.there is not None:  # the trainer was restarted
            if order.is_same:
                self._move_on(Image(order.there, state, own), layout, arrays)
                self._count_links()
            return self.chain.follow(order.there)
        ranks.all_gather(lambda: self._start_from(order.base, layout), type(None))
        shards, census = self._upload(order.epoch, version, state, own, self._last)
        made = Manifest(
            version=version, stage=stage, step=step, epoch=order.epoch, parent=order.base, root="",
            adapter_of=None if adapter_of is None else self.chain.find(adapter_of)[0],
            bytes=sum(entry.bytes for entry in state), route=Route(order.base, shards),
            changed=census.shares(), publisher=self.name, time=self._now(),
        )  # fmt: skip
        link = ranks.broadcast(lambda: self._commit(made, state), VersionRef)
        self._move_on(Image(link, state, own), layout, arrays)
        manifest = self.chain.follow(link)
        self._maybe_add_snapshot(manifest)
        return manifest

    def _order(self, version: int, state: State, exact: bool) -> _Order:
        if (there := self._published(version)) is not None:
            link, manifest = there
            is_same = manifest.root == state_json(state)[1]
            if exact and not is_same:
                raise self._refusal(manifest)
            return _Order(link.epoch, manifest.parent, link, is_same)
        end = self._claim(version)
        return _Order(end.epoch, end.head)

    def _start_from(self, base: VersionRef | None, layout: Layout) -> None:
        """Make our part of the base available. It is rebuilt from the store and checked, and never
        taken from a copy elsewhere; only a version that we published ourselves, in the same parts,
        is not rebuilt."""
        if base is None:
            self._last = None
        elif self._last is None or self._last.link != base or self._layout is not layout:
            table = {entry.name: entry for entry in layout.table}
            owned = layout.owned(self._ranks.rank)

            def only(entry: TensorEntry) -> range | None:
                return owned.get(entry.name) if entry.is_like(table.get(entry.name)) else None

            self._last = Follower(self.chain, only=only).move_to(base)
            self._count_links()

    def _upload(
        self, epoch: int, version: int, state: State, own: Mapping[str, Slab], base: Image | None
    ) -> tuple[tuple[Shard, ...], ChangeStats]:
        """Upload the shards of all ranks; return them, with their change statistics."""

        def upload() -> _Receipt:
            census = ChangeStats()
            packed = pack(
                state,
                own,
                base.state if base else (),
                base.held if base else {},
                self._pool,
                census,
            )
            put = self.chain.put_shard
            shards = [
                Shard(put(epoch, version, p.data), len(p.data), p.first, p.last) for p in packed
            ]
            return _Receipt(tuple(shards), census)

        receipts, total = self._ranks.all_gather(upload, _Receipt), ChangeStats()
        for receipt in receipts:
            total.join(receipt.census)
        return tuple(shard for receipt in receipts for shard in receipt.shards), total

    def _commit(self, made: Manifest, state: State) -> VersionRef:
        root = self.chain.put_shard(made.epoch, made.version, state_json(state)[0])
        # If another trainer has succeeded us meanwhile, its epoch record is at this key.
        if not self.chain.create(
            manifest_key(made.epoch, made.version), self._sign(replace(made, root=root))
        ):
            raise Fenced(self._fenced())
        return self.chain.at(made.epoch, made.version)[0]

    def _move_on(self, image: Image, layout: Layout, arrays: Arrays) -> None:
        self._snapshots.release(self._arrays)
        self._last, self._layout, self._arrays = image, layout, arrays

    def _maybe_add_snapshot(self, manifest: Manifest) -> None:
        """Add a snapshot if one is due. The version is live already; a snapshot only shortens the
        route of readers that are behind."""
        assert self._last is not None
        image = self._last
        link = self._last.link
        route = manifest.route
        self._links, self._bytes = (
            (0, 0) if route.base is None else (self._links + 1, self._bytes + route.bytes)
        )
        wanted = self.policy.wants_snapshot(self._links, self._bytes, manifest.bytes)
        if route.base is None or not self._ranks.broadcast(lambda: wanted, bool):
            return
        shards, _ = self._upload(link.epoch, link.version, image.state, image.held, None)
        extra = ExtraRoute(target=link, route=Route(None, shards))
        self._ranks.broadcast(
            lambda: self.chain.create(route_key(link, None), self._sign(extra)), bool
        )
        self._links = self._bytes = 0

    def _published(self, version: int) -> tuple[VersionRef, Manifest] | None:
        try:
            return self.chain.find(version)
        except (Missing, VersionGone):
            return None

    def _refusal(self, published: Manifest) -> EtudeError:
        if self._epoch not in (None, published.epoch):
            return Fenced(self._fenced())
        return EtudeError(
            f"{self.chain.objects.url}: weight version {published.version} is already published "
            f"with other weights (stage {published.stage}, step {published.step}); stop the "
            f"other trainer of this run, or start a new run"
        )

    def _claim(self, version: int) -> End:
        """The end of the log, where only we may commit this version. This needs an epoch: we claim
        one if we have none, and another one if the number does not follow our last, because the
        numbers of one epoch count up by one."""
        while True:
            end = self.chain.look()
            if self._epoch not in (None, end.epoch):
                raise Fenced(self._fenced())
            if end.head is not None and version <= end.head.version:
                raise EtudeError(
                    f"{self.chain.objects.url}: cannot publish weight version {version}: "
                    f"version {end.head.version} is already published; start a new run, or "
                    f"continue from the newest checkpoint"
                )
            if self._epoch is not None and version == end.next:
                return end
            self._check_kept(end.head)
            record = self._sign(
                Epoch(epoch=end.epoch + 1, first=version, parent=end.head, publisher=self.name)
            )
            if self.chain.create(end.key, record):
                self._epoch = record.epoch
            elif self.chain.look().epoch != end.epoch:
                # otherwise its trainer has published one more version: look again
                raise Fenced(self._fenced())

    def _check_kept(self, head: VersionRef | None) -> None:
        """Check that the newest version found is still stored: if it was deleted, newer ones exist
        that the listing does not show yet."""
        if head is not None and not self.chain.exists(manifest_key(head.epoch, head.version)):
            raise EtudeError(
                f"{self.chain.objects.url}: weight version {head.version} was deleted, so newer "
                f"versions exist, but the store does not list them yet; start again later"
            )

    def _count_links(self) -> None:
        """Count, from the store, the deltas between the last version and a whole one. Rank 0 counts
        for all."""
        self._links, self._bytes = 0, 0
        at = self._last.link if self._last and self._ranks.rank == 0 else None
        while at is not None:
            try:
                route = self.chain.follow(at).route
                if route.base is None or any(
                    extra.base is None for extra in self.chain.extra_routes(at)
                ):
                    break
            except (Missing, Corrupt):
                break
            self._links, self._bytes, at = self._links + 1, self._bytes + route.bytes, route.base

    def _fenced(self) -> str:
        return (
            f"{self.chain.objects.url}: another trainer has taken over this run, so this one "
            f"({self.name}) stops. If this is the right one, stop the other and start again"
        )


def publish(
    objects: Objects, version: int, tensors: Mapping[str, torch.Tensor], *, stage: str, step: int
) -> Manifest:
    """Store one version, and return when it is published. A trainer that publishes repeatedly keeps
    a `Publisher`."""
    publisher = Publisher(Chain(objects))
    try:
        publisher.publish(version, tensors, stage=stage, step=step)
        manifest = publisher.wait()
    finally:
        publisher.close()
    assert manifest is not None
    return manifest
