"""The first process of a virtual machine: it opens a sandbox in namespaces for the host, and serves
it over the port that is its standard input and output (`machine` has the lines).

The machine is one wall, and inside it are all the walls of `namespaces`: commands in here are
separated from this process as they would be from a host, with the same limits. Standard library
only.
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
"""Directory for temporary files; it is in memory, like everything writable in here."""
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207


class VirtualMachine(NestedMachine):
    """The server of one sandbox, of a pool that is up before the machine is saved for the first
    time."""

    def hello(self, told: dict[str, Any]) -> None:
        """Set the clock and reseed the random number generator: a restored machine has the time of
        its snapshot, and would draw the same random numbers as all others from it."""
        time.clock_settime(time.CLOCK_REALTIME, told["now"])
        drawn = base64.b64decode(told["chance"])
        with open("/dev/urandom", "wb", buffering=0) as source:
            added = struct.pack("ii", 8 * len(drawn), len(drawn)) + drawn
            fcntl.ioctl(source, _RNDADDENTROPY, added)
            fcntl.ioctl(source, _RNDRESEEDCRNG)


async def _serve(mounts: Sequence[Mount]) -> None:
    await VirtualMachine(NamespaceSandboxPool(PATIENCE_S, mounts)).serve()


def main(places: Sequence[str]) -> None:
    """`places`: pairs of the path of a host's directory in this machine, and its path in
    sandboxes."""
    os.environ.clear()
    os.environ["TMPDIR"] = _TEMPORARY
    os.mkdir(_TEMPORARY)
    os.chdir("/")
    mounts = [Mount(*pair) for pair in zip(places[::2], places[1::2], strict=True)]
    asyncio.run(_serve(mounts))
    os._exit(0)
