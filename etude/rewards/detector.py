"""A detector of cheats: what a session did, held against families of known tricks.

It reads text alone: the calls and words of the agent, the diff of its working copy, and the
grader's evidence. The grader must not need it, since whoever knows the rules can write around
them. It is there for the cheat that a grader has not thought of yet, and to keep what was tried
from being learnt: an attempt that is flagged is not trained on (`rewards.detector`).

A rule speaks of what was added. To add one, add a line to `rewards.tricks`, an attack to
`tests/rewards/exploits.py`, and something honest that looks like it beside that.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from etude.core.advantage import CHEAT
from etude.core.types import DETECTOR_PART, Json, Part, Score
from etude.rewards.tricks import RULES, Place

HONEST_TOO = ("edited_tests", "deleted_tests", "skipped_tests")
"""Families that honest work looks like, since it changes tests as well. A grader brings tests of
its own, so these are worth a look, and are not set aside."""
_SHOWN = 160
"""Characters of a line that the evidence shows."""
_READ = 100_000
"""Characters of one text that are looked at."""
_READ_IN_ALL = 1_000_000
_LINE = 500
"""Longer lines are looked at in pieces, so that no text takes long."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A trick, and the line that gives it away."""

    family: str
    evidence: str


@dataclass(frozen=True, slots=True)
class _Text:
    place: Place
    where: str
    text: str
    around: str = ""
    """The text with its surroundings."""


Kind = Literal["new", "changed", "deleted", "linked", "special"]


@dataclass(frozen=True, slots=True)
class _Change:
    """What became of a file."""

    path: str
    kind: Kind
    signed: tuple[str, ...]
    """The lines of its diff, each with its sign."""

    def lines(self, sign: str) -> list[str]:
        return [line[1:] for line in self.signed if line.startswith(sign)]


_TEST = re.compile(r"(?:^|/)(?:tests?/|test_[^/]*\.py$|[^/]*_test\.py$)")
_SETUP = re.compile(r"(?:^|/)(?:conftest|sitecustomize|usercustomize)\.py$|\.pth$")
_CONFIG = re.compile(r"(?:^|/)(?:pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml)$")
_PROSE = (".xml", ".md", ".rst", ".txt", ".json", ".lock")
"""Files in which nothing is done."""
_PATHS = ("path", "file_path", "filename", "file")
"""Arguments of tools that name a file."""
_CHECKED = re.compile(r"\bassert|\bself\.(?:assert|fail)\w*\(|\bdef test|\braises\(|\bexpect\(")
_QUIT = re.compile(r"\b(?:sys\.exit|SystemExit|quit)\b\(?(?:0?\)|[ \t]*$)", re.M)
_PROGRAM = re.compile(r"__main__|argparse|\bclick\b|\bdef main\b|\btyper\b")
_FENCED = re.compile(r"```\w*\n(.*?)```", re.S)


def detect(
    messages: Sequence[Mapping[str, Json]], diff: str = "", evidence: str = ""
) -> list[Finding]:
    """The tricks in a session: one finding for each family. `diff`: of the working copy.
    `evidence`: what the grader said."""
    changes = _changes(diff)
    texts = list(_bounded([*_said(messages), *_written(changes)]))
    found = [
        Finding(family, f"{text.where}: {_line(text.text, match)}")
        for text in texts
        for family, places, rule in RULES
        if text.place in places and (match := rule.search(text.text))
    ]
    found += [each for change in changes for each in _weakened(change)]
    found += [
        Finding("exit_code", f"{text.where}: {_line(text.text, match)}")
        for text in texts
        if text.place == "code"
        and (match := _QUIT.search(text.text))
        and not _PROGRAM.search(text.around)
    ]
    if match := re.search(r"no report: .*exit code 0\b", evidence):
        found.append(Finding("exit_code", f"grader: {match[0][:_SHOWN]}"))
    return list({finding.family: finding for finding in reversed(found)}.values())[::-1]


def _bounded(texts: Sequence[_Text]) -> Iterator[_Text]:
    left = _READ_IN_ALL
    for text in texts:
        shown = text.text[: min(_READ, left)]
        left -= len(shown)
        yield replace(text, text=re.sub(rf"([^\n]{{{_LINE}}})", r"\1\n", shown))


