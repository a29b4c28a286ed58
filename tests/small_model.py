"""A model small enough to run a thousand steps in a test, its tokenizer, and a slow-motion view of
the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from etude.core.types import Sample
from etude.engine.engine import Engine, FinishedRequest, Request
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


def sharp(config: ModelConfig, seed: int, factor: float = 8.0) -> Transformer:
    """Random weights, large enough that the context decides what comes next."""
    model = init_from_scratch(config, seed).requires_grad_(False)
    for name, parameter in model.named_parameters():
        # embeddings begin large; larger still, they would drown what the layers add
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
    """What the trainer would compute: one forward pass over the whole row."""
    row = torch.tensor([prompt + tokens])
    logits = model.logits(model(row, torch.arange(row.shape[1])[None], CausalAttention()))[0]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs[range(len(prompt) - 1, row.shape[1] - 1), tokens]


def request(id: str, prompt: list[int], **options: object) -> Request:
    defaults: dict[str, object] = {
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": int(id),
        "stop": frozenset({0}),
    }
    return Request(id=id, prompt=tuple(prompt), **(defaults | options))  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[str, Sample]:
    done: dict[str, Sample] = {}
    while not engine.idle:
        done |= {
            event.id: event.sample for event in engine.step() if isinstance(event, FinishedRequest)
        }
    return done
