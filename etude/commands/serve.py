"""`etude serve`: a model directory, or a version of a run, behind an OpenAI-compatible port. One
process with one engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.types import ASGIApp
from torch import Tensor

from etude.commands.weights import find_version, open_chain
from etude.core.errors import EtudeError
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine
from etude.engine.select import select_device
from etude.model.checkpoint import Checkpoint
from etude.model.directory import missing_files
from etude.model.files import build_model, read_directory
from etude.model.lora import (
    CONFIG_FILE,
    Adapter,
    LoraConfig,
    is_adapter_tensor,
    read_adapter,
    whole_model,
)
from etude.model.numerics import Arithmetic
from etude.model.transformer import Transformer
from etude.serve import process
from etude.serve.access import OneToken
from etude.serve.answerer import ConcurrencyLimit, PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes
from etude.serve.engine_thread import EngineThread, exit_on_engine_failure
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import create_app
from etude.serve.metrics import Metrics
from etude.store.objects import is_bucket
from etude.store.runs import Run, runs_below
from etude.weights.follow import Follower

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RUN_FOLDERS = ("model", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: str
    """A model directory, the directory of a run, or the URL of its store."""
    version: int | None
    """Version of a run; None for the newest."""
    host: str
    port: int
    name: str | None
    adapter: list[str]
    """NAME=PLACE of each adapter: a directory in PEFT's format, or a run that trains one."""
    token_file: Path | None
    max_num_seqs: int
    """Limit on answers that are computed together; others wait."""
    max_answers: int
    """Limit on answers under way, including those that wait; further requests are refused."""
    max_context: int | None
    default_max_tokens: int
    """Default token limit of an answer."""
    dtype: str | None
    threads: int | None
    device: str
    """cpu, cuda or auto."""
    invariant: bool
    quantization: str | None
    kv_cache_dtype: str
    quiet: bool
    """No log of requests, and no warnings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for inference, with its files."""

    name: str
    version: int
    files: dict[str, bytes]
    model: Transformer
    is_merged: bool = False
    """True if an adapter is merged into its weights."""


def create_server(
    engine: EngineThread,
    files: Mapping[str, bytes],
    name: str,
    token: str | None,
    options: Options,
    adapters: tuple[str, ...] = (),
) -> ASGIApp:
    """The public API over one engine with these adapters."""
    if name in adapters:
        raise EtudeError(
            f"--adapter {name}: this is the name of the model itself: choose another name, or "
            "rename the model with --name"
        )
    longest = engine.engine.max_context
    if (options.max_context or 0) > longest:
        raise EtudeError(
            f"--max-context {options.max_context}: the longest context of {name} is {longest}"
        )
    model = ServedModel(
        tokenizer=engine.tokenizer,
        grammars=GrammarBuilder(files),
        max_context=options.max_context or longest,
        default_max_tokens=options.default_max_tokens,
        name=name,
        adapters=adapters,
        concurrency=ConcurrencyLimit(options.max_answers),
        metrics=Metrics() if options.quiet else Metrics(process.log_to_stderr),
    )
    answerer = PolicyAnswerer(model, engine)
    routes = public_routes(model, lambda http: answerer, engine.gauges)
    return create_app(routes, OneToken(token) if token else None, model.metrics)


def serve(options: Options) -> None:
    """Serve until the process is told to stop."""
    process.run(lambda: _serve(options))


async def _serve(options: Options) -> None:
    token = process.token(options.token_file)
    listener = process.bind(options.host, options.port, token)
    exit_on_engine_failure()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = select_device(options.device)
    if not options.quiet:
        print(f"loading {options.target}", file=sys.stderr, flush=True)
    loaded = load(options.target, options.dtype, device, version=options.version)
    arithmetic = Arithmetic.of(
        invariant=options.invariant,
        fp8=options.quantization == "fp8",
        fp8_kv=options.kv_cache_dtype == "fp8",
    )
    loaded.model.compute_with(arithmetic)
    adapters = read_adapters(options.adapter)
    inner = make_engine(loaded, adapters, options)
    engine = EngineThread(inner, no_other_version, loaded.files)
    name = options.name or loaded.name
    files = loaded.files
    version = f" (version {loaded.version})" if is_run(options.target) else ""
    del loaded  # the engine may compute with a copy
    server = create_server(engine, files, name, token, options, tuple(adapters))
    if not engine.tokenizer.supports_tools and not options.quiet:
        print(
            f"warning: the chat template of {name} has no place for tools: requests can offer "
            "some, but the model will not see them",
            file=sys.stderr,
            flush=True,
        )
    async with process.serving(server, listener) as running:
        print(f"serving {name}{version} at {process.url_of(listener)}/v1", flush=True)
        await running
    engine.close()