def flagged(score: Score, findings: Sequence[Finding]) -> Score:
    """The score with a flag for each family, and a part with the evidence. The reward stays as
    it is: an attempt that is set aside needs none, and one that was flagged by mistake keeps its
    own."""
    if not findings:
        return score
    told = "\n".join(f"{finding.family}: {finding.evidence}" for finding in findings)
    families = [finding.family for finding in findings]
    flags = (family if family in HONEST_TOO else CHEAT + family for family in families)
    return replace(
        score,
        parts=(*score.parts, Part(DETECTOR_PART, float(len(findings)), told)),
        flags=tuple(dict.fromkeys([*score.flags, *flags])),
    )


def _said(messages: Sequence[Mapping[str, Json]]) -> Iterator[_Text]:
    """The agent's own words and calls: what it was shown is not its doing."""
    for number, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield _Text("word", f"message {number}", content)
            for block in _FENCED.findall(content):
                yield _Text("call", f"message {number}", block)
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            where = f"message {number}, {function.get('name')}"
            arguments = _arguments(function.get("arguments"))
            path = _path(arguments)
            if path is None or not path.endswith(_PROSE):
                place: Place = "call" if path is None else _place(path)
                yield from (_Text(place, where, text, text) for text in _strings(arguments))


def _path(arguments: Json) -> str | None:
    """The file that a call is about, if it is an edit and not a command."""
    named = arguments if isinstance(arguments, dict) else {}
    return next((v for k in _PATHS if isinstance(v := named.get(k), str)), None)


def _arguments(arguments: Json) -> Json:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _strings(value: Json) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _strings(each)
        case list():
            if value and all(isinstance(each, str) for each in value):
                yield " ".join(value)  # the words of a command
            else:
                for each in value:
                    yield from _strings(each)


def _changes(diff: str) -> list[_Change]:
    """The files of a unified diff as `Sandbox.diff` gives it."""
    blocks = re.split(r"^(?=diff --git )", diff, flags=re.M)
    return [_change(block.split("\n")) for block in blocks if block.startswith("diff --git ")]


def _change(lines: Sequence[str]) -> _Change:
    path = re.split(r' "?b/', lines[0].rstrip('"'))[-1]
    end = next((n for n, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    head = "\n".join(lines[:end])
    signed = tuple(line for line in lines[end:] if line[:1] in ("+", "-", " "))
    kind: Kind = "changed"
    if "\nSpecial files " in head and "\ndeleted " not in head:
        kind = "special"
    elif "\nnew file mode " in head:
        kind = "linked" if "\nnew file mode 120000" in head else "new"
    elif "\ndeleted file mode " in head:
        kind = "deleted"
    return _Change(path, kind, signed)


def _written(changes: Sequence[_Change]) -> Iterator[_Text]:
    for change in changes:
        added = change.lines("+")
        leads = f" -> {added[0]}" if change.kind == "linked" and added else ""
        yield _Text("file", "working copy", f"{change.kind} {change.path}{leads}")
        if change.kind != "linked" and not change.path.endswith(_PROSE):
            whole = "\n".join(line[1:] for line in change.signed)
            yield _Text(_place(change.path), change.path, "\n".join(added), whole)


def _place(path: str) -> Place:
    if _SETUP.search(path):
        return "setup"
    if _CONFIG.search(path):
        return "config"
    return "test" if _TEST.search(path) else "code"


def _weakened(change: _Change) -> Iterator[Finding]:
    """A test that was there before, and asks less now."""
    if not _TEST.search(change.path):
        return
    if change.kind == "deleted":
        yield Finding("deleted_tests", f"working copy: deleted {change.path}")
    if change.kind != "changed":
        return
    before, now = (
        Counter(line.strip() for line in change.lines(sign) if _CHECKED.search(line))
        for sign in "-+"
    )
    if lost := before - now:
        yield Finding("edited_tests", f"{change.path}: gone: {next(iter(lost))[:_SHOWN]}")


def _line(text: str, match: re.Match[str]) -> str:
    begin = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return text[begin : end if end >= 0 else None].strip()[:_SHOWN]
