"""Progress of a long command: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from etude.commands.terminal import showing_progress


def test_a_log_has_a_line_a_minute() -> None:
    now = 1000.0
    written = io.StringIO()
    console = Console(file=written, force_terminal=False)
    with showing_progress(console, clock=lambda: now) as show:
        for step in range(1, 7):
            now += 25.0
            show(step, 400, f"cart-bug-{step} [of 3]")
    assert written.getvalue() == (
        "3 of 400 after 0:01:15: cart-bug-3 [of 3]\n6 of 400 after 0:02:30: cart-bug-6 [of 3]\n"
    )


def test_a_terminal_has_a_bar() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    with showing_progress(console) as show:
        show(3, 400, "cart-bug-1 " + "x" * 100)
    shown = written.getvalue()
    assert "3/400" in shown and "cart-bug-1 xxx" in shown and "x" * 40 not in shown
