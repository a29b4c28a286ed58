"""Asynchronous copies of device tensors to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncHostCopy:
    """An asynchronous copy of a device tensor to the host, taken after all work queued so far.
    `wait` returns it, and does not wait for work that is queued later."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._made: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._made:
            self._made.synchronize()
        return self._copy
