"""A checkpoint as bytes: one safetensors object, the learner's tensors in it and everything else in its header.

One object, so that it is there whole or not at all. Where it is kept is for `run/` to say; nothing here touches a disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.types import Json

KEY = "etude"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One stage of the lineage that led here."""

    stage: str
    parent: int | None
    """The weight version that it started from; None for fresh weights or a model from outside."""
    config: str
    """Digest of what it was told."""
    data: str
    """What it learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    stage: str
    step: int
    """Steps of the stage that are done."""
    version: int
    """The weight version that these weights are."""
    lineage: tuple[Origin, ...]
    """Oldest first; the last one is this stage."""
    cursor: dict[str, Json]
    """What else the stage needs to go on, such as the held-out losses so far."""
    tensors: Mapping[str, Tensor]
    """`Learner.state()`."""


def pack(checkpoint: Checkpoint) -> bytes:
    record = {
        "stage": checkpoint.stage,
        "step": checkpoint.step,
        "version": checkpoint.version,
        "lineage": [{name: getattr(origin, name) for name in Origin.__slots__} for origin in checkpoint.lineage],
        "cursor": checkpoint.cursor,
    }
    return save(dict(checkpoint.tensors), metadata={KEY: json.dumps(record)})


def unpack(data: bytes, source: str) -> Checkpoint:
    """`source` says where the bytes come from, for the error when they are not a checkpoint."""
    try:
        tensors = load(data)
        record = json.loads(_header(data)["__metadata__"][KEY])
    except (SafetensorError, KeyError) as e:
        raise EtudeError(
            f"{source} is not a whole checkpoint ({e}): remove it, and the run goes on from the one before"
        ) from e
    lineage = tuple(Origin(**origin) for origin in record.pop("lineage"))
    return Checkpoint(**record, lineage=lineage, tensors=tensors)


def _header(data: bytes) -> dict[str, Json]:
    """A safetensors object begins with the size of its header, 8 bytes, and the header, JSON."""
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Json] = json.loads(data[8 : 8 + size])
    return header
