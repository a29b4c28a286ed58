"""Search tools: grep and glob. A small program in the sandbox does both, so that a pattern means
the same wherever a session runs, and directories that nobody reads (caches, `.git`) are skipped."""

from __future__ import annotations

import json

from etude.core.types import Json
from etude.harness.code.tool import Tool, ToolError, boolean, integer, string

_PROGRAM = r"""
import json, os, re, sys
asked = json.load(sys.stdin)
SKIPPED = set(".git .hg .svn __pycache__ node_modules .venv venv .tox .mypy_cache .pytest_cache "
              ".ruff_cache .hypothesis".split())

def translate(pattern):
    out, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:[^/]+/)*", i + 3
        elif pattern.startswith("**", i):
            out, i = out + ".*", i + 2
        elif pattern[i] == "*":
            out, i = out + "[^/]*", i + 1
        elif pattern[i] == "?":
            out, i = out + "[^/]", i + 1
        elif pattern[i] == "{" and "}" in pattern[i:]:
            end = pattern.index("}", i)
            parts = pattern[i + 1:end].split(",")
            out, i = out + "(?:" + "|".join(translate(part) for part in parts) + ")", end + 1
        else:
            out, i = out + re.escape(pattern[i]), i + 1
    return out

def matcher(pattern):
    if "/" not in pattern:
        pattern = "**/" + pattern
    return re.compile(translate(pattern.lstrip("/")) + r"\Z")

def files(top):
    if os.path.isfile(top):
        yield top
        return
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name))

def show(found):
    lines, room, more = [], asked["room"], 0
    for line in found:
        room -= len(json.dumps(line)) + 2
        if room < 0:
            more += 1
        else:
            lines.append(line)
    return json.dumps({"lines": lines, "more": more})

top = asked["path"]
if not os.path.exists(top):
    sys.exit("no such place: " + top)
fits = matcher(asked["files"]).match if asked["files"] else (lambda path: True)
found = (path for path in files(top) if fits(path) or fits(os.path.relpath(path, top)))
if asked["pattern"] is None:
    print(show(sorted(found)))
    sys.exit()
try:
    wanted = re.compile(asked["pattern"], re.IGNORECASE if asked["ignore_case"] else 0)
except re.error as e:
    sys.exit("the pattern is no regular expression (%s): escape ( [ { . * + ? with a backslash" % e)
lines, context = [], asked["context"]
for path in found:
    if not os.path.isfile(path):  # a pipe would be waited for
        continue
    try:
        with open(path, "rb") as file:
            data = file.read(2 << 20)
    except OSError:
        continue
    if b"\0" in data[:8192]:
        continue
    text = re.split(r"\r\n?|\n", data.decode(errors="replace"))
    hits = dict.fromkeys(n for n, line in enumerate(text) if wanted.search(line))
    shown = -1
    for hit in hits:
        for n in range(max(hit - context, shown + 1, 0), min(hit + context + 1, len(text))):
            mark = ":" if n in hits else "-"
            lines.append("%s%s%d%s%s" % (path, mark, n + 1, mark, text[n][:300]))
            shown = n
print(show(lines))
"""
_ROOM = 12_000
"""Byte limit of the results: a sandbox keeps the last 16 KiB of an output."""


async def _search(tool: Tool, what: str, **asked: Json) -> str:
    path = await tool.workspace.inside(asked.pop("path"))
    told = json.dumps({"path": path, "room": _ROOM, "context": 0, "ignore_case": False, **asked})
    ran = await tool.workspace.sandbox.run(
        ["python", "-c", _PROGRAM], timeout_s=tool.config.command_timeout_s, stdin=told
    )
    if ran.exit_code != 0:
        raise ToolError(ran.output.strip() if ran.exit_code else "it took too long: say where")
    found = json.loads(ran.output)
    more = [f"({found['more']} more {what}: narrow it down)"] if found["more"] else []
    return "\n".join([*found["lines"], *more]) or "nothing was found"


class Grep(Tool):
    description = "Find lines by a regular expression (Python's), with path and line number."
    parameters = {
        "pattern": string("The regular expression."),
        "path": string("A folder or a file to look in; without it, everywhere."),
        "glob": string("Look in files of this pattern only, such as *.py or src/**/*.py."),
        "ignore_case": boolean("Take upper and lower case for the same."),
        "context": integer("Lines to show before and after each.", 0),
    }
    required = ("pattern",)

    async def call(
        self,
        pattern: str,
        path: str = ".",
        glob: str = "",
        ignore_case: bool = False,
        context: int = 0,
    ) -> str:
        asked = {"pattern": pattern, "files": glob, "ignore_case": ignore_case, "context": context}
        return await _search(self, "lines", path=path, **asked)


class Glob(Tool):
    description = "Find files by a pattern, such as *.py, src/**/*.py or **/test_*.{py,pyi}."
    parameters = {
        "pattern": string("The pattern; one without / fits names in every folder."),
        "path": string("A folder to look in; without it, everywhere."),
    }
    required = ("pattern",)

    async def call(self, pattern: str, path: str = ".") -> str:
        return await _search(self, "files", pattern=None, files=pattern, path=path)
