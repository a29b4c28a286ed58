"""The stages that learn from files: `midtrain` reads the product's own text, `sft` imitates demonstrated sessions,
`dpo` prefers one answer to another.

Which tokens step n reads follows from the seed and n alone. So a stage that was interrupted goes on, to the bit, from
the learner's state and the number of steps done (and, for `sft`, the held-out losses so far), and no data loader has
a state of its own.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from etude.train.learner import MICROBATCH_TOKENS, FitStats, Learner
from etude.train.rows import Text, plan
from etude.train.schedule import rate
from etude.train.stream import Documents, Mix, shuffled
from etude.train.supervised import Figures, Pair, answer_logprobs, pack_pairs, preference

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""The tokens of a session, and which of them the assistant said."""
Preference = tuple[Demonstration, Demonstration]
"""The chosen session and the rejected one, which begin alike."""

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
    num_rows, ends = max(1, batch_tokens // width), eos if separate else None
    exam = _exam(held_out, width, ends) if held_out and len(held_out.ends_D) else []
    for step in range(start_step, steps):
        fit = learner.fit(
            documents(mix.rows(step * num_rows, num_rows), ends),
            lr=rate(step, lr=lr, warmup=warmup, total=steps, decay="cosine"),
            weight_decay=weight_decay,
        )
        due = exam and ((step + 1) % held_out_every == 0 or step + 1 == steps)
        figures = {"held_out": learner.evaluate(exam)} if due else {}
        on_step(Progress(step=step + 1, total=steps, fit=fit, figures=figures))


def documents(tokens_BT: NDArray[np.int64], eos: int | None) -> list[Text]:
    """Of rows in which every token counts. With `eos`, what follows one is another document, which sees nothing before
    it; otherwise a row is one."""
    found = []
    for tokens_T in tokens_BT:
        borders = np.zeros(0, np.int64) if eos is None else np.flatnonzero(tokens_T[:-1] == eos) + 1
        found += [Text(own.tolist(), (True,) * len(own)) for own in np.split(tokens_T, borders)]
    return found


def _exam(held_out: Documents, width: int, eos: int | None) -> list[Text]:
    """The same questions at every time: the first held-out tokens in rows, what does not fill a row left over."""
    tokens_N = held_out.tokens_N[:EXAM_TOKENS].astype(np.int64)
    width = min(width, len(tokens_N))
    return documents(tokens_N[: len(tokens_N) // width * width].reshape(-1, width), eos)


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
    texts, exam = ([Text(*session) for session in some] for some in (demonstrations, held_out))
    losses, step = list(held_out_losses), start_step
    while step < total and since_best(losses) < patience:
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(demonstrations), seed, epoch), steps_per_epoch)[part]
        fit = learner.fit(
            [texts[i] for i in chosen],
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
        judged = _judged(
            learner, [Pair(Text(*chosen), Text(*rejected)) for chosen, rejected in pairs], length_normalised
        )
    steps_per_epoch = max(1, round(len(pairs) / batch_pairs))
    total = epochs * steps_per_epoch
    loss = preference(beta=beta, length_normalised=length_normalised)
    for step in range(start_step, total):
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(shuffled(len(pairs), seed, epoch), steps_per_epoch)[part].tolist()
        fit = learner.fit(
            [judged[i] for i in chosen],
            lr=rate(step, lr=lr, warmup=warmup, total=total, decay="linear"),
            pack=pack_pairs,
            loss=loss,
        )
        on_step(Progress(step=step + 1, total=total, fit=fit, figures=fit.figures))


@torch.no_grad()
def _judged(learner: Learner, pairs: Sequence[Pair], mean: bool) -> list[Pair]:
    """With the log-probs of the chosen and the rejected session of each pair under the present weights."""
    judged = list(pairs)
    for some in plan([pair.length for pair in pairs], MICROBATCH_TOKENS[learner.device.type])[0]:
        packed = pack_pairs([pairs[i] for i in some]).to(learner.device)
        for i, (chosen, rejected) in zip(some, answer_logprobs(learner.model, packed, mean=mean).tolist(), strict=True):
            judged[i] = replace(pairs[i], reference=(chosen, rejected))
    return judged


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
