"""From the trainer's tensors to a version that every region can load.

`publish` takes the tensors and returns; hashing, encoding, uploading and the commit happen on a thread of their own,
one version after the other. What the trainer waits for is counted in `stalled_s`.

The first version is stored whole, every later one as the difference to the one before. When the differences since the
last whole version have grown to half of it, or to 64 of them, the version gets a second way, whole; and every eighth a
way from eight versions before, which costs about half of the eight single ones.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from etude.core.errors import EtudeError
from etude.core.types import Link, Manifest, Route, Shard
from etude.store.objects import Missing, Objects
from etude.weights.codec import Array
from etude.weights.follow import Follower, Image
from etude.weights.manifest import Chain, Epoch, ExtraRoute, Gone, epoch_key, manifest_key, route_key
from etude.weights.shards import Census, pack
from etude.weights.signing import Signer, signer_from_environment
from etude.weights.tensors import State, bytes_of, state_json, state_of


class Fenced(EtudeError):
    """Another trainer has taken over; nothing that this one publishes would be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When a version gets more than one way."""

    max_chain: int = 64
    max_share: float = 0.5
    """Of a whole version, in differences since the last one."""
    skip: int = 8
    """Versions that one skip leads over; 0 for none."""

    def wants_whole(self, links: int, bytes: int, whole_bytes: int) -> bool:
        return links >= self.max_chain or bytes > self.max_share * whole_bytes


class Publisher:
    """One trainer's hand on the store. It takes an epoch with its first new version."""

    def __init__(
        self,
        chain: Chain,
        *,
        name: str = "trainer",
        policy: Policy | None = None,
        signer: Signer | None = None,
        threads: int = 1,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.chain, self.policy = chain, policy or Policy()
        self.name = f"{name}@{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.stalled_s = 0.0
        self._sign, self._now = signer or signer_from_environment(), now
        self._epoch: int | None = None
        self._last: Image | None = None
        self._anchor: Image | None = None  # where the next skip starts
        self._links, self._bytes = 0, 0  # since the last whole version
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._pending: Future[Manifest] | None = None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, stage: str, step: int) -> None:
        """Hands over tensors that nobody changes from now on. Waits until the version before is published, and raises
        what went wrong there."""
        began = time.monotonic()
        self.wait()
        data = {name: bytes_of(tensor) for name, tensor in tensors.items()}
        self._pending = self._worker.submit(self._publish, version, tensors, data, stage, step)
        self.stalled_s += time.monotonic() - began

    def wait(self) -> Manifest | None:
        """Returns when all that was handed over is published, with the last manifest."""
        return self._pending.result() if self._pending else None

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._pool.shutdown()

    def _publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], data: dict[str, Array], stage: str, step: int
    ) -> Manifest:
        state = state_of(tensors, data, self._pool)
        state_data, root = state_json(state)
        if self._epoch is None:
            self.chain.refresh()
        if (there := self._published(version)) is not None:
            link, manifest = there
            self._check_same(manifest, root)
            self._adopt(Image(link, state, data))  # the trainer was restarted, with the very bits that the store holds
            return manifest
        epoch, base = self._claim(), self._last
        if base is not None and version <= base.link.version:
            raise EtudeError(
                f"{self.chain.objects.url}: cannot publish weight version {version}, since {base.link.version} is "
                f"published already; start a new run, or go on from the newest checkpoint"
            )
        self.chain.put_shard(epoch, version, state_data)
        census = Census()
        route = Route(base.link if base else None, self._upload(epoch, version, state, data, base, census))
        manifest = self._sign(
            Manifest(
                version=version, stage=stage, step=step, epoch=epoch, parent=base.link if base else None, root=root,
                bytes=sum(entry.bytes for entry in state), route=route, changed=census.shares(),
                publisher=self.name, time=self._now(),
            )
        )  # fmt: skip
        self._check_fence(epoch)
        if not self.chain.create(manifest_key(epoch, version), manifest):
            raise Fenced(self._fenced())
        self._last = Image(self.chain.at(epoch, version)[0], state, data)
        self._add_ways(self._last, route, manifest.bytes)
        return manifest

    def _upload(
        self, epoch: int, version: int, state: State, data: Mapping[str, Array], base: Image | None, census: Census
    ) -> tuple[Shard, ...]:
        packed = pack(state, data, base.state if base else (), base.data if base else {}, self._pool, census)
        return tuple(Shard(self.chain.put_shard(epoch, version, p.data), len(p.data), p.first, p.last) for p in packed)

    def _add_ways(self, image: Image, route: Route, whole_bytes: int) -> None:
        """A version is live already; what is added here only shortens the way of those who are late."""
        whole = route.base is None
        self._links, self._bytes = (0, 0) if whole else (self._links + 1, self._bytes + route.bytes)
        if not whole and self.policy.wants_whole(self._links, self._bytes, whole_bytes):
            self._add_way(image, None)
            self._links = self._bytes = 0
        if self.policy.skip:
            if self._anchor is None:
                self._anchor = image
            elif self._links and self._links % self.policy.skip == 0:
                self._add_way(image, self._anchor)
                self._anchor = image

    def _add_way(self, image: Image, base: Image | None) -> None:
        link = image.link
        shards = self._upload(link.epoch, link.version, image.state, image.data, base, Census())
        route = Route(base.link if base else None, shards)
        self.chain.create(route_key(link, route.base), self._sign(ExtraRoute(target=link, route=route)))

    def _published(self, version: int) -> tuple[Link, Manifest] | None:
        try:
            return self.chain.find(version)
        except (Missing, Gone):
            return None

    def _check_same(self, published: Manifest, root: str) -> None:
        if published.root != root:
            raise EtudeError(
                f"{self.chain.objects.url}: weight version {published.version} is published already, with other "
                f"weights (stage {published.stage}, step {published.step}); "
                f"stop the other trainer that works on this run, or start a new run"
            )

    def _claim(self) -> int:
        """Our epoch. Taking one fences off whoever published before, and fixes the version that we go on from; that is
        rebuilt from the store and checked, never taken from a copy that somebody kept."""
        while self._epoch is None:
            self.chain.refresh()
            parent = self._newest()
            if parent is not None and (self._last is None or self._last.link != parent):
                self._adopt(Follower(self.chain).reach(parent))
            number = max((epoch.epoch for epoch in self.chain.epochs()), default=0) + 1
            record = self._sign(Epoch(epoch=number, parent=parent, publisher=self.name))
            if not self.chain.create(epoch_key(number), record):
                raise Fenced(self._fenced())
            # What was committed before the fence stood must not be lost: if there is more now, take another epoch.
            if self._newest(before_epoch=number) == parent:
                self._epoch = number
        self._check_fence(self._epoch)
        return self._epoch

    def _newest(self, before_epoch: int | None = None) -> Link | None:
        """A listing may be late; whether a key exists is not. Versions count up by one as a rule."""
        link = self.chain.head(before_epoch=before_epoch)
        while link is not None and self.chain.exists(manifest_key(link.epoch, link.version + 1)):
            link = self.chain.at(link.epoch, link.version + 1)[0]
        return link

    def _adopt(self, image: Image) -> None:
        """Go on from a version of the store. How far it is from a whole one, the store knows."""
        self._last, self._links, self._bytes = image, 0, 0
        at: Link | None = image.link
        while at is not None:
            try:
                route = self.chain.follow(at).route
                if route.base is None or any(extra.base is None for extra in self.chain.extra_routes(at)):
                    break
            except Missing:
                break
            self._links, self._bytes, at = self._links + 1, self._bytes + route.bytes, route.base

    def _check_fence(self, epoch: int) -> None:
        if self.chain.exists(epoch_key(epoch + 1)):
            raise Fenced(self._fenced())

    def _fenced(self) -> str:
        return (
            f"{self.chain.objects.url}: another trainer has taken over this run; this one ({self.name}) stops. "
            f"If it is the right one, stop the other and start again"
        )


def publish(objects: Objects, version: int, tensors: Mapping[str, torch.Tensor], *, stage: str, step: int) -> Manifest:
    """Stores one version, and returns when it is there. A trainer that goes on keeps a `Publisher`."""
    publisher = Publisher(Chain(objects))
    try:
        publisher.publish(version, tensors, stage=stage, step=step)
        manifest = publisher.wait()
    finally:
        publisher.close()
    assert manifest is not None
    return manifest
