"""The stages before RL: `midtrain` reads the product's own text, `sft` imitates demonstrated sessions.

Which tokens step n reads follows from the seed and n alone. So a stage that was interrupted goes on, to the bit, from
the learner's state and the number of steps done (and, for `sft`, the held-out losses so far), and no data loader has
a state of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from etude.core.seeds import derive
from etude.train.learner import FitStats, Learner
from etude.train.rows import Padded, pack_text
from etude.train.schedule import rate

Demonstration = tuple[Sequence[int], Sequence[bool]]
"""The tokens of a session, and which of them the assistant said."""

# Small enough to stay in the caches of a CPU core; a step does not depend on it but for rounding.
MICROBATCH_TOKENS = 1024


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


OnStep = Callable[[Progress], None]


def _ignore(progress: Progress) -> None: ...


class Stream:
    """The documents as one endless row of tokens, an `eos` after each; every pass goes through them in a new order."""

    def __init__(self, documents: Sequence[Sequence[int]], *, eos: int, seed: int) -> None:
        if not documents:
            raise ValueError("there are no documents to train on")
        self._documents = [np.array([*document, eos], dtype=np.int64) for document in documents]
        self._size = sum(map(len, self._documents))
        self._seed = seed
        self._pass = functools.lru_cache(maxsize=2)(self._shuffled)  # two: a read may span the end of one

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        parts = []
        while count > 0:
            number, offset = divmod(start, self._size)
            parts.append(self._pass(number)[offset : offset + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def _shuffled(self, number: int) -> NDArray[np.int64]:
        return np.concatenate([self._documents[i] for i in _order(len(self._documents), self._seed, number)])


def midtrain(
    learner: Learner,
    documents: Sequence[Sequence[int]],
    *,
    eos: int,
    steps: int,
    batch_tokens: int,
    lr: float,
    warmup: int,
    weight_decay: float,
    seed: int,
    row_tokens: int | None = None,
    start_step: int = 0,
    on_step: OnStep = _ignore,
) -> None:
    """Next-token prediction; documents are packed into rows of `row_tokens` (None: the model's whole context)."""
    stream = Stream(documents, eos=eos, seed=seed)
    width = row_tokens or learner.model.config.max_position_embeddings
    size = max(1, batch_tokens // width) * width
    for step in range(start_step, steps):
        tokens_BT = torch.from_numpy(stream.read(step * size, size).reshape(-1, width))
        fit = learner.fit(
            [_all_count(rows_BT) for rows_BT in torch.split(tokens_BT, max(1, MICROBATCH_TOKENS // width))],
            lr=rate(step, lr=lr, warmup=warmup, total=steps, decay="cosine"),
            weight_decay=weight_decay,
        )
        on_step(Progress(step=step + 1, total=steps, fit=fit))


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
    steps_per_epoch = max(1, round(sum(len(tokens) for tokens, _ in demonstrations) / batch_tokens))
    total = max_epochs * steps_per_epoch
    exam = pack_text(held_out, microbatch_tokens=MICROBATCH_TOKENS)
    losses, step = list(held_out_losses), start_step
    while step < total and since_best(losses) < patience:
        epoch, part = divmod(step, steps_per_epoch)
        chosen = np.array_split(_order(len(demonstrations), seed, epoch), steps_per_epoch)[part]
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


def _all_count(tokens_BT: torch.Tensor) -> Padded:
    return Padded(tokens_BT=tokens_BT, mask_BT=torch.ones_like(tokens_BT, dtype=torch.bool))


def _order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.Generator(np.random.PCG64(derive(seed, "epoch", epoch))).permutation(count)
