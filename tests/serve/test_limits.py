"""Authentication, limits on concurrency, and cleanup after clients that disconnect, with a real
engine in this process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from starlette.applications import Starlette

from etude.cli import main
from etude.commands.serve import load
from etude.core.errors import EtudeError
from etude.engine.engine import Engine
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig
from etude.serve import process
from etude.serve.access import SignedTokens
from etude.serve.answerer import ConcurrencyLimit
from etude.serve.engine_thread import EngineThread
from etude.serve.gateway import Gateway
from etude.serve.http import ApiError, Unavailable, create_app
from etude.serve.recorder import Recorder
from etude.serve.router import Router
from etude.serve.tokens import Scope, TokenAuthority
from etude.serve.worker import Worker
from etude.store.objects import Objects
from tests.serve.conftest import served
from tests.serve.serving import FILES, start, write_model
from tests.serve.soak import settled, soak
from tests.small_model import sharp

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "read"}], "max_tokens": 250}
ENDLESS: dict[str, Any] = {"prompt": [1], "max_tokens": 250, "stop_token_ids": []}


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Worker, str]]:
    engine = Engine(sharp(ModelConfig.from_json(FILES["config.json"]), 0), max_num_seqs=4)
    thread = EngineThread(engine, lambda version: {}, FILES)
    made = Worker(thread, FILES, "here")
    made.model.concurrency.limit = 3
    async with served(create_app(made.routes(), None, made.model.metrics)) as url:
        yield made, url
    thread.close()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


@pytest.mark.parametrize(
    "more", [{"stream": True}, {"stream": True, "n": 3}, {"stream": True, "stop": ["never said"]}]
)
async def test_leaving_a_stream_frees_everything(
    worker: tuple[Worker, str], http: aiohttp.ClientSession, more: dict[str, Any]
) -> None:
    made, url = worker
    before = asyncio.all_tasks()
    response = await http.post(f"{url}/v1/completions", json=ENDLESS | more)
    async for _ in events(response):
        break
    assert made.model.concurrency.in_use == more.get("n", 1)
    response.close()
    await settled(made, made.engine_thread, before)
    stats = made.engine_thread.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_free) == (0, 0, stats.blocks)


async def test_too_many_at_once_are_told_to_wait(
    worker: tuple[Worker, str], http: aiohttp.ClientSession
) -> None:
    made, url = worker
    with made.model.concurrency.acquire(2):
        for body, status in (
            (ASK | {"n": 2}, 429),
            (ASK | {"n": 4}, 400),
            (ASK | {"n": 2, "stream": True}, 429),
        ):
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == status
                assert response.headers.get("Retry-After") == ("1" if status == 429 else None)
        async with http.post(
            f"{url}/v1/chat/completions", json=ASK | {"max_tokens": 1}
        ) as response:
            assert response.status == 200
    assert made.model.concurrency.in_use == 0


def test_one_client_does_not_keep_the_others_out() -> None:
    limit = ConcurrencyLimit(4)
    with ExitStack() as stack:
        stack.enter_context(limit.acquire(1, "ann"))
        stack.enter_context(limit.acquire(1, "ann"))
        with (
            pytest.raises(Unavailable, match="2 answers are in progress for this client"),
            limit.acquire(1, "ann"),
        ):
            raise AssertionError
        stack.enter_context(limit.acquire(2, "bob"))
        with pytest.raises(Unavailable, match="4 answers are in progress"), limit.acquire(1, "eve"):
            raise AssertionError
    with (
        pytest.raises(ApiError, match="at most 2 answers at once are allowed, not 3"),
        limit.acquire(3, "ann"),
    ):
        raise AssertionError
    with limit.acquire(2, "ann"), limit.acquire(2, "bob"):
        pass
    with limit.acquire(4):  # a single client may use all of them
        assert limit.in_use == 4
    assert (limit.in_use, dict(limit._of_clients)) == (0, {})


async def test_a_client_is_who_has_the_token(
    worker: tuple[Worker, str], http: aiohttp.ClientSession
) -> None:
    made, _ = worker
    authority = TokenAuthority()
    made.model.concurrency.limit = 4
    async with served(create_app(made.routes(), SignedTokens(authority))) as url:

        async def asked(name: str, path: str, body: dict[str, Any]) -> int:
            token = authority.mint(Scope.USER, name, 60.0)
            headers = process.authorization(token)
            async with http.post(f"{url}/v1/{path}", json=body, headers=headers) as response:
                return response.status

        short = {"max_tokens": 1}
        with made.model.concurrency.acquire(2, "user ann"):
            for more in ({}, {"stream": True}):
                for path, body in (
                    ("chat/completions", ASK | short),
                    ("completions", {"prompt": [1]} | short),
                    ("messages", ASK | short),
                    ("responses", {"input": "read", "max_output_tokens": 1}),
                ):
                    assert await asked("ann", path, body | more) == 429
                    assert await asked("bob", path, body | more) == 200


class Watched(ChatTokenizer):
    """A tokenizer that records what it worked on, and on which thread."""

    def __init__(self) -> None:
        self._forget()
        super().__init__(FILES)
        self._forget()  # its creation encodes a little text

    def _forget(self) -> None:
        self.rendered = 0
        self.encoded = 0
        self.threads = set[bool]()

    def render(self, *args: Any, **options: Any) -> str:
        self.rendered += 1
        return super().render(*args, **options)

    def encode(self, text: str, *, long: bool = False) -> list[int]:
        self.encoded += 1
        self.threads.add(threading.current_thread() is threading.main_thread())
        assert long != (threading.current_thread() is threading.main_thread())
        return super().encode(text, long=long)


def said(content: str, count: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * count}


def guessed(content: object) -> dict[str, Any]:
    return {"prompt": [1], "prediction": {"type": "content", "content": content}}


CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "", "function": {"name": "a", "arguments": "{}"}}] * 300,
}
TOO_MUCH: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "a long message": ("/v1/chat/completions", said("a" * 10_000), "messages", 1),
    "a long message, recorded": ("/s/x/v1/chat/completions", said("a" * 10_000), "messages", 1),
    "a long message of marks": ("/v1/chat/completions", said("<|end|>" * 300), "messages", 1),
    "many messages": ("/v1/chat/completions", said("", 300), "messages", 0),
    "many messages, recorded": ("/s/x/v1/chat/completions", said("", 300), "messages", 0),
    "many calls": ("/v1/chat/completions", {"messages": [CALLING]}, "messages", 0),
    "a long text": ("/v1/completions", {"prompt": "a" * 10_000}, "prompt", 0),
    "a long text of many": ("/v1/completions", {"prompt": ["a", "a" * 10_000]}, "prompt", 0),
    "many texts": ("/v1/completions", {"prompt": ["a"] * 3000}, "prompt", 0),
    "a long prediction": ("/v1/completions", guessed("a" * 40_000), "prediction", 0),
    "a prediction of many tokens": ("/v1/completions", guessed([5] * 1025), "prediction", 0),
    "a long draft": ("/v1/completions", {"prompt": [1], "drafts": [[5] * 1025]}, "drafts", 0),
    "many drafts": ("/v1/completions", {"prompt": [1], "drafts": [[]] * 1025}, "drafts", 0),
    "many ends": (
        "/v1/completions",
        {"prompt": [1], "stop_token_ids": [5] * 2000},
        "stop_token_ids",
        0,
    ),
}

TOO_LONG = [
    kind
    for kind in TOO_MUCH
    if kind.startswith(("a long m", "a long t", "a long p", "many m", "many c"))
]


@pytest.fixture
async def watched(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Watched, str]]:
    """A gateway without workers: every accepted request waits for one in vain."""
    monkeypatch.setattr("etude.serve.router.WORKER_WAIT_S", 0.0)
    made = Gateway(Router(http), Objects.open(f"file:{tmp_path}/run"), FILES, max_context=256)
    tokenizer = Watched()
    made.model = replace(made.model, tokenizer=tokenizer)
    made.records.recorder = Recorder(tokenizer)
    async with served(create_app(made.routes(), None)) as url:
        yield tokenizer, url


@pytest.mark.parametrize("kind", TOO_MUCH)
async def test_what_cannot_fit_is_refused_before_it_is_worked_on(
    kind: str, watched: tuple[Watched, str], http: aiohttp.ClientSession
) -> None:
    (tokenizer, url), (path, body, param, rendered) = watched, TOO_MUCH[kind]
    async with http.post(url + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)
    assert (tokenizer.rendered, tokenizer.encoded) == (rendered, 0)
    assert error["code"] == ("context_length_exceeded" if kind in TOO_LONG else "invalid_request")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/s/x/v1/chat/completions"])
async def test_long_texts_do_not_hold_up_the_port(
    path: str,
    watched: tuple[Watched, str],
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, url = watched
    monkeypatch.setattr("etude.serve.answerer.AT_ONCE_CHARS", 100)
    for content, in_loop in (("read", True), ("read " * 30, False)):
        tokenizer.threads.clear()
        async with http.post(url + path, json=said(content)) as response:
            assert response.status == 503
        assert tokenizer.threads == {in_loop}


async def test_many_prompts_are_told_from_many_answers(
    worker: tuple[Worker, str], http: aiohttp.ClientSession
) -> None:
    for body, param in (
        ({"prompt": ["a"] * 4}, "prompt"),
        ({"prompt": "a", "n": 4}, "n"),
        ({"prompt": [1], "n": 4}, "n"),
    ):
        async with http.post(f"{worker[1]}/v1/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, param)


async def test_figures(worker: tuple[Worker, str], http: aiohttp.ClientSession) -> None:
    _, url = worker
    async with http.post(
        f"{url}/v1/chat/completions", json=ASK | {"max_tokens": 3, "seed": 0}
    ) as response:
        usage = (await response.json())["usage"]
    async with http.get(f"{url}/nothing") as response:
        assert response.status == 404
    async with http.get(f"{url}/metrics") as response:
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    figures = {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }
    assert figures['etude_requests_total{route="chat",status="200"}'] == 1
    assert figures['etude_requests_total{route="none",status="404"}'] == 1
    assert figures["etude_prompt_tokens_total"] == usage["prompt_tokens"]
    assert figures["etude_sampled_tokens_total"] == usage["completion_tokens"] == 3
    assert (
        figures["etude_request_seconds_count"]
        == figures['etude_request_seconds_bucket{le="+Inf"}']
        == 2
    )
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


@pytest.mark.parametrize("port", [-5, 99999])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(EtudeError, match=f"invalid port {port}"):
        process.bind("127.0.0.1", port, None)


def test_a_context_that_the_model_does_not_have(tmp_path: Path) -> None:
    child = start(write_model(tmp_path / "tiny"), "--max-context", "99999")
    assert "--max-context 99999: the longest context of tiny is 256" in child.communicate()[1]
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
        load(str(tmp_path), None, torch.device("cpu"))
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(EtudeError, match="give a Hugging Face model directory"):
        load(str(tmp_path), None, torch.device("cpu"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_stopped_while_it_loads(number: signal.Signals) -> None:
    code = """
