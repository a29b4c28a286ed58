"""The host of one program of a run on a node of a Ray cluster, as an actor."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from etude.launch.endings import LAST_LINES
from etude.launch.launcher import CREDENTIALS, STOP_S
from etude.run.process import die_with_parent
from etude.serve import heartbeat


class ProgramHost:
    """The parent of one process. Ray calls its methods from several threads; the process dies with
    the actor, and so with the node."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()
        self._heartbeats = 0

    def address(self) -> tuple[str, int]:
        """The node's address, and a port of it that is free now."""
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def run(self, argv: Sequence[str], environment: dict[str, str]) -> tuple[int, list[str]]:
        """Run the program; return its exit code and its last lines. All lines are in the log of the
        actor."""
        parent = os.getpid()
        program, *arguments = argv
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        kept = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
        self._process = process = subprocess.Popen(
            [sys.executable if program == "python" else program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            pass_fds=(theirs,),
            preexec_fn=lambda: die_with_parent(parent),
            env=kept | environment | {heartbeat.HEARTBEAT_VARIABLE: str(theirs)},
        )
        os.close(theirs)
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()
        if self._stopped.is_set():
            self.stop()
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=LAST_LINES)
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line.rstrip())
        return process.wait(), list(last)

    def heartbeats(self) -> int:
        """The number of heartbeats that the process has sent."""
        return self._heartbeats

    def stop(self) -> None:
        """Stop the program, and return when nothing of it is left."""
        self._stopped.set()
        if (process := self._process) is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        self._signal(signal.SIGKILL)  # including processes left behind in its group
        process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _listen(self, pipe: int) -> None:
        while os.read(pipe, 1 << 16):
            self._heartbeats += 1
        os.close(pipe)
