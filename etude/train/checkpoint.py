"""Serialization of a rank's tensors, as one safetensors object; `store/` keeps it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from etude.core.errors import EtudeError
from etude.train.masters import Master, whole


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialize tensors to bytes. The result is a copy: the tensors may change as soon as this
    returns. Equal tensors give equal bytes."""
    return save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})


def from_bytes(data: bytes, source: str) -> dict[str, Tensor]:
    """Parse tensors from bytes. `source` names the bytes in the error message for damaged ones."""
    try:
        return load(data)
    except SafetensorError as e:
        raise EtudeError(
            f"{source} is not a whole part of a checkpoint ({e}): remove that checkpoint, and the "
            f"run goes on from "
            f"the one before"
        ) from e


@torch.no_grad()
def fill_tensors(own: Mapping[str, Master], given: Mapping[str, Master]) -> None:
    """Copy the given tensors into the own ones, which must have the same names and shapes."""
    if own.keys() != given.keys():
        raise ValueError(
            f"the state does not fit the model: missing {sorted(own.keys() - given.keys())}, "
            f"unknown {sorted(given.keys() - own.keys())}"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise ValueError(
                f"the state does not fit the model: {name} is {tuple(given[name].shape)}, not "
                f"{tuple(tensor.shape)}"
            )
        tensor.copy_(whole(given[name]))
