"""A worker uses the settings of its run, except those given on its command line."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.lending import SlotPolicy
from etude.serve import gateway, worker
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority
from etude.serve.worker_protocol import read_model_files
from etude.store.runs import Run
from tests.dash.recorded_store import ask
from tests.serve.conftest import Store, served

RUN = """
name = "mine"
heartbeat_timeout_s = 7.0
{top}
[engine]
regions = ["east"]
max_num_seqs = 5
{engine}
[[stage]]
kind = "rl"
steps = 1
max_lag = 0
"""


class Stop(Exception):
    pass


def store_of(path: Path, run: RunConfig) -> Store:
    store = Store(path / "run")
    Run(store.objects).put_config(run)
    # The model's file belongs to its config: another config removes it.
    store.objects.put_sealed("model/config.json", store.files["config.json"])
    return store


def config(top: str = "", engine: str = "") -> RunConfig:
    return parse(RUN.format(top=top, engine=engine))


async def engine_of(
    store: Store, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """The arguments with which the engine is created."""
    made: list[tuple[Any, dict[str, Any]]] = []

    def make(model: Any, **settings: Any) -> None:
        made.append((model, settings))
        raise Stop

    monkeypatch.setattr(worker, "Engine", make)
    monkeypatch.setattr(worker, "exit_on_engine_failure", lambda: None)
    with pytest.raises(Stop):
        async with worker.own_engine(store.files, lambda version: {}, run):
            pass
    return made[0]


async def test_an_engine_is_made_as_the_run_says(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = await engine_of(store, config(), monkeypatch)
    assert settings == {
        "max_num_seqs": 5,
        "version": -1,
        "prefix_cache": True,
        "adapters": None,
    }
    assert not model.invariant and next(model.parameters()).dtype == torch.float32
    model, _ = await engine_of(store, config(engine='dtype = "bfloat16"'), monkeypatch)
    assert next(model.parameters()).dtype == torch.bfloat16
    model, _ = await engine_of(store, config(top="batch_invariant = true"), monkeypatch)
    assert model.invariant and not model.arithmetic.fp8
    both = 'batch_invariant = true\nquantization = "fp8"'
    model, _ = await engine_of(store, config(top=both), monkeypatch)
    assert model.invariant and model.arithmetic.fp8 and not model.arithmetic.fp8_kv
    model, _ = await engine_of(store, config(top='kv_cache_dtype = "fp8"'), monkeypatch)
    assert model.arithmetic.fp8_kv and not model.arithmetic.fp8


async def test_a_deterministic_run_is_served_one_request_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings = await engine_of(store, config(top="deterministic = true"), monkeypatch)
    assert settings == {
        "max_num_seqs": 1,
        "version": -1,
        "prefix_cache": False,
        "adapters": None,
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], (5, 1, "cpu")), (["--max-num-seqs", "9", "--threads", "2"], (9, 2, "cpu"))],
)
def test_what_a_worker_is_started_with_goes_before_the_run(
    tmp_path: Path,
    flags: list[str],
    expected: tuple[int, int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, seen, threads = store_of(tmp_path, config()), list[RunConfig](), list[int]()

    @asynccontextmanager
    async def own_engine(
        files: Mapping[str, bytes], fetch: object, run: RunConfig, lending: object
    ) -> AsyncIterator[None]:
        seen.append(run)
        assert lending is None
        raise Stop
        yield

    monkeypatch.setattr(worker, "own_engine", own_engine)
    monkeypatch.setattr(worker.torch, "set_num_threads", threads.append)
    arguments = ["--store", store.url, "--region", "east", "--port", "0", *flags]
    monkeypatch.setattr(sys, "argv", ["worker", *arguments])
    with pytest.raises(Stop):
        worker.main()
    ((run,), engine) = seen, seen[0].engine
    assert (engine.max_num_seqs, engine.threads, engine.device) == expected
    assert run.heartbeat_timeout_s == 7.0 and threads == [expected[1]]


@pytest.mark.parametrize(("top", "slots"), [("", 5), ("deterministic = true", 1)])
def test_a_worker_lends_its_slots_and_an_engine_of_ones_own_does_not(
    tmp_path: Path, top: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise evaluations would be limited to the hours in which users lend slots."""
    far = (time.gmtime().tm_hour + 12) % 24
    run = config(top=top, engine=f'lend = {{hours = ["{far:02d}:00-{far:02d}:01"]}}')
    store, made = store_of(tmp_path, run), list[SlotPolicy | None]()

    def make(
        engine: object, fetch: object, files: object, lending: SlotPolicy | None = None
    ) -> None:
        made.append(lending)
        raise Stop

    monkeypatch.setattr(worker, "EngineThread", make)
    monkeypatch.setattr(worker, "exit_on_engine_failure", lambda: None)
    monkeypatch.setattr(sys, "argv", f"w --store {store.url} --region east --port 0".split())

    async def evaluate() -> None:
        async with worker.own_engine(store.files, lambda version: {}, run):
            pass

    with pytest.raises(Stop):
        worker.main()
    with pytest.raises(Stop):
        asyncio.run(evaluate())
    lent, own = made
    assert own is None and lent is not None
    assert not lent.is_open(time.time()) and lent.decide((far + 0.001) * 3600) == slots


