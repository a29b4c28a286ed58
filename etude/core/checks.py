"""Validation of training data: the reason why a row or batch must not be trained on. Pure, and run
twice: by the controller, which drops the attempt under the name `malformed`, and by the trainer,
which stops before a step that could not be undone."""

from __future__ import annotations

import math

from etude.core.errors import EtudeError
from etude.core.types import Batch, Row

LEAST_LOGPROB = -53 * math.log(2)
"""The smallest log-prob that a sampled token can have. Sampling uses a number of 53 bits, whose
smallest step is 2**-53, so nothing less likely is ever sampled. Servers report smaller values when
they do not know the log-prob, or when it belongs to another distribution than the one sampled from.
The limit bounds every ratio of probabilities by 2**53; that times `LARGEST` is finite in float32,
and so are all losses and their gradients."""
MOST_LOGPROB = 1e-3  # 0, with some room for rounding
LARGEST = 1e15
"""The largest absolute value of a reward, credit or advantage: the squares of gradients must be
finite in float32."""


def row_fault(
    row: Row,
    *,
    oldest: int,
    newest: int,
    max_tokens: int | None = None,
    vocab_size: int | None = None,
) -> str | None:
    """The first fault of a row, or None. Its tokens may come from versions `oldest` to `newest`."""
    sizes = [len(field) for field in (row.tokens, row.mask, row.logprobs, row.advantages)]
    if len(set(sizes)) > 1:
        return "tokens, mask, log-probs and advantages have {}, {}, {} and {} entries".format(
            *sizes
        )
    if max_tokens is not None and len(row.tokens) > max_tokens:
        return f"it has {len(row.tokens)} tokens, more than the context of {max_tokens}"
    if not any(row.mask):
        return "none of its tokens was sampled"
    if row.mask[0]:
        return "its first token is marked as sampled, but no prompt precedes it"
    if vocab_size is not None and not 0 <= min(row.tokens) <= max(row.tokens) < vocab_size:
        return f"a token is outside the vocabulary of {vocab_size}"
    if not all(map(math.isfinite, row.logprobs)):
        return "a log-prob is not finite"
    if wrong := [
        p
        for p, sampled in zip(row.logprobs, row.mask, strict=True)
        if sampled and not _is_logprob(p)
    ]:
        return (
            f"a sampled token has the log-prob {wrong[0]:g}: it must be between "
            f"{LEAST_LOGPROB:g} and 0"
        )
    if not all(map(math.isfinite, row.advantages)):
        return "an advantage is not finite"
    if (largest := max(map(abs, row.advantages))) > LARGEST:
        return f"its advantage is {largest:g}; the gradient cannot be computed above {LARGEST:g}"
    return _span_fault(row, oldest, newest)


def _span_fault(row: Row, oldest: int, newest: int) -> str | None:
    """The first fault in the origin of a row's tokens, or None."""
    num_sampled = sum(row.mask)
    counts = {
        "a weight version": [span.count for span in row.versions],
        "a region": [span.count for span in row.regions],
        "sampling parameters": [span.count for span in row.sampling],
    }
    strangers = [span.version for span in row.versions if not oldest <= span.version <= newest]
    for origin, runs in counts.items():
        if min(runs, default=1) < 1:
            return f"a span of {min(runs)} tokens has {origin}: a span has at least 1"
        # Only the version must be known in every row.
        if sum(runs) != num_sampled and (runs or origin == "a weight version"):
            return f"{num_sampled} tokens were sampled, and {sum(runs)} have {origin}"
    if strangers:
        return (
            f"a token comes from version {strangers[0]}, but only versions {oldest} to "
            f"{newest} are possible"
        )
    for span in row.sampling:
        if not 0 <= span.params.temperature < math.inf:
            return f"a token was sampled at temperature {span.params.temperature}"
        if span.params.untrainable is not None:
            return (
                f"a token was sampled with {span.params.untrainable}, which the trainer "
                "cannot recompute"
            )
    return None


def _is_logprob(p: float) -> bool:
    return LEAST_LOGPROB <= p <= MOST_LOGPROB


def check_batch(batch: Batch, *, max_tokens: int, vocab_size: int, where: str) -> None:
    """Raise an error that names the fault of the batch, or of its first bad row. `where` names the
    batch."""
    if not batch.rows:
        raise EtudeError(
            f"{where} has no rows: there is nothing to learn from; `etude audit` shows what "
            "came before"
        )
    if batch.reward is not None and not math.isfinite(batch.reward):
        raise EtudeError(
            f"{where} has a mean reward of {batch.reward}. No step was taken: the batch is damaged"
        )
    if batch.oldest < 0:
        raise EtudeError(
            f"{where} has tokens of version {batch.oldest}. No step was taken: the batch is damaged"
        )
    for row in batch.rows:
        fault = row_fault(
            row,
            oldest=batch.oldest,
            newest=batch.step - 1,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
        )
        if fault is not None:
            raise EtudeError(
                f"{where}, row of {row.sample}: {fault}. No step was taken: the batch is "
                "damaged, or it was made with another config or model than the run has now"
            )
