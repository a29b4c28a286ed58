"""Real processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from etude.core.config import parse
from etude.serve.process import authorization
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.runs import Run
from tests.serve.client import post, status, until_up
from tests.serve.conftest import RUN, Store

SECRET = "the secret of a gateway that is a process"


class Processes:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.running: list[subprocess.Popen[str]] = []

    def start(
        self, module: str, *arguments: str, port: str = "0", **environment: str
    ) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", module, "--store", self.store.url, "--port", port, *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.running.append(child)
        return child


def url(child: subprocess.Popen[str]) -> str:
    """The URL that a server prints; waits until it does."""
    assert child.stdout is not None
    return child.stdout.readline().rpartition(" ")[2].strip()


@pytest.fixture
def processes(store: Store) -> Iterator[Processes]:
    started = Processes(store)
    yield started
    for child in started.running:
        child.kill()
        child.communicate()


async def test_a_request_survives_its_worker(
    processes: Processes, http: aiohttp.ClientSession
) -> None:
    """Each process gets the token that it needs, and no other."""
    Run(processes.store.objects).put_config(parse(f"heartbeat_timeout_s = 3.0\n{RUN}"))
    gateway = url(processes.start("etude.serve.gateway", ETUDE_SECRET=SECRET))
    authority = TokenAuthority(SECRET)
    http.headers.update(authorization(authority.mint(Scope.ADMIN, "", 3600.0)))

    def worker(region: str) -> subprocess.Popen[str]:
        token = authority.mint(Scope.WORKER, region, 3600.0)
        where = ("--region", region, "--gateway", gateway)
        return processes.start("etude.serve.worker", *where, ETUDE_TOKEN=token)

    east, west = worker("east"), worker("west")
    await post(http, f"{gateway}/load", {"version": 0})
    await until_up(http, gateway, 2)
    asked = {
        "prompt": [1, 2, 3],
        "max_tokens": 20,
        "seed": 1,
        "stop_token_ids": [],
        "return_token_ids": True,
    }
    expected = (await post(http, f"{gateway}/v1/completions", asked))["choices"][0]["token_ids"]

    # Stopped rather than killed: its connections stay open, but it is silent.
    east.send_signal(signal.SIGSTOP)
    asking = [post(http, f"{gateway}/v1/completions", asked) for _ in range(8)]
    answers = await asyncio.gather(*asking)
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 8
    assert "east" in (await status(http, gateway))["silent"]
    east.send_signal(signal.SIGCONT)
    await until_up(http, gateway, 2)

    # Stopped first, so that half of the requests are certainly under way when it dies.
    east.send_signal(signal.SIGSTOP)
    waiting = {
        asyncio.create_task(post(http, f"{gateway}/v1/completions", asked)) for _ in range(8)
    }
    pending = waiting
    while len(pending) > 4:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    east.kill()
    answers = await asyncio.gather(*waiting)
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected] * 8
    assert (await status(http, gateway))["regions"].keys() == {"west"}

    # A worker that restarts has no weights. It is up only once it serves the same version as the
    # others.
    await post(http, f"{gateway}/load", {"version": 1})
    again = worker("east")
    await until_up(http, gateway, 2)
    assert {region["version"] for region in (await status(http, gateway))["regions"].values()} == {
        1
    }

    for child in (processes.running[0], west, again):
        child.terminate()
        assert child.communicate()[1] == ""
        assert child.returncode == 0


@pytest.mark.parametrize(("module", "more"), [("gateway", []), ("worker", ["--region", "east"])])
def test_a_port_in_use_is_one_clear_message(
    processes: Processes, module: str, more: list[str]
) -> None:
    port = url(processes.start("etude.serve.gateway")).rpartition(":")[2]
    second = processes.start(f"etude.serve.{module}", *more, port=port)
    errors = second.communicate()[1]
    assert (second.returncode, errors.count("\n")) == (2, 1)
    assert f"127.0.0.1:{port}" in errors


def test_a_store_without_a_model_is_one_clear_message(processes: Processes) -> None:
    processes.store.url = processes.store.url + "/nothing"
    child = processes.start("etude.serve.gateway")
    errors = child.communicate()[1]
    assert (child.returncode, errors.count("\n")) == (2, 1)
