"""Gateway and workers as processes that are killed: everything that a client was told is recorded,
once. The long form is `etude bench gateway --kills`."""

from __future__ import annotations

from etude.bench._kills import kill_run


def test_every_acknowledged_turn_is_recorded_once() -> None:
    figures = kill_run(24, 4, after_turns=(12, 36, 60))
    assert (figures["turns"], figures["gateway_kills"], figures["worker_kills"]) == (96, 2, 1)
    assert figures["retries"] > 0, "nobody noticed"
