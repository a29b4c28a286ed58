"""A rank's tensors as bytes, and back: one safetensors object. Where it is kept is for `store/` to
say."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from etude.core.errors import EtudeError


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """A copy: the tensors may change as soon as this returns. Equal tensors give equal bytes."""
    return save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})


def unpack(data: bytes, source: str) -> dict[str, Tensor]:
    """`source` says where the bytes come from, for the error when they are something else."""
    try:
        return load(data)
    except SafetensorError as e:
        raise EtudeError(
            f"{source} is not a whole part of a checkpoint ({e}): remove that checkpoint, and the "
            f"run goes on from "
            f"the one before"
        ) from e
