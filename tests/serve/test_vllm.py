"""A worker over a real vLLM server (`make test-vllm`): its answers, changes of weights, and
requests that are never sent.

The model is SmolLM2-135M in two versions: the original, and a slightly changed one. Figures are
printed as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path

import aiohttp
import pytest
import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.events import MismatchStats
from etude.core.sampling import Request, Sample, SamplingParams, expand_spans
from etude.core.types import Segment
from etude.model.files import build_model, read_directory
from etude.model.transformer import Transformer
from etude.serve.gateway import Gateway
from etude.serve.http import create_app
from etude.serve.router import Router
from etude.serve.vllm import VllmServer, connect
from etude.serve.worker import Worker, keep_joined
from etude.store.objects import Objects
from etude.train.mismatch import mismatch_stats
from etude.weights.follow import fetch
from etude.weights.publish import publish
from tests.serve.client import converse, post, segments, until_up
from tests.serve.conftest import served
from tests.small_model import plain_logprobs

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models/smollm2-135m"
START_S = 600.0
PROMPTS = [
    "def area(a, b):\n    return",
    "The capital of France is",
    "import os\n\n",
    "Once upon a time",
]


@cache
def directory() -> tuple[dict[str, bytes], dict[str, Tensor]]:
    return read_directory(MODEL)


@cache
def version(number: int) -> dict[str, Tensor]:
    """Version 0 is the original model; 1 has other norms in its last layers."""
    tensors = dict(directory()[1])
    if number:
        for layer in range(20, 30):
            name = f"model.layers.{layer}.input_layernorm.weight"
            tensors[name] = (tensors[name].float() * 0.8).bfloat16()
    return tensors


@cache
def model(number: int) -> Transformer:
    """The trainer's model: the same values, computed in fp32."""
    return build_model(directory()[0], version(number)).requires_grad_(False)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if url := os.environ.get("ETUDE_TEST_VLLM"):
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(ROOT / ".venv-vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(MODEL), "--dtype", served_dtype(), "--max-model-len", "2048", "--max-num-seqs", "32",
        "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    environment |= {"VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    scratch = tmp_path_factory.mktemp("vllm")
    with (scratch / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=scratch)
        try:
            wait_for(f"http://127.0.0.1:{port}", child, scratch / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            child.wait(60)


def served_dtype() -> str:
    """The dtype of vllm-cpu, which uses bf16 only if the processor supports it."""
    words = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if {"bf16", "avx512_bf16", "amx_bf16"} & set(words) else "float32"


def wait_for(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except OSError:
            time.sleep(1.0)
    raise AssertionError(log.read_text()[-3000:])


@asynccontextmanager
async def policy(
    vllm: str, versions: Mapping[int, Mapping[str, Tensor]] | None = None
) -> AsyncIterator[VllmServer]:
    files = directory()[0]
    async with connect(
        vllm, (versions or {0: version(0), 1: version(1)}).__getitem__, files
    ) as server:
        yield server


def ask(
    prompt: str, seed: int, server: VllmServer, temperature: float = 1.0, **more: object
) -> Request:
    params = SamplingParams(temperature=temperature)
    options: dict[str, object] = {
        "max_tokens": 60,
        "stop_token_ids": (server.tokenizer.eos_token_id,),
        "seed": seed,
        "params": params,
    } | more
    return Request(prompt=tuple(server.tokenizer.encode(prompt)), **options)  # type: ignore[arg-type]


def mismatch(asked: Request, sample: Sample, number: int) -> tuple[Tensor, Tensor]:
    """(vLLM's, trainer's) log-probs of the sampled tokens, if version `number` sampled them."""
    ours = plain_logprobs(model(number), asked.prompt, sample.tokens, asked.params.temperature)
    return torch.tensor(sample.logprobs), ours


def between(old: Tensor, new: Tensor) -> MismatchStats:
    return mismatch_stats(old.double().numpy(), new.detach().double().numpy())


async def test_a_sample_is_what_the_trainer_would_compute(vllm: str) -> None:
    async with policy(vllm) as server:
        await server.load(0)
        for temperature in (1.0, 0.7):
            asks = [
                ask(text, seed, server, temperature=temperature)
                for text in PROMPTS
                for seed in range(4)
            ]
            samples = await asyncio.gather(*map(server.sample, asks))
            assert {span.version for sample in samples for span in sample.versions} == {0}
            pairs = [
                mismatch(asked, sample, 0) for asked, sample in zip(asks, samples, strict=True)
            ]
            found = between(
                torch.cat([old for old, _ in pairs]), torch.cat([new for _, new in pairs])
            )
            print(
                json.dumps(
                    {
                        "temperature": temperature,
                        "tokens": found.num_tokens,
                        "k1": found.k1,
                        "k3": found.k3,
                        "k3_p99": found.k3_p99,
                    }
                )
            )
            assert found.k3 < 5e-3 and found.k3_p99 < 0.1


async def test_stop_texts_and_alternatives(vllm: str) -> None:
    async with policy(vllm) as server:
        await server.load(0)
        greedy = ask("1 2 3 4 5 6 7 8", 0, server, temperature=0.0, max_tokens=30, top_logprobs=3)
        whole = await server.sample(greedy)
        assert all(
            top[0][0] == token for token, top in zip(whole.tokens, whole.top_logprobs, strict=True)
        )
        cut = await server.sample(
            ask("1 2 3 4 5 6 7 8", 0, server, temperature=0.0, max_tokens=30, stop=("11",))
        )
        assert cut.finish_reason == "stop" and cut.tokens == whole.tokens[: len(cut.tokens)]
        assert "11" in server.tokenizer.decode(cut.tokens) and "11" not in server.tokenizer.decode(
            cut.tokens[:-1]
        )


async def test_weights_change_under_load(vllm: str) -> None:
    """Requests under way continue and report the versions that sampled them. A later request gets
    nothing of the old weights, not even from the prefix cache."""
    async with policy(vllm) as server:
        await server.load(0)
        shared = "\n".join(PROMPTS * 4)
        before = await server.sample(ask(shared, 1, server))
        asks = [
            ask(text, seed, server, max_tokens=200, stop_token_ids=())
            for text in PROMPTS
            for seed in range(2)
        ]
        under_way = [asyncio.create_task(server.sample(asked)) for asked in asks]
        # by now the others have begun
        await server.sample(ask("x", 0, server, max_tokens=4, stop_token_ids=()))
        await server.load(1)
        after = await server.sample(asked := ask(shared, 1, server))
        samples = await asyncio.gather(*under_way)
    assert [span.version for span in before.versions] == [0] and [
        span.version for span in after.versions
    ] == [1]
    for sample in samples:
        assert [span.version for span in sample.versions] in ([0], [0, 1], [1])
        assert len(list(expand_spans(sample.versions))) == len(sample.tokens) == 200
    assert any(len(sample.versions) == 2 for sample in samples)
    right, wrong = (between(*mismatch(asked, after, number)).k3 for number in (1, 0))
    assert right < 5e-3 < wrong and 5 * right < wrong


async def test_a_part_of_the_weights_is_never_sent(vllm: str) -> None:
    part = {name: tensor for name, tensor in version(1).items() if "layers.3." not in name}
    narrow = version(1) | {"model.norm.weight": version(1)["model.norm.weight"][:-1]}
    async with policy(vllm, {0: version(0), 1: part, 2: narrow}) as server:
        await server.load(0)
        asked = ask(PROMPTS[0], 3, server)
        before = await server.sample(asked)
        for number, words in ((1, "missing"), (2, "model.norm.weight")):
            with pytest.raises(EtudeError, match=words):
                await server.load(number)
        assert server.version == 0 and await server.sample(asked) == before


@asynccontextmanager
async def run_of(vllm: str, path: Path, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """A store with both versions, a gateway, and a worker that uses vLLM."""
    objects = Objects.open(f"file:{path}")
    files = directory()[0]
    for number in (0, 1):
        publish(objects, number, version(number), stage="test", step=number)
    gateway = Gateway(Router(http), objects, files, max_context=2048)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(create_app(gateway.routes(), None)))
        server = await stack.enter_async_context(
            connect(vllm, lambda number: fetch(objects, number), files)
        )
        worker = Worker(server, files, "east")
        own = await stack.enter_async_context(served(create_app(worker.routes(), None)))
        stack.callback(asyncio.create_task(keep_joined(worker, own, url, None)).cancel)
        yield url


async def test_sessions_through_gateway_and_worker(
    vllm: str, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with run_of(vllm, tmp_path, http) as url:
        await post(http, f"{url}/load", {"version": 0})
        await until_up(http, url, 1)
        await asyncio.gather(*(converse(http, url, f"s{n}", turns=3) for n in range(3)))
        later = [
            asyncio.create_task(converse(http, url, f"t{n}", turns=3, max_tokens=48))
            for n in range(3)
        ]
        await post(http, f"{url}/load", {"version": 1})
        await asyncio.gather(*later)
        recorded: list[Segment] = [
            one for n in range(3) for one in await segments(http, url, f"s{n}")
        ]
        moved: list[Segment] = [one for n in range(3) for one in await segments(http, url, f"t{n}")]
    for segment in recorded:
        ours = plain_logprobs(model(0), segment.prompt, segment.tokens)[torch.tensor(segment.mask)]
        theirs = torch.tensor(
            [p for p, sampled in zip(segment.logprobs, segment.mask, strict=True) if sampled]
        )
        assert {span.version for span in segment.versions} == {0}
        assert between(theirs, ours).k3 < 5e-3
    for segment in moved:
        found = [span.version for span in segment.versions]
        assert found == sorted(found) and found[-1] == 1
