"""Which weight versions there are. Knows no tensors, so controller and gateway can import it.

    weights/{version:06d}/model.safetensors
    weights/{version:06d}/manifest.json

The manifest is created last: a version exists when, and only when, its manifest does.
"""

from __future__ import annotations

import asyncio

from etude.core.types import Manifest
from etude.store.codec import from_json, to_json
from etude.store.objects import Missing, Objects

FIRST_POLL_S, LAST_POLL_S = 0.05, 0.2


class Versions:
    """The published versions of one run; a `core.seams.WeightStore`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def newest(self) -> Manifest | None:
        return await asyncio.to_thread(find_newest, self._objects)

    async def wait(self, after: int) -> Manifest:
        """The newest version, as soon as it is newer than `after`."""
        # The store is the only link between clusters, and it cannot call us: this is the one place that polls for
        # weights. The delay grows because a version that is not there now is a whole training step away.
        delay_s = FIRST_POLL_S
        while (manifest := await asyncio.to_thread(find_newest, self._objects, after)) is None:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_POLL_S)
        return manifest

    async def get(self, version: int) -> Manifest:
        """Raises `Missing` if it is not published."""
        return await asyncio.to_thread(read_manifest, self._objects, version)


def file_key(version: int, name: str) -> str:
    return f"weights/{version:06d}/{name}"


def manifest_key(version: int) -> str:
    return file_key(version, "manifest.json")


def read_manifest(objects: Objects, version: int) -> Manifest:
    key = manifest_key(version)
    try:
        data = objects.get(key)
    except Missing as e:
        raise Missing(f"{objects.url}: weight version {version} is not published") from e
    return from_json(data, Manifest, f"{objects.url}: {key}")


def create_manifest(objects: Objects, manifest: Manifest) -> bool:
    """False if the version has one."""
    return objects.create(manifest_key(manifest.version), to_json(manifest))


def find_newest(objects: Objects, after: int = -1) -> Manifest | None:
    keys = objects.list("weights", after=manifest_key(after) if after >= 0 else None)
    published = [key for key in keys if key.endswith("/manifest.json")]
    return read_manifest(objects, int(published[-1].split("/")[1])) if published else None
