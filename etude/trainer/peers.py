"""`weights.peers.Peers` over torch.distributed, through which the ranks of a trainer publish
together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class TorchPeer:
    """All ranks of the default process group. They exchange bytes over gloo, on their own group:
    publishing runs in parallel with training, and the two must not receive each other's
    messages."""

    def __init__(self, timeout_s: float = 600.0) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def all_to_all(self, messages: Sequence[bytes]) -> list[bytes]:
        """Exchange lengths first, since a rank does not know the sizes of the messages for it; then
        all nonempty messages at once."""
        sizes = torch.tensor([len(message) for message in messages])
        table = [torch.empty_like(sizes) for _ in range(self.world_size)]
        dist.all_gather(table, sizes, group=self._group)
        received = [torch.empty(int(row[self.rank]), dtype=torch.uint8) for row in table]
        received[self.rank] = _tensor(messages[self.rank])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        works = [dist.irecv(received[r], r, group=self._group) for r in others if len(received[r])]
        for rank in others:
            if messages[rank]:
                works.append(dist.isend(_tensor(messages[rank]), rank, group=self._group))
        for work in works:
            if work is not None:
                work.wait()
        return [tensor.numpy().tobytes() for tensor in received]


def _tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
