"""A worker in front of users that is lent to RL while users leave it idle, and comes back.

    python -m etude.launch.lender --store USERS_RUN --region here --port 8101 --lent-port 8102
        --gateway http://127.0.0.1:8100

`[engine.lend]` of the users' run sets the run that it is lent to, and the hours; `core.lending`
decides. The machine is what changes hands: the worker is drained, its process ends, and another one
is started that loads the other run's weights whole and joins that run's gateway, at a port of its
own, so that neither gateway ever sends a request to the wrong model. On the way back RL's requests
are aborted; its gateway sends them elsewhere, and no session is graded for that.

ETUDE_TOKEN is an admin's token of the users' gateway, to query its load and to drain the worker;
ETUDE_LENT_TOKEN is a worker's token of the other gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from etude.core.errors import EtudeError
from etude.core.lend_config import LendConfig
from etude.core.lending import LoanPolicy, UsersLoad
from etude.launch.launcher import CREDENTIALS, STOP_S, python
from etude.run.process import die_with_parent, run_process
from etude.serve.process import TOKEN_VARIABLE, authorization, log_to_stderr, token
from etude.store.runs import Run

LENT_TOKEN_VARIABLE = "ETUDE_LENT_TOKEN"
LOOK_S = 1.0
UNKNOWN = {"state": "unknown", "active": 0}
"""The status of a worker that a shard does not know."""


class Lender:
    """One worker process at a time, the users' or the lent one."""

    def __init__(
        self, http: aiohttp.ClientSession, lend: LendConfig, *, store: str, gateway: str,
        region: str, port: int, lent_port: int, host: str, slots: int,
    ) -> None:  # fmt: skip
        assert lend.run is not None and lend.gateway is not None
        self._http = http
        self._shards = gateway.split(",")
        self._keep = lend.keep
        self._url = f"http://{host}:{port}"
        own = ("--region", region, "--host", host)
        module = "etude.serve.worker"
        self._programs = {
            False: python(module, "--store", store, "--gateway", gateway, "--port", port, *own),
            True: python(
                module, "--store", lend.run, "--gateway", lend.gateway, "--port", lent_port, *own
            ),
        }
        self._policy = LoanPolicy(
            slots=slots,
            keep=lend.keep,
            max_load=lend.max_load,
            max_ttft_s=lend.max_ttft_s,
            calm_s=lend.calm_s,
            return_s=lend.return_s,
            hours=lend.hours,
        )
        self._lent = False
        self._refused = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await self._serve_users()
            while True:
                await self._look()
                await asyncio.sleep(LOOK_S)
        finally:
            await self._stop()

    async def _look(self) -> None:
        await self._keep_running()
        status = await self._status()
        users = _users_load(status)
        if self._lent:
            if self._policy.recalls(time.time(), users):
                began = time.monotonic()
                await self._stop()
                away_s = await self._serve_users()
                took_s = time.monotonic() - began
                self._policy.returned(took_s - away_s)
                log_to_stderr(f"back with the users after {took_s:.1f} s")
        elif self._state(status) == "draining":  # an answer to `_empty` was lost
            await self._drain(draining=False)
        elif users is not None and self._policy.lends(time.time(), users) and await self._empty():
            await self._stop()
            self._lent = True
            await self._start()
            log_to_stderr("lent to RL")

    async def _serve_users(self) -> float:
        """Start the users' worker, and return when the users' gateway sends requests to it again.
        The result is the number of seconds of that time in which the gateway itself was away."""
        self._lent = False
        await self._start()
        away_s = 0.0
        while True:
            began = time.monotonic()
            status = await self._status()
            if status is not None and await self._is_back():
                return away_s
            await asyncio.sleep(LOOK_S / 4)
            await self._keep_running()
            if status is None:
                away_s += time.monotonic() - began

    async def _is_back(self) -> bool:
        # The gateway may still know the previous worker: it must send no requests to its port
        # before the new one is up.
        return (
            await self._ask("GET", "/status", at=self._url) is not None
            and await self._drain(draining=False) is not None
            and self._state(await self._status()) == "live"
        )

    async def _keep_running(self) -> None:
        assert self._process is not None
        if self._process.returncode is not None:
            log_to_stderr(f"the worker ended with code {self._process.returncode}; restarting it")
            await self._start()

    async def _empty(self) -> bool:
        """Drain the worker. Returns False, with everything as before, if it must stay or users come
        back."""
        while (active := await self._drain(draining=True)) is not None:
            if active == 0:
                return True
            if self._policy.recalls(time.time(), _users_load(await self._status())):
                break
            await asyncio.sleep(LOOK_S / 4)
        await self._drain(draining=False)
        return False

    async def _start(self) -> None:
        assert self._process is None or self._process.returncode is not None
        parent = os.getpid()
        kept = {name: value for name, value in os.environ.items() if name not in CREDENTIALS}
        kept.pop(LENT_TOKEN_VARIABLE, None)
        given = os.environ.get(LENT_TOKEN_VARIABLE) if self._lent else token()
        self._process = await asyncio.create_subprocess_exec(
            *self._programs[self._lent],
            env=kept | ({TOKEN_VARIABLE: given} if given else {}),
            preexec_fn=lambda: die_with_parent(parent),
        )

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def _status(self) -> dict[str, Any] | None:
        """The combined status of all shards of the gateway; None if one does not answer, since the
        users' load is then not known."""
        told = await asyncio.gather(*(self._ask("GET", "/status", at=url) for url in self._shards))
        answers = [each for each in told if each is not None]
        return join_shards(answers) if len(answers) == len(told) else None

    def _state(self, status: dict[str, Any] | None) -> str | None:
        """The state of our worker at the gateway; None if it is not known there."""
        return None if status is None else status["workers"].get(self._url, {}).get("state")

    async def _drain(self, *, draining: bool) -> int | None:
        """Start or stop draining. Returns the number of requests that the worker is still working
        on; None if the gateway does not confirm. One shard tells the others, and answers for
        itself."""
        asked = {"url": self._url, "draining": draining, "keep": self._keep}
        if await self._ask("POST", "/workers/drain", asked) is None:
            return None
        status = await self._status()
        if status is None or self._url not in status["workers"]:
            return None
        return int(status["workers"][self._url]["active"])

    async def _ask(
        self, method: str, path: str, body: Any = None, at: str | None = None
    ) -> dict[str, Any] | None:
        """Send a request. `at`: the server, if it is not the gateway's first shard."""
        url = at or self._shards[0]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._http.request(method, url + path, json=body) as response:
                # Go on serving users: an expired token is no reason to leave them.
                if response.status in (401, 403) and not self._refused:
                    self._refused = True
                    log_to_stderr(
                        f"{url} refuses {path}, so nothing can be lent: set {TOKEN_VARIABLE} to "
                        "an admin token of the users' gateway, and start this again"
                    )
                if response.ok:
                    told: dict[str, Any] = await response.json()
                    return told
        return None


