"""The dashboard of a run: no process until the first visitor, and none after the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from etude.launch.dashboard import _visited, dashboard
from etude.store.runs import Run
from tests.dash.recorded_store import write_run


def children() -> set[int]:
    """Child processes of all threads of this process; a thread may end between the listing and the
    look."""
    found: set[int] = set()
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, (thread / "children").read_text().split()))
    return found


def visit(link: str, token: str) -> object:
    request = urllib.request.Request(f"{link}/api/runs", headers={"Authorization": token})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


async def test_it_starts_with_its_first_visitor_and_ends_with_the_run(tmp_path: Path) -> None:
    write_run(Run.open(f"file:{tmp_path}/lr=1,seed=2"))
    before = children()
    async with dashboard(f"file:{tmp_path}/lr=1,seed=2", tmp_path / "new" / "logs") as whole:
        link, _, token = whole.partition("/#token=")
        await asyncio.sleep(0)
        assert children() == before
        found = await asyncio.to_thread(visit, link, f"Bearer {token}")
        assert isinstance(found, dict) and found["runs"][0]["name"] == "lr=1_seed=2"
        started = children() - before
        assert len(started) == 1
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await asyncio.to_thread(visit, link, "Bearer guessed")
    assert not started & children()
    with pytest.raises(OSError), contextlib.closing(urllib.request.urlopen(link)):
        pass


async def test_visitors_are_looked_for_until_one_is_there() -> None:
    """Nothing accepts connections here: a loop that went on looking would do nothing else."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        looking = asyncio.create_task(_visited(listener))
        await asyncio.sleep(0)
        with socket.create_connection(listener.getsockname()):
            await looking
            assert not loop.remove_reader(listener)
        looking = asyncio.create_task(_visited(listener))
        await asyncio.sleep(0)
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        assert not loop.remove_reader(listener)
