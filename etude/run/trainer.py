"""The trainer process: one lineage of stages, each from the last one's checkpoint, resumed wherever it was killed.

A checkpoint is written before the version is published, so whatever the engines have ever served can be trained on from
here. Both happen in the background: a step waits for the copies only, and for the checkpoint before.

Several ranks are several such processes, started by the launcher or by torchrun. All of them do everything; rank 0
alone commits and tells what happened.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from etude.core.config import RlConfig, RunConfig, TrainerConfig
from etude.core.errors import EtudeError
from etude.core.events import FitStep, HandedOver, StageDone
from etude.core.types import Batch, Recomputed
from etude.engine.choose import device_for
from etude.model.files import SMALL
from etude.model.numerics import INVARIANT
from etude.model.tokenizer import ChatTokenizer
from etude.run import checkpoints
from etude.run.checkpoints import Checkpoint, Origin, Saver, code_version
from etude.run.peers import Distributed
from etude.run.plan import Leg, legs
from etude.run.prepare import model_directory
from etude.run.process import keep_freed_memory
from etude.run.stages import STAGE
from etude.run.step import objective_of
from etude.run.telemetry import Emit, emitter
from etude.serve import pulse
from etude.store.runs import Run
from etude.train.checkpoint import pack, unpack
from etude.train.learner import Learner
from etude.train.meter import meter
from etude.train.ranks import ALONE, Ranks
from etude.train.stages import Progress
from etude.train.start import fused, starting_model
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.snapshot import Part

CPU = torch.device("cpu")
CHECKPOINT_S = 20.0  # between checkpoints within mid-training and sft, which take minutes


class Trainer:
    """`version` and `step` say where the learner stands: `step` steps of `stage` after `version`. `made_by` is the step
    within its stage that made the version."""

    def __init__(
        self, run: Run, config: RunConfig, emit: Emit, ranks: Ranks = ALONE, device: torch.device = CPU
    ) -> None:
        self.run, self.config, self.emit, self.ranks = run, config, emit, ranks
        for stage in config.stage:
            if isinstance(stage, RlConfig):
                objective_of(stage)  # a loss that cannot be loaded shall not cost the stages before its own
        torch.use_deterministic_algorithms(config.deterministic)
        self.publisher = Publisher(Chain(run.objects), peers=Distributed() if ranks.size > 1 else None)
        self.saver = Saver(run, ranks.rank, ranks.size)
        if ranks.rank == 0:
            self.saver.clean()
        ranks.barrier()
        self.files = {name: run.objects.get_sealed(f"model/{name}") for name in SMALL}
        self.tokenizer = ChatTokenizer(self.files)
        names = run.checkpoints()
        # A checkpoint holds every weight: the model's directory may be gone by then.
        given = None if names or config.model.path is None else model_directory(config.model.path)
        model = starting_model(given, self.files["config.json"], config.seed).to(device)
        if config.invariant:
            model.compute_with(INVARIANT)
        compute = computed_in(config.trainer, device)
        if compute == torch.bfloat16 and not config.deterministic:
            fused(model)
        self.learner = Learner(
            model,
            ranks,
            optimizer=config.trainer.optimizer,
            dtype=getattr(torch, config.trainer.weights),
            compute=compute,
        )
        self.stage, self.version, self.step, self.made_by = "", 0, 0, 0
        self.lineage: tuple[Origin, ...] = ()
        self.held_out: tuple[float, ...] = ()
        self.books = hashlib.sha256().hexdigest()
        """Speaks for all batches that the stage has trained on, in their order."""
        if names:
            self.resume(checkpoints.read(run, names[-1]))

    def train(self) -> None:
        for leg in legs(self.config.stage):
            if leg.end > self.version:
                began = time.monotonic()
                self.enter(leg)
                torch.set_num_threads(leg.stage.threads)
                STAGE[leg.stage.kind](self, leg)
                self.saver.wait()
                self.publisher.wait()
                self.emit(StageDone(stage=leg.name, version=self.version, seconds=time.monotonic() - began))

    def enter(self, leg: Leg) -> None:
        """A stage that is not being resumed starts from the weights of the last one, and from nothing else of it."""
        if self.stage != leg.name:
            path, seed = self.config.model.path, self.config.seed
            parent = f"version {leg.start}" if self.lineage else f"the model in {path}" if path else f"seed {seed}"
            config = leg.stage.model_dump(mode="json", exclude_none=True)
            origin = Origin(stage=leg.name, parent=parent, config=config, data="", code=code_version())
            self.stage, self.step, self.held_out, self.lineage = leg.name, 0, (), (*self.lineage, origin)
            self.books = hashlib.sha256().hexdigest()
            self.learner.restart()
        self.ranks.at = f"the start of {leg.name}"

    @property
    def context(self) -> int:
        return self.learner.model.config.max_position_embeddings

    def learns_from(self, data: str) -> None:
        """Enters into the lineage what the stage learns from; after a stop it must still be that."""
        origin = self.lineage[-1]
        if self.step and origin.data != data:
            raise EtudeError(
                f"stage {self.stage} learnt from other data before it was stopped ({origin.data}, and now {data}): put "
                f"the files back as they were, or start a run with another name"
            )
        self.lineage = (*self.lineage[:-1], replace(origin, data=data))

    def read_batch(self, step: int, leg: Leg) -> Batch:
        """Waits for it, and enters it into the lineage."""
        batch = self.run.wait_batch(step)
        self.ranks.at = f"step {step} of {self.stage}"
        self.books = hashlib.sha256(f"{self.books} {self.run.batch_digest(step)}".encode()).hexdigest()
        self.learns_from(f"batches {leg.start + 1} to {step}, sha256 {self.books}")
        return batch

    def compare(self, batch: Batch, found: tuple[Recomputed, ...]) -> None:
        """How far the engines' log-probs of a batch are from what the trainer found, for the store and as an event."""
        if self.ranks.rank == 0:
            self.run.put_recomputed(batch.step, found)
            self.emit(meter(batch.rows, found, step=batch.step, decode=self.tokenizer.decode))

    def follow_fit(self) -> Callable[[Progress], None]:
        """What happens after each step of mid-training and sft: an event, and now and then a checkpoint."""
        last = saved = time.monotonic()

        def on_step(progress: Progress) -> None:
            nonlocal last, saved
            now = time.monotonic()
            speed = progress.fit.num_tokens / max(now - last, 1e-9)
            self.emit(
                FitStep(
                    stage=self.stage,
                    step=progress.step,
                    steps=progress.total,
                    loss=progress.fit.loss,
                    tokens_per_s=speed,
                    figures=progress.figures,
                )
            )
            self.step, self.held_out = progress.step, progress.held_out
            self.ranks.at = f"step {progress.step + 1} of {self.stage}"
            # One clock decides for all: a checkpoint that only some ranks hold to be due would never be whole.
            (due,) = self.ranks.sum(float(self.ranks.rank == 0 and now - saved > CHECKPOINT_S))
            if due:
                self.save()
                saved = now
            last = time.monotonic()

        return on_step

    def reach(self, version: int, *, step: int) -> None:
        """The learner's weights are this version: keep them, then show them to the world."""
        self.version, self.step, self.made_by = version, 0, step
        self.save(then=self.publication())

    def publication(self) -> Callable[[], None]:
        """Takes what this rank holds of the weights; to publish that is to call what is returned."""
        began = time.monotonic()
        parts = {name: Part(*rows) for name, rows in self.learner.rows().items()}
        start = self.publisher.prepare(self.version, parts, stage=self.stage, step=self.made_by, given=True)
        self.emit(HandedOver(version=self.version, stall_s=time.monotonic() - began))
        return start

    def save(self, then: Callable[[], None] = lambda: None) -> None:
        checkpoint = Checkpoint(
            stage=self.stage,
            step=self.step,
            version=self.version,
            lineage=self.lineage,
            cursor={"held_out": list(self.held_out), "made_by": self.made_by, "books": self.books},
        )
        self.saver.save(checkpoint, pack(self.learner.state()), then)

    def resume(self, checkpoint: Checkpoint) -> None:
        self.stage, self.version, self.step = checkpoint.stage, checkpoint.version, checkpoint.step
        self.lineage, self.held_out = checkpoint.lineage, tuple(checkpoint.cursor["held_out"])
        self.made_by, self.books = checkpoint.cursor["made_by"], checkpoint.cursor["books"]

        def shard(rank: int) -> dict[str, torch.Tensor]:
            return unpack(checkpoints.read_part(self.run, checkpoint, rank), f"checkpoint {checkpoint.name}")

        self.learner.load_shards(len(checkpoint.parts), shard)
        if self.step == 0:
            self.publication()()  # a crash may have come between the checkpoint and the publication
            self.publisher.wait()

    def close(self) -> None:
        self.saver.close()


