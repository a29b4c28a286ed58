"""A model small enough to run a thousand steps in a test, its tokenizer, and helpers to step an
engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.core.sampling import Request, Sample, SamplingParams
from etude.engine.engine import Engine, FinishedRequest
from etude.engine.scheduler import Constraint, Sequence
from etude.model.attention import CausalAttention
from etude.model.from_scratch import tokenizer_files
from etude.model.transformer import ModelConfig, Transformer, init_from_scratch

TEXTS = [
    "def area(a, b):\n    return a * b\n",
    "read area.py",
    "edit 2 return a + b",
    "test",
    "submit",
    "call a tool",
] * 4


def config(vocab_size: int = 61, context: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=context,
    )


# Tolerance for rounding of a log-prob of a `sharp` model. In fp32 a plain pass differs from float64
# by up to 1e-3, depending on processor and batch; one missing token of context changes it by more
# than 3.
ROUNDING = 5e-3


def sharp(config: ModelConfig, seed: int, factor: float = 8.0) -> Transformer:
    """A model with random weights that are large enough for the context to determine the next
    token."""
    model = init_from_scratch(config, seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        # embeddings are initialized large; scaled by the full factor they would drown the layers
        if parameter.ndim >= 2:
            parameter.mul_(factor / 4 if "embed" in name else factor)
    return model


def small_files(vocab_size: int = 300, context: int = 256) -> dict[str, bytes]:
    """All small files of a model directory."""
    return tokenizer_files(TEXTS, vocab_size) | {
        "config.json": config(vocab_size, context).to_json().encode()
    }


def plain_logprobs(
    model: Transformer, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> Tensor:
    """The trainer's log-probs: one forward pass over the whole row."""
    row = torch.tensor([prompt + tokens])
    logits = model.logits(model(row, torch.arange(row.shape[1])[None], CausalAttention()))[0]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[range(len(prompt) - 1, row.shape[1] - 1), tokens]


PARAMS = {field.name for field in fields(SamplingParams)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Request):
    """A request with the other arguments of an engine's `add`."""

    id: str
    stream: bool = False
    constraint: Constraint | None = None
    stop_check: Callable[[int], bool] | None = None

    @property
    def temperature(self) -> float:
        return self.params.temperature


def request(id: str, prompt: list[int], **options: Any) -> Asked:
    """A request to an engine. Options may include sampling parameters by name."""
    params = {name: options.pop(name) for name in PARAMS & set(options)}
    defaults: dict[str, Any] = {
        "max_tokens": 20,
        "seed": int(id),
        "stop_token_ids": (0,),
        "experts_from": 0,
    }
    given = defaults | options
    return Asked(id=id, prompt=tuple(prompt), params=SamplingParams(**params), **given)


def add(engine: Engine, asked: Asked) -> None:
    engine.add(
        asked,
        asked.id,
        stream=asked.stream,
        constraint=asked.constraint,
        stop_check=asked.stop_check,
    )


def in_sequence(asked: Asked, arrival: int, limit: int, **options: Any) -> Sequence:
    """The request as a sequence in the scheduler."""
    return Sequence(
        asked, asked.id, arrival, np.zeros(limit), tokens=list(asked.prompt), stream=asked.stream,
        constraint=asked.constraint, stop_check=asked.stop_check, **options,
    )  # fmt: skip


def drain(engine: Engine) -> dict[str, Sample]:
    done: dict[str, Sample] = {}
    while not engine.idle:
        done |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    return done
