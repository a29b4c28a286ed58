"""Distributed training: the processes (ranks) that train one model together.

A rank holds its rows of every parameter (FSDP2 on a device mesh), and computes its share of every
batch. A single process runs the same code without communication, and needs no process group.

Rows are divided as FSDP divides them: equal pieces of the first dimension, the last ones shorter or
empty. Masters, optimizer and checkpoints follow that division, so they work on a rank's own rows,
and elementwise operations need no other rank at all.

A rank that dies or hangs breaks the communication of all others, which only see a reset connection
or a time-out that does not name the rank. So a rank that sees one starts a *liveness check* in the
store of the rendezvous: the others answer from a separate thread, even while they are stuck, and
the ranks that do not answer are named.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from etude.core.errors import EtudeError
from etude.model.transformer import Transformer

# Sharding modules are imported where they are needed: that takes half as long as importing torch,
# and most runs have one rank.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

LIVENESS_S = 10.0  # for a healthy rank, however busy
POLL_S = 0.5


class World:
    """The ranks that train one model together, seen from one of them. All ranks must call the
    collective methods in the same order, and all get the same results."""

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self.activity = "the start"
        """The current activity of this rank, for the error message when another rank is lost."""
        self._liveness = RankLiveness(store, self) if store else None

    @classmethod
    def on_one_machine(
        cls, rank: int, size: int, rendezvous_file: Path, timeout_s: float, device: str = "cpu"
    ) -> World:
        """A group of processes on one machine. Its rendezvous is a file that must not exist yet; it
        is not reachable from outside."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return cls._rendezvous(FileStore(str(rendezvous_file), size), rank, size, timeout_s, device)

    @classmethod
    def from_torchrun(cls, timeout_s: float, device: str = "cpu") -> World:
        """The group started by torchrun; without torchrun only this process."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        return cls._rendezvous(store, rank, size, timeout_s, device)

    @classmethod
    def _rendezvous(
        cls, store: Store, rank: int, size: int, timeout_s: float, device: str
    ) -> World:
        """Join the group. `timeout_s` holds for every collective, including the rendezvous."""
        # metrics are exchanged on the CPU in any case
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timeout
            )
        except RuntimeError as e:
            raise EtudeError(
                f"rank {rank} of {size} could not connect to all others within {timeout_s:.0f} "
                f"s: {e}"
            ) from e
        return cls(rank, size, PrefixStore("roll", store))

    def close(self) -> None:
        if self._liveness:
            self._liveness.close()
            dist.destroy_process_group()

    def shard(self, model: Transformer) -> None:
        """Shard a model (FSDP2): from now on every rank holds its rows of each parameter, and
        gradients are summed over the ranks."""
        if self.world_size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(next(model.parameters()).device.type, (self.world_size,))
        for block in model.model.layers:
            shard_module(block, mesh)
        # The root keeps its parameters gathered after `forward`, because the head is needed after
        # it has returned.
        shard_module(model, mesh, reshard_after_forward=False)

    def reshard(self, model: Transformer) -> None:
        """Free the gathered parameters after passes that no backward pass follows; the next step
        would make them stale."""
        if self.world_size > 1:
            model.reshard()  # type: ignore[operator]  # of FSDPModule, which `shard` made of it

    def all_reduce_sum(self, *values: float) -> list[float]:
        """The sums over all ranks, taken in their order."""
        if self.world_size == 1:
            return list(values)
        return [
            math.fsum(column)
            for column in self._table(torch.tensor(values, dtype=torch.float64)).T.tolist()
        ]

    def global_norm(self, own: Tensor) -> Tensor:
        """The norm of all gradients, from the norm of each rank's own."""
        return (
            own
            if self.world_size == 1
            else own.new_tensor(math.sqrt(self.all_reduce_sum(float(own) ** 2)[0]))
        )

    def all_gather(self, own_N: Tensor) -> Tensor:
        """The tensors of all ranks, concatenated."""
        if self.world_size == 1:
            return own_N
        sizes = [int(size) for (size,) in self._table(torch.tensor([len(own_N)])).tolist()]
        padded = torch.cat((own_N, own_N.new_zeros(max(sizes) - len(own_N))))
        return torch.cat([row[:size] for row, size in zip(self._table(padded), sizes, strict=True)])

    def agrees(self, digest: bytes) -> bool:
        """True if all ranks have the same digest."""
        if self.world_size == 1:
            return True
        table = self._table(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        return bool((table == table[0]).all())

    def _table(self, row_N: Tensor) -> Tensor:
        """The rows of all ranks."""
        rows = [torch.empty_like(row_N) for _ in range(self.world_size)]
        dist.all_gather(rows, row_N)
        return torch.stack(rows)

    def barrier(self) -> None:
        self.all_reduce_sum(0.0)

    def local_rows(self, count: int) -> slice:
        """The rows of a tensor of `count` rows that this rank holds."""
        return shard_rows(count, self.rank, self.world_size)

    @contextlib.contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Context for collective work: if a rank is lost, the error names it."""
        try:
            yield
        except RuntimeError as e:  # the only type that collectives raise, for every reason
            if self._liveness and (missing := self._liveness.missing_ranks()):
                raise EtudeError(self._liveness.message(missing)) from e
            raise


SINGLE_PROCESS = World()


def shard_module(
    module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool = True
) -> None:
    """Shard the parts of a module that are not sharded yet among the ranks of a mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    sharded = fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        reshard_after_forward=reshard_after_forward,
    )
    # losses are already divided by the tokens of the whole batch
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def shard_rows(count: int, rank: int, size: int) -> slice:
    """The rows of a tensor of `count` rows that one of `size` ranks holds."""
    each = -(-count // size)
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def local_tensor(tensor: Tensor) -> Tensor:
    """The rows of a parameter or of its gradient that this rank holds; they share memory with
    it."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def full_tensor(own_rows: Tensor, like: nn.Parameter) -> Tensor:
    """The whole tensor, gathered from the rows that each rank holds; sharded like the parameter."""
    if not _is_sharded(like):
        return own_rows
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(
        own_rows,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return sharded.full_tensor()


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local")


class RankLiveness:
    """Finds the ranks that died or hang. There is no heartbeat: a rank whose collective failed asks
    all others, and a thread of each answers. The same thread ends a process that keeps waiting for
    a lost rank."""

    def __init__(self, store: Store, world: World) -> None:
        self._store = store
        self._world = world
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="liveness check", daemon=True)
        self._thread.start()

    def missing_ranks(self) -> list[int]:
        """The ranks that do not answer within the waiting time."""
        try:
            number = self._store.add("calls", 1) - 1
            self._store.set(f"call {number}", self._world.activity)
            deadline = time.monotonic() + LIVENESS_S
            while (missing := self._missing(number)) and time.monotonic() < deadline:
                time.sleep(POLL_S / 5)
        except RuntimeError:  # the store itself is gone, and rank 0 kept it
            return [0]
        return missing

    def message(self, missing: list[int]) -> str:
        lost = (
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of "
            f"{self._world.world_size}"
        )
        return (
            f"{lost} cannot be reached, so rank {self._world.rank} stops at "
            f"{self._world.activity}: see the log of {lost}, then start again; the run "
            f"continues from its newest checkpoint"
        )

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _answer(self) -> None:
        """Answer checks until the end. The main thread may be waiting for the lost rank until its
        own time-out; this thread ends the process if the main thread has not done so well after a
        check in which a rank was missing."""
        number, over = 0, math.inf
        while not self._ended.wait(POLL_S):
            try:
                while self._store.check([f"call {number}"]):
                    self._store.set(f"here {number} {self._world.rank}", self._world.activity)
                    number, over = number + 1, min(over, time.monotonic() + 2 * LIVENESS_S)
                missing = self._missing(number - 1) if time.monotonic() > over else []
            except RuntimeError:
                missing = [0]
            if missing:
                print(f"error: {self.message(missing)}", file=sys.stderr, flush=True)
                os._exit(2)

    def _missing(self, number: int) -> list[int]:
        return [
            rank
            for rank in range(self._world.world_size)
            if not self._store.check([f"here {number} {rank}"])
        ]
