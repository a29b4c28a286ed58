"""The tools of the built-in agent: read, edit, test, submit. Their answers are short, because the
model pays for each token. An error is an answer like any other, for the model to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from etude.core.sandbox import CommandResult, Sandbox
from etude.core.types import Json, Task
from etude.harness.summary import CarriedState

SUBMIT = "submit"
_JSON_TYPES: dict[type, str] = {int: "integer", str: "string"}


class Tools:
    """A `harness.agent.AgentTools` for one task in one sandbox."""

    def __init__(self, task: Task, sandbox: Sandbox, *, test_timeout_s: float = 10.0) -> None:
        self._sandbox = sandbox
        self._test_timeout_s = test_timeout_s
        if "module" not in task.meta:
            raise ValueError(
                f"task {task.id!r} has no meta['module'], the file that the built-in agent "
                f"works on: add it to the task, or use your own agent"
            )
        self._module = str(task.meta["module"])
        path = PurePosixPath(self._module)
        self._test_file = str(path.with_name(f"test_{path.name}"))

    @property
    def schemas(self) -> list[dict[str, Json]]:
        return SCHEMAS

    def ends(self, name: str) -> bool:
        return name == SUBMIT

    async def call(self, name: str, arguments: Json) -> str:
        """The answer to a call as the model wrote it, however wrong it is. Raises only if the
        sandbox fails."""
        if name not in PARAMETERS:
            return f"error: no tool {name}"
        wanted = PARAMETERS[name]
        if (
            not isinstance(arguments, dict)
            or {key: type(value) for key, value in arguments.items()} != wanted
        ):
            return (
                f"error: {name} takes "
                f"({', '.join(f'{key}: {kind.__name__}' for key, kind in wanted.items())})"
            )
        try:
            answer: str = await getattr(self, name)(**arguments)
        except FileNotFoundError:
            return "error: no such file"
        # a fault of the working copy: a path that leads out of it, a full disk
        except ValueError as e:
            return f"error: {e}"
        return answer

    def carried(self) -> CarriedState:
        """State that the session's next window receives in addition to its summary; none here."""
        return CarriedState()

    async def read(self) -> str:
        """The module, with line numbers."""
        text = await self._sandbox.read(self._module)
        return "\n".join(
            f"{number} {line}" for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)
        )

    async def edit(self, line: int, text: str) -> str:
        """Replace one line of the module. Its indentation stays: counting spaces is not the skill
        that we train."""
        lines = (await self._sandbox.read(self._module)).split("\n")
        last = len(lines) - (lines[-1] == "")
        if not 1 <= line <= last:
            return f"error: lines are 1 to {last}"
        if "\n" in text:
            return "error: text is one line"
        old = lines[line - 1]
        lines[line - 1] = old[: len(old) - len(old.lstrip())] + text.strip()
        await self._sandbox.write(self._module, "\n".join(lines))
        return "ok"

    async def test(self) -> str:
        """Run the visible tests."""
        ran = await self._sandbox.run(["python", self._test_file], timeout_s=self._test_timeout_s)
        return report(ran)

    async def submit(self) -> str:
        """Finish; the module is graded as it is now."""
        return "ok"


PARAMETERS: dict[str, dict[str, type]] = {
    "read": {},
    "edit": {"line": int, "text": str},
    "test": {},
    SUBMIT: {},
}


def report(ran: CommandResult) -> str:
    """The last line of the test script, or the kind of its failure."""
    if ran.exit_code is None:
        return "timeout"
    lines = ran.output.strip().splitlines()
    if not lines:
        return "ok" if ran.exit_code == 0 else f"error: exit {ran.exit_code}"
    crashed = ran.exit_code != 0 and "Traceback (most recent call last):" in lines
    return f"error: {lines[-1]}" if crashed else lines[-1]


def _schema(name: str) -> dict[str, Json]:
    method: Callable[..., Any] = getattr(Tools, name)
    parameters = PARAMETERS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": (method.__doc__ or "").split(".")[0],
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": _JSON_TYPES[kind]} for key, kind in parameters.items()
                },
                "required": list(parameters),
            },
        },
    }


SCHEMAS: list[dict[str, Json]] = [_schema(name) for name in PARAMETERS]
"""Schemas in the format of the chat completions API."""
