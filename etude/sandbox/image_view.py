"""An image as a zygote shows it: with paths of this machine in place of digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.sandbox.image import VENV, Image, ImageStore, read_times, read_tree
from etude.sandbox.mounts import Mount, find_mounts
from etude.sandbox.tree import Tree


@dataclass(frozen=True, slots=True)
class ImageView:
    """The parts of a root, and the working copy that sandboxes start with."""

    layers: tuple[str, ...]
    system: bool
    mounts: tuple[Mount, ...]
    hostname: str
    user: str
    work: Tree
    times: Mapping[str, int]
    """Modification times of its files, in nanoseconds."""
    packages: bool = False
    """True if the packages of this machine's Python belong to the image."""


def view(store: ImageStore, image: Image) -> ImageView:
    places = [store.layer(digest) for digest in image.layers]
    venvs = (
        [] if image.system else [place for each in places if (place := each / VENV[1:]).is_dir()]
    )
    work = store.layer(image.work) if image.work else None
    return ImageView(
        layers=tuple(map(str, places)),
        system=image.system,
        mounts=find_mounts(f"{place}:{VENV}" for place in venvs),
        hostname=image.hostname,
        user=image.user,
        work=read_tree(work) if work else {},
        times=read_times(work) if work else {},
    )
