"""The supervised stages, which learn from files: `midtrain`, `sft` and `dpo`.

The tokens of step n follow from the seed and n alone. So an interrupted stage resumes, exact to the
bit, from the learner's state and the number of steps done (and, for `sft`, the held-out losses so
far), and no data loader has state of its own.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from etude.core.stages import DpoConfig, MidtrainConfig, SftConfig
from etude.train.learner import MICROBATCH_TOKENS, Learner
from etude.train.packing import TokenSequence, plan_microbatches
from etude.train.schedule import learning_rate
from etude.train.stats import SupervisedStats
from etude.train.stream import SourceMix, TokenizedDocuments, shuffled
from etude.train.supervised import Metrics, PreferencePair, dpo_loss, pack_pairs, sequence_logprobs

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""The tokens of a session, and a mask of the assistant's tokens."""
Preference = tuple[Demonstration, Demonstration]
"""The chosen session and the rejected one, which share their beginning."""

HELDOUT_TOKENS = 65_536
"""The most tokens of the held-out documents that are evaluated: enough for three digits of the
loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedStepReport:
    """The state of a supervised stage (`midtrain`, `sft`, `dpo`) after a step, as passed to the
    callback `on_step`: its progress, the step's `SupervisedStats`, held-out losses. The callback
    may checkpoint the learner's state."""

    step: int
    """Steps done."""
    total: int
    """Steps at most."""
    stats: SupervisedStats
    heldout_losses: tuple[float, ...] = ()
    """The loss on held-out demonstrations after each epoch so far."""
    metrics: Metrics = field(default_factory=dict)
    """Further metrics, such as the loss on held-out documents, or how often the chosen answer
    wins."""


OnStep = Callable[[SupervisedStepReport], None]


def _ignore(report: SupervisedStepReport) -> None: ...


