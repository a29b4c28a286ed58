"""Four regions behind bad links (150 ms, lossy, 2 MB/s), with the store on a real S3 server:
workers are killed and stopped, a region is cut off, the gateway is killed. The run goes on, the
ledger balances, all workers serve the same bits, and the faults affect no session's grade
(`make test-hosts`, as root)."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from etude.core.events import EVENTS, AttemptDone
from etude.launch.launcher import free_ports, python
from etude.run.audit import audit
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.runs import Run
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.tensors import root_of
from tests.e2e.regions import Region
from tests.e2e.runs import TINY
from tests.weights.conftest import reached_by, s3_port  # noqa: F401

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(3600)]

SECRET = "a secret of this test, and of nobody else"
EVERY_S = 10.0
CUT_S = 60.0
FAULTS = 12
CUT_AT, MEND_AT = 2, 2 + int(CUT_S / EVERY_S)
GATEWAY_AT = (4, 10)
RECOVERY_S = float(os.environ.get("ETUDE_RECOVERY_S", "inf"))
"""Time after a fault within which rollouts must reach half their rate again: 15 on an idle
machine."""


def config(store: str, policy: Path, isolation: str) -> str:
    common, _, _, rl = TINY.read_text().split("[[stage]]")
    added = f'[model]\npath = "{policy}"\n[sandbox]\nisolation = "{isolation}"\n[tasks]'
    names = [f"region-{number}" for number in range(1, 5)]
    common = common.replace("[tasks]", added).replace("[engine]", f"[engine]\nregions = {names}")
    head = f'store = "{store}"\nheartbeat_timeout_s = 5.0\n'
    return head + common + "[[stage]]" + rl.replace("steps = 4", "steps = 4000")


class Central:
    """Gateway, trainer and controller, close to the store."""

    def __init__(self, store: str, port: int, folder: Path, stack: ExitStack) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder, self._stack = folder, stack
        self.admin = TokenAuthority(SECRET).mint(Scope.ADMIN, "controller", 86_400.0)
        given = ("--store", store)
        self._programs = {
            "gateway": python("etude.serve.gateway", *given, "--port", port, "--await-load"),
            "trainer": python("etude.trainer.trainer", *given),
            "controller": python("etude.run.controller", *given, "--gateway", self.url),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for name in self._programs:
            self.start(name)
        stack.callback(self.end)

    def start(self, name: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("ab"))
        secrets = {"ETUDE_SECRET": SECRET} if name == "gateway" else {"ETUDE_TOKEN": self.admin}
        self.running[name] = subprocess.Popen(
            self._programs[name], env=os.environ | secrets, stdout=log, stderr=log
        )

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def check(self) -> None:
        for name, process in self.running.items():
            said = (self._folder / f"{name}.log").read_text()[-3000:]
            assert process.poll() is None, f"the {name} has ended: {said}"

    def end(self) -> None:
        for name in reversed(self.running):
            self.kill(name)

    def weights(self) -> list[dict[str, object]]:
        asked = urllib.request.Request(
            f"{self.url}/weights", headers={"Authorization": f"Bearer {self.admin}"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            told: list[dict[str, object]] = json.load(answer)
        return told


@pytest.fixture
def regions() -> Iterator[list[Region]]:
    with ExitStack() as stack:
        try:
            yield [Region(number, stack) for number in range(1, 5)]
        except (OSError, subprocess.CalledProcessError) as e:
            pytest.skip(f"needs root, and network namespaces: {e}")


def finished(run: Run) -> list[float]:
    """The times at which rollouts without an error ended."""
    events = run.events("controller", EVENTS).read()[0]
    return [e.t for e in events if isinstance(e.record, AttemptDone) and e.record.error is None]


def wait_for(run: Run, central: Central, count: int) -> None:
    goal = len(finished(run)) + count
    while len(finished(run)) < goal:
        central.check()
        time.sleep(1.0)


def strike(central: Central, regions: list[Region], rng: Random) -> list[float]:
    """Cause a fault every 10 s. Return the time of each."""
    faults, cut = [], regions[-1]
    stopped: Region | None = None
    for number in range(FAULTS):
        began = time.monotonic()
        faults.append(time.time())
        if stopped is not None:
            stopped.stop(go_on=True)
            stopped = None
        if number == CUT_AT:
            cut.cut()
        if number == MEND_AT:
            cut.cut(mend=True)
        victim = rng.choice(regions[:-1])
        if number in GATEWAY_AT:
            central.kill("gateway")
            central.start("gateway")
        elif number % 2:
            victim.kill()
            victim.start()
        else:
            victim.stop()
            stopped = victim
        central.check()
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
    if stopped is not None:
        stopped.stop(go_on=True)
    return faults


def test_the_run_goes_on(
    s3_port: int,  # noqa: F811
    regions: list[Region],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: Path,
    isolation: str,
) -> None:
    seed = int(os.environ.get("ETUDE_SEED", Random().randrange(2**32)))
    print(f"ETUDE_SEED={seed} python -m pytest -m hosts {__file__}; logs in {tmp_path}")
    store = f"{reached_by(s3_port, monkeypatch)}/four/tiny"
    toml, (port,) = tmp_path / "run.toml", free_ports(1)
    toml.write_text(config(store, policy, isolation))
    subprocess.run(python("etude.launch.start", toml, "--store", store), check=True)
    run = Run.open(store, create=False)
    with ExitStack() as stack:
        central = Central(store, port, tmp_path, stack)
        for region in regions:
            token = TokenAuthority(SECRET).mint(Scope.WORKER, region.name, 86_400.0)
            region.open(store, s3_port, port, token, tmp_path)
        wait_for(run, central, 40)
        faults = strike(central, regions, Random(seed))
        wait_for(run, central, 40)
        central.kill("controller")
        roots = same_weights(central, len(regions))
    report(finished(run), faults, regions)

    version, root = roots
    served = Follower(Chain(run.objects)).fetch(version)
    assert root == root_of(served)
    books = audit(run)
    print(books)
    assert books.trained > 0 and version > 0, "nothing was learnt, so nothing was shown"
    assert books.violations == [] and books.lag_max <= books.lag_bound == 1
    assert books.issued == books.trained + sum(books.dropped.values()) + books.in_flight
    found = [t for name in run.groups() for t in run.group(name).trajectories]
    print(Counter(t.status for t in found), Counter(t.error for t in found if t.error))
    # A fault can make a session lose time, but not turns or context.
    assert {t.status for t in found} <= {"done", "truncated", "failed"}, "graded for lost time"
    assert all((t.reward is None) == (t.status == "failed") for t in found)


def same_weights(central: Central, count: int) -> tuple[int, str]:
    """Wait until all workers serve the same version with the same digest, and return both."""
    while True:
        try:
            told = {(each["region"], each["version"], each["root"]) for each in central.weights()}
        except (urllib.error.URLError, TimeoutError):
            told = set()
        versions = {version for _, version, _ in told}
        if len(told) == count and len(versions) == 1:
            (root,) = {root for _, _, root in told}
            (version,) = versions
            return int(str(version)), str(root)
        time.sleep(1.0)


def report(ends: list[float], faults: list[float], regions: list[Region]) -> None:
    """Print the cost of the faults, from the times at which rollouts ended."""
    quiet = [t for t in ends if t < faults[0]]
    before = len(quiet) / (quiet[-1] - quiet[0])
    recovered = [
        next(t for t in ends if t >= fault and rate(ends, t) >= before / 2) - fault
        for fault in faults
    ]
    under = sum(faults[0] <= t < faults[-1] + EVERY_S for t in ends) / (FAULTS * EVERY_S)
    shaped = "netem" if regions[0].by_kernel else "the proxy"
    broken = sum(region.broken for region in regions)
    print(
        f"links by {shaped}, {broken} transfers broken; {before:.2f} rollouts/s before the faults, "
        f"{under:.2f} under them; half the rate again after {[round(s, 1) for s in recovered]} s"
    )
    assert max(recovered) <= RECOVERY_S


def rate(ends: list[float], since: float) -> float:
    return sum(since <= t < since + 5.0 for t in ends) / 5.0
