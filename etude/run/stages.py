"""How the trainer goes through each kind of stage: what it reads, and what of its table it hands to `train`.

Those that learn from files end in one version. Those that are loops step on the batches that the controller writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from etude.core.config import RlConfig
from etude.core.errors import EtudeError
from etude.core.events import Skipped, StageStarted
from etude.core.stages import DistillConfig, DpoConfig, LoopConfig, MidtrainConfig, SftConfig
from etude.core.types import Batch
from etude.model.directory import read_small
from etude.model.tokenizer import same_vocabulary
from etude.run import data
from etude.run.documents import read_corpus
from etude.run.plan import Leg
from etude.run.prepare import model_directory
from etude.run.step import Scribe, objective_of
from etude.store.experts import get_experts
from etude.train import stages as learning
from etude.train.objective import Objective
from etude.train.schedule import rate
from etude.train.start import starting_model
from etude.train.teacher import Teacher

if TYPE_CHECKING:
    from etude.run.trainer import Trainer

SHOWN = 8  # of the sessions that are left out

Judge = Callable[[Batch, int], tuple[Batch, float | None]]
"""(batch, microbatch_tokens) -> the batch with the advantages to learn from, and how far the student is from a
teacher."""


def as_it_is(batch: Batch, microbatch_tokens: int) -> tuple[Batch, float | None]:
    return batch, None


def _tell_skipped(trainer: Trainer, where: Sequence[str]) -> None:
    if where:
        trainer.emit(Skipped(stage=trainer.stage, count=len(where), where=tuple(where[:SHOWN])))


def midtrain(trainer: Trainer, leg: Leg) -> None:
    stage = leg.stage
    assert isinstance(stage, MidtrainConfig)
    trainer.emit(StageStarted(stage=leg.name, steps=stage.steps, done=trainer.step))
    corpus = read_corpus(stage, trainer.files, trainer.config.seed)
    trainer.learns_from(corpus.about)
    learning.midtrain(
        trainer.learner,
        corpus.sources,
        eos=trainer.tokenizer.eos,
        steps=stage.steps,
        batch_tokens=stage.batch_tokens,
        row_tokens=min(stage.row_tokens, trainer.context),
        separate=stage.separate,
        held_out=corpus.held_out,
        held_out_every=stage.held_out_every,
        lr=stage.lr,
        warmup=stage.warmup,
        weight_decay=stage.weight_decay,
        seed=trainer.config.seed,
        start_step=trainer.step,
        on_step=trainer.follow_fit(),
    )
    trainer.reach(leg.end, step=trainer.step)


def sft(trainer: Trainer, leg: Leg) -> None:
    stage = leg.stage
    assert isinstance(stage, SftConfig)
    trainer.emit(StageStarted(stage=leg.name, steps=0, done=trainer.step))
    shown, held_back = [], []
    if stage.demonstrations:
        made = data.built_in_sessions(trainer.config, stage.demonstrations, trainer.tokenizer, trainer.context)
        shown, held_back = made.shown, made.held_back
    if stage.path is not None:
        read = data.read_sessions(stage.path, trainer.tokenizer, trainer.context, stage.overlong)
        shown, held_back = shown + read.shown, held_back + read.held_back
        _tell_skipped(trainer, read.skipped)
    trainer.learns_from(f"{len(shown)} sessions and {len(held_back)} held back, {digest([shown, held_back])}")
    learning.sft(
        trainer.learner,
        shown,
        held_back,
        max_epochs=stage.max_epochs,
        patience=stage.patience,
        batch_tokens=stage.batch_tokens,
        lr=stage.lr,
        seed=trainer.config.seed,
        start_step=trainer.step,
        held_out_losses=trainer.held_out,
        on_step=trainer.follow_fit(),
    )
    trainer.reach(leg.end, step=trainer.step)


def dpo(trainer: Trainer, leg: Leg) -> None:
    stage = leg.stage
    assert isinstance(stage, DpoConfig)
    trainer.emit(StageStarted(stage=leg.name, steps=0, done=trainer.step))
    pairs, skipped = data.read_preferences(stage.path, trainer.tokenizer, trainer.context, stage.overlong)
    _tell_skipped(trainer, skipped)
    trainer.learns_from(f"{len(pairs)} pairs, {digest(pairs)}")
    learning.dpo(
        trainer.learner,
        pairs,
        epochs=stage.epochs,
        batch_pairs=stage.batch_pairs,
        beta=stage.beta,
        length_normalised=stage.length_normalised,
        lr=stage.lr,
        warmup=stage.warmup,
        seed=trainer.config.seed,
        start_step=trainer.step,
        on_step=trainer.follow_fit(),
    )
    trainer.reach(leg.end, step=trainer.step)


def rl(trainer: Trainer, leg: Leg) -> None:
    assert isinstance(leg.stage, RlConfig)
    if leg.stage.kl_coef and trainer.version == leg.start:
        trainer.learner.keep()  # the reference
    _loop(trainer, leg, leg.stage, objective=objective_of(leg.stage))


def distill(trainer: Trainer, leg: Leg) -> None:
    stage = leg.stage
    assert isinstance(stage, DistillConfig)
    teacher = read_teacher(stage.teacher, trainer.files, trainer.context)
    teacher.model.to(trainer.learner.device).cast(trainer.learner.compute)

    def judge(batch: Batch, microbatch_tokens: int) -> tuple[Batch, float]:
        return teacher.judge(batch, temperature=stage.temperature, microbatch_tokens=microbatch_tokens)

    _loop(trainer, leg, stage, judge, Objective(taught=True))


def _loop(
    trainer: Trainer,
    leg: Leg,
    stage: LoopConfig,
    judge: Judge = as_it_is,
    objective: Objective = Objective(),  # noqa: B008 (frozen)
) -> None:
    """Steps on the batches that the controller writes."""
    trainer.emit(StageStarted(stage=leg.name, steps=stage.steps, done=trainer.version - leg.start))
    microbatch_tokens = 0 if trainer.config.deterministic else stage.microbatch_tokens
    if trainer.version == 0:
        trainer.reach(0, step=0)  # no stage came before: the engines need the starting weights
    scribe = Scribe(trainer.learner)
    for step in range(trainer.version + 1, leg.end + 1):
        batch = scribe.accept(trainer.read_batch(step, leg), f"{trainer.run.objects.url}: batches/{step:06d}")
        batch, teacher_kl = judge(batch, microbatch_tokens)
        lr = rate(step - leg.start - 1, lr=stage.lr, warmup=stage.warmup, total=stage.steps, decay=stage.decay)
        stats = trainer.learner.step(
            batch,
            lr=lr,
            objective=objective,
            temperature=stage.temperature,
            microbatch_tokens=microbatch_tokens,
            fetch=(lambda name: get_experts(trainer.run.objects, name)) if stage.replay else None,
            plausible=stage.plausible,
            balance=stage.balance,
        )
        trainer.reach(step, step=step - leg.start)
        trainer.emit(scribe.write(batch, stats, teacher_kl))
        trainer.compare(batch, stats.recomputed)


STAGE: dict[str, Callable[[Trainer, Leg], None]] = {
    "midtrain": midtrain,
    "sft": sft,
    "rl": rl,
    "dpo": dpo,
    "distill": distill,
}


def digest(tokens: object) -> str:
    return f"sha256 {hashlib.sha256(repr(tokens).encode()).hexdigest()}"


def read_teacher(path: str, files: Mapping[str, bytes], context: int) -> Teacher:
    """`files` are the student's: a teacher speaks of the same tokens, and of sessions as long."""
    directory = model_directory(path, key="teacher")
    small = read_small(directory)
    model = starting_model(directory, small["config.json"], 0)
    if not same_vocabulary(small["tokenizer.json"], files["tokenizer.json"]):
        raise EtudeError(f"the teacher in {path} has another vocabulary than the student: take one of the same family")
    if model.config.max_position_embeddings < context:
        raise EtudeError(
            f"the teacher in {path} has a context of {model.config.max_position_embeddings} tokens, and sessions may "
            f"have {context}: lower model.max_context, or take another teacher"
        )
    return Teacher(model)
