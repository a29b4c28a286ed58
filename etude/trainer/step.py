"""One RL step, from the batch in the store to the event that reports it."""

from __future__ import annotations

import time

import torch

from etude.core.alarms import RepeatedRows
from etude.core.checks import check_batch
from etude.core.errors import EtudeError
from etude.core.events import StepDone, StepProgress
from etude.core.stages import RlConfig
from etude.core.types import Batch
from etude.run.plugins import load
from etude.store.telemetry import Emit
from etude.train.correction import CORRECTION
from etude.train.flops import peak_flops, step_flops
from etude.train.learner import Learner
from etude.train.loss import LOSS, Clip, PolicyLoss
from etude.train.objective import AGGREGATE, RlObjective
from etude.train.stats import RlStats


def objective_of(stage: RlConfig) -> RlObjective:
    """The objective of a stage; settings that its config leaves out are the loss's defaults."""
    loss = LOSS[stage.loss] if stage.loss in LOSS else load(stage.loss, "stage.rl.loss")
    if not isinstance(loss, PolicyLoss):
        raise EtudeError(
            f"stage.rl.loss = {stage.loss!r} is a {type(loss).__name__}: it must be an "
            f"etude.train.loss.PolicyLoss, such as "
            f"PolicyLoss(function=your_function)"
        )
    if not isinstance(loss.clip, Clip):
        raise EtudeError(
            f"stage.rl.loss = {stage.loss!r} has clip = {loss.clip!r}: it must be a Clip(low, high)"
        )
    objective = RlObjective(
        loss=loss,
        aggregate=stage.loss_aggregation or loss.aggregate,
        clip=Clip(
            loss.clip.low if stage.clip_low is None else stage.clip_low,
            loss.clip.high if stage.clip_high is None else stage.clip_high,
        ),
        correction=stage.correction or loss.correction,
        correction_cap=stage.correction_cap,
        kl_coef=stage.kl_coef,
    )
    for key, value, known in (
        ("aggregate", objective.aggregate, [*AGGREGATE]),
        ("correction", objective.correction, ["none", *CORRECTION]),
    ):
        if value not in known:
            raise EtudeError(
                f"stage.rl.loss = {stage.loss!r} has {key} = {value!r}: it must be one of "
                f"{', '.join(known)}"
            )
    if stage.loss not in LOSS:
        _try_out(objective, stage.loss)
    return objective


def _try_out(objective: RlObjective, name: str) -> None:
    """Try the loss on three tokens, so that a mistake in a custom loss shows before anything is
    sampled or learnt."""
    logp_N = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    adv_N = torch.tensor([1.0, -1.0, 0.5])
    engine_logp_N = logp_N.detach() + torch.tensor([0.1, -0.1, 0.0])
    try:
        losses = objective.token_losses(
            logp_N, engine_logp_N, adv_N, torch.tensor([0, 0, 1]), engine_logp_N
        )
    except EtudeError as e:
        raise EtudeError(f"stage.rl.loss = {name!r}, tested on three tokens: {e}") from e
    if not losses.loss_N.isfinite().all():
        raise EtudeError(
            f"stage.rl.loss = {name!r}, tested on three tokens: the loss returned "
            f"{losses.loss_N.tolist()}; all values must be finite"
        )


PROGRESS_S = 5.0
"""Seconds between two events about the progress of a step."""


class StepReporter:
    """Reports a step: the learner's statistics with duration, utilisation, staleness and repeated
    rows; and the progress of a long step."""

    def __init__(self, learner: Learner, emit: Emit = lambda event: None) -> None:
        self._emit = emit
        self._done = self._total = self._step = 0
        self._num_shares = learner.num_shares
        learner.on_rows = self._progress
        self._config = learner.model.config
        self._peak = learner.world.world_size * peak_flops(learner.device, learner.compute_dtype)
        self._repeats = RepeatedRows()
        self._idle_since = self._began = self._told = time.monotonic()

    def check(self, batch: Batch, where: str) -> Batch:
        """Check a batch that has arrived before it is learnt from. `where` names it."""
        check_batch(
            batch,
            max_tokens=self._config.max_position_embeddings,
            vocab_size=self._config.vocab_size,
            where=where,
        )
        self._began = self._told = time.monotonic()
        self._step, self._done, self._total = batch.step, 0, len(batch.rows)
        return batch

    def _progress(self, rows: int) -> None:
        """Report progress, assuming that the other shares are about as far."""
        self._done = min(self._total, self._done + rows * self._num_shares)
        if time.monotonic() - self._told > PROGRESS_S:
            self._told = time.monotonic()
            self._emit(StepProgress(step=self._step, done=self._done, total=self._total))

    def report(self, batch: Batch, stats: RlStats, teacher_kl: float | None = None) -> StepDone:
        """Report a finished step, whose weights are published."""
        now = time.monotonic()
        seconds, wait_s, self._idle_since = now - self._began, self._began - self._idle_since, now
        return StepDone(
            step=batch.step,
            loss=stats.loss,
            reward=batch.reward,
            lr=stats.lr,
            lag=batch.lag,
            lags=batch.lags,
            k1=stats.mismatch.k1,
            k1_p99=stats.mismatch.k1_p99,
            k3_mean=stats.mismatch.k3,
            k3_p99=stats.mismatch.k3_p99,
            corrected_frac=stats.corrected_frac,
            zero_grad_frac=stats.zero_grad_frac,
            router_mismatch_frac=stats.router_mismatch_frac,
            experts_replaced_frac=stats.experts_replaced_frac,
            entropy=stats.entropy,
            grad_norm=stats.grad_norm,
            tokens=stats.num_loss_tokens,
            tokens_per_s=stats.num_forward_tokens / seconds,
            mfu=step_flops(self._config, batch.rows) / seconds / self._peak,
            repeated_rows=self._repeats.count(batch),
            seconds=seconds,
            wait_s=wait_s,
            teacher_kl=teacher_kl,
        )
