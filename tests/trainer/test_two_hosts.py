"""A trainer on two hosts by torchrun: two network namespaces joined only by a virtual cable, so
that no traffic uses the loopback. One is killed; the run continues with one, then with two again
(`make test-hosts`, as root)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from etude.core.events import EVENTS, StepDone
from etude.launch.export import OWN_STORE
from etude.launch.launcher import free_ports, python
from etude.run.audit import audit
from etude.store.runs import Run
from tests.e2e.conftest import isolation, policy  # noqa: F401
from tests.e2e.runs import ONE_REGION

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]


class Host:
    """A network namespace with one interface, and the processes in it."""

    def __init__(self, number: int) -> None:
        self.name = f"etude{os.getpid()}h{number}"
        self.interface = f"et{os.getpid() % 10**6}n{number}"
        self.address = f"10.77.0.{number}"

    def open(self, peer: Host | None) -> None:
        ip("netns", "add", self.name)
        if peer is not None:
            cable = ("link", "add", self.interface, "type", "veth", "peer", "name", peer.interface)
            ip(*cable)
            for host in (self, peer):
                ip("link", "set", host.interface, "netns", host.name)
                within = ("-n", host.name)
                ip(*within, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    ip(*within, "link", "set", interface, "up")

    def train(self, store: str, rendezvous: str, log: Path) -> None:
        argv = (
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "100"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "tiny", "--rdzv-endpoint", rendezvous),
            # host names do not resolve in here
            *("--rdzv-conf", f"is_host={rendezvous.startswith(self.address)}"),
            *("--local-addr", self.address, "-m", "etude.trainer.trainer", "--store", store),
        )
        own = {"GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        own |= [OWN_STORE.split("=")]
        with log.open("ab") as out:
            subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | own)

    def worlds(self) -> list[int]:
        """The number of ranks according to each trainer process on this host."""
        found = []
        for pid in ip("netns", "pids", self.name).split():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"etude.trainer.trainer" in line and b"torch.distributed.run" not in line:
                given = dict(each.partition(b"=")[::2] for each in variables)
                found.append(int(given[b"WORLD_SIZE"]))
        return found

    def kill(self) -> None:
        for pid in ip("netns", "pids", self.name).split():
            subprocess.run(["kill", "-9", pid], check=False, stderr=subprocess.DEVNULL)


def ip(*argv: str) -> str:
    return subprocess.run(["ip", *argv], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made = [Host(1), Host(2)]
    try:
        made[0].open(None)
        made[1].open(made[0])
    except (OSError, subprocess.CalledProcessError) as e:
        subprocess.run(["ip", "netns", "del", made[0].name], check=False, capture_output=True)
        pytest.skip(f"needs root, and network namespaces: {e}")
    yield made
    for host in made:
        host.kill()
        ip("netns", "del", host.name)


def test_a_host_is_killed_and_returns(
    hosts: list[Host],
    tmp_path: Path,
    policy: Path,  # noqa: F811
    isolation: str,  # noqa: F811
) -> None:
    added = f'[model]\npath = "{policy}"\n[sandbox]\nisolation = "{isolation}"\n'
    added += "[trainer]\ntimeout_s = 30.0\n[tasks]"
    text = ONE_REGION.replace("steps = 14", "steps = 60").replace("[tasks]", added)
    text = text.replace("[harness]", "[harness]\ntool_delay_s = 0.3")  # so that it lasts
    (tmp_path / "run.toml").write_text(text)
    store, logs = f"file:{tmp_path / 'run'}", tmp_path / "logs"
    logs.mkdir()
    prepare = python("etude.launch.start", tmp_path / "run.toml", "--store", store)
    subprocess.run(prepare, check=True)
    run = Run.open(store, create=False)
    gateway, worker = free_ports(2)
    url = f"http://127.0.0.1:{gateway}"
    given = ("--store", store)
    programs = {
        "gateway": python("etude.serve.gateway", *given, "--port", gateway, "--await-load"),
        "worker": python(
            "etude.serve.worker", *given, "--region", "east", "--port", worker, "--gateway", url
        ),
        "controller": python("etude.run.controller", *given, "--gateway", url),
    }

    def steps() -> int:
        events = run.events("trainer", EVENTS).records()
        return max((each.step for each in events if isinstance(each, StepDone)), default=0)

    def wait_until_trained_by(ranks: int) -> None:
        """Wait until one more step was taken by this many ranks."""
        began = None
        while True:
            worlds = [world for host in hosts for world in host.worlds()]
            if worlds != [ranks] * ranks:
                began = None
            elif began is None:
                began = steps()
            elif steps() > began:
                print(f"step {steps()} by {ranks}", flush=True)
                return
            assert controller.poll() is None, (logs / "controller").read_text()
            time.sleep(0.1)

    with ExitStack() as stack:
        for name, argv in programs.items():
            log = stack.enter_context((logs / name).open("wb"))
            controller = subprocess.Popen(argv, stdout=log, stderr=log)
            stack.callback(controller.wait)
            stack.callback(controller.terminate)
        first, second = hosts
        rendezvous = f"{first.address}:29400"
        for host in hosts:
            host.train(store, rendezvous, logs / host.name)
        wait_until_trained_by(2)
        second.kill()
        wait_until_trained_by(1)
        second.train(store, rendezvous, logs / second.name)
        wait_until_trained_by(2)
        assert controller.wait() == 0, (logs / "controller").read_text()
    audited = audit(run)
    assert audited.finished and audited.violations == [] and audited.in_flight == 0
