"""A model as the files of a Hugging Face directory: config.json, tokenizer.json, model.safetensors and so on.

The small files travel as a dict (name -> bytes), because in a run they live in the object store, not on a disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from etude.model.transformer import ModelConfig, Transformer

SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def weights(model: Transformer) -> dict[str, Tensor]:
    """The tensors of a model by their Hugging Face names, in bf16: what is published, saved and served."""
    return {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}


def load_weights(model: Transformer, tensors: Mapping[str, Tensor]) -> None:
    """Copies values in place, so that whoever holds the model goes on with the new ones."""
    own = dict(model.named_parameters())
    if own.keys() != tensors.keys():
        raise ValueError(
            f"tensors do not fit the model: missing {sorted(own.keys() - tensors.keys())}, "
            f"unknown {sorted(tensors.keys() - own.keys())}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def write_directory(path: Path, small: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in small.items():
        (path / name).write_bytes(data)
    (path / "model.safetensors").write_bytes(save(dict(tensors), metadata={"format": "pt"}))


def read_directory(path: Path) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    """The small files and the tensors of a model directory."""
    missing = [name for name in ("config.json", "tokenizer.json", "model.safetensors") if not (path / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} is not a model directory: it has no {', '.join(missing)}")
    small = {name: (path / name).read_bytes() for name in SMALL if (path / name).is_file()}
    return small, load((path / "model.safetensors").read_bytes())


def build(small: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> Transformer:
    model = Transformer(ModelConfig.from_json(small["config.json"]))
    load_weights(model, tensors)
    return model
