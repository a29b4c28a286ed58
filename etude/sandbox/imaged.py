"""A pool whose sandboxes may have images: each image gets its own pool, opened when a task first
names it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec, Tier
from etude.sandbox.image import Image, ImageStore
from etude.sandbox.image_view import ImageView, view

_IDLE = 16
"""Images without a sandbox at the moment that are kept open."""


class ImagedPool:
    """A `core.sandbox.SandboxPool`."""

    def __init__(
        self, plain: SandboxPool, store: ImageStore, opened: Callable[[ImageView], SandboxPool]
    ) -> None:
        """`plain`: the pool for tasks that name no image. `opened`: opens a pool for an image; it
        may block."""
        self._plain = plain
        self._store = store
        self._opened = opened
        self._pools: dict[str, SandboxPool] = {}
        self._users: Counter[str] = Counter()
        self._opening = asyncio.Lock()

    @property
    def tier(self) -> Tier:
        return self._plain.tier

    def check(self, spec: SandboxSpec) -> None:
        if spec.image:
            self._store.find(spec.image)
        self._plain.check(replace(spec, image=""))

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        if not spec.image:
            async with self._plain.open(spec) as sandbox:
                yield sandbox
            return
        image = self._store.find(spec.image)
        digest = image.digest
        self._users[digest] += 1
        try:
            pool = await self._pool_of(image)
            inner = replace(spec, image="", env={**image.env, **spec.env})
            async with pool.open(inner) as sandbox:
                yield sandbox
        finally:
            self._users[digest] -= 1

    async def _pool_of(self, image: Image) -> SandboxPool:
        async with self._opening:
            pool = self._pools.pop(image.digest, None)
            if pool is None:
                pool = await asyncio.to_thread(self._open_pool, image)
            self._pools[image.digest] = pool  # the last one used is the last one to be closed
            idle = [digest for digest in self._pools if not self._users[digest]]
            for digest in idle[:-_IDLE]:
                await self._pools.pop(digest).close()
            return pool

    def _open_pool(self, image: Image) -> SandboxPool:
        return self._opened(view(self._store, image))

    def owing(self) -> dict[str, float]:
        owed = self._plain.owing()
        for digest, pool in self._pools.items():
            owed |= {f"image {digest[:12]} {name}": s for name, s in pool.owing().items()}
        return owed

    async def close(self) -> None:
        for pool in (*self._pools.values(), self._plain):
            await pool.close()
