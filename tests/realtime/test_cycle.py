"""Users' outcomes in both arms, from the figures of their sessions."""

from __future__ import annotations

from etude.core.updates import SessionFigures
from etude.realtime.cycle import METRICS, user_outcomes


def figures(user: str, started: float, *versions: int, kept: float = 1.0) -> SessionFigures:
    metrics = dict.fromkeys(METRICS, 0.0) | {"kept": kept}
    return SessionFigures(
        user=user, organisation="", session=f"{started}", started=started, versions=versions,
        metrics=metrics, events=(),
    )  # fmt: skip


SEEN = [
    figures("b", 1.0, 5, kept=0.25),
    figures("b", 2.0, 5, kept=0.75),
    figures("b", 10.0, 7),
    figures("b", 12.0, 7, kept=0.5),
    figures("a", 11.0, 5),
    figures("a", 11.5, 5, 7),  # changed versions midway
    figures("a", 9.0, 7),  # before the stage
    figures("a", 13.0, 7),  # after it
    figures("a", 11.0, 4),  # of neither version
    figures("c", 12.0, 7),
]
STAGE = {"new": 7, "old": 5, "first_seen": 3.0, "since": 10.0, "until": 12.0}


def test_sessions_of_one_version_within_the_stage_count() -> None:
    found = user_outcomes(SEEN, **STAGE)  # type: ignore[arg-type]
    assert [(one.user, one.is_candidate, one.sessions) for one in found] == [
        ("a", False, 1),
        ("b", True, 2),
        ("c", True, 1),
    ]
    assert [one.totals["kept"] for one in found] == [1.0, 1.5, 1.0]
    assert found[1].before["kept"] == 0.5 and not found[2].before


def test_the_order_of_sessions_changes_nothing() -> None:
    assert user_outcomes(SEEN[::-1], **STAGE) == user_outcomes(SEEN, **STAGE)  # type: ignore[arg-type]