import time
from etude.serve.process import run

async def main() -> None:
    print("loading", flush=True)
    time.sleep(3600)

run(main)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "loading\n"
    child.send_signal(number)
    assert child.communicate() == ("", "")
    assert child.returncode == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_of_the_first_moment_is_not_lost(number: signal.Signals) -> None:
    listener = process.bind("127.0.0.1", 0, None)
    before = signal.getsignal(number)
    async with process.serving(Starlette(), listener) as running:
        signal.raise_signal(number)
        await running
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("quiet", [False, True])
def test_a_template_that_shows_no_tools_is_told_of(quiet: bool, tmp_path: Path) -> None:
    (write_model(tmp_path / "tiny") / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ eos_token }}"
    )
    child = start(tmp_path / "tiny", *(["--quiet"] if quiet else []))
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline().startswith("serving tiny at http")
    child.terminate()
    told = child.communicate()[1]
    assert told == "" if quiet else "\nwarning: the chat template of tiny has no place" in told


def chat(tmp_path: Path, typed: str) -> subprocess.CompletedProcess[str]:
    options = ["--max-tokens", "5", "--seed", "1"]
    argv = [sys.executable, "-m", "etude", "chat", str(write_model(tmp_path)), *options]
    return subprocess.run(argv, input=typed, capture_output=True, text=True, check=False)


def test_a_chat_in_the_terminal(tmp_path: Path) -> None:
    talked = chat(tmp_path, "hello\n\nread\n")
    assert (talked.returncode, talked.stderr) == (0, "")
    assert talked.stdout.count("5 tokens, ") == 2


def test_a_chat_goes_on_after_a_turn_that_is_refused(tmp_path: Path) -> None:
    talked = chat(tmp_path, f"{'a ' * 300}\nread\n")
    assert (talked.returncode, talked.stderr) == (0, "")
    assert "no room for an answer in a context of 256" in " ".join(talked.stdout.split())
    assert talked.stdout.count("5 tokens, ") == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere", "neither a URL"),
        ("http://127.0.0.1:9", "no answer from"),
        ("http://127.0.0.1:notaport", "is not a URL"),
        ("http://127.0.0.1:99999", "is not a URL"),
        ("http://", "names no server"),
    ],
)
def test_a_chat_with_nobody(
    target: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert main(["chat", target]) == 2
    assert words in capsys.readouterr().err