def make_engine(loaded: LoadedModel, adapters: Mapping[str, Adapter], options: Options) -> Engine:
    if adapters and loaded.is_merged:
        raise EtudeError(
            f"version {loaded.version} of {options.target} is an adapter, and is served merged "
            "into the weights: choose the version it applies to with --version, or leave out "
            "--adapter"
        )
    rank = max((adapter.config.rank for adapter in adapters.values()), default=0)
    limits = AdapterLimits(num_named=len(adapters), max_rank=rank) if adapters else None
    engine = Engine(
        loaded.model,
        max_num_seqs=options.max_num_seqs,
        version=loaded.version,
        adapters=limits,
    )
    for name, adapter in adapters.items():
        try:
            engine.load_adapter(name, adapter)
        except ValueError as e:
            raise EtudeError(f"--adapter {name}: {e}; is it an adapter of {options.target}?") from e
    return engine


def read_adapters(given: Sequence[str]) -> dict[str, Adapter]:
    """Read adapters given as NAME=PLACE; of a run, its newest."""
    found: dict[str, Adapter] = {}
    for text in given:
        name, equals, place = text.partition("=")
        if not (name and equals and place) or name in found:
            raise EtudeError(
                f"--adapter {text}: write NAME=DIR or NAME=RUN, with each name only once"
            )
        found[name] = _run_adapter(place) if is_run(place) else read_adapter(Path(place))
    return found


def _run_adapter(url: str) -> Adapter:
    chain = open_chain(url)
    manifest = find_version(chain, None)[1]
    if manifest.adapter_of is None:
        raise EtudeError(f"{url}: version {manifest.version} is not an adapter: it has all weights")
    config = LoraConfig.from_json(Run(chain.objects).model_files()[CONFIG_FILE])
    return Adapter(config, Follower(chain).image(manifest.version).tensors())


def load(
    target: str, dtype: str | None, device: torch.device, *, version: int | None = None
) -> LoadedModel:
    """Load the model of a directory, or a version of a run, by default its newest."""
    tensors: Mapping[str, Tensor]
    try:
        if is_run(target):
            version, files, tensors = _read_run(target, version)
        elif not Path(target).exists():
            raise EtudeError(f"{target} does not exist: give a model directory, or a run")
        elif version is None:
            version, (files, tensors) = 0, read_directory(Path(target))
        else:
            raise EtudeError(f"--version {version}: {target} is not a run, so it has no versions")
        kind = DTYPES[dtype] if dtype else _fastest(tensors, device)
        whole = whole_model(files, tensors)
        model = build_model(files, whole, kind).requires_grad_(False).to(device)
    except (OSError, ValueError, KeyError) as e:
        raise EtudeError(
            f"cannot load a model from {target}: {e}; give a Hugging Face model directory, or a "
            f"run{runs_below(target)}"
        ) from e
    name = Path(target).resolve().name
    return LoadedModel(
        name=name,
        version=version,
        files=files,
        model=model,
        is_merged=any(map(is_adapter_tensor, tensors)),
    )


def is_run(target: str) -> bool:
    """False for a model directory, and for anything else that is not a run."""
    path = Path(target)
    return (
        target.startswith("file:")
        or is_bucket(target)
        or (bool(missing_files(path)) and any((path / name).is_dir() for name in RUN_FOLDERS))
    )


def _read_run(url: str, version: int | None) -> tuple[int, dict[str, bytes], Mapping[str, Tensor]]:
    chain = open_chain(url)
    found = find_version(chain, version)[1].version
    return found, Run(chain.objects).model_files(), Follower(chain).fetch(found)


def _fastest(tensors: Mapping[str, Tensor], device: torch.device) -> torch.dtype:
    """The dtype of the weights if the processor computes in it natively, else float32."""
    if isinstance(tensors, Checkpoint):
        in_bfloat16 = any(map(tensors.in_bfloat16, tensors))
    else:
        in_bfloat16 = any(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    computes = device.type == "cuda" or _computes_bfloat16()
    return torch.bfloat16 if in_bfloat16 and computes else torch.float32


def _computes_bfloat16() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def no_other_version(version: int) -> Mapping[str, Tensor]:
    raise EtudeError(f"this server has only one version of its weights, not {version}")
