"""A worker moves from the users to RL and back while users send requests all the time: no answer is
lost (`make test-hosts`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from etude.core.lend_config import LendConfig
from etude.launch.launcher import free_ports
from etude.launch.lender import Lender
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from tests.serve.client import converse, post, status, until_up, versions
from tests.serve.conftest import Store, http, served, worker  # noqa: F401

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]

ASKED = {"prompt": [1, 2, 3], "max_tokens": 30, "stop_token_ids": [], "return_token_ids": True}
SLOTS = 8


@asynccontextmanager
async def gateway_of(store: Store, session: aiohttp.ClientSession) -> AsyncIterator[str]:
    made = Gateway(Router(session, 0, 60.0), store.objects, store.files, max_context=256)
    async with served(create_app(made.routes(), None)) as url:
        yield url


class Users:
    """Users who send requests again and again, each with a deterministic answer."""

    def __init__(self, session: aiohttp.ClientSession, gateway: str) -> None:
        self._session, self._url = session, f"{gateway}/v1/completions"
        self._asking: list[asyncio.Task[None]] = []
        self.answers: list[tuple[int, list[int]]] = []

    async def ask(self, seed: int) -> list[int]:
        answer = await post(self._session, self._url, ASKED | {"seed": seed})
        return list(answer["choices"][0]["token_ids"])

    def come(self, count: int, pause_s: float = 0.0) -> None:
        async def keep_asking(seed: int) -> None:
            while True:
                self.answers.append((seed, await self.ask(seed)))
                await asyncio.sleep(pause_s)

        first = len(self._asking)
        self._asking += [asyncio.create_task(keep_asking(first + n)) for n in range(count)]

    async def go(self) -> None:
        for task in self._asking:
            task.cancel()
        for task in self._asking:  # raises if a request was refused
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_a_hand_over_and_back_loses_no_request_of_a_user(
    tmp_path: Path,
    http: aiohttp.ClientSession,  # noqa: F811
) -> None:
    theirs = Store(tmp_path / "users", versions=(0,))
    ours = Store(tmp_path / "rl", versions=(5,), intermediate_size=40)
    port, lent_port = free_ports(2)
    async with (
        gateway_of(theirs, http) as users_url,
        gateway_of(ours, http) as rl_url,
        worker(theirs, "here", users_url),
    ):
        await post(http, f"{rl_url}/load", {"version": 5})
        await until_up(http, users_url, 1)
        lend = LendConfig(
            run=ours.url, gateway=rl_url, max_load=0.8, calm_s=0.1, return_s=1.0, max_ttft_s=1000.0
        )
        lender = Lender(
            http, lend, store=theirs.url, gateway=users_url, region="here", port=port,
            lent_port=lent_port, host="127.0.0.1", slots=SLOTS,
        )  # fmt: skip
        users = Users(http, users_url)
        expected = [await users.ask(seed) for seed in range(14)]
        users.come(2, pause_s=0.1)
        lending = asyncio.create_task(lender.run())
        await until_up(http, rl_url, 1)
        before = len(users.answers)
        await converse(http, rl_url, "s", turns=2)
        assert await versions(http, rl_url, "s") == {5}
        assert (await status(http, users_url))["up"] == 1
        users.come(12)
        await until_up(http, users_url, 2)
        await users.go()
        assert (await status(http, rl_url))["workers"].keys() == {f"http://127.0.0.1:{lent_port}"}
        lending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lending
    assert len(users.answers) > before > 0
    assert all(tokens == expected[seed] for seed, tokens in users.answers)
