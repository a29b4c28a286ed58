"""The window, tested by scripts that a person can read.

Each file in `scripts/` contains a window and the events that happen to it, in blocks that end with
an empty line: commands, `----`, and their answers in order. `admit` answers the slot or `full`,
`take` the slot or `wait`; `finish` and `drop` answer `again` if the group was settled before; all
other commands answer nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.window import Window

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


def execute(window: Window[int], line: str) -> str:
    command, *numbers = line.split()
    args = [int(number) for number in numbers]
    match command:
        case "admit":
            slot = window.admit()
            return "full" if slot is None else str(slot)
        case "take":
            work = window.take()
            return "wait" if work is None else str(work)
        case "finish":
            return "" if window.finish(args[0], args[0]) else "again"
        case "drop":
            return "" if window.drop(args[0]) else "again"
        case "live":
            window.advance(args[0])
            return ""
        case "show":
            return f"step={window.step} active={window.active}"
    raise ValueError(f"no such command: {line}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path) -> None:
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    first, *blocks = "\n".join(lines).strip().split("\n\n")
    settings, expected = first.split("\n----\n")
    window: Window[int] = Window(
        **{key: int(v) for key, v in (word.split("=") for word in settings.split()[1:])}
    )
    assert f"capacity={window.capacity}" == expected
    for block in blocks:
        commands, expected = block.split("\n----\n")
        answers = [execute(window, line) for line in commands.splitlines()]
        assert " ".join(answer for answer in answers if answer) == expected, block


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 5


@pytest.mark.parametrize(("per_step", "max_lag", "most"), [(2, 0, 1), (2, 1, 3), (16, 2, 33)])
def test_lookahead_has_a_limit(per_step: int, max_lag: int, most: int) -> None:
    Window[int](per_step=per_step, max_lag=max_lag, reorder_window=most)
    for reorder_window in (0, most + 1):
        with pytest.raises(ValueError, match=f"from 1 to {most}$"):
            Window[int](per_step=per_step, max_lag=max_lag, reorder_window=reorder_window)


def test_live_weights_never_go_back() -> None:
    window: Window[int] = Window(per_step=1, max_lag=0, live=3)
    with pytest.raises(AssertionError, match="went back from version 3 to 2"):
        window.advance(2)


def test_a_restored_window_goes_on_where_the_run_stopped() -> None:
    """Steps 1 and 2 are live, step 3 is batched and not live, slots 6 and 8 are finished, 7 and 9
    were in flight."""
    window: Window[str] = Window(per_step=2, max_lag=2, reorder_window=2, live=2)
    window.restore(step=4, slots=10, finished=[(8, 2, "eight"), (6, 1, "six")])
    assert (window.step, window.active) == (4, 4), "two that wait, and the batch of step 3"
    assert not window.finish(7, "late") and not window.drop(9), "what was in flight is gone"
    assert not window.finish(6, "again") and not window.drop(6)
    assert window.admit() == 10, "no number is given out twice"
    assert window.admit() is None, "capacity is (2 + 1) * 2 - 1"
    assert window.take() == "six"
    window.advance(3)
    assert window.active == 3, "the batch of step 3 is live, 'six' is not"
    assert [window.take(), window.take(), window.step] == ["eight", None, 5]


def test_what_waits_in_a_restored_window_is_as_old_as_it_was() -> None:
    window: Window[str] = Window(per_step=1, max_lag=1, live=3)
    window.restore(step=4, slots=3, finished=[(2, 1, "admitted under version 1")])
    with pytest.raises(AssertionError, match="slot 2 is too old for step 4"):
        window.take()


def test_more_than_a_window_holds_cannot_be_restored() -> None:
    window: Window[str] = Window(per_step=1, max_lag=1, live=3)
    window.restore(step=5, slots=3, finished=[(2, 3, "work")])
    assert window.active == window.capacity == 2
    with pytest.raises(
        AssertionError, match="3 groups were in flight, but the window has only 2 slots"
    ):
        Window[str](per_step=1, max_lag=1, live=3).restore(
            step=5, slots=3, finished=[(1, 3, "a"), (2, 3, "b")]
        )


def test_finished_groups_that_wait_for_an_older_one_are_counted() -> None:
    window: Window[str] = Window(per_step=2, max_lag=1, reorder_window=2)
    slots = [slot for _ in range(3) if (slot := window.admit()) is not None]
    assert slots == [0, 1, 2]
    for slot in (1, 2):
        window.finish(slot, f"group {slot}")
    assert window.take() == "group 1" and window.take() is None
    assert window.usage == (3, 3, 1)
    window.finish(0, "group 0")
    assert [window.take(), window.take()] == ["group 0", "group 2"]
    assert window.usage == (3, 3, 0)
