"""The stages that learn from files: `midtrain` reads the product's own text, `sft` imitates demonstrated sessions,
`dpo` prefers one answer to another.

Which tokens step n reads follows from the seed and n alone. So a stage that was interrupted goes on, to the bit, from
the learner's state and the number of steps done (and, for `sft`, the held-out losses so far), and no data loader has
a state of its own.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from etude.train.learner import FitStats, Learner
from etude.train.rows import Padded, pack_text, pad, plan
from etude.train.schedule import rate
from etude.train.stream import Documents, Mix, shuffled
from etude.train.supervised import Figures, Pairs, answer_logprobs, preference

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""The tokens of a session, and which of them the assistant said."""
Preference = tuple[Demonstration, Demonstration]
"""The chosen session and the rejected one, which begin alike."""

# Small enough to stay in the caches of a CPU core; a step does not depend on it but for rounding.
MICROBATCH_TOKENS = 1024

EXAM_TOKENS = 65_536
"""Of the held-out documents no more than so many tokens are asked: enough for three digits of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Reported after every step, when the learner's state is the one to checkpoint."""

    step: int
    """Steps done."""
    total: int
    """Steps at most."""
    fit: FitStats
    held_out: tuple[float, ...] = ()
    """The loss on held-out demonstrations after each epoch so far."""
    figures: Figures = field(default_factory=dict)
    """What else there is to tell: the loss on held-out documents, how often the chosen answer wins."""


OnStep = Callable[[Progress], None]


def _ignore(progress: Progress) -> None: ...


def midtrain(
    learner: Learner,
    sources: Sequence[tuple[Documents, float]],
    *,
    eos: int,
    steps: int,
    batch_tokens: int,
    lr: float,
    warmup: int,
    weight_decay: float,
    seed: int,
    row_tokens: int | None = None,
    separate: bool = True,
    held_out: Documents | None = None,
    held_out_every: int = 100,
    start_step: int = 0,
    on_step: OnStep = _ignore,
) -> None:
    """Next-token prediction on (documents, weight) sources; documents are packed into rows of `row_tokens` (None: the
    model's whole context), and with `separate` do not see each other there."""
    width = row_tokens or learner.model.config.max_position_embeddings
    mix = Mix(sources, width=width, seed=seed)
    num_rows, rows_at_once = max(1, batch_tokens // width), max(1, MICROBATCH_TOKENS // width)
    ends = eos if separate else None
    exam = _exam(held_out, width, ends, rows_at_once) if held_out and len(held_out.ends_D) else []
    for step in range(start_step, steps):
        tokens_BT = torch.from_numpy(mix.rows(step * num_rows, num_rows))
        fit = learner.fit(
            [text_rows(rows_BT, ends) for rows_BT in torch.split(tokens_BT, rows_at_once)],
            lr=rate(step, lr=lr, warmup=warmup, total=steps, decay="cosine"),
            weight_decay=weight_decay,
        )
        due = exam and ((step + 1) % held_out_every == 0 or step + 1 == steps)
        figures = {"held_out": learner.evaluate(exam)} if due else {}
        on_step(Progress(step=step + 1, total=steps, fit=fit, figures=figures))


def text_rows(tokens_BT: Tensor, eos: int | None) -> Padded:
    """Rows in which every token counts. With `eos`, what follows one is another document: it sees nothing before, and
    its first token, which nothing foretells, does not count."""
    mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    if eos is None:
        return Padded(tokens_BT=tokens_BT, mask_BT=mask_BT)
    mask_BT[:, 1:] = tokens_BT[:, :-1] != eos
    begins_BT = torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT) * ~mask_BT
    return Padded(tokens_BT=tokens_BT, mask_BT=mask_BT, starts_BT=begins_BT.cummax(-1).values)


