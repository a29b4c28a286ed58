"""`etude serve`: a model directory behind an OpenAI-compatible port. One process, one engine, no
run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from starlette.types import ASGIApp
from torch import Tensor

from etude.core.errors import EtudeError
from etude.engine.engine import Engine
from etude.engine.select import select_device
from etude.model.checkpoint import Checkpoint
from etude.model.files import build_model, read_directory
from etude.model.numerics import INVARIANT
from etude.model.transformer import Transformer
from etude.serve import process
from etude.serve.answerer import ConcurrencyLimit, PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes
from etude.serve.engine_thread import EngineThread, exit_on_engine_failure
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import create_app

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    model: Path
    host: str
    port: int
    name: str | None
    token_file: Path | None
    max_batch: int
    """Answers that are computed together; others wait."""
    max_answers: int
    """Answers under way at once, waiting ones included; beyond them requests are refused."""
    max_context: int | None
    dtype: str | None
    threads: int | None
    device: str
    """cpu, cuda, or auto."""
    invariant: bool


def create_server(
    engine: EngineThread, files: Mapping[str, bytes], name: str, token: str | None, *,
    max_context: int, max_answers: int,
) -> ASGIApp:  # fmt: skip
    """The public API over one engine."""
    model = ServedModel(
        tokenizer=engine.tokenizer,
        grammars=GrammarBuilder(files),
        max_context=max_context,
        name=name,
        concurrency=ConcurrencyLimit(max_answers),
    )
    answerer = PolicyAnswerer(model, engine)
    routes = public_routes(model, lambda http: answerer, engine.gauges)
    return create_app(routes, token, model.metrics)


def serve(options: Options) -> None:
    """Returns when the process is told to stop."""
    process.run(lambda: _serve(options))


async def _serve(options: Options) -> None:
    token = process.token(options.token_file)
    listener = process.bind(options.host, options.port, token)
    exit_on_engine_failure()
    if options.threads:
        torch.set_num_threads(options.threads)
    name = options.name or options.model.resolve().name
    files, model = load(options.model, options.dtype, select_device(options.device))
    if options.invariant:
        model.compute_with(INVARIANT)
    engine = EngineThread(Engine(model, max_batch=options.max_batch), _no_other, files)
    del model  # what the engine computes with may be a copy
    longest = engine.engine.max_context
    if (options.max_context or 0) > longest:
        raise EtudeError(
            f"--max-context {options.max_context}: the longest context of {name} is {longest}"
        )
    server = create_server(
        engine,
        files,
        name,
        token,
        max_context=options.max_context or longest,
        max_answers=options.max_answers,
    )
    if not engine.tokenizer.supports_tools:
        print(
            f"warning: the chat template of {name} shows no tools: requests may offer some, but "
            f"the model is not "
            f"told of them",
            file=sys.stderr,
            flush=True,
        )
    async with process.serving(server, listener) as running:
        print(f"serving {name} at {process.url_of(listener)}", flush=True)
        await running
    engine.close()


def load(
    directory: Path, dtype: str | None, device: torch.device
) -> tuple[dict[str, bytes], Transformer]:
    try:
        files, tensors = read_directory(directory)
        kind = DTYPES[dtype] if dtype else _fastest(tensors, device)
        return files, build_model(files, tensors, kind).requires_grad_(False).to(device)
    except (OSError, ValueError, KeyError) as e:
        raise EtudeError(
            f"cannot load a model from {directory}: {e}; give a Hugging Face model directory"
        ) from e


def _fastest(tensors: Checkpoint, device: torch.device) -> torch.dtype:
    """The dtype of the weights, if the processor computes in it."""
    in_bfloat16 = any(tensors.in_bfloat16(name) for name in tensors)
    computes = device.type == "cuda" or _computes_bfloat16()
    return torch.bfloat16 if in_bfloat16 and computes else torch.float32


def _computes_bfloat16() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _no_other(version: int) -> Mapping[str, Tensor]:
    raise EtudeError(f"this server has one version of its weights, and {version} is not it")
