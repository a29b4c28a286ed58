"""A vLLM server as the engine of a worker: same worker, same recorder, other kernels.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIR --port 8000 \\
        --enable-scale-out --logprobs-mode processed_logprobs

and in the run's file, for each region with a server:

    [engine.vllm_urls]
    east = "http://127.0.0.1:8000"

vLLM itself is unmodified. Its `/inference/v1/generate` takes and returns token ids, with log-probs,
with the weight version of every token, and with routed experts if the server was started to record
them. New weights are passed as a directory of safetensors on the machine that worker and server
share: `/pause` freezes the requests under way, `reload_weights` reads the directory, and `/resume`
continues the requests with the keys and values that they already have.

Three traps, and how they are avoided:

- Given only some of the tensors, vLLM loads those, answers 200 and then generates nonsense. So the
  tensors are first checked against the model's config, name by name and shape by shape, and an
  incomplete set is refused.
- Its prefix cache ignores the weights. So every request carries its version as salt, and hits only
  what the same version has computed.
- Its log-probs are by default those before temperature and top-p. So the worker asks the server for
  its mode, and refuses a server that does not report what a learner needs.
"""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import torch
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.sampling import Request, Sample, Token, VersionSpan, expand_spans, version_spans
from etude.model.config import ModelConfig
from etude.model.detokenizer import IncrementalDetokenizer, StopStringFilter
from etude.model.files import check_fit, write_directory
from etude.model.tokenizer import ChatTokenizer
from etude.serve.answerer import as_stream
from etude.serve.http import ApiError, Unavailable, deadline
from etude.store.decoding import convert

LOGPROBS_MODE = "processed_logprobs"
KEEPALIVE_S = 2.0
"""vLLM closes an idle connection after 5 seconds."""


