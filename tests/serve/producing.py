"""A gateway in production mode over a worker whose model follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from etude.serve.access import Access
from etude.serve.fake import Scripted
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.production.config import ProductionConfig
from etude.serve.production.routes import Production
from etude.serve.router import Router
from etude.serve.worker import Worker
from etude.serve.worker_protocol import JoinRequest
from etude.store.objects import Objects
from etude.store.production import ProductionStore
from tests.serve.conftest import served
from tests.serve.scripted import FILES, TOKENIZER, answers

KEY = bytes(range(32))
ALICE = {"X-Etude-User": "alice@example.com", "X-Etude-Consent": "granted"}


class ScriptedEngine(Scripted):
    """An engine with the members that a worker needs."""

    tokenizer = TOKENIZER
    max_context = 4096


@dataclass
class Produced:
    """A running gateway in production mode, and a client of it."""

    http: aiohttp.ClientSession
    url: str
    store: ProductionStore
    mode: Production

    async def ask(
        self, messages: Sequence[dict[str, Any]], session: str = "one", **more: Any
    ) -> Any:
        headers = ALICE | more.pop("headers", {}) | {"X-Etude-Session": session}
        body = {"messages": list(messages), "max_tokens": 500} | more
        async with self.http.post(
            f"{self.url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            if more.get("stream"):
                return (await response.read()).decode()
            answer = await response.json()
            assert response.status == 200, answer
            return answer

    async def say(self, text: str, session: str = "one", **more: Any) -> Any:
        return await self.ask([{"role": "user", "content": text}], session, **more)

    async def call(
        self, method: str, path: str, body: Any = None, headers: Any = None
    ) -> tuple[int, Any]:
        async with self.http.request(
            method, self.url + path, json=body, headers=ALICE if headers is None else headers
        ) as response:
            return response.status, await response.json()

    async def feedback(self, headers: Any = None, **event: Any) -> tuple[int, Any]:
        return await self.call("POST", "/v1/feedback", event, headers)


@asynccontextmanager
async def production(
    http: aiohttp.ClientSession,
    directory: str,
    texts: Sequence[str],
    access: Access | None = None,
    **config: Any,
) -> AsyncIterator[Produced]:
    engine = ScriptedEngine(answers(texts))
    worker = Worker(engine, FILES, "east")  # type: ignore[arg-type]
    objects = Objects.open(directory)
    gateway = Gateway(Router(http), objects, FILES, max_context=4096)
    store = ProductionStore(objects)
    settings = ProductionConfig(user_key_file="", **config)
    mode = Production(gateway.model, gateway.router, store, settings, KEY, "mine")
    await mode.refresh()
    async with (
        served(create_app(worker.routes(), None)) as at,
        served(create_app([*gateway.fleet_routes(), *mode.routes()], access)) as url,
    ):
        await gateway.router.join(JoinRequest(url=at, region="east", version=0))
        yield Produced(http, url, store, mode)
