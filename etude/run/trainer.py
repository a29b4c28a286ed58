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

import torch

from etude.core.config import MidtrainConfig, RlConfig, RunConfig, SftConfig
from etude.core.errors import EtudeError
from etude.core.events import FitStep, HandedOver, StageDone, StageStarted
from etude.model.files import SMALL
from etude.model.tokenizer import ChatTokenizer
from etude.run import data
from etude.run.plan import Leg, legs
from etude.run.prepare import model_directory
from etude.run.step import Scribe, computing_in, objective_of
from etude.run.telemetry import Emit, emitter
from etude.store.experts import get_experts
from etude.store.runs import Run
from etude.train import stages
from etude.train.checkpoint import Checkpoint, Origin, pack, unpack
from etude.train.learner import Learner
from etude.train.schedule import rate
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
        self.learner = Learner(starting_model(given, self.files["config.json"], config.seed))
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
                STAGE[leg.kind](self, leg)
                self.publisher.wait()
                self.emit(StageDone(stage=leg.kind, version=self.version, seconds=time.monotonic() - began))

    def enter(self, leg: Leg) -> None:
        """A stage that is not being resumed starts from the weights of the last one, and from nothing else of it."""
        if self.stage != leg.kind:
            digest = hashlib.blake2b(leg.stage.model_dump_json().encode(), digest_size=8).hexdigest()
            parent = leg.start if self.lineage else None
            origin = Origin(stage=leg.kind, parent=parent, config=digest, data=f"seed {self.config.seed}")
            self.stage, self.step, self.held_out, self.lineage = leg.kind, 0, (), (*self.lineage, origin)
            self.learner.restart()

    def midtrain(self, leg: Leg) -> None:
        stage = leg.stage
        assert isinstance(stage, MidtrainConfig)
        tokenizer = ChatTokenizer(self.files)
        self.emit(StageStarted(stage=leg.kind, steps=stage.steps, done=self.step))
        stages.midtrain(
            self.learner,
            [tokenizer.encode(text) for text in data.texts(self.config)],
            eos=tokenizer.eos,
            steps=stage.steps,
            batch_tokens=stage.batch_tokens,
            row_tokens=min(stage.row_tokens, self.learner.model.config.max_position_embeddings),
            lr=stage.lr,
            warmup=stage.warmup,
            weight_decay=stage.weight_decay,
            seed=self.config.seed,
            start_step=self.step,
            on_step=self.follow_fit(),
        )
        self.reach(leg.end, step=self.step)

    def sft(self, leg: Leg) -> None:
        stage = leg.stage
        assert isinstance(stage, SftConfig)
        tokenizer = ChatTokenizer(self.files)
        self.emit(StageStarted(stage=leg.kind, steps=0, done=self.step))
        shown, held_back = (
            [data.tokenize(session, tokenizer) for session in sessions]
            for sessions in data.sessions(self.config, stage.demonstrations)
        )
        data.check_fits(shown + held_back, self.learner.model.config.max_position_embeddings)
        stages.sft(
            self.learner,
            shown,
            held_back,
            max_epochs=stage.max_epochs,
            patience=stage.patience,
            batch_tokens=stage.batch_tokens,
            lr=stage.lr,
            seed=self.config.seed,
            start_step=self.step,
            held_out_losses=self.held_out,
            on_step=self.follow_fit(),
        )
        self.reach(leg.end, step=self.step)

    def rl(self, leg: Leg) -> None:
        stage = leg.stage
        assert isinstance(stage, RlConfig)
        self.emit(StageStarted(stage=leg.kind, steps=stage.steps, done=self.version - leg.start))
        if stage.kl_coef and self.version == leg.start:
            self.learner.keep()  # the reference
        if self.version == 0:
            self.reach(0, step=0)  # no stage came before: the engines need the starting weights
        objective, scribe = objective_of(stage), Scribe(self.learner)
        for step in range(self.version + 1, leg.end + 1):
            batch = scribe.read(self.run, step)
            with computing_in(stage.compute, self.learner.model):
                stats = self.learner.step(
                    batch,
                    lr=rate(
                        step - leg.start - 1, lr=stage.lr, warmup=stage.warmup, total=stage.steps, decay=stage.decay
                    ),
                    objective=objective,
                    temperature=stage.temperature,
                    microbatch_tokens=0 if self.config.deterministic else stage.microbatch_tokens,
                    fetch=(lambda name: get_experts(self.run.objects, name)) if stage.replay else None,
                    plausible=stage.plausible,
                    balance=stage.balance,
                )
            self.reach(step, step=step - leg.start)
            self.emit(scribe.write(batch, stats))

    def follow_fit(self) -> Callable[[stages.Progress], None]:
        """What happens after each step of mid-training and sft: an event, and now and then a checkpoint."""
        last = saved = time.monotonic()

        def on_step(progress: stages.Progress) -> None:
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


STAGE: dict[str, Callable[[Trainer, Leg], None]] = {"midtrain": Trainer.midtrain, "sft": Trainer.sft, "rl": Trainer.rl}


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
