"""Demonstrations: sessions of a scripted worker that knows the harness well and sometimes the
answer.

The worker reads the module, tries a repair, runs the tests, and tries another if they fail. One try
in `1 / SKILL` is the right repair; the others are mutations of the usual kinds. Sessions that do
not end with passing tests are discarded, as one would with the sessions of any teacher. The rest
show how the tools are used, and leave much to be learnt.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from random import Random
from typing import Any

from etude.core.seeds import derive
from etude.tasks import bugs
from etude.tasks.repair import RepairTask

Message = dict[str, Any]
MAX_TRIES = 2
SKILL = 0.25


def demonstrations(tasks: Sequence[RepairTask], count: int, seed: int) -> list[list[Message]]:
    """`count` solved sessions as chat messages, of tasks drawn from `tasks`."""
    rng = Random(derive("demonstrations", seed))
    sessions: list[list[Message]] = []
    while len(sessions) < count:
        if (session := attempt(rng.choice(tasks), rng)) is not None:
            sessions.append(session)
    return sessions


def attempt(task: RepairTask, rng: Random) -> list[Message] | None:
    """One session of the scripted worker; None if all of its repairs failed."""
    original = task.broken
    session: list[Message] = task.task.opening
    _turn(session, [("read", {}, numbered(original))])
    tried: bugs.Mutation | None = None
    for _ in range(MAX_TRIES):
        slip = repair(task) if rng.random() < SKILL else bugs.random_mutation(original, rng)
        undo = (
            [_edit(tried.line, original.splitlines()[tried.line - 1])]
            if tried and tried.line != slip.line
            else []
        )
        report = visible_report(task, bugs.apply_mutation(original, slip))
        _turn(session, [*undo, _edit(slip.line, slip.text), ("test", {}, report)])
        if report == "ok":
            _turn(session, [("submit", {}, "")])
            return session
        tried = slip
    return None


def repair(task: RepairTask) -> bugs.Mutation:
    """The correction of the one line that differs from the solution."""
    pairs = zip(task.broken.splitlines(), task.solution.splitlines(), strict=True)
    return next(
        bugs.Mutation("repair", line, right)
        for line, (wrong, right) in enumerate(pairs, start=1)
        if wrong != right
    )


Call = tuple[str, dict[str, Any], str]
"""A tool, its arguments, and its answer."""


def _edit(line: int, text: str) -> Call:
    return "edit", {"line": line, "text": text.strip()}, "ok"


def numbered(text: str) -> str:
    return "\n".join(f"{number} {line}" for number, line in enumerate(text.splitlines(), start=1))


def visible_report(task: RepairTask, module: str) -> str:
    """The output of the tool `test`. The module is one of our own programs with one token changed,
    so it may run here."""
    scope: dict[str, Any] = {}
    # without its import: the module's names are in the scope
    test = task.visible_tests.split("\n", 1)[1]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            exec(module, scope)
            exec(test, scope)
        except SystemExit:
            pass
        except (
            ArithmeticError,
            LookupError,
            NameError,
            TypeError,
            ValueError,
            AttributeError,
        ) as e:
            print(f"{type(e).__name__}: {e}")
    return said.getvalue().splitlines()[-1]


def _turn(session: list[Message], calls: Sequence[Call]) -> None:
    """Add one assistant message with its tool calls, and the answers to them."""
    ids = [f"call_{len(session)}_{number}" for number in range(len(calls))]
    said = [
        {
            "id": i,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments, _) in zip(ids, calls, strict=True)
    ]
    session.append({"role": "assistant", "content": None, "tool_calls": said})
    if calls[0][0] != "submit":
        session += [
            {"role": "tool", "tool_call_id": i, "content": answer}
            for i, (_, _, answer) in zip(ids, calls, strict=True)
        ]
