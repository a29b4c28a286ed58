"""The trainer process: one lineage of stages, each from the last one's checkpoint, resumed wherever it was killed.

A checkpoint is named `version.step`: so many steps of the running stage after that version. It is written before the
version is published, so whatever the engines have ever served can be trained on from here.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from etude.core.config import RlConfig, RunConfig
from etude.core.errors import EtudeError
from etude.core.events import FitStep, HandedOver, StageDone
from etude.model.files import SMALL
from etude.model.numerics import INVARIANT
from etude.run.plan import Leg, legs
from etude.run.prepare import model_directory
from etude.run.stages import STAGE
from etude.run.step import objective_of
from etude.run.telemetry import Emit, emitter
from etude.store.runs import Run
from etude.train.checkpoint import Checkpoint, Origin, pack, unpack
from etude.train.learner import Learner
from etude.train.stages import Progress
from etude.train.start import starting_model
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.snapshot import Part

KEEP = 2
CHECKPOINT_S = 20.0  # between checkpoints within mid-training and sft, which take minutes


class Trainer:
    """`version` and `step` say where the learner stands: `step` steps of `stage` after `version`. `made_by` is the step
    within its stage that made the version."""

    def __init__(self, run: Run, config: RunConfig, emit: Emit) -> None:
        self.run, self.config, self.emit = run, config, emit
        for stage in config.stage:
            if isinstance(stage, RlConfig):
                objective_of(stage)  # a loss that cannot be loaded shall not cost the stages before its own
        self.publisher = Publisher(Chain(run.objects))
        self.files = {name: run.objects.get(f"model/{name}") for name in SMALL}
        names = run.checkpoints()
        # A checkpoint holds every weight: the model's directory may be gone by then.
        given = None if names or config.model.path is None else model_directory(config.model.path)
        model = starting_model(given, self.files["config.json"], config.seed)
        if config.invariant:
            model.compute_with(INVARIANT)
        self.learner = Learner(model)
        self.stage, self.version, self.step, self.made_by = "", 0, 0, 0
        self.lineage: tuple[Origin, ...] = ()
        self.held_out: tuple[float, ...] = ()
        if names:
            self.resume(unpack(run.checkpoint(names[-1]), f"checkpoint {names[-1]} of {run.objects.url}"))

    def train(self) -> None:
        for leg in legs(self.config.stage):
            if leg.end > self.version:
                began = time.monotonic()
                self.enter(leg)
                torch.set_num_threads(leg.stage.threads)
                STAGE[leg.stage.kind](self, leg)
                self.publisher.wait()
                self.emit(StageDone(stage=leg.name, version=self.version, seconds=time.monotonic() - began))

    def enter(self, leg: Leg) -> None:
        """A stage that is not being resumed starts from the weights of the last one, and from nothing else of it."""
        if self.stage != leg.name:
            digest = hashlib.blake2b(leg.stage.model_dump_json().encode(), digest_size=8).hexdigest()
            parent = leg.start if self.lineage else None
            origin = Origin(stage=leg.name, parent=parent, config=digest, data=f"seed {self.config.seed}")
            self.stage, self.step, self.held_out, self.lineage = leg.name, 0, (), (*self.lineage, origin)
            self.learner.restart()

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
            if now - saved > CHECKPOINT_S:
                self.save()
                saved = now
            last = time.monotonic()

        return on_step

    def reach(self, version: int, *, step: int) -> None:
        """The learner's weights are this version: keep them, then show them to the world."""
        self.version, self.step, self.made_by = version, 0, step
        self.save()
        self.publish()

    def publish(self) -> None:
        began = time.monotonic()
        parts = {name: Part(*rows) for name, rows in self.learner.rows().items()}
        self.publisher.publish(self.version, parts, stage=self.stage, step=self.made_by)
        self.emit(HandedOver(version=self.version, stall_s=time.monotonic() - began))

    def save(self) -> None:
        checkpoint = Checkpoint(
            stage=self.stage,
            step=self.step,
            version=self.version,
            lineage=self.lineage,
            cursor={"held_out": list(self.held_out), "made_by": self.made_by},
            tensors=self.learner.state(),
        )
        self.run.put_checkpoint(f"{self.version:06d}.{self.step:06d}", pack(checkpoint))
        for name in self.run.checkpoints()[:-KEEP]:
            self.run.delete_checkpoint(name)

    def resume(self, checkpoint: Checkpoint) -> None:
        self.stage, self.version, self.step = checkpoint.stage, checkpoint.version, checkpoint.step
        self.lineage, self.held_out = checkpoint.lineage, tuple(checkpoint.cursor["held_out"])
        self.made_by = checkpoint.cursor["made_by"]
        self.learner.load_state(checkpoint.tensors)
        if self.step == 0:
            self.publish()  # a crash may have come between the checkpoint and the publication
            self.publisher.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="etude.run.trainer", description="The trainer of one run.")
    parser.add_argument("--store", required=True, help="the run's store")
    args = parser.parse_args()
    try:
        run = Run.open(args.store, create=False)
        Trainer(run, run.config(), emitter(run, "trainer")).train()
    except EtudeError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