def join_shards(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The status of all shards as one: the sum of the requests; live only for a worker that is live
    at all of them; and the worst of the users' p99."""
    names = {url for status in told for url in status["workers"]}
    workers = {url: [status["workers"].get(url, UNKNOWN) for status in told] for url in names}
    waits = [status["users_ttft_p99_s"] for status in told]
    return {
        "workers": {
            url: {
                "state": next((e["state"] for e in each if e["state"] != "live"), "live"),
                "active": sum(e["active"] for e in each),
            }
            for url, each in workers.items()
        },
        "users_ttft_p99_s": max((wait for wait in waits if wait is not None), default=None),
    }


def _users_load(status: dict[str, Any] | None) -> UsersLoad | None:
    if status is None:
        return None
    workers = [each for each in status["workers"].values() if each["state"] == "live"]
    active = sum(each["active"] for each in status["workers"].values())
    return UsersLoad(len(workers), active, status["users_ttft_p99_s"])


async def lend_worker(
    *, store: str, gateway: str, region: str, port: int, lent_port: int, host: str
) -> None:
    engine = Run.open(store, create=False).config().engine
    if engine.lend is None or engine.lend.run is None:
        raise EtudeError(
            f"{store} lends no workers: set [engine.lend] run to the run that borrows them"
        )
    headers, limit = authorization(token()), aiohttp.ClientTimeout(total=10 * LOOK_S)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as http:
        await Lender(
            http, engine.lend, store=store, gateway=gateway, region=region, port=port,
            lent_port=lent_port, host=host, slots=engine.max_num_seqs,
        ).run()  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m etude.launch.lender",
        description="A worker for users that is lent to RL when they leave it idle.",
    )
    parser.add_argument("--store", required=True, help="the run whose model serves the users")
    parser.add_argument(
        "--gateway",
        required=True,
        help="the users' gateway; if it has several shards, all of them as URL,URL",
    )
    parser.add_argument("--region", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="port of the worker for users")
    parser.add_argument("--lent-port", type=int, required=True, help="port of the lent worker")
    a = parser.parse_args()
    return run_process(
        lambda: lend_worker(
            store=a.store,
            gateway=a.gateway,
            region=a.region,
            port=a.port,
            lent_port=a.lent_port,
            host=a.host,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