def _exam(held_out: Documents, width: int, eos: int | None, rows_at_once: int) -> list[Padded]:
    """The same questions at every time: the first held-out tokens in rows, what does not fill a row left over."""
    tokens_N = held_out.tokens_N[:EXAM_TOKENS].astype(np.int64)
    width = min(width, len(tokens_N))
    tokens_BT = torch.from_numpy(tokens_N[: len(tokens_N) // width * width].reshape(-1, width))
    return [text_rows(rows_BT, eos) for rows_BT in torch.split(tokens_BT, rows_at_once)]


def sft(
    learner: Learner,
    demonstrations: Sequence[Demonstration],
    held_out: Sequence[Demonstration],
    *,
    max_epochs: int,
    patience: int,
    batch_tokens: int,
    lr: float,
    seed: int,
    warmup: int = 0,
    weight_decay: float = 0.0,
    start_step: int = 0,
    held_out_losses: Sequence[float] = (),
    on_step: OnStep = _ignore,
) -> tuple[float, ...]:
    """Imitation of what the assistant said, until the loss on held-out demonstrations has not fallen for `patience`
    epochs; the learner ends with the weights of the best epoch. Returns the held-out loss of every epoch."""
    _check(demonstrations, held_out, learner.model.config.max_position_embeddings)
    num_tokens = sum(len(tokens) for tokens, _ in demonstrations)
    steps_per_epoch = min(len(demonstrations), max(1, round(num_tokens / batch_tokens)))  # no step without a session
    total = max_epochs * steps_per_epoch
    exam = pack_text(held_out, microbatch_tokens=MICROBATCH_TOKENS)
    losses, step = list(held_out_losses), start_step
    while step < total and since_best(losses) < patience:
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(demonstrations), seed, epoch), steps_per_epoch)[part]
        fit = learner.fit(
            pack_text([demonstrations[i] for i in chosen], microbatch_tokens=MICROBATCH_TOKENS),
            lr=rate(step, lr=lr, warmup=warmup, total=total, decay="linear"),
            weight_decay=weight_decay,
        )
        step += 1
        if step % steps_per_epoch == 0:
            losses.append(learner.evaluate(exam))
            if since_best(losses) == 0:
                learner.keep()
        on_step(Progress(step=step, total=total, fit=fit, held_out=tuple(losses)))
    learner.recall()
    return tuple(losses)


def dpo(
    learner: Learner,
    pairs: Sequence[Preference],
    *,
    epochs: int,
    batch_pairs: int,
    beta: float,
    lr: float,
    seed: int,
    length_normalised: bool = False,
    warmup: int = 0,
    start_step: int = 0,
    on_step: OnStep = _ignore,
) -> None:
    """Preference of the chosen session to the rejected one, measured against the weights that the stage starts from.
    These are kept in the learner's state: what they say of each pair is computed once, at every start."""
    if start_step == 0:
        learner.keep()
    with learner.recalled():
        references = _references(learner, pairs, length_normalised)
    steps_per_epoch = max(1, round(len(pairs) / batch_pairs))
    total = epochs * steps_per_epoch
    loss = preference(beta=beta, length_normalised=length_normalised)
    for step in range(start_step, total):
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(pairs), seed, epoch), steps_per_epoch)[part].tolist()
        fit = learner.fit(
            [_pairs([pairs[i] for i in some], [references[i] for i in some]) for some in _together(pairs, chosen)],
            lr=rate(step, lr=lr, warmup=warmup, total=total, decay="linear"),
            loss=loss,
        )
        on_step(Progress(step=step + 1, total=total, fit=fit, figures=fit.figures))


def _together(pairs: Sequence[Preference], chosen: Sequence[int]) -> list[list[int]]:
    """Which pairs share a microbatch."""
    widths = [sum(len(tokens) for tokens, _ in pairs[i]) for i in chosen]
    return [[chosen[i] for i in some] for some in plan(widths, MICROBATCH_TOKENS)]


def _pairs(pairs: Sequence[Preference], references: Sequence[tuple[float, float]]) -> Pairs:
    """Both sessions of a pair in one row, so that no share of a microbatch can take them apart."""
    tokens = [[*chosen, *rejected] for (chosen, _), (rejected, _) in pairs]
    masks = [[*chosen, *rejected] for (_, chosen), (_, rejected) in pairs]
    starts = [[0] * len(chosen) + [len(chosen)] * len(rejected) for (chosen, _), (rejected, _) in pairs]
    width = max(map(len, tokens))  # two sessions may be longer than the model's context, so padding begins anew too
    starts = [[*row, *range(len(row), width)] for row in starts]
    return Pairs(
        tokens_BT=pad(tokens, torch.int64),
        mask_BT=pad(masks, torch.bool),
        starts_BT=pad(starts, torch.int64),
        reference_B2=torch.tensor(references),
    )


@torch.no_grad()
def _references(learner: Learner, pairs: Sequence[Preference], mean: bool) -> list[tuple[float, float]]:
    """The log-probs of the chosen and the rejected session of each pair under the present weights."""
    found: dict[int, tuple[float, float]] = {}
    for some in _together(pairs, range(len(pairs))):
        rows = _pairs([pairs[i] for i in some], [(0.0, 0.0)] * len(some)).to(learner.device)
        found |= dict(zip(some, map(tuple, answer_logprobs(learner.model, rows, mean=mean).tolist()), strict=True))
    return [found[i] for i in range(len(pairs))]


def since_best(losses: Sequence[float]) -> int:
    """Evaluations since the lowest loss; one that merely equals it is no progress."""
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def _check(demonstrations: Sequence[Demonstration], held_out: Sequence[Demonstration], context: int) -> None:
    for name, sessions in (("demonstrations", demonstrations), ("held-out demonstrations", held_out)):
        if not sessions:
            raise ValueError(f"there are no {name}")
        longest = max(len(tokens) for tokens, _ in sessions)
        if longest > context:
            raise ValueError(f"the longest of the {name} has {longest} tokens, and the model's context {context}")
