"""Servers in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.types import ASGIApp

from etude.core.config import parse
from etude.engine.engine import Engine
from etude.model.files import hf_state_dict
from etude.model.transformer import ModelConfig, Transformer
from etude.serve import process
from etude.serve.engine_thread import EngineThread
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.worker import Worker, keep_joined
from etude.store.objects import Objects
from etude.store.runs import Run
from etude.weights.follow import fetch
from etude.weights.publish import publish
from tests.serve.client import post, until_up
from tests.small_model import sharp, small_files


@asynccontextmanager
async def served(app: ASGIApp, port: int = 0) -> AsyncIterator[str]:
    listener = process.bind("127.0.0.1", port, None)
    url = process.url_of(listener)
    async with process.serving(app, listener):
        yield url


RUN = """
name = "tiny"
[engine]
regions = ["east", "west"]
[[stage]]
kind = "rl"
steps = 1
"""


class Store:
    """A run's store with a tiny model in a few versions."""

    def __init__(self, path: Path, *, versions: Sequence[int] = (0, 1, 2), **shape: Any) -> None:
        """`shape`: fields of the model config that differ from the tiny model's."""
        self.url = f"file:{path}"
        self.objects = Objects.open(f"file:{path}")
        Run(self.objects).put_config(parse(RUN))
        self.files = small_files()
        config = replace(ModelConfig.from_json(self.files["config.json"]), **shape)
        self.files["config.json"] = config.to_json().encode()
        for name, data in self.files.items():
            self.objects.put_sealed(f"model/{name}", data)
        self.config = ModelConfig.from_json(self.files["config.json"])
        for version in versions:
            publish(
                self.objects,
                version,
                hf_state_dict(sharp(self.config, version)),
                stage="test",
                step=version,
            )

    def model(self, version: int) -> Transformer:
        """The model as a worker serves it: with the published values, which are rounded to bf16."""
        model = sharp(self.config, version)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        return model

    def damage(self, version: int) -> None:
        for key in self.objects.list("weights/shards"):
            if key.split("/")[3] == f"{version:06d}":
                data = bytearray(self.objects.get(key))
                data[-1] ^= 1
                self.objects.put(key, bytes(data))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@asynccontextmanager
async def worker(
    store: Store, region: str, gateway: str | None = None
) -> AsyncIterator[tuple[Worker, str]]:
    """A worker without weights, as after its start."""
    engine = Engine(Transformer(store.config), max_num_seqs=8, version=-1)
    thread = EngineThread(engine, partial(fetch, store.objects), store.files)
    made = Worker(thread, store.files, region)
    async with AsyncExitStack() as stack:
        stack.callback(thread.close)
        url = await stack.enter_async_context(served(create_app(made.routes(), None)))
        if gateway is not None:
            joined = asyncio.create_task(keep_joined(made, url, gateway, None))
            stack.callback(joined.cancel)
        yield made, url


@pytest.fixture
async def gateway(store: Store, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    made = Gateway(
        Router(http), store.objects, store.files, max_context=store.config.max_position_embeddings
    )
    async with served(create_app(made.routes(), None)) as url:
        yield url


@pytest.fixture
async def regions(
    store: Store, gateway: str, http: aiohttp.ClientSession
) -> AsyncIterator[list[Worker]]:
    async with (
        worker(store, "east", gateway) as (east, _),
        worker(store, "west", gateway) as (west, _),
    ):
        await post(http, f"{gateway}/load", {"version": 0})
        await until_up(http, gateway, 2)
        yield [east, west]
