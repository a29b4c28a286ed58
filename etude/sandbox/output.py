"""Output and input of commands: pipes, terminals, and the tail of an output. Standard library only:
this runs in the first process of a sandbox."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

from etude.sandbox import kernel
from etude.sandbox.limits import TERMINAL_SIZE

TERMINALS = "/dev/pts"
_UNLOCK_TERMINAL, _OPEN_PEER = 0x40045431, 0x5441  # ioctls that `termios` has no names for
_MAX_TERMINALS = 16


class Tail:
    """The tail of a pipe's output; the rest is read and forgotten."""

    def __init__(self, pipe: int, limit: int) -> None:
        self._pipe = pipe
        self._limit = limit
        self._kept = b""
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bool:
        """Read more; False if there is none at the moment."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        self._kept = (self._kept + data)[-self._limit :]
        return bool(data)

    def rest(self) -> bytes:
        """The whole tail, once all writers are gone."""
        while self.read():
            pass
        return self._kept


def open_pipes() -> tuple[int, int, int, int]:
    """Standard input and output of a process, and the host's ends of both. If the host does not
    read, the pipe fills up, and the process blocks."""
    source, into = os.pipe()
    out_of, output = os.pipe()
    return source, output, out_of, into


def open_terminal() -> tuple[int, int, int]:
    """The same three ends with a terminal of this sandbox alone: its master is the host's end."""
    if not os.path.exists(f"{TERMINALS}/ptmx"):  # rarely needed, and large in the kernel
        options = f"newinstance,ptmxmode=0666,mode=0600,max={_MAX_TERMINALS}"
        flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
        kernel.mount("devpts", TERMINALS, "devpts", flags, options)
    master = os.open(f"{TERMINALS}/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, _UNLOCK_TERMINAL, struct.pack("=i", 0))
    peer = fcntl.ioctl(master, _OPEN_PEER, os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(peer, termios.TIOCSWINSZ, TERMINAL_SIZE)
    return peer, peer, master
