"""The stages as the trainer runs them: for each kind, its data and the call of `train` with its
config table.

Stages that learn from files end in one version. Stages that are loops step on the batches that the
controller writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from etude.core.errors import EtudeError
from etude.core.events import OverlongSkipped, StageStarted, StepPassedOver
from etude.core.lineage import StageSpan
from etude.core.stages import (
    DistillConfig,
    DpoConfig,
    MidtrainConfig,
    RlConfig,
    RolloutStageConfig,
    SftConfig,
)
from etude.core.types import Batch
from etude.model.directory import read_model_files
from etude.model.tokenizer import same_vocabulary
from etude.store.experts import get_experts
from etude.train import stages as learning
from etude.train.learner import MICROBATCH_TOKENS
from etude.train.objective import RlObjective
from etude.train.schedule import learning_rate
from etude.train.start import initial_model
from etude.train.teacher import Teacher
from etude.trainer import data
from etude.trainer.documents import read_corpus
from etude.trainer.prepare import model_directory
from etude.trainer.state import TrainerState
from etude.trainer.step import StepReporter, objective_of

SHOWN = 8  # of the skipped sessions

ScoreBatch = Callable[[Batch, int], tuple[Batch, float | None]]
"""(batch, microbatch_tokens) -> the batch with the advantages to learn from, and the student's KL
to a teacher."""


def unchanged(batch: Batch, microbatch_tokens: int) -> tuple[Batch, float | None]:
    return batch, None


def _tell_skipped(trainer: TrainerState, where: Sequence[str]) -> None:
    if where:
        trainer.emit(
            OverlongSkipped(stage=trainer.stage, count=len(where), where=tuple(where[:SHOWN]))
        )


def midtrain(trainer: TrainerState, span: StageSpan) -> None:
    stage = span.stage
    assert isinstance(stage, MidtrainConfig)
    trainer.emit(StageStarted(stage=span.name, steps=stage.steps, done=trainer.step))
    corpus = read_corpus(stage, trainer.files, trainer.config.seed)
    trainer.record_data(corpus.about)
    learning.midtrain(
        trainer.learner,
        stage,
        corpus.sources,
        corpus.heldout,
        eos=trainer.tokenizer.eos_token_id,
        seed=trainer.config.seed,
        start_step=trainer.step,
        on_step=trainer.report_fit(),
    )
    trainer.finish_version(span.end, step=trainer.step)


def sft(trainer: TrainerState, span: StageSpan) -> None:
    stage = span.stage
    assert isinstance(stage, SftConfig)
    trainer.emit(StageStarted(stage=span.name, steps=0, done=trainer.step))
    shown, heldout = [], []
    if stage.demonstrations:
        made = data.built_in_sessions(
            trainer.config, stage.demonstrations, trainer.tokenizer, trainer.context
        )
        shown, heldout = made.train, made.heldout
    if stage.path is not None:
        read = data.read_sessions(stage.path, trainer.tokenizer, trainer.context, stage.overlong)
        shown, heldout = shown + read.train, heldout + read.heldout
        _tell_skipped(trainer, read.skipped)
    trainer.record_data(
        f"{len(shown)} sessions and {len(heldout)} held out, {digest([shown, heldout])}"
    )
    learning.sft(
        trainer.learner,
        stage,
        shown,
        heldout,
        seed=trainer.config.seed,
        start_step=trainer.step,
        heldout_losses=trainer.heldout_losses,
        on_step=trainer.report_fit(),
    )
    trainer.finish_version(span.end, step=trainer.step)


def dpo(trainer: TrainerState, span: StageSpan) -> None:
    stage = span.stage
    assert isinstance(stage, DpoConfig)
    trainer.emit(StageStarted(stage=span.name, steps=0, done=trainer.step))
    pairs, skipped = data.read_preferences(
        stage.path, trainer.tokenizer, trainer.context, stage.overlong
    )
    _tell_skipped(trainer, skipped)
    trainer.record_data(f"{len(pairs)} pairs, {digest(pairs)}")
    learning.dpo(
        trainer.learner,
        stage,
        pairs,
        seed=trainer.config.seed,
        start_step=trainer.step,
        on_step=trainer.report_fit(),
    )
    trainer.finish_version(span.end, step=trainer.step)


def rl(trainer: TrainerState, span: StageSpan) -> None:
    assert isinstance(span.stage, RlConfig)
    run_steps(trainer, span, span.stage, objective=objective_of(span.stage))


def distill(trainer: TrainerState, span: StageSpan) -> None:
    stage = span.stage
    assert isinstance(stage, DistillConfig)
    teacher = read_teacher(stage.teacher, trainer.files, trainer.context)
    teacher.model.to(trainer.learner.device).cast(trainer.learner.compute_dtype)

    def score_batch(batch: Batch, microbatch_tokens: int) -> tuple[Batch, float]:
        return teacher.compute_advantages(
            batch, temperature=stage.temperature, microbatch_tokens=microbatch_tokens
        )

    run_steps(trainer, span, stage, score_batch, RlObjective(distills=True))


def run_steps(
    trainer: TrainerState,
    span: StageSpan,
    stage: RolloutStageConfig,
    score_batch: ScoreBatch = unchanged,
    objective: RlObjective = RlObjective(),  # noqa: B008 (frozen)
) -> None:
    """Take steps on the batches that the controller writes."""
    first_reported = _start_loop(trainer, span, stage)
    microbatch_tokens = stage.microbatch_tokens or MICROBATCH_TOKENS[trainer.learner.device.type]
    if trainer.config.deterministic:
        microbatch_tokens = 0  # row after row
    if trainer.version == 0 and trainer.config.model.path is None:
        # no stage came before: the engines need the starting weights
        trainer.publish_start()
    reporter = StepReporter(trainer.learner, trainer.emit)
    for step in range(trainer.version + 1, span.end + 1):
        batch = trainer.read_batch(step, span)
        if not batch.rows and trainer.config.realtime is not None:
            # deleted users are in no batch, but the loop waits for the version all the same
            trainer.finish_step(step, span)
            trainer.emit(StepPassedOver(step=step))
            continue
        reporter.check(batch, f"{trainer.run.objects.url}: batches/{step:06d}")
        batch, teacher_kl = score_batch(batch, microbatch_tokens)
        lr = learning_rate(
            step - span.start - 1,
            lr=stage.lr,
            warmup=stage.warmup_steps,
            total=stage.steps,
            decay=stage.lr_schedule,
        )
        stats = trainer.learner.rl_step(
            batch,
            lr=lr,
            objective=objective,
            temperature=stage.temperature,
            microbatch_tokens=microbatch_tokens,
            fetch_experts=(lambda name: get_experts(trainer.run.objects, name))
            if stage.router_replay
            else None,
            router_replay_min_score=stage.router_replay_min_score,
            router_balance=stage.router_balance,
        )
        trainer.finish_step(step, span)
        done = reporter.report(batch, stats, teacher_kl)
        if step >= first_reported:
            trainer.emit(done)
            trainer.report_mismatch(batch, stats.recomputed)


def _start_loop(trainer: TrainerState, span: StageSpan, stage: RolloutStageConfig) -> int:
    """Announce the stage, and return the first step to report. A trainer that died may have
    published more steps than its newest checkpoint holds: these are repeated, and only the last of
    them is reported, since its report may be missing."""
    repeated = max(0, min(trainer.published, span.end) - trainer.version)
    first_reported = trainer.version + max(1, repeated)
    trainer.emit(
        StageStarted(
            stage=span.name,
            steps=stage.steps,
            done=first_reported - 1 - span.start,
            repeated=repeated,
            groups_per_step=stage.groups_per_step,
        )
    )
    return first_reported


STAGE: dict[str, Callable[[TrainerState, StageSpan], None]] = {
    "midtrain": midtrain,
    "sft": sft,
    "rl": rl,
    "dpo": dpo,
    "distill": distill,
}


def digest(tokens: object) -> str:
    return f"sha256 {hashlib.sha256(repr(tokens).encode()).hexdigest()}"


def read_teacher(path: str, files: Mapping[str, bytes], context: int) -> Teacher:
    """Read a teacher. `files` are the student's: a teacher needs the same vocabulary, and a context
    as long."""
    directory = model_directory(path, key="teacher")
    small = read_model_files(directory)
    model = initial_model(directory, small["config.json"], 0)
    if not same_vocabulary(small["tokenizer.json"], files["tokenizer.json"]):
        raise EtudeError(
            f"the teacher in {path} has a different vocabulary from the student: use a teacher "
            f"of the same family"
        )
    if model.config.max_position_embeddings < context:
        raise EtudeError(
            f"the teacher in {path} has a context of {model.config.max_position_embeddings} "
            f"tokens, but sessions may have {context}: lower model.max_context, or use another "
            f"teacher"
        )
    return Teacher(model)
