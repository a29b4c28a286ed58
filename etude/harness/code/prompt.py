"""The first messages of a session, rendered from parts.

Parts are ordered by how often they change: first those that all sessions share, then those of a
repository, then the task. So a server's cached prefix of one session is the beginning of the next.
If not all parts fit, the least important ones are left out, wherever they are. The parts are stored
with the session, so `render` can be called again later with another budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from etude.core.errors import EtudeError
from etude.core.harness_config import TOOL_KINDS, CodeConfig
from etude.core.sandbox import Sandbox
from etude.core.types import Json, PromptPart, Task

SYSTEM = "system"
TASK = "task"
_SYSTEM_PRIORITY, _INSTRUCTIONS_PRIORITY, _TREE_PRIORITY = 100, 50, 40
_TREE = """
import json, os, sys
skipped = ("__pycache__", "node_modules")
levels = [[] for _ in range(int(sys.argv[1]))]
for folder, folders, names in os.walk("."):
    depth = 0 if folder == "." else folder.count(os.sep)
    folders[:] = sorted(n for n in folders if n[0] != "." and n not in skipped)
    if depth < len(levels):
        place = "" if folder == "." else folder[2:] + "/"
        levels[depth] += [place + n for n in [*(n + "/" for n in folders), *sorted(names)]]
    else:
        folders[:] = []
shown = [level[:100] + ["..."] * (len(level) > 100) for level in levels]
while len(json.dumps(shown)) > int(sys.argv[2]):
    shown.pop()
print(json.dumps(shown))
"""
_TREE_ROOM = 16_000
"""Byte limit of the listed levels: a sandbox keeps the last 16 KiB of an output."""

DEFAULT_SYSTEM = """\
You are a coding agent. You work on a repository, in a sandbox without a network, until the task is
done; then you call {submit}. Nobody reads what you say beside tool calls until then.

How to work
- Look before you change: find the place with {grep} and {glob}, and {read} it with its
  neighbourhood. Ask for several things at once where they do not depend on each other.
- Reproduce what is wrong, with {run_tests} or a few lines in the {terminal}, before you mend it.
- Make the smallest change that does it in the style of what is there. {edit} replaces text that
  stands once in a file; {apply_patch} changes several files; {write} is for new files; {undo}
  takes the newest change back.
- Read what linter and type checker say after an edit, and mend what you broke. Do not silence them.
- Run the tests that speak of what you changed, then all of them. Never change a test so that it
  passes, unless the task asks for that.
- Keep a list with {todo} where there are more than three steps, and leave nothing open on it.
- Long commands and servers belong in the background. Leave no files behind that the task did not
  ask for.
- {ask_user} is for what you cannot find out. A reasonable assumption is better than a question.
- When tests keep failing and you do not see why, {debug} shows what really happens.
"""


def system_text(config: CodeConfig) -> str:
    """The system prompt with the tools' names as the model knows them."""
    text = DEFAULT_SYSTEM
    if config.prompt.system is not None:
        try:
            text = Path(config.prompt.system).read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise EtudeError(
                f"harness.code.prompt.system = {config.prompt.system!r} cannot be read: {e}"
            ) from e
    for kind in TOOL_KINDS:
        text = text.replace(f"{{{kind}}}", config.name_of(kind))
    return text


async def collect_parts(task: Task, sandbox: Sandbox, config: CodeConfig) -> list[PromptPart]:
    """All parts that the first messages could contain."""
    parts = [_part(SYSTEM, system_text(config), "system", _SYSTEM_PRIORITY)]
    if task.messages:
        return parts
    for path in config.prompt.instructions:
        try:
            text = await sandbox.read(path)
        except (FileNotFoundError, ValueError):
            continue
        parts.append(_part(path, f"{path} says:\n\n{text}", "user", _INSTRUCTIONS_PRIORITY))
    for depth, level in enumerate(await _levels(sandbox, config), 1):
        text = f"Files, level {depth}: {' '.join(level)}"
        parts.append(_part(f"files {depth}", text, "user", max(_TREE_PRIORITY - depth, 1)))
    return [*parts, _part(TASK, task.prompt, "user", 0)]


def render(
    parts: Sequence[PromptPart],
    max_tokens: int,
    count: Callable[[str], int],
    *,
    without: Collection[str] = (),
) -> list[dict[str, Json]]:
    """The messages of the parts that fit, in order. Parts of one priority are kept or dropped
    together, along with all less important ones; parts of priority 0 are always kept. `without`:
    names of parts to leave out."""
    wanted = [part for part in parts if part.name not in without]
    kept = {0}
    room = max_tokens - _sum(count, wanted, 0)
    for priority in sorted({part.priority for part in wanted} - {0}, reverse=True):
        room -= _sum(count, wanted, priority)
        if room < 0:
            break
        kept.add(priority)
    messages: list[dict[str, Json]] = []
    for part in (part for part in wanted if part.priority in kept):
        if messages and messages[-1]["role"] == part.role:
            messages[-1]["content"] += f"\n\n{part.text}"
        else:
            messages.append({"role": part.role, "content": part.text})
    return messages


def counter(chars_per_token: float) -> Callable[[str], int]:
    """A function that estimates the number of tokens of a text."""
    return lambda text: int(len(text) / chars_per_token) + 1


def _sum(count: Callable[[str], int], parts: Iterable[PromptPart], priority: int) -> int:
    return sum(count(part.text) for part in parts if part.priority == priority)


def _part(name: str, text: str, role: str, priority: int) -> PromptPart:
    return PromptPart(name=name, text=text, role=role, priority=priority)  # type: ignore[arg-type]


async def _levels(sandbox: Sandbox, config: CodeConfig) -> Sequence[Sequence[str]]:
    if not config.prompt.depth:
        return []
    argv = ["python", "-c", _TREE, str(config.prompt.depth), str(_TREE_ROOM)]
    ran = await sandbox.run(argv, timeout_s=config.command_timeout_s)
    try:
        levels = json.loads(ran.output)
    except ValueError:
        return []
    return [level for level in levels if level]
