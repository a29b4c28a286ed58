"""Regions as network namespaces. All traffic of a region goes through a virtual cable and a bad
link, which the kernel shapes if it has netem, and a proxy otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from etude.launch.launcher import python
from tests.weights.link import Link, linked

WORKER_PORT = 8101
DELAY_S, LOSS, BYTES_PER_S = 0.15, 0.01, 2e6
NETEM = ("netem", "delay", "150ms", "loss", "1%", "rate", "16mbit")


class Region:
    """A namespace with one worker. `near` is our address, `far` the worker's."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        self.name = f"region-{number}"
        self.near, self.far = f"10.78.{number}.1", f"10.78.{number}.2"
        self._netns = f"etude{os.getpid()}r{number}"
        self._ends = [f"et{os.getpid() % 10**6}{end}{number}" for end in "nf"]
        self._stack = stack
        self._links: list[Link] = []
        self._argv: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}
        self.worker: subprocess.Popen[bytes] | None = None
        ip("netns", "add", self._netns)
        stack.callback(ip, "netns", "del", self._netns)
        near, far = self._ends
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self._netns)
        within = ("-n", self._netns)
        ip("addr", "add", f"{self.near}/24", "dev", near)
        ip(*within, "addr", "add", f"{self.far}/24", "dev", far)
        ip("link", "set", near, "up")
        for end in (far, "lo"):
            ip(*within, "link", "set", end, "up")
        self.by_kernel = all(
            subprocess.run(
                ["ip", "netns", "exec", self._netns, *shape] if dev == far else shape,
                capture_output=True,
                check=False,
            ).returncode
            == 0
            for dev in (near, far)
            for shape in [["tc", "qdisc", "add", "dev", dev, "root", *NETEM]]
        )

    def _reached(self, port: int, target_host: str, host: str) -> Link:
        link = self._stack.enter_context(linked(port, target_host, host))
        if not self.by_kernel:
            link.delay_s, link.loss, link.bytes_per_s = DELAY_S, LOSS, BYTES_PER_S
        self._links.append(link)
        return link

    def open(self, store: str, s3_port: int, gateway_port: int, token: str, folder: Path) -> None:
        """Start its worker; store and gateway are on our side."""
        s3 = self._reached(s3_port, "127.0.0.1", self.near)
        s3.break_after = 50_000
        gateway = self._reached(gateway_port, "127.0.0.1", self.near)
        inward = self._reached(WORKER_PORT, self.far, "127.0.0.1")
        self._argv = (
            *("ip", "netns", "exec", self._netns),
            *python("etude.serve.worker", "--store", store, "--region", self.name),
            *("--host", self.far, "--port", str(WORKER_PORT)),
            *("--gateway", f"http://{self.near}:{gateway.port}"),
            *("--advertise", f"http://127.0.0.1:{inward.port}"),
            *("--cache", str(folder / self.name)),
        )
        self._environment = os.environ | {
            "ETUDE_TOKEN": token,
            "AWS_ENDPOINT": f"http://{self.near}:{s3.port}",
        }
        self._log = self._stack.enter_context((folder / f"{self.name}.log").open("ab"))
        self.start()
        self._stack.callback(self.kill)

    def start(self) -> None:
        self.worker = subprocess.Popen(
            self._argv, env=self._environment, stdout=self._log, stderr=self._log
        )

    def kill(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker.wait()

    def stop(self, *, go_on: bool = False) -> None:
        assert self.worker is not None
        self.worker.send_signal(signal.SIGCONT if go_on else signal.SIGSTOP)

    def cut(self, *, mend: bool = False) -> None:
        ip("link", "set", self._ends[0], "up" if mend else "down")

    @property
    def broken(self) -> int:
        """Number of connections to the store that broke during a transfer."""
        return sum(link.broken for link in self._links)


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True, text=True)
