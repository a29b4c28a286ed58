"""Real-time RL with its real processes, killed twice in every state; and deletion of a user
(`make test-realtime`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from etude.bench import _realtime_setup
from etude.bench.realtime import Product
from etude.core.consent import pseudonym
from etude.core.errors import EtudeError
from etude.core.ledger import Batched
from etude.core.updates import is_of_user
from etude.launch.launcher import free_ports
from etude.realtime.cycle import Compare
from etude.realtime.population import Population
from etude.run.audit import audit
from etude.run.realtime import RealtimeLoop
from etude.run.realtime_process import open_loop
from etude.serve.production.config import read_user_key
from etude.serve.production.place import Place
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority
from etude.store.realtime import TrafficLog
from etude.store.runs import Run

SECRET = "s" * 64
KILLS = 2
STATES = {"Collect", "AwaitVersion", "Evaluate", "canary", "promote"}
ASKING = 4
FIRST = 2
"""The version of the first update; version 1 is that of sft."""


def opened(store: Path) -> RealtimeLoop | None:
    """A loop for reading the store; None if the store does not exist yet."""
    try:
        run = Run.open(str(store), create=False)
        return open_loop(run, run.config())
    except EtudeError:
        return None


def state(loop: RealtimeLoop) -> str:
    """The current state of the loop, from the store."""
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


def write_run(folder: Path) -> str:
    """Write the files of a run with frequent updates. Return the URL of its gateway."""
    (port,) = free_ports(1)
    _realtime_setup.write_run(folder, seed=0, port=port)
    quick = (folder / "run.toml").read_text()
    for ours, theirs in (
        ("max_epochs = 1", "max_epochs = 6"),
        ("min_sessions = 150", "min_sessions = 1500"),
        ("margin = 0.3", "margin = 0.1"),
        ("simulated_share = 0.2\n[realtime.gate]", "[realtime.gate]"),
    ):
        assert theirs in quick
        quick = quick.replace(theirs, ours)
    (folder / "run.toml").write_text(quick)
    return f"http://127.0.0.1:{port}"


def product(url: str, population: Population) -> Product:
    return Product(url, TokenAuthority(SECRET).mint(Scope.ADMIN, "product", 86_400.0), population)


@pytest.mark.realtime
async def test_killed_in_every_state_twice(tmp_path: Path) -> None:
    users = product(write_run(tmp_path), Population.of(2000, seed=1, saboteurs=0.05))
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
    entered = filter(is_of_user, loop.ledger.samples())
    known = {*entered, *(entry.group for entry in found.issued)}
    sessions, said = Place(tmp_path / "production.toml", run.objects.url).read()
    assert known == {f"{one.user}.{one.session}" for one in sessions.sessions}
    counted = [event for one in loop.users.figures() for event in one.events]
    heard = [event.event for events in said.by_answer.values() for event in events]
    assert sorted(counted) == sorted(heard), "what a user said is lost"


async def until_batched(store: Path, step: int, child: subprocess.Popen[bytes]) -> Run:
    while True:
        assert child.poll() is None, (store.parent / "out.log").read_text()[-2000:]
        with contextlib.suppress(EtudeError):
            run = Run.open(str(store), create=False)
            if step in await asyncio.to_thread(run.batches):
                return run
        await asyncio.sleep(0.5)


@pytest.mark.realtime
async def test_a_deleted_user_is_in_no_later_batch_and_status_says_what_has_seen_them(
    tmp_path: Path,
) -> None:
    url, population = write_run(tmp_path), Population.of(800, seed=1)
    users, store = product(url, population), tmp_path / "songs"
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:

        async def keep_asking() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    await users.use(http)

        with realtime(tmp_path) as child:
            asking = [group.create_task(keep_asking()) for _ in range(ASKING)]
            run = await until_batched(store, FIRST, child)
            key = read_user_key(tmp_path / "user.key", create=False)
            names = {pseudonym(user.id, key): user for user in population.users}
            gone = run.batch(FIRST).rows[0].sample.partition(".")[0]
            left = tuple(user for user in population.users if user is not names[gone])
            users = product(url, replace(population, users=left))
            headers = {"Authorization": f"Bearer {users.token}", "X-Etude-User": names[gone].id}
            async with http.delete(f"{url}/v1/users", headers=headers) as response:
                assert response.status == 200, await response.text()
            await until_batched(store, FIRST + 1, child)
            for task in asking:
                task.cancel()
    rows = [row for step in (FIRST, FIRST + 1) for row in run.batch(step).rows]
    assert not any(row.sample.startswith(gone) for row in rows)
    assert any(row.sample.startswith(f"s{FIRST:06d}-") for row in rows), "no rollout of a task"
    assert [key for key in run.objects.list("production") if gone in key] == [
        f"production/tombstones/{gone}"
    ]
    argv = [sys.executable, "-P", "-m", "etude", "realtime", "status", str(store)]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert f"deleted user {gone}: seen by versions {FIRST}" in said
    assert not audit(run).violations