class VersionRange(msgspec.Struct):
    """Output tokens from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


class TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob]


class Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs
    weight_versions: list[VersionRange]
    routed_experts: str | None = None


class GenerateResponse(msgspec.Struct):
    choices: tuple[Choice]


class VllmServer:
    """A vLLM server as the engine of a worker: a `Policy`, with the metrics that a worker reports.
    `version` is -1 until the first `load`."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        fetch: Callable[[int], Mapping[str, Tensor]],
        files: Mapping[str, bytes],
    ) -> None:
        """`fetch` returns the checked tensors of a version. It may take long, and runs on a
        thread."""
        self.url = url
        self.tokenizer = ChatTokenizer(files)
        self.config = ModelConfig.from_json(files["config.json"])
        self.max_context = self.config.max_position_embeddings
        self.version = -1
        self.num_running = 0
        self.num_waiting = 0
        self.step_s = 0.0  # vLLM does not report how long its steps take
        self.started = time.monotonic()
        self.busy_s = 0.0
        self.num_tokens = 0
        self.pauses_s: deque[float] = deque(maxlen=1000)
        """Time that each of the latest weight swaps held up the server."""
        self._http = http
        self._fetch = fetch
        self._files = files
        self._loading = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()

    async def check(self) -> None:
        """Raise if the server cannot be reached, or cannot be used for training."""
        told = await self._call("GET", "/server_info?config_format=json")
        config = told["vllm_config"]["model_config"]
        if config["logprobs_mode"] != LOGPROBS_MODE:
            raise EtudeError(
                f"vLLM at {self.url} reports {config['logprobs_mode']}, which are not the "
                f"log-probs of the distribution that it samples from: start it with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )
        self.max_context = min(self.max_context, config["max_model_len"])

    async def sample(self, request: Request) -> Sample:
        if self.version < 0:
            raise Unavailable(
                "vLLM has no weights of this run yet; try again once the worker has joined the "
                "gateway"
            )
        if request.params.grammar is not None:
            raise ValueError(
                "grammars are not supported with vLLM: serve this model with Etude's own engine"
            )
        async with deadline(request.deadline_s):
            return await self._sample(request)

    async def _sample(self, request: Request) -> Sample:
        if (finish_reason := finished_already(request)) is not None:
            empty = Sample(tokens=(), logprobs=(), versions=(), finish_reason=finish_reason)
            return with_begun(request, empty)
        await self._open.wait()
        with self._busy():
            answer = await self._call(
                "POST", "/inference/v1/generate", generate_request(request, self.version)
            )
        sample = to_sample(convert(answer, GenerateResponse).choices[0], request, self.config)
        self.num_tokens += len(sample.tokens)
        sample = with_begun(request, sample)
        return truncate_at_stop(request, sample, self.tokenizer) if request.stop else sample

    async def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        """Stream the sample once it is complete, since vLLM reports the weight versions only at the
        end."""
        async for event in as_stream(await self.sample(request), len(request.begun)):
            yield event

    async def load(self, version: int) -> None:
        async with self._loading:
            if version == self.version:
                return
            tensors = await asyncio.to_thread(self._fetch, version)
            async with self._directory(tensors) as directory, self._paused():
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
                await self._call("POST", "/collective_rpc", reload)
                await self._call("POST", "/update_weight_version", {"new_version": str(version)})
                self.version = version

    async def weights(self) -> tuple[int, dict[str, Tensor]]:
        raise ApiError(
            "vLLM cannot return the weights that it serves",
            status=501,
            code="not_implemented",
        )

    def gauges(self) -> dict[str, float]:
        return {
            "engine_running": self.num_running,
            "engine_busy_seconds": self.busy_s,
            "weight_version": self.version,
        }

    @asynccontextmanager
    async def _directory(self, tensors: Mapping[str, Tensor]) -> AsyncIterator[Path]:
        """A directory with the whole model in vLLM's format, in shared memory if the system has
        it."""
        try:
            with torch.device("meta"):
                check_fit(self.config, tensors)
        except ValueError as e:
            raise EtudeError(
                f"these weights do not fit the model and are not sent to vLLM: {e}"
            ) from e
        memory = Path("/dev/shm")
        directory = Path(
            tempfile.mkdtemp(prefix="etude-vllm-", dir=memory if memory.is_dir() else None)
        )
        try:
            await asyncio.to_thread(write_directory, directory, self._files, tensors)
            yield directory
        finally:
            await asyncio.to_thread(shutil.rmtree, directory)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the server during the block. Requests under way stand still, and new ones wait
        here, because their salt is not known yet. If the block fails, the server's weights are
        unknown, so it serves nothing until a version has been loaded."""
        self._open.clear()
        began, whole = time.monotonic(), False
        try:
            await self._call("POST", "/pause?mode=keep")
            yield
            whole = True
        finally:
            if not whole:
                self.version = -1
                with suppress(ApiError, ValueError):
                    await self._call("POST", "/abort_requests", {})
            self._open.set()
            with suppress(Unavailable):
                await self._call("POST", "/resume")
            self.pauses_s.append(time.monotonic() - began)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Count a request as under way during the block. Time with several requests counts once."""
        if not self.num_running:
            self._began = time.monotonic()
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.busy_s += time.monotonic() - self._began

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            async with self._http.request(method, self.url + path, json=body) as response:
                status = response.status
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as e:
            raise Unavailable(f"vLLM at {self.url} does not answer: {type(e).__name__} {e}") from e
        if 400 <= status < 500:
            raise ValueError(f"vLLM rejects {path}: {text[:300]}")
        if status != 200:
            raise Unavailable(f"vLLM at {self.url}{path} returned {status}: {text[:300]}")
        return msgspec.json.decode(text) if text else None


@asynccontextmanager
async def connect(
    url: str, fetch: Callable[[int], Mapping[str, Tensor]], files: Mapping[str, bytes]
) -> AsyncIterator[VllmServer]:
    # As many connections as there are requests, and no limit on their time. Idle connections are
    # closed on this side, since a server that closes one during a request looks like a server that
    # is gone.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    patient = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(connector=connector, timeout=patient) as http:
        server = VllmServer(http, url, fetch, files)
        try:
            await server.check()
        except (ApiError, ValueError) as e:
            raise EtudeError(
                f"{e}; start vLLM as described in docs/serve.md, then this worker"
            ) from e
        yield server


def generate_request(request: Request, version: int) -> dict[str, Any]:
    params = asdict(request.params)  # vLLM uses the same names
    del params["grammar"]
    return {
        "token_ids": (*request.prompt, *(token.token for token in request.begun)),
        "cache_salt": f"version-{version}",
        "sampling_params": params
        | {
            "max_tokens": request.max_tokens - len(request.begun),
            "seed": request.seed,
            "stop_token_ids": request.stop_token_ids,
            "ignore_eos": True,
            "logprobs": request.top_logprobs,
            "detokenize": False,
        },
    }


def to_sample(choice: Choice, request: Request, config: ModelConfig) -> Sample:
    if choice.finish_reason not in ("stop", "length"):
        raise Unavailable(f"vLLM aborted the request: {choice.finish_reason}")
    tokens = tuple(choice.token_ids)
    drawn = choice.logprobs.content
    versions = tuple(
        VersionSpan(int(span.version), span.end - span.start) for span in choice.weight_versions
    )
    assert sum(span.count for span in versions) == len(tokens) == len(drawn)
    tops = ([(likely.token_id, likely.logprob) for likely in each.top_logprobs] for each in drawn)
    return Sample(
        tokens=tokens,
        logprobs=tuple(each.logprob for each in drawn),
        versions=versions,
        finish_reason="stop" if choice.finish_reason == "stop" else "length",
        experts=to_routed_experts(choice.routed_experts, request, config)
        if choice.routed_experts
        else None,
        top_logprobs=tuple(tuple(sorted(top, key=lambda pair: -pair[1])) for top in tops)
        if request.top_logprobs
        else (),
    )


def to_routed_experts(encoded: str, request: Request, config: ModelConfig) -> bytes | None:
    """Convert vLLM's array, which has all layers and any integer type, to the bytes that our engine
    would report."""
    if request.experts_from is None or config.experts is None:
        return None
    ids = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    if ids.shape[1] == config.num_hidden_layers:
        ids = ids[:, list(config.experts.layers)]
    kind = np.dtype(config.experts.id_dtype)
    data: bytes = ids[request.experts_from :].astype(kind).tobytes()
    return data


def finished_already(request: Request) -> Literal["stop", "length"] | None:
    """The reason why nothing is left to sample of an answer that another worker has begun; None if
    something is left."""
    if request.begun and request.begun[-1].token in request.stop_token_ids:
        return "stop"
    return "length" if len(request.begun) == request.max_tokens else None


def with_begun(request: Request, sample: Sample) -> Sample:
    """The sample with the beginning that another worker sampled."""
    if not request.begun:
        return sample
    versions = (*(token.version for token in request.begun), *expand_spans(sample.versions))
    tops = (*(token.top for token in request.begun), *sample.top_logprobs)
    return replace(
        sample,
        tokens=(*(token.token for token in request.begun), *sample.tokens),
        logprobs=(*(token.logprob for token in request.begun), *sample.logprobs),
        versions=version_spans(versions),
        top_logprobs=tops if request.top_logprobs else (),
    )


def truncate_at_stop(request: Request, sample: Sample, tokenizer: ChatTokenizer) -> Sample:
    """Cut the sample after the token that completes a stop string. The tokens before it do not
    depend on what was sampled later."""
    decoder, finder = IncrementalDetokenizer(tokenizer.decode), StopStringFilter(request.stop)
    number = 0
    while not finder.found:
        if number == len(sample.tokens):
            return sample
        finder.push(decoder.push(sample.tokens[number]))
        number += 1
    experts = sample.experts
    unread = len(sample.tokens) - number
    if experts:
        num_reported = len(request.prompt) + len(sample.tokens) - 1 - (request.experts_from or 0)
        experts = experts[: len(experts) * (num_reported - unread) // num_reported]
    return Sample(
        tokens=sample.tokens[:number], logprobs=sample.logprobs[:number],
        top_logprobs=sample.top_logprobs[:number], finish_reason="stop",
        versions=version_spans(list(expand_spans(sample.versions))[:number]), experts=experts,
    )  # fmt: skip