def computed_in(config: TrainerConfig, device: torch.device) -> torch.dtype:
    if config.compute != "auto":
        return getattr(torch, config.compute)  # type: ignore[no-any-return]
    return torch.bfloat16 if device.type == "cuda" and config.weights == "bfloat16" else torch.float32


def main() -> int:
    parser = argparse.ArgumentParser(prog="etude.run.trainer", description="The trainer of one run, or one rank of it.")
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--meeting", type=Path, help="a file in which ranks of this machine meet; else: as torchrun says"
    )
    args = parser.parse_args()
    pulse.beat_from_a_thread()
    try:
        run = Run.open(args.store, create=False)
        config = run.config()
        timeout_s = config.trainer.timeout_s
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA's products refuse to be
        device = own_device(config.trainer.device, args.rank or int(os.environ.get("LOCAL_RANK", "0")))
        if args.meeting:
            ranks = Ranks.on_this_machine(args.rank, args.ranks, args.meeting, timeout_s, device.type)
        else:
            ranks = Ranks.of_torchrun(timeout_s, device.type)
        keep_freed_memory()
        train(run, config, ranks, device)
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # no thread may wait any longer for a rank that is gone
    return 0


def own_device(asked: str, number: int) -> torch.device:
    """Of the rank with that number on this machine."""
    device = device_for(asked)
    if device.type == "cpu":
        return device
    if number >= (count := torch.cuda.device_count()):
        raise EtudeError(f"rank {number} has no CUDA device of its own, this machine has {count}: lower trainer.ranks")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def train(run: Run, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
    """To the end of the last stage."""
    emit = emitter(run, "trainer") if ranks.rank == 0 else lambda event: None
    with ranks.watched():
        trainer = Trainer(run, config, emit, ranks, device)
        try:
            trainer.train()
        except torch.OutOfMemoryError as e:
            raise EtudeError(
                f"{device} has too little memory at {ranks.at} ({str(e).partition('. ')[0]}): go on with less of "
                f"microbatch_tokens or with more ranks, or start a run with another name and less of max_context"
            ) from e
        finally:
            trainer.close()
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
