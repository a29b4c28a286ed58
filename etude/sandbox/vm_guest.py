"""The first process of a virtual machine: it opens a sandbox in namespaces when the host asks, and
serves it over the port that is its standard input and output (`machine` has the lines).

The machine is one wall, and within it stand all those of `namespaces`: what runs in here is as far
from this process as it would be from a host, and has the same limits. Standard library only.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import struct
import time
from collections.abc import Sequence
from typing import Any

from etude.sandbox.mounts import Mount
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.sandbox.nested import PATIENCE_S, NestedMachine

_TEMPORARY = "/run/tmp"
"""In memory, as all that can be written to in here."""
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207


class VirtualMachine(NestedMachine):
    """One sandbox, of a pool that is up before the machine is saved for the first time."""

    def hello(self, told: dict[str, Any]) -> None:
        """A machine that was restored has the time at which it was saved, and would draw the same
        random numbers as all others that come from it."""
        time.clock_settime(time.CLOCK_REALTIME, told["now"])
        drawn = base64.b64decode(told["chance"])
        with open("/dev/urandom", "wb", buffering=0) as source:
            added = struct.pack("ii", 8 * len(drawn), len(drawn)) + drawn
            fcntl.ioctl(source, _RNDADDENTROPY, added)
            fcntl.ioctl(source, _RNDRESEEDCRNG)


async def _serve(mounts: Sequence[Mount]) -> None:
    await VirtualMachine(NamespaceSandboxPool(PATIENCE_S, mounts)).serve()


def main(places: Sequence[str]) -> None:
    """`places`: pairs of where a directory of the host is in here, and where sandboxes are to show
    it."""
    os.environ.clear()
    os.environ["TMPDIR"] = _TEMPORARY
    os.mkdir(_TEMPORARY)
    os.chdir("/")
    mounts = [Mount(*pair) for pair in zip(places[::2], places[1::2], strict=True)]
    asyncio.run(_serve(mounts))
    os._exit(0)
