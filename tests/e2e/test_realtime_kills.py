"""Real-time RL with its real processes, killed in every state twice: `make test-realtime`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from etude.bench.realtime import PRODUCTION, RUN, Product
from etude.core.errors import EtudeError
from etude.core.ledger import Batched
from etude.launch.launcher import free_ports
from etude.realtime.cycle import Compare
from etude.realtime.population import Population
from etude.run.audit import audit
from etude.run.realtime import RealtimeLoop
from etude.run.realtime_process import open_loop
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority
from etude.store.realtime import TrafficLog
from etude.store.runs import Run

SECRET = "s" * 64
KILLS = 2
STATES = {"Collect", "AwaitVersion", "Evaluate", "canary", "promote"}
ASKING = 4


def opened(store: Path) -> RealtimeLoop | None:
    """To look at the store with; None if nothing is there yet."""
    try:
        run = Run.open(str(store), create=False)
        return open_loop(run, run.config())
    except EtudeError:
        return None


def state(loop: RealtimeLoop) -> str:
    """What the loop does now, as anybody can see in the store."""
    if loop.traffic.newest() is None:
        return "Start"
    action = loop.next()
    return loop.last.action if isinstance(action, Compare) else type(action).__name__


@contextlib.contextmanager
def realtime(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-P", "-m", "etude", "realtime", "run.toml", "--dir", "songs"]
    with (folder / "out.log").open("ab") as log:
        child = subprocess.Popen(
            argv, cwd=folder, env=os.environ | {SECRET_VARIABLE: SECRET}, stdout=log, stderr=log
        )
    try:
        yield child
    finally:
        child.kill()  # its children die with it
        child.wait()


@pytest.mark.realtime
async def test_killed_in_every_state_twice(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "run.toml").write_text(RUN.replace("PORT", str(port)))
    (tmp_path / "production.toml").write_text(PRODUCTION)
    token = TokenAuthority(SECRET).mint(Scope.ADMIN, "product", 86_400.0)
    users = Product(f"http://127.0.0.1:{port}", token, Population.of(2000, seed=1, saboteurs=0.05))
    store, killed = tmp_path / "songs", Counter[str]()
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:

        async def keep_asking() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    await users.use(http)

        asking = [group.create_task(keep_asking()) for _ in range(ASKING)]
        while set(killed) < STATES or min(killed.values()) < KILLS:
            with realtime(tmp_path) as child:
                loop, now = None, "Start"
                while now not in STATES or killed[now] >= KILLS:
                    assert child.poll() is None, (tmp_path / "out.log").read_text()[-2000:]
                    await asyncio.sleep(0.05)
                    loop = loop or await asyncio.to_thread(opened, store)
                    now = await asyncio.to_thread(state, loop) if loop else "Start"
                killed[now] += 1
        for task in asking:
            task.cancel()
    run = Run.open(str(store), create=False)
    told = audit(run)
    assert not told.violations and told.trained
    batched = [e for e in run.ledger.records() if isinstance(e, Batched)]
    samples = [sample for entry in batched for sample in entry.samples]
    assert len(samples) == len(set(samples)), "a session is trained on twice"
    changes = TrafficLog(run.objects).changes()
    words = Counter((each.action, each.version, each.traffic.share) for each in changes)
    assert all(count == 1 for count in words.values()), words
    loop = open_loop(run, run.config())
    found = loop.sort_out(loop.last.traffic.version, loop.last.traffic)
    known = {*loop.ledger.samples(), *(entry.group for entry in found.issued)}
    assert known == {outcome.id for outcome in loop.outcomes()}, "what a user said is lost"