def test_a_region_with_a_vllm_server_connects_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(engine='vllm_urls = {east = "http://127.0.0.1:8000"}')
    store, urls = store_of(tmp_path, run), list[str]()

    @asynccontextmanager
    async def connect(url: str, fetch: object, files: object) -> AsyncIterator[None]:
        urls.append(url)
        raise Stop
        yield

    monkeypatch.setattr(worker, "connect", connect)
    monkeypatch.setattr(
        sys, "argv", ["worker", "--store", store.url, "--region", "east", "--port", "0"]
    )
    with pytest.raises(Stop):
        worker.main()
    assert urls == ["http://127.0.0.1:8000"]


def test_the_gateway_takes_a_worker_for_silent_when_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, told = store_of(tmp_path, config()), list[tuple[int, float]]()

    def router(
        http: object, version: int, heartbeat_timeout_s: float, *, awaits_load: bool
    ) -> None:
        told.append((version, heartbeat_timeout_s))
        raise Stop

    monkeypatch.setattr(gateway, "Router", router)
    monkeypatch.setattr(sys, "argv", ["gateway", "--store", store.url, "--port", "0"])
    with pytest.raises(Stop):
        gateway.main()
    assert told == [(-1, 7.0)]


def test_a_gateway_with_a_secret_asks_everyone_for_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, served = "a secret that nobody would find by trying", list[ASGIApp]()

    @asynccontextmanager
    async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[Awaitable[None]]:
        served.append(app)
        with listener:
            yield asyncio.sleep(0)

    monkeypatch.setattr(gateway, "gc", SimpleNamespace(freeze=int, set_threshold=max))
    monkeypatch.setattr(gateway.process, "serving", serving)
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    store = store_of(tmp_path, config())
    monkeypatch.setattr(sys, "argv", ["gateway", "--store", store.url, "--port", "0"])
    gateway.main()
    admin = TokenAuthority(secret).mint(Scope.ADMIN, "me", 60.0)
    for token, status in (("", 401), ("guessed", 401), (admin, 200)):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        assert ask(served[0], "/status", headers=headers).status == status


def test_a_store_without_a_model_says_so(tmp_path: Path) -> None:
    objects = Run.open(f"file:{tmp_path}").objects
    told = "has no model to serve .* missing.: start a run there first"
    with pytest.raises(EtudeError, match=told):
        read_model_files(Run(objects))


async def test_a_worker_that_is_not_let_in_says_so_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal is logged again if the worker had been accepted in between."""
    statuses = [401, 403, 200, 503, 403, 401]
    asked: list[dict[str, Any]] = []

    async def take(http: Request) -> Response:
        asked.append(await http.json())
        return Response("x" * 600, status_code=statuses[len(asked) - 1])

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == len(statuses):
            raise Stop

    made: Any = SimpleNamespace(region="east", version=3, users_only=True, well=lambda: True)
    async with served(Starlette(routes=[Route("/workers", take, methods=["POST"])])) as url:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "asyncio", SimpleNamespace(sleep=sleep))
            with pytest.raises(Stop):
                await worker.keep_joined(made, "http://me", url, "token", pool="blue")
    told = {"url": "http://me", "region": "east", "version": 3, "pool": "blue", "users_only": True}
    assert asked == [told] * len(statuses)
    assert slept == [worker.HEARTBEAT_S] * len(statuses)
    said = [line.partition("Z ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == [f"the gateway rejects this worker: {'x' * 500}"] * 2