def midtrain(
    learner: Learner,
    stage: MidtrainConfig,
    sources: Sequence[tuple[TokenizedDocuments, float]],
    heldout: TokenizedDocuments | None = None,
    *,
    eos: int,
    seed: int,
    start_step: int = 0,
    on_step: OnStep = _ignore,
) -> None:
    """Next-token prediction on (documents, weight) sources, packed into rows of `stage.seq_len`, or
    of the model's context if that is shorter."""
    width = min(stage.seq_len, learner.model.config.max_position_embeddings)
    mix = SourceMix(sources, width=width, seed=seed)
    num_rows = max(1, stage.batch_tokens // width)
    ends = eos if stage.document_mask else None
    heldout_rows = _heldout_rows(heldout, width, ends) if heldout and len(heldout.ends_D) else []
    for step in range(start_step, stage.steps):
        rate = learning_rate(
            step, lr=stage.lr, warmup=stage.warmup_steps, total=stage.steps, decay="cosine"
        )
        stats = learner.supervised_step(
            split_documents(mix.rows(step * num_rows, num_rows), ends),
            lr=rate,
            weight_decay=stage.weight_decay,
        )
        done = step + 1
        due = heldout_rows and (done % stage.heldout_every == 0 or done == stage.steps)
        metrics = {"heldout": learner.evaluate(heldout_rows)} if due else {}
        on_step(SupervisedStepReport(step=done, total=stage.steps, stats=stats, metrics=metrics))


def split_documents(tokens_BT: NDArray[np.int64], eos: int | None) -> list[TokenSequence]:
    """Rows of tokens as sequences in which the loss counts every token. With `eos`, a row is split
    into its documents, which do not see each other; otherwise a row is one sequence."""
    found = []
    for tokens_T in tokens_BT:
        borders = np.zeros(0, np.int64) if eos is None else np.flatnonzero(tokens_T[:-1] == eos) + 1
        found += [
            TokenSequence(own.tolist(), (True,) * len(own)) for own in np.split(tokens_T, borders)
        ]
    return found


def _heldout_rows(heldout: TokenizedDocuments, width: int, eos: int | None) -> list[TokenSequence]:
    """The held-out rows, the same at every evaluation: the first held-out tokens, without those
    that do not fill a row."""
    tokens_N = heldout.tokens_N[:HELDOUT_TOKENS].astype(np.int64)
    width = min(width, len(tokens_N))
    return split_documents(tokens_N[: len(tokens_N) // width * width].reshape(-1, width), eos)


def sft(
    learner: Learner,
    stage: SftConfig,
    demonstrations: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    *,
    seed: int,
    start_step: int = 0,
    heldout_losses: Sequence[float] = (),
    on_step: OnStep = _ignore,
) -> tuple[float, ...]:
    """Supervised fine-tuning on the assistant's tokens, until the loss on held-out demonstrations
    has not fallen for `stage.patience` epochs; the learner ends with the weights of the best epoch.
    Returns the held-out loss of every epoch."""
    _check(demonstrations, heldout, learner.model.config.max_position_embeddings)
    num_tokens = sum(len(tokens) for tokens, _ in demonstrations)
    # no step without a session
    steps_per_epoch = min(len(demonstrations), max(1, round(num_tokens / stage.batch_tokens)))
    total = stage.max_epochs * steps_per_epoch
    texts, heldout_rows = (
        [TokenSequence(*session) for session in some] for some in (demonstrations, heldout)
    )
    losses = list(heldout_losses)
    step = start_step
    while step < total and evaluations_since_best(losses) < stage.patience:
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(demonstrations), seed, epoch), steps_per_epoch)[part]
        stats = learner.supervised_step(
            [texts[i] for i in chosen],
            lr=learning_rate(step, lr=stage.lr, warmup=0, total=total, decay="linear"),
        )
        step += 1
        if step % steps_per_epoch == 0:
            losses.append(learner.evaluate(heldout_rows))
            if evaluations_since_best(losses) == 0:
                learner.snapshot()
        on_step(
            SupervisedStepReport(step=step, total=total, stats=stats, heldout_losses=tuple(losses))
        )
    learner.restore_snapshot()
    return tuple(losses)


def dpo(
    learner: Learner,
    stage: DpoConfig,
    pairs: Sequence[Preference],
    *,
    seed: int,
    start_step: int = 0,
    on_step: OnStep = _ignore,
) -> None:
    """Direct preference optimization against the initial weights of the stage. These are kept as
    the learner's snapshot; their log-probs of each pair are computed once, at every start."""
    if start_step == 0:
        learner.snapshot()
    with learner.using_snapshot():
        judged = _judged(
            learner,
            [
                PreferencePair(TokenSequence(*chosen), TokenSequence(*rejected))
                for chosen, rejected in pairs
            ],
            stage.length_normalised,
        )
    steps_per_epoch = max(1, round(len(pairs) / stage.batch_pairs))
    total = stage.epochs * steps_per_epoch
    loss = dpo_loss(beta=stage.beta, length_normalised=stage.length_normalised)
    for step in range(start_step, total):
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(pairs), seed, epoch), steps_per_epoch)[part].tolist()
        rate = learning_rate(
            step, lr=stage.lr, warmup=stage.warmup_steps, total=total, decay="linear"
        )
        stats = learner.supervised_step(
            [judged[i] for i in chosen], lr=rate, pack=pack_pairs, loss=loss
        )
        on_step(
            SupervisedStepReport(step=step + 1, total=total, stats=stats, metrics=stats.metrics)
        )


@torch.no_grad()
def _judged(learner: Learner, pairs: Sequence[PreferencePair], mean: bool) -> list[PreferencePair]:
    """The pairs, with the log-probs of both sessions under the current weights as reference."""
    judged = list(pairs)
    for some in plan_microbatches(
        [pair.length for pair in pairs], MICROBATCH_TOKENS[learner.device.type]
    )[0]:
        packed = pack_pairs([pairs[i] for i in some]).to(learner.device)
        for i, (chosen, rejected) in zip(
            some, sequence_logprobs(learner.model, packed, mean=mean).tolist(), strict=True
        ):
            judged[i] = replace(pairs[i], reference=(chosen, rejected))
    return judged


def evaluations_since_best(losses: Sequence[float]) -> int:
    """The number of evaluations since the lowest loss; an equal one is not lower."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _check(
    demonstrations: Sequence[Demonstration], heldout: Sequence[Demonstration], context: int
) -> None:
    for name, sessions in (
        ("demonstrations", demonstrations),
        ("held-out demonstrations", heldout),
    ):
        if not sessions:
            raise ValueError(f"there are no {name}")
        longest = max(len(tokens) for tokens, _ in sessions)
        if longest > context:
            raise ValueError(
                f"the longest of the {name} has {longest} tokens, but the model's context is "
                f"{context}"
            )
