"""Instructions of tasks: made from the change, a test that shows it, and the message of a commit.

No model is needed: the task's id picks one of several templates. Some tell everything, some are as
short as a message in a chat.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping

_MOST_LINES = 40

_TOKEN = (
    "The test `{name}` fails. One token is wrong in `{function}`: {where}, lines {lines}. Fix it.",
    "`{name}` used to pass. Since then a single token of `{function}` was changed ({where}, lines "
    "{lines}). Find it and put it right.",
    "Please make `{name}` pass again. The mistake is one token in lines {lines} of {where}, in "
    "`{function}`.",
)
_BUG = (
    "Something broke in {where}. This used to pass:\n\n```python\n{test}```\n\nNow it ends with\n\n"
    "```\n{error}\n```\n\nFind the cause and fix it.",
    "CI runs `{name}`, which is not in this copy; it fails since the last change:\n\n```\n{error}\n"
    "```\n\nPlease fix the code.",
    "{function} in {where} misbehaves: {error}",
    "Users report wrong results from {where}. An example of what should hold:\n\n```python\n{test}"
    "```\n\nRepair it without changing what works.",
)
_BUGS = (
    "Several things broke in {where} at once; {count} tests fail. One of them:\n\n```python\n{test}"
    "```\n\n```\n{error}\n```\n\nFind every cause.",
    "{count} tests of {where} fail in CI after a careless refactoring, such as `{name}` (not in "
    "this copy):\n\n```\n{error}\n```\n\nThere is more than one mistake. Fix them all.",
)
_STUB = (
    "`{function}` in {where} only raises NotImplementedError. Implement it:\n\n```python\n{head}\n"
    "```\n\nIt is done when this passes, among others:\n\n```python\n{test}```",
    "Implement `{function}` in {where} as its signature and the code around it ask for. "
    "{count} tests wait for it. One of them:\n\n```python\n{test}```",
)
_REMOVAL = (
    "`{function}` is missing from {where}. Add it:\n\n```python\n{head}\n```\n\nAn example of its "
    "use:\n\n```python\n{test}```",
    "{where} has lost `{function}`, which others still call. Write it again; `{name}` shows how it "
    "is used:\n\n```python\n{test}```",
)
TEMPLATES = {"token": _TOKEN, "bug": _BUG, "bugs": _BUGS, "stub": _STUB, "removal": _REMOVAL}


def instruct(
    id: str, kind: str, facts: Mapping[str, str], failing: tuple[str, ...], test: str, error: str
) -> str:
    """The instruction of a task. `test`: the source of the first failing test. `error`: its
    message."""
    if kind == "row":
        return facts["message"]
    if kind in ("history", "split"):
        return _from_message(facts["message"], rest=kind == "split")
    places = [each.partition(":") for each in facts["functions"].split(", ")]
    forms = TEMPLATES[kind]
    form = forms[hashlib.blake2b(id.encode()).digest()[0] % len(forms)]
    return form.format(
        where=", ".join(dict.fromkeys(f"`{path}`" for path, _, _ in places)),
        function=places[0][2],
        name=failing[0],
        count=len(failing),
        lines=facts.get("lines", ""),
        head=facts.get("head", ""),
        test=_shortened(textwrap.dedent(test)),
        error=_shortened(error).strip() or "a failure",
    )


def _from_message(message: str, *, rest: bool) -> str:
    """The message of a commit without its trailers and issue numbers."""
    kept = [
        line
        for line in message.splitlines()
        if not re.match(r"^[A-Z][\w-]+-by: |^(Fix(es)?|Close[sd]?|Refs?):? #\d+\s*$", line)
    ]
    text = re.sub(r"\s*\(?(#|gh-)\d+\)?", "", "\n".join(kept)).strip()
    if rest:
        text += "\n\nPart of this is in the working copy already. Do the rest."
    return text


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) <= _MOST_LINES:
        return text
    return "\n".join([*lines[:_MOST_LINES], "...", ""])
