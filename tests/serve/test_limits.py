"""Who is let in, how many at once, and what is left of those who go away: over the real engine, in this process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from etude.cli import main
from etude.core.errors import EtudeError
from etude.engine.engine import Engine
from etude.model.transformer import ModelConfig
from etude.run.serve import load
from etude.serve import process
from etude.serve.engine_thread import EngineThread
from etude.serve.http import create_app
from etude.serve.worker import Worker
from tests.serve.conftest import served
from tests.serve.serving import FILES, start, write_model
from tests.serve.soak import settled, soak
from tests.small_model import sharp

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "read"}], "max_tokens": 250}
ENDLESS: dict[str, Any] = {"prompt": [1], "max_tokens": 250, "stop_token_ids": []}


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Worker, str]]:
    engine = Engine(sharp(ModelConfig.from_json(FILES["config.json"]), 0), max_batch=4)
    thread = EngineThread(engine, lambda version: {}, FILES)
    made = Worker(thread, FILES, "here")
    made.slots.limit = 3
    async with served(create_app(made.routes(), None, made.metrics)) as url:
        yield made, url
    thread.close()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


@pytest.mark.parametrize("more", [{"stream": True}, {"stream": True, "n": 3}, {"stream": True, "stop": ["never said"]}])
async def test_leaving_a_stream_frees_everything(
    worker: tuple[Worker, str], http: aiohttp.ClientSession, more: dict[str, Any]
) -> None:
    made, url = worker
    before = asyncio.all_tasks()
    response = await http.post(f"{url}/v1/completions", json=ENDLESS | more)
    async for _ in events(response):
        break
    assert made.slots.taken == more.get("n", 1)
    response.close()
    await settled(made, made.engine_thread, before)
    stats = made.engine_thread.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks)


async def test_too_many_at_once_are_told_to_wait(worker: tuple[Worker, str], http: aiohttp.ClientSession) -> None:
    made, url = worker
    with made.slots.take(2):
        for body, status in ((ASK | {"n": 2}, 429), (ASK | {"n": 4}, 400), (ASK | {"n": 2, "stream": True}, 429)):
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == status
                assert response.headers.get("Retry-After") == ("1" if status == 429 else None)
        async with http.post(f"{url}/v1/chat/completions", json=ASK | {"max_tokens": 1}) as response:
            assert response.status == 200
    assert made.slots.taken == 0


async def test_figures(worker: tuple[Worker, str], http: aiohttp.ClientSession) -> None:
    _, url = worker
    async with http.post(f"{url}/v1/chat/completions", json=ASK | {"max_tokens": 3, "seed": 0}) as response:
        usage = (await response.json())["usage"]
    async with http.get(f"{url}/nothing") as response:
        assert response.status == 404
    async with http.get(f"{url}/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    figures = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
    assert figures['etude_requests_total{route="chat",status="200"}'] == 1
    assert figures['etude_requests_total{route="none",status="404"}'] == 1
    assert figures["etude_prompt_tokens_total"] == usage["prompt_tokens"]
    assert figures["etude_sampled_tokens_total"] == usage["completion_tokens"] == 3
    assert figures["etude_request_seconds_count"] == figures['etude_request_seconds_bucket{le="+Inf"}'] == 2
    assert figures["etude_engine_blocks_free"] == figures["etude_engine_blocks"]


async def test_a_small_soak() -> None:
    report = await soak(300, swap_s=0.2)
    assert sum(report.outcomes.values()) == 300
    assert min(report.outcomes[kind] for kind in ("whole", "streamed", "left", "refused")) > 0
    assert report.swaps > 0


def test_a_server_that_others_can_reach_needs_a_token(tmp_path: Path) -> None:
    child = start(write_model(tmp_path / "tiny"), "--host", "0.0.0.0")
    assert "ETUDE_TOKEN" in child.communicate()[1]
    assert child.returncode == 2


def test_a_token_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(EtudeError, match="No such file"):
        process.token(file)
    file.write_text("\n")
    with pytest.raises(EtudeError, match="is empty"):
        process.token(file)
    file.write_text("secret\n")
    assert process.token(file) == "secret"


def test_what_is_no_model_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="give a Hugging Face model directory"):
        load(tmp_path, None, torch.device("cpu"))
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(EtudeError, match="give a Hugging Face model directory"):
        load(tmp_path, None, torch.device("cpu"))


def test_a_chat_in_the_terminal(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "etude", "chat", str(write_model(tmp_path)), "--max-tokens", "5", "--seed", "1"]
    talked = subprocess.run(argv, input="hello\n\nread\n", capture_output=True, text=True, check=False)
    assert (talked.returncode, talked.stderr) == (0, "")
    assert talked.stdout.count("5 tokens, ") == 2


@pytest.mark.parametrize(("target", "words"), [("nowhere", "neither a URL"), ("http://127.0.0.1:9", "does not answer")])
def test_a_chat_with_nobody(
    target: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert main(["chat", target]) == 2
    assert words in capsys.readouterr().err
