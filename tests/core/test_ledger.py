from __future__ import annotations

from typing import get_args

import pytest

from etude.core.ledger import (
    MEANINGS,
    Batched,
    Dropped,
    Entry,
    Issued,
    Ledger,
    Reason,
    Trained,
    Unbalanced,
)


def issued(*samples: str, group: str = "g") -> Issued:
    return Issued(group=group, task="t", samples=samples, version=0)


def test_a_sample_from_issue_to_training() -> None:
    ledger = Ledger([issued("a", "b", "c")])
    assert (ledger.issued, ledger.trained, ledger.in_flight) == (3, 0, 3)
    ledger.apply(Dropped(samples=("c",), reason="failed"))
    ledger.apply(Batched(step=1, samples=("a", "b")))
    assert (ledger.trained, ledger.in_flight, ledger.open_samples()) == (0, 2, [])
    ledger.apply(Trained(step=1))
    assert (ledger.issued, ledger.trained, dict(ledger.dropped), ledger.in_flight) == (
        3,
        2,
        {"failed": 1},
        0,
    )


def test_trained_up_to_a_step_takes_all_batches_before_it() -> None:
    ledger = Ledger(
        [issued("a", "b", "c"), *(Batched(step=n, samples=(s,)) for n, s in enumerate("abc", 1))]
    )
    ledger.apply(Trained(step=2))
    assert (ledger.trained, ledger.in_flight) == (2, 1)
    ledger.apply(Trained(step=2))  # a trainer that resumes at a step reports it again
    assert (ledger.trained, ledger.in_flight) == (2, 1)


START: list[Entry] = [
    issued("a", "b", "c"),
    Batched(step=1, samples=("a",)),
    Dropped(samples=("b",), reason="no_signal"),
]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (issued("a"), "a was issued before"),
        (issued("x", "x"), "twice"),
        (Batched(step=2, samples=("a",)), "a cannot become 2: it is 1"),
        (Batched(step=2, samples=("b",)), "b cannot become 2: it is 'no_signal'"),
        (Dropped(samples=("a",), reason="cancelled"), "a cannot become 'cancelled': it is 1"),
        (
            Dropped(samples=("c", "b"), reason="cancelled"),
            "b cannot become 'cancelled': it is 'no_signal'",
        ),
        (
            Dropped(samples=("nobody",), reason="failed"),
            "nobody cannot become 'failed': it was never issued",
        ),
        (Dropped(samples=("c", "c"), reason="failed"), "twice"),
        (Batched(step=1, samples=("c",)), "step 1 already has a batch"),
    ],
)
def test_what_contradicts_the_books_is_refused_and_changes_nothing(
    entry: Entry, message: str
) -> None:
    ledger = Ledger(START)
    with pytest.raises(Unbalanced, match=message):
        ledger.apply(entry)
    assert (ledger.issued, ledger.trained, ledger.in_flight, ledger.open_samples()) == (
        3,
        0,
        2,
        ["c"],
    )


def test_training_does_not_go_back() -> None:
    ledger = Ledger([*START, Trained(step=1), Batched(step=2, samples=("c",)), Trained(step=2)])
    with pytest.raises(Unbalanced, match="step 1 was trained after step 2"):
        ledger.apply(Trained(step=1))
    with pytest.raises(Unbalanced, match="step 2 already has a batch"):
        ledger.apply(Batched(step=2, samples=()))


def test_every_reason_is_told_in_words() -> None:
    assert MEANINGS.keys() == set(get_args(Reason)) and all(MEANINGS.values())
