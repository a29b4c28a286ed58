"""The ledger of samples: every sample that was issued is settled exactly once.

    issued = trained + dropped{reason} + in flight

The ledger is a fold over an append-only list of entries, so the same code runs in the controller
and in an audit that reads the entries back from disk after a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "failed",
    "malformed",
    "sampling",
    "quarantined",
    "no_signal",
    "passed_over",
    "interrupted",
    "cancelled",
    "censored",
    "stale",
    "capped",
    "heldout",
    "deleted",
]
"""The reason why a sample is not trained on; `MEANINGS` explains each. The last five apply to
sessions of users (`realtime`), which arrive whether or not there is room for them."""
MEANINGS: dict[Reason, str] = {
    "failed": "something broke, or nothing was sampled, so there is nothing to learn from",
    "malformed": "not fit to train on: too long, a number that is not finite or an unknown version",
    "sampling": "sampled with parameters that the trainer cannot recompute",
    "quarantined": "suspected of a trick",
    "no_signal": "no token of its group has an advantage, as when all attempts earned the same",
    "passed_over": "others of its group have an advantage, but not it, as when it earned the mean",
    "interrupted": "cut short when the run was stopped or killed; its task is issued again",
    "cancelled": "no longer needed: the last batch of the stage filled up before it was used",
    "censored": "nobody gave any feedback on it before its horizon ended",
    "stale": "one of its tokens comes from weights that are too old, or that were rolled back",
    "capped": "its user or organisation already had its share of the batch",
    "heldout": "its user is in the group that never gets an update",
    "deleted": "its user was deleted or withdrew consent, or its retention period is over",
}
"""The reasons in words; `Dropped.detail` names the parameters, the trick, or the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    group: str
    task: str
    samples: tuple[str, ...]
    version: int
    epoch: int = 0
    """The number of times that all tasks had been issued before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """The samples that went into the batch of `step`. They count as trained once that step's
    weights are published."""

    step: int
    samples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    samples: tuple[str, ...]
    reason: Reason
    detail: str = ""

    @property
    def label(self) -> str:
        """The name that the samples are counted under: the reason, with its detail if there is
        one."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """All samples batched for steps up to `step` are in published weights."""

    step: int


Entry = Issued | Batched | Dropped | Trained


class Unbalanced(Exception):
    """An entry that contradicts an earlier one: a sample settled twice, or never issued."""


class Ledger:
    """The balance after the entries so far. `apply` refuses an entry that would break the
    equation."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        # sample -> "open", the step of its batch, or why it was dropped
        self._state: dict[str, str | int] = {}
        self._open: dict[str, None] = {}  # in the order in which they were issued
        self._batched: dict[int, tuple[str, ...]] = {}  # step -> samples, until trained
        self.trained_step = 0
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        for entry in entries:
            self.apply(entry)

    @property
    def in_flight(self) -> int:
        return self.issued - self.trained - self.dropped.total()

    @property
    def batched(self) -> int:
        """The number of samples in flight whose batch is written."""
        return sum(map(len, self._batched.values()))

    def samples(self) -> list[str]:
        """All samples that were ever issued."""
        return list(self._state)

    def __contains__(self, sample: str) -> bool:
        """True if the sample was ever issued."""
        return sample in self._state

    def has_fate(self, sample: str) -> bool:
        """True if the sample was issued and is batched or dropped."""
        return sample in self._state and sample not in self._open

    def has_batch(self, step: int) -> bool:
        """True if the batch of `step` is entered and not trained yet."""
        return step in self._batched

    def open_samples(self) -> list[str]:
        """The samples that were issued and are neither batched nor dropped yet."""
        return list(self._open)

    def fate(self, sample: str) -> int | str | None:
        """The fate of a sample that was issued: the step of its batch, or the reason why it was
        dropped; None while it is open."""
        state = self._state[sample]
        return None if state == "open" else state

    def apply(self, entry: Entry) -> None:
        match entry:
            case Issued():
                for sample in entry.samples:
                    if sample in self._state:
                        raise Unbalanced(f"{sample} was issued before")
                if len(set(entry.samples)) != len(entry.samples):
                    raise Unbalanced(
                        f"a sample appears twice in the entry that issues group {entry.group}"
                    )
                self._state |= dict.fromkeys(entry.samples, "open")
                self._open |= dict.fromkeys(entry.samples)
                self.issued += len(entry.samples)
            case Batched():
                if entry.step in self._batched or entry.step <= self.trained_step:
                    raise Unbalanced(f"step {entry.step} already has a batch")
                self._settle(entry.samples, entry.step)
                self._batched[entry.step] = entry.samples
            case Dropped():
                self._settle(entry.samples, entry.label)
                self.dropped[entry.label] += len(entry.samples)
            case Trained():
                if entry.step < self.trained_step:
                    raise Unbalanced(
                        f"step {entry.step} was trained after step {self.trained_step}"
                    )
                self.trained_step = entry.step
                for step in [step for step in self._batched if step <= entry.step]:
                    self.trained += len(self._batched.pop(step))

    def _settle(self, samples: tuple[str, ...], fate: str | int) -> None:
        for sample in samples:
            state = self._state.get(sample)
            if state != "open":
                why = "it was never issued" if state is None else f"it is {state!r}"
                raise Unbalanced(f"{sample} cannot become {fate!r}: {why}")
        if len(set(samples)) != len(samples):
            raise Unbalanced(f"a sample appears twice in the entry that makes it {fate!r}")
        self._state |= dict.fromkeys(samples, fate)
        for sample in samples:
            del self._open[sample]
