"""A working copy in layers: forks share the lower ones, which are frozen; the top one takes all
writes (overlayfs).

A fork of a large working copy costs two mounts this way, whatever its size. All layers are mounted
at the path of the working copy, each covering the last, so that nothing in the sandbox can reach
one except through the topmost mount. Standard library only: this runs in the first process of a
sandbox.
"""

from __future__ import annotations

import contextlib
import os

from etude.sandbox import kernel

_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
MAX_LAYERS = 64
"""The mount options with their names must fit into a page."""


class Layers:
    """The layers of the working copy that is mounted at `root`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._frozen: list[int] = []
        self._upper: int | None = None

    def __len__(self) -> int:
        return len(self._frozen)

    def full(self) -> bool:
        """True if the working copy has changed and no layer can be added."""
        return len(self._frozen) >= MAX_LAYERS and not self._unchanged()

    def freeze(self, options: str) -> list[int]:
        """Turn the current state into a layer, with an empty one on top. Return descriptors of all
        layers for another sandbox, from the lowest on. OSError if the kernel refuses; nothing has
        changed then."""
        if not self._unchanged():
            self._add(options)
        return [kernel.clone_mount(f"/proc/self/fd/{layer}") for layer in self._frozen]

    def _unchanged(self) -> bool:
        """True if nothing was written since the last freeze. Deletions count, since the top layer
        records them."""
        if self._upper is None:
            return False
        top = os.open("upper", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._upper)
        try:
            return not os.listdir(top)
        finally:
            os.close(top)

    def _add(self, options: str) -> None:
        before = self._frozen, self._upper
        if self._upper is None:
            top = os.open(self._root, os.O_PATH | os.O_DIRECTORY)
        else:
            top = os.open("upper", os.O_PATH | os.O_DIRECTORY, dir_fd=self._upper)
            kernel.unmount(self._root)
        self._frozen = [*self._frozen, top]
        try:
            self._cover(options)
        except OSError:
            self._frozen, self._upper = before
            if self._upper is not None:
                self._mount()
            raise

    def adopt(self, layers: list[int], options: str) -> None:
        """Mount the layers of another working copy over this one."""
        for layer in layers:
            kernel.attach_mount(layer, self._root)
        self._frozen = layers
        self._cover(options)

    def _cover(self, options: str) -> None:
        """Mount a new empty layer, and over it the overlay that shows all layers as one."""
        kernel.mount("tmpfs", self._root, "tmpfs", _FLAGS, options)
        try:
            self._upper = os.open(self._root, os.O_PATH | os.O_DIRECTORY)
            for name in ("upper", "work"):
                os.mkdir(name, 0o755, dir_fd=self._upper)
            self._mount()
        except OSError:
            with contextlib.suppress(OSError):
                kernel.unmount(self._root)
            raise

    def _mount(self) -> None:
        lower = ":".join(f"/proc/self/fd/{layer}" for layer in reversed(self._frozen))
        upper = f"/proc/self/fd/{self._upper}"
        options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work,userxattr"
        kernel.mount("overlay", self._root, "overlay", _FLAGS, options)
