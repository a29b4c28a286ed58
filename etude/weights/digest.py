"""What it means that two tensors are the same: equal dtype, shape and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch


def digest(tensor: torch.Tensor) -> str:
    hasher = blake2b(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode(), digest_size=32)
    hasher.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensors[name]) for name in sorted(tensors)}
