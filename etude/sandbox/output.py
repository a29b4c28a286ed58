"""What goes out of commands and into them: pipes, terminals, and the end of what was said. Standard
library only: this runs in the first process of a sandbox."""

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
    """The last of what comes out of a pipe; the rest is read and forgotten."""

    def __init__(self, pipe: int, limit: int) -> None:
        self._pipe = pipe
        self._limit = limit
        self._kept = b""
        os.set_blocking(pipe, False)

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bool:
        """False if there is no more at the moment."""
        try:
            data = os.read(self._pipe, 1 << 16)
        except BlockingIOError:
            return False
        self._kept = (self._kept + data)[-self._limit :]
        return bool(data)

    def rest(self) -> bytes:
        """All of it, once nobody is left who writes."""
        while self.read():
            pass
        return self._kept


def open_pipes() -> tuple[int, int, int, int]:
    """Standard input and output of a process, and the host's ends of both. What nobody reads fills
    the pipe, and then the process waits."""
    source, into = os.pipe()
    out_of, output = os.pipe()
    return source, output, out_of, into


def open_terminal() -> tuple[int, int, int]:
    """The same as a terminal of this sandbox alone, whose other end is one."""
    if not os.path.exists(f"{TERMINALS}/ptmx"):  # most never need it, and it is much of the kernel
        options = f"newinstance,ptmxmode=0666,mode=0600,max={_MAX_TERMINALS}"
        flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
        kernel.mount("devpts", TERMINALS, "devpts", flags, options)
    master = os.open(f"{TERMINALS}/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, _UNLOCK_TERMINAL, struct.pack("=i", 0))
    peer = fcntl.ioctl(master, _OPEN_PEER, os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(peer, termios.TIOCSWINSZ, TERMINAL_SIZE)
    return peer, peer, master
