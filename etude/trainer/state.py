"""The trainer's state: the learner and its position in the lineage of stages, its checkpoints and
the versions that it publishes.

The version of a supervised stage is published when its checkpoint is written. A loop publishes
every step at once and writes a checkpoint now and then: its batches stay in the store, so a trainer
that dies repeats the steps since its newest checkpoint. Both happen in the background: a step waits
for the copies only, and for the version or checkpoint before.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import FitStep, PublishStarted
from etude.core.lineage import StageSpan, adapted_spans
from etude.core.stages import RlConfig
from etude.core.trainer_config import TrainerConfig
from etude.core.types import Batch, RecomputedRow
from etude.engine.select import invariant_trainer_model
from etude.model.directory import cut_context
from etude.model.files import build_model
from etude.model.lora import add_adapter
from etude.model.numerics import Arithmetic
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import Transformer
from etude.run.plugins import import_from
from etude.store import checkpoints
from etude.store.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    Origin,
    code_version,
    version_name,
)
from etude.store.runs import Run
from etude.store.telemetry import Emit
from etude.train.checkpoint import from_bytes, to_bytes
from etude.train.distributed import SINGLE_PROCESS, World
from etude.train.learner import Learner
from etude.train.mismatch import measure_mismatch
from etude.train.stages import SupervisedStepReport
from etude.train.start import compile_layers, initial_model
from etude.trainer.peers import TorchPeer
from etude.trainer.prepare import adapter_config, model_directory
from etude.trainer.step import objective_of
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.snapshot import Part

CPU = torch.device("cpu")


class TrainerState:
    """The learner and its position: `step` steps of `stage` after `version`. `version_step` is the
    step within its stage that made the version."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        emit: Emit,
        world: World = SINGLE_PROCESS,
        device: torch.device = CPU,
    ) -> None:
        self.run = run
        self.config = config
        self.emit = emit
        self.world = world
        import_from(config.folder)
        for stage in config.stage:
            if isinstance(stage, RlConfig):
                # a loss that cannot be loaded must not cost the earlier stages
                objective_of(stage)
        _be_deterministic(config.deterministic, device)
        self.publisher = Publisher(
            Chain(run.objects), peers=TorchPeer() if world.world_size > 1 else None
        )
        head = self.publisher.chain.head() if world.rank == 0 else None
        (published,) = world.all_reduce_sum(float(head.version + 1 if head else 0))
        self.published = int(published) - 1
        """The newest version that an earlier life has published; -1 without one."""
        self.saver = CheckpointWriter(run, world.rank, world.world_size)
        self._saved_at = time.monotonic()
        if world.rank == 0:
            self.saver.clean()
        world.barrier()
        self.files = cut_context(run.model_files(), config.model.max_context)
        self.tokenizer = ChatTokenizer(self.files)
        self._device = device
        names = run.checkpoints()
        newest = checkpoints.read(run, names[-1]) if names else None
        self._adapted = {span.name: span for span in adapted_spans(config)}
        first = config.stage[0].name if config.stage else ""
        self.learner = self._make_learner(newest.stage if newest else first, newest)
        self.stage = ""
        self.version = 0
        self.step = 0
        self.version_step = 0
        self.lineage: tuple[Origin, ...] = ()
        self.heldout_losses: tuple[float, ...] = ()
        self.batches_digest = hashlib.sha256().hexdigest()
        """Digest of all batches that the stage has trained on, in order."""
        if newest:
            self.resume(newest)

    def _make_learner(self, stage: str, resumed: Checkpoint | None) -> Learner:
        """The learner of a stage, with its initial weights; those of a checkpoint are loaded
        later."""
        config = self.config
        self.adapter_of = self._base_version() if stage in self._adapted else None
        model = self._start_model(resumed).to(self._device)
        if self.adapter_of is not None:
            assert config.trainer.lora is not None
            add_adapter(model, adapter_config(config.trainer.lora), config.seed)
        compute = computed_in(config.trainer, self._device)
        model.compute_with(
            Arithmetic.of(
                invariant=False,
                fp8=config.quantization == "fp8",
                fp8_kv=config.kv_cache_dtype == "fp8",
            )
        )
        if config.batch_invariant:
            model = invariant_trainer_model(model, compute)
        elif compute == torch.bfloat16 and not config.deterministic:
            compile_layers(model)
        model.gradient_checkpointing = config.trainer.gradient_checkpointing
        return Learner(
            model,
            self.world,
            optimizer=config.trainer.optimizer,
            published_dtype=getattr(torch, config.trainer.published_dtype),
            compute_dtype=compute,
            context_parallel=config.trainer.context_parallel,
            expert_parallel=config.trainer.expert_parallel,
        )

    def _replace_learner(self, stage: str, resumed: Checkpoint | None) -> None:
        """Replace the learner; the callback on its rows moves to the new one."""
        on_rows = self.learner.on_rows
        self.learner = self._make_learner(stage, resumed)
        self.learner.on_rows = on_rows

    def _base_version(self) -> int:
        """The base version of the run's adapter."""
        return min(span.start for span in self._adapted.values())

    def _start_model(self, resumed: Checkpoint | None) -> Transformer:
        """The initial model. A checkpoint holds every trained weight, and the base of an adapter
        was published, so the model's directory may be gone by then."""
        path = self.config.model.path
        shape = self.files["config.json"]
        chain = self.publisher.chain
        if self.adapter_of is not None and chain.head() is not None:
            return build_model(self.files, Follower(chain).fetch(self.adapter_of))
        is_given = path is not None and (resumed is None or self.adapter_of is not None)
        directory = model_directory(path) if path is not None and is_given else None
        return initial_model(directory, shape, self.config.seed)

    def enter_stage(self, span: StageSpan) -> None:
        """Enter a stage. A stage that is not being resumed starts from the weights of the previous
        one, and from nothing else of it."""
        config = span.stage.model_dump(mode="json", exclude_none=True)
        if self.stage == span.name:  # the stage may have been given more steps
            self.lineage = (*self.lineage[:-1], replace(self.lineage[-1], config=config))
        else:
            path, seed = self.config.model.path, self.config.seed
            parent = (
                f"version {span.start}"
                if self.lineage
                else f"the model in {path}"
                if path
                else f"seed {seed}"
            )
            origin = Origin(
                stage=span.name, parent=parent, config=config, data="", code=code_version()
            )
            self.stage = span.name
            self.step = 0
            self.heldout_losses = ()
            self.lineage = (*self.lineage, origin)
            self.batches_digest = hashlib.sha256().hexdigest()
            if span.name in self._adapted and self.adapter_of is None:
                self.world.barrier()  # until all ranks have published the base
                self._replace_learner(span.name, None)
            self.learner.begin_stage()
            if isinstance(span.stage, RlConfig) and span.stage.kl_coef:
                self.learner.snapshot()  # the reference
        self.world.activity = f"the start of {span.name}"

    @property
    def context(self) -> int:
        return self.learner.model.config.max_position_embeddings

    def record_data(self, data: str) -> None:
        """Record in the lineage the data that the stage learns from; after a stop it must still be
        the same."""
        origin = self.lineage[-1]
        if self.step and origin.data != data:
            raise EtudeError(
                f"the data of stage {self.stage} has changed since it was stopped (then "
                f"{origin.data}, now {data}): restore the files, or start over with --fresh"
            )
        self.lineage = (*self.lineage[:-1], replace(origin, data=data))

    def read_batch(self, step: int, span: StageSpan) -> Batch:
        """Wait for a batch, and enter it into the lineage."""
        batch, digest = self.run.wait_batch(step)
        # A user may be deleted between the reads of two ranks: then all read it again.
        while not self.world.agrees(digest):
            batch, digest = self.run.wait_batch(step)
        base = batch.begins_with
        if base != self.version:
            self.rewind(base, span)
        self.saver.kept = frozenset(map(version_name, self._needed(base, span)))
        self.world.activity = f"step {step} of {self.stage}"
        self.batches_digest = hashlib.sha256(
            f"{self.batches_digest} {digest.hex()}".encode()
        ).hexdigest()
        self.record_data(f"batches {span.start + 1} to {step}, sha256 {self.batches_digest}")
        return batch

    def _needed(self, base: int, span: StageSpan) -> list[int]:
        """The versions that a later step may begin with, apart from the newest: the base of this
        step, if its version is refused; and the version before that, if users return to it."""
        if self.config.realtime is None or base == span.start:
            return [base]
        return [base, self.run.batch(base).begins_with]

    def report_mismatch(self, batch: Batch, found: tuple[RecomputedRow, ...]) -> None:
        """Measure the train/inference mismatch of a batch, for the store and as an event."""
        if self.world.rank == 0:
            self.run.put_recomputed(batch.step, found)
            # The record reveals, nearly word for word, what users said. The deletion of a user
            # first removes rows from batches and then this record, so the batch is checked after
            # the record is written.
            realtime = self.config.realtime is not None
            if realtime and self.run.batch(batch.step).rows != batch.rows:
                self.run.delete_recomputed(batch.step)
            # Users' text must stay where it can be deleted, so it is not put into events.
            decode = self.tokenizer.decode if self.config.realtime is None else None
            self.emit(measure_mismatch(batch.rows, found, step=batch.step, decode=decode))

    def report_fit(self) -> Callable[[SupervisedStepReport], None]:
        """The callback after each supervised step: an event, and now and then a checkpoint."""
        last = time.monotonic()

        def on_step(report: SupervisedStepReport) -> None:
            nonlocal last
            now = time.monotonic()
            speed = report.stats.num_loss_tokens / max(now - last, 1e-9)
            self.emit(
                FitStep(
                    stage=self.stage,
                    step=report.step,
                    steps=report.total,
                    loss=report.stats.loss,
                    tokens_per_s=speed,
                    metrics=report.metrics,
                )
            )
            self.step, self.heldout_losses = report.step, report.heldout_losses
            self.world.activity = f"step {report.step + 1} of {self.stage}"
            if self._checkpoint_is_due():
                self.save()
            last = time.monotonic()

        return on_step

    def _checkpoint_is_due(self) -> bool:
        """True for all ranks by the clock of one: a checkpoint that is due for only some of them
        would never be complete."""
        waited_s = time.monotonic() - self._saved_at
        is_due = waited_s >= self.config.trainer.checkpoint_every_s
        return any(self.world.all_reduce_sum(float(self.world.rank == 0 and is_due)))

    def finish_version(self, version: int, *, step: int) -> None:
        """Make the learner's weights this version: checkpoint them, then publish them."""
        self._reach(version, step)
        self.save(then=self.publication())

    def finish_step(self, version: int, span: StageSpan) -> None:
        """Make the learner's weights this version of a loop: publish them, and write a checkpoint
        if one is due or this step is the last. Real-time RL may go back to any version, so it has a
        checkpoint of each."""
        if self.config.realtime is not None:
            self.finish_version(version, step=version - span.start)
            return
        self._reach(version, version - span.start)
        if version >= self.published:
            self.publication()()
        if self._checkpoint_is_due() or version == span.end:
            self.save()

    def _reach(self, version: int, step: int) -> None:
        self.version = version
        self.step = 0
        self.version_step = step

    @property
    def is_fresh(self) -> bool:
        """True if no step was ever taken."""
        return self.version == 0 and self.step == 0

    def publish_start(self) -> None:
        """Publish the weights before any training, as version 0, unless an earlier life has. Later
        states must not be saved before that, since the first weights could then no longer be
        published."""
        if self.published >= 0:
            return
        self.finish_version(0, step=0)
        self.saver.wait()
        self.publisher.wait()

    def publication(self) -> Callable[[], None]:
        """Copy this rank's rows of the weights; call the result to publish them."""
        began = time.monotonic()
        is_base = self.version == self.adapter_of
        rows = self.learner.base_rows() if is_base else self.learner.hf_rows()
        start = self.publisher.prepare(
            self.version,
            {name: Part(*part) for name, part in rows.items()},
            stage=self.stage,
            step=self.version_step,
            adapter_of=None if is_base else self.adapter_of,
            given=True,
            # A repeated step has the same bits in a deterministic run only, and by the same code.
            exact=self.version > self.published
            or (self.config.deterministic and self.lineage[-1].code == code_version()),
        )
        self.emit(PublishStarted(version=self.version, stall_s=time.monotonic() - began))
        return start

    def save(self, then: Callable[[], None] = lambda: None) -> None:
        checkpoint = Checkpoint(
            stage=self.stage,
            step=self.step,
            version=self.version,
            lineage=self.lineage,
            cursor={
                "heldout_losses": list(self.heldout_losses),
                "version_step": self.version_step,
                "batches_digest": self.batches_digest,
            },
        )
        self.saver.save(checkpoint, to_bytes(self.learner.state()), then)
        self._saved_at = time.monotonic()

    def rewind(self, version: int, span: StageSpan) -> None:
        """Go back to the state in which a version was made; later updates are discarded. If it is
        the last version of the previous stage, this stage starts again from it."""
        name = version_name(version)
        if not self.run.has_checkpoint(name):
            raise EtudeError(
                f"{self.run.objects.url}: the next step starts from version {version}, but "
                f"checkpoints/{name} does not exist any more: restore it from a backup"
            )
        self.saver.wait()
        checkpoint = checkpoints.read(self.run, name)
        if (checkpoint.stage in self._adapted) != (self.adapter_of is not None):
            self._replace_learner(checkpoint.stage, checkpoint)
        self.load(checkpoint)
        if self.stage != span.name:
            self.enter_stage(span)

    def resume(self, checkpoint: Checkpoint) -> None:
        self.load(checkpoint)
        if self.step == 0 and self.version >= self.published:
            self.publication()()  # a crash may have come between the checkpoint and the publication
            self.publisher.wait()

    def load(self, checkpoint: Checkpoint) -> None:
        self.stage, self.version, self.step = checkpoint.stage, checkpoint.version, checkpoint.step
        self.lineage, self.heldout_losses = (
            checkpoint.lineage,
            tuple(checkpoint.cursor["heldout_losses"]),
        )
        self.version_step = checkpoint.cursor["version_step"]
        self.batches_digest = checkpoint.cursor["batches_digest"]

        def shard(rank: int) -> dict[str, torch.Tensor]:
            return from_bytes(
                checkpoints.read_part(self.run, checkpoint, rank), f"checkpoint {checkpoint.name}"
            )

        self.learner.load_shards(len(checkpoint.parts), shard)

    def close(self) -> None:
        self.saver.close()


def computed_in(config: TrainerConfig, device: torch.device) -> torch.dtype:
    if config.compute_dtype != "auto":
        return getattr(torch, config.compute_dtype)  # type: ignore[no-any-return]
    return (
        torch.bfloat16
        if device.type == "cuda" and config.published_dtype == "bfloat16"
        else torch.float32
    )


def _be_deterministic(wanted: bool, device: torch.device) -> None:
    if wanted == torch.are_deterministic_algorithms_enabled():
        return
    if device == CPU:  # nothing is compiled there, and the compiler takes as long to load as torch
        torch.set_deterministic_debug_mode("error" if wanted else "default")
    else:
        torch.use_deterministic_algorithms(wanted)
