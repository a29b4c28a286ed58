"""A worker: one engine, one port, one region.

    python -m etude.serve.worker --store RUN --region east --port 8101 --gateway
    http://127.0.0.1:8100

A worker without weights serves nothing: it joins the gateway, and the gateway tells it what to
load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import aiohttp
import msgspec
import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import StoreUsed
from etude.core.lending import SlotPolicy
from etude.core.sampling import Request, Sample, Token
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine
from etude.engine.select import select_device
from etude.model.lora import CONFIG_FILE, LoraConfig, whole_model
from etude.model.numerics import Arithmetic
from etude.model.transformer import ModelConfig, Transformer
from etude.serve import heartbeat, process
from etude.serve.access import OneToken
from etude.serve.answerer import PolicyAnswerer, ServedModel, refusals
from etude.serve.dialects import public_routes
from etude.serve.engine_thread import EngineThread, FetchWeights, exit_on_engine_failure
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import (
    ApiError,
    EventStream,
    SendEvent,
    Unavailable,
    cancel_on_disconnect,
    create_app,
    read,
    respond,
    respond_packed,
)
from etude.serve.vllm import VllmServer, connect
from etude.serve.worker_protocol import (
    GenerateFrame,
    GenerateRequest,
    JoinRequest,
    LoadRequest,
    WorkerStatus,
    WorkerWeights,
    read_model_files,
)
from etude.store.decoding import decode_msgpack
from etude.store.runs import Run
from etude.store.telemetry import store_used
from etude.weights.cache import HostCache
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.relay import Relay
from etude.weights.tensors import root_of

HEARTBEAT_S = 1.0
STEP_TIMEOUT_FACTOR = 10
"""Factor on the heartbeat timeout for one step of the engine, or one swap of weights: the first
step compiles, and a long prompt on a slow machine is not a fault."""


class Worker:
    """An engine behind the public API, `/generate` for the gateway, and the routes to load weights.
    `engine`: our own, or vLLM behind the same protocol."""

    def __init__(
        self,
        engine: EngineThread | VllmServer,
        files: Mapping[str, bytes],
        region: str,
        heartbeat_timeout_s: float = math.inf,
        store: Callable[[], list[StoreUsed]] = list,
    ) -> None:
        """`store`: returns the worker's traffic with the run's store, for its status."""
        self.model = ServedModel(
            tokenizer=engine.tokenizer,
            grammars=GrammarBuilder(files),
            max_context=engine.max_context,
        )
        self.engine_thread = engine
        self.region = region
        self._store = store
        self._step_s = STEP_TIMEOUT_FACTOR * heartbeat_timeout_s

    def routes(self) -> list[Route]:
        answerer = PolicyAnswerer(self.model, self.engine_thread)
        return [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/load", self.load, methods=["POST"]),
            Route("/status", self.status),
            Route("/weights", self.weights),
            *public_routes(self.model, lambda http: answerer, self.gauges),
        ]

    async def generate(self, http: HttpRequest) -> Response:
        """Answer a gateway: one sampling request, with token ids both ways."""
        asked = await read(http, GenerateRequest, decode_msgpack)
        if self.version < asked.min_weight_version:
            raise Unavailable(
                f"this worker serves version {self.version}, but the request needs "
                f"{asked.min_weight_version} or newer"
            )
        if asked.stream:
            return EventStream(
                lambda send: self._stream(asked.request, send),
                failed=lambda error: GenerateFrame(status=error.status, error=str(error)),
                encode=GenerateFrame.packed,
            )
        with refusals():
            sample = await cancel_on_disconnect(http, self.engine_thread.sample(asked.request))
        self.model.metrics.count_tokens(len(asked.request.prompt), len(sample.tokens))
        return respond_packed(sample)

    async def _stream(self, request: Request, send: SendEvent) -> None:
        stream = self.engine_thread.stream(request)
        with refusals():
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for event in stream:
                    if isinstance(event, Token):
                        await send(GenerateFrame(token=event))
                    else:
                        await send(GenerateFrame(sample=event))
        assert isinstance(event, Sample)
        self.model.metrics.count_tokens(len(request.prompt), len(event.tokens))

    async def load(self, http: HttpRequest) -> Response:
        """Load a version; answers once it is live."""
        asked = await read(http, LoadRequest)
        try:
            await self.engine_thread.load(asked.version)
        except (EtudeError, ValueError) as e:
            raise ApiError(
                f"version {asked.version} cannot be served: {e}", status=500, code="load_failed"
            ) from e
        return respond(LoadRequest(version=self.version))

    async def status(self, http: HttpRequest) -> Response:
        return respond(self.report())

    async def weights(self, http: HttpRequest) -> Response:
        version, tensors = await self.engine_thread.weights()
        root = await asyncio.to_thread(root_of, tensors)
        pauses_s = list(self.engine_thread.pauses_s)
        return respond(
            WorkerWeights(region=self.region, version=version, root=root, pauses_s=pauses_s)
        )

    @property
    def version(self) -> int:
        return self.engine_thread.version

    @property
    def users_only(self) -> bool:
        """True while the worker serves users only, and lends nothing to RL."""
        thread = self.engine_thread
        return isinstance(thread, EngineThread) and thread.users_only

    def well(self) -> bool:
        """False if the engine hangs while the server still answers. The worker then sends no
        heartbeats."""
        return self.engine_thread.step_s < self._step_s

    def report(self) -> WorkerStatus:
        thread = self.engine_thread
        return WorkerStatus(
            region=self.region,
            version=self.version,
            running=thread.num_running,
            waiting=thread.num_waiting,
            busy_s=thread.busy_s,
            wall_s=time.monotonic() - thread.started,
            tokens=thread.num_tokens,
            store=self._store(),
        )

    def gauges(self) -> dict[str, float]:
        return self.engine_thread.gauges()


async def keep_joined(
    worker: Worker, url: str, gateway_url: str, token: str | None, pool: str = ""
) -> None:
    """Send heartbeats to the gateway: it may have been restarted, and know no workers. It answers
    once the worker is up, after telling it to load what is missing."""
    headers = process.authorization(token)
    # A heartbeat does not wait long for the answer to the previous one, since the gateway measures
    # the time between heartbeats.
    short = aiohttp.ClientTimeout(total=HEARTBEAT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=short) as session:
        refused = False
        while True:
            joining = JoinRequest(
                url=url,
                region=worker.region,
                version=worker.version,
                pool=pool,
                users_only=worker.users_only,
            )
            body = msgspec.json.encode(joining)
            # the gateway may be away for a while
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if worker.well():
                    async with session.post(f"{gateway_url}/workers", data=body) as response:
                        if response.status in (401, 403) and not refused:
                            said = (await response.text())[:500]
                            process.log_to_stderr(f"the gateway rejects this worker: {said}")
                        refused = response.status in (401, 403)
            await asyncio.sleep(HEARTBEAT_S)


@contextlib.asynccontextmanager
async def own_engine(
    files: Mapping[str, bytes],
    fetch: FetchWeights,
    config: RunConfig,
    lending: SlotPolicy | None = None,
) -> AsyncIterator[EngineThread]:
    """The engine of a worker. `lending`: for an engine that also serves users; others, such as
    those of evaluations, have no users of their own to give way to."""
    exit_on_engine_failure()
    device = select_device(config.engine.device)
    # Published weights are bf16. On a CPU both engine and trainer compute with them in fp32.
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = usual if config.engine.dtype == "auto" else getattr(torch, config.engine.dtype)
    model = Transformer(ModelConfig.from_json(files["config.json"])).requires_grad_(False)
    model = model.to(device, dtype)
    model.compute_with(
        Arithmetic.of(
            invariant=config.batch_invariant,
            fp8=config.quantization == "fp8",
            fp8_kv=config.kv_cache_dtype == "fp8",
        )
    )
    max_num_seqs = _max_num_seqs(config)
    adapter = files.get(CONFIG_FILE)
    limits = AdapterLimits(own=LoraConfig.from_json(adapter)) if adapter else None
    engine = EngineThread(
        Engine(
            model,
            max_num_seqs=max_num_seqs,
            version=-1,
            prefix_cache=max_num_seqs > 1,
            adapters=limits,
        ),
        fetch,
        files,
        lending,
    )
    async with process.meanwhile(engine.lend()):
        yield engine
    engine.close()


def _max_num_seqs(config: RunConfig) -> int:
    # One request at a time in deterministic mode: the other sequences of a batch change the last
    # bits of a result, and nothing may depend on earlier requests.
    return 1 if config.deterministic else config.engine.max_num_seqs


def _slot_policy(config: RunConfig) -> SlotPolicy | None:
    lend = config.engine.lend
    if lend is None or lend.run is not None:
        return None
    return SlotPolicy(slots=_max_num_seqs(config), max_ttft_s=lend.max_ttft_s, hours=lend.hours)


async def serve_worker(
    *, store_url: str, region: str, port: int, host: str = "127.0.0.1",
    gateway_url: str | None = None, version: int | None = None, cache: Path | None = None,
    relay: str | None = None, advertise: str | None = None, pool: str = "",
    overrides: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Run a worker with the settings of the run. `advertise`: the URL at which the gateway reaches
    this worker, if it differs from the address that it listens at. `overrides`: keys of `[engine]`
    that differ for this process."""
    token = process.token()
    listener = process.bind(host, port, token)
    run = Run.open(store_url, create=False)
    config = run.config()
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update=dict(overrides or {}))}
    )
    torch.set_num_threads(config.engine.threads)
    files = read_model_files(run)
    name = f"{region}-{port}"
    relay = relay or config.engine.relays.get(region)
    fetch = Follower(
        Chain(run.objects),
        name=name,
        cache=HostCache.beside(store_url, cache),
        relay=Relay(relay) if relay else None,
    ).fetch
    vllm = config.engine.vllm_urls.get(region)

    def fetch_whole(version: int) -> Mapping[str, Tensor]:
        return whole_model(files, fetch(version))

    async with (
        connect(vllm, fetch_whole, files)
        if vllm
        else own_engine(files, fetch, config, _slot_policy(config)) as engine
    ):
        worker = Worker(
            engine,
            files,
            region,
            config.heartbeat_timeout_s,
            store=lambda: store_used(run.objects, f"worker {name}"),
        )
        if version is not None:
            await engine.load(version)
        async with process.serving(
            create_app(worker.routes(), OneToken(token) if token else None, worker.model.metrics),
            listener,
        ) as running:
            url = advertise or process.url_of(listener)
            print(f"worker {region} at {url}", flush=True)
            gateways = gateway_url.split(",") if gateway_url else []
            joined = [keep_joined(worker, url, gateway, token, pool) for gateway in gateways]
            async with process.meanwhile(heartbeat.send_heartbeats(worker.well), *joined):
                await running


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m etude.serve.worker",
        description="A worker of a run, configured by the run's configuration; engine options "
        "given here override it for this worker alone.",
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--region", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--gateway", help="gateways to join: URL[,URL...]; without any, the worker runs alone"
    )
    parser.add_argument(
        "--version", type=int, help="weights to load at once; by default the gateway decides"
    )
    parser.add_argument(
        "--cache", type=Path, help="directory shared by this host's workers for downloaded weights"
    )
    parser.add_argument("--relay", help="the relay of this region (default: the run's)")
    parser.add_argument(
        "--advertise", metavar="URL", help="URL at which the gateway can reach this worker"
    )
    parser.add_argument(
        "--pool",
        default="",
        choices=("", "blue", "green", "heldout"),
        help="pool to join, for a run that learns from users (docs/realtime.md)",
    )
    own = parser.add_argument_group("overrides of the run's [engine]")
    own.add_argument("--max-num-seqs", type=int)
    own.add_argument("--threads", type=int)
    own.add_argument("--device", choices=("auto", "cpu", "cuda"), help="auto: cuda if available")
    a = parser.parse_args()
    given = {"max_num_seqs": a.max_num_seqs, "threads": a.threads, "device": a.device}
    process.run(
        lambda: serve_worker(
            store_url=a.store,
            region=a.region,
            port=a.port,
            host=a.host,
            gateway_url=a.gateway,
            version=a.version,
            cache=a.cache,
            relay=a.relay,
            advertise=a.advertise,
            pool=a.pool,
            overrides={key: value for key, value in given.items() if value is not None},
        )
    )


if __name__ == "__main__":
    main()
