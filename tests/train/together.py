"""Functions that several ranks run at once, each in its own process on this machine."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

# One process loads torch, and all ranks are forked from it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch._dynamo", "etude.train.learner", "tests.train.distributed_work"]
)


def together(
    size: int, work: Callable[..., R], *arguments: Any, timeout_s: float = 30.0
) -> list[R | str]:
    """Run `work(world, *arguments)` on every rank; return each result, or a string that states how
    the rank ended."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank,
                args=(rank, size, Path(folder) / "rendezvous", timeout_s, theirs, work, arguments),
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return [_outcome(ours, process) for process, ours in started]


def _outcome(ours: Connection, process: Any) -> Any:
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return f"ended with {process.exitcode}"
    finally:
        process.join()


def _rank(
    rank: int,
    size: int,
    meeting: Path,
    timeout_s: float,
    pipe: Connection,
    work: Callable[..., Any],
    arguments: Any,
) -> None:
    import torch

    from etude.core.errors import EtudeError
    from etude.train import distributed as module

    module.LIVENESS_S = 2.0
    torch.set_num_threads(1)
    world = module.World.on_one_machine(rank, size, meeting, timeout_s)
    try:
        with world.naming_lost_ranks():
            pipe.send(work(world, *arguments))
        world.close()
    except EtudeError as e:
        pipe.send(str(e))
