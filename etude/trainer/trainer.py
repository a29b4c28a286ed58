"""The trainer process: one lineage of stages, each from the previous one's checkpoint, resumable
wherever it was killed.

Several ranks are several such processes, started by the launcher or by torchrun. All of them do
everything; only rank 0 commits and emits events.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import torch

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import StageDone
from etude.core.lineage import stage_spans
from etude.engine.select import check_ranks, select_device
from etude.run.process import keep_freed_memory
from etude.serve import heartbeat
from etude.store.runs import Run
from etude.store.telemetry import sync_event_writer
from etude.train.distributed import World
from etude.trainer.stages import STAGE
from etude.trainer.state import TrainerState


class Trainer(TrainerState):
    """Runs the stages of a run, one after the other."""

    def train(self) -> None:
        """Run all stages. A model that the run was given is published first, as version 0, for its
        evaluation."""
        for span in stage_spans(self.config.stage):
            if span.end > self.version:
                began = time.monotonic()
                self.enter_stage(span)
                torch.set_num_threads(span.stage.threads)
                if self.is_fresh and self.config.model.path is not None:
                    self.publish_start()
                STAGE[span.stage.kind](self, span)
                self.saver.wait()
                self.publisher.wait()
                self.emit(
                    StageDone(
                        stage=span.name, version=self.version, seconds=time.monotonic() - began
                    )
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.trainer.trainer", description="The trainer of one run, or one rank of it."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--rendezvous",
        type=Path,
        help="rendezvous file of the ranks of one machine; without it, torchrun's "
        "environment variables are used",
    )
    args = parser.parse_args()
    heartbeat.send_heartbeats_from_thread()
    try:
        run = Run.open(args.store, create=False)
        config = run.config()
        timeout_s = config.trainer.timeout_s
        if config.deterministic:
            # CUDA's products refuse to run deterministically without it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = rank_device(
            config.trainer.device, args.rank or int(os.environ.get("LOCAL_RANK", "0"))
        )
        if args.rendezvous:
            world = World.on_one_machine(
                args.rank, args.ranks, args.rendezvous, timeout_s, device.type
            )
        else:
            world = World.from_torchrun(timeout_s, device.type)
        keep_freed_memory()
        train(run, config, world, device)
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # no thread may keep waiting for a lost rank
    return 0


def rank_device(asked: str, number: int) -> torch.device:
    """The device of the rank with this number on its machine."""
    device = select_device(asked)
    if device.type == "cpu":
        return device
    check_ranks(device, number + 1)
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def train(run: Run, config: RunConfig, world: World, device: torch.device) -> None:
    """Train to the end of the last stage."""
    heard = world.rank == 0
    writer = (
        sync_event_writer(run, "trainer") if heard else contextlib.nullcontext(lambda event: None)
    )
    with world.naming_lost_ranks(), writer as emit:
        trainer = Trainer(run, config, emit, world, device)
        try:
            trainer.train()
        except torch.OutOfMemoryError as e:
            raise EtudeError(
                f"{device} ran out of memory at {world.activity} ({str(e).partition('. ')[0]}): "
                f"continue with trainer.gradient_checkpointing = true, a smaller "
                f"microbatch_tokens or more ranks, or start over with --fresh and a smaller "
                f"max_context"
            ) from e
        finally:
            trainer.close()
        world.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Everything is saved and published, so the interpreter is not shut down: a gloo thread that
    # frees a tensor meanwhile would abort the process.
    os._exit(status)
