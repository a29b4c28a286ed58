"""Tells: signs that a machine is a sandbox, and that nobody lives there.

A command in the sandbox reports what can be seen there; this module decides which of it is a tell.
The score is the share of tells that were not found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from etude.core.sandbox import Sandbox

_LOOK = r"""
say() { printf '%s\t%s\n' "$1" "$2"; }
say hostname "$(cat /proc/sys/kernel/hostname)"
say uptime "$(cut -d. -f1 /proc/uptime)"
say user "$(id -un 2>/dev/null)"
say uid "$(id -u 2>/dev/null)"
say home "$HOME"
say history "$(cat ~/.bash_history ~/.zsh_history 2>/dev/null | wc -l)"
say dotfiles "$(ls -A ~ 2>/dev/null | grep -c '^\.')"
say machine_id "$(cat /etc/machine-id 2>/dev/null)"
say months "$(find . -path ./.git -prune -o -type f -print0 2>/dev/null | head -z -n 400 \
    | xargs -0 -r stat -c %y 2>/dev/null | cut -c1-7 | sort -u | wc -l)"
say files "$(find . -path ./.git -prune -o -type f -print 2>/dev/null | head -n 400 | wc -l)"
say mounts "$(cut -d' ' -f2,3 /proc/self/mounts | tr '\n' ',')"
say options "$(grep -c 'lowerdir=/[^p]' /proc/self/mounts)"
say environment "$(env | cut -d= -f1 | tr '\n' ',')"
say markers "$(ls -d /.dockerenv /run/.containerenv 2>/dev/null | tr '\n' ',')"
say paths "$(ls -d /tests /logs /testbed /workspace /solution /oracle 2>/dev/null | tr '\n' ',')"
say commits "$(git -c safe.directory='*' rev-list --count HEAD 2>/dev/null)"
"""
_TIMEOUT_S = 60.0
_HARNESS = re.compile(r"ETUDE|SANDBOX|CONTAINER|MODAL|E2B|DAYTONA|HARBOR|SWE_?BENCH|KUBERNETES")
_DAY_S = 24 * 3600

Seen = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Tell:
    """One sign that gives a machine away."""

    name: str
    seen: str
    fix: str


@dataclass(frozen=True, slots=True)
class Report:
    """Number of tells that were looked for, and those that were found."""

    looked: int
    tells: Sequence[Tell]

    @property
    def score(self) -> float:
        return 1.0 - len(self.tells) / self.looked


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


_TELLS: dict[str, tuple[Callable[[Seen], bool], str]] = {
    "hostname": (
        lambda s: bool(re.fullmatch(r"localhost|sandbox.*|[0-9a-f]{12}|", s["hostname"])),
        "[realism] hostname",
    ),
    "uptime": (lambda s: _number(s["uptime"]) < _DAY_S, "[realism]: a clock of its own"),
    "user": (
        lambda s: s["user"] in ("", "root", "user", "nobody", "sandbox") or s["uid"] == "0",
        "[realism] user",
    ),
    "home": (
        lambda s: not s["home"].startswith("/home/") or _number(s["dotfiles"]) < 3,
        "[realism]: a home made of /etc/skel",
    ),
    "history": (lambda s: _number(s["history"]) < 10, "[realism]: a shell history"),
    "machine-id": (
        lambda s: not re.fullmatch("[0-9a-f]{32}", s["machine_id"]),
        "[realism]: /etc/machine-id",
    ),
    "mtimes": (
        lambda s: _number(s["files"]) >= 10 and _number(s["months"]) < 3,
        "[realism]: times of the working copy, spread",
    ),
    "mounts": (
        lambda s: bool(re.search(r" (9p|virtiofs|fuse)", s["mounts"])) or s["options"] != "0",
        "no paths of the host in /proc/mounts",
    ),
    "environment": (
        lambda s: bool(_HARNESS.search(s["environment"].upper())),
        "take the variables out of the spec",
    ),
    "container files": (lambda s: bool(s["markers"]), "remove them from the image"),
    "harness paths": (lambda s: bool(s["paths"]), "another workdir, none of these directories"),
    "squashed git": (
        lambda s: _number(s["commits"]) < 2,
        "[repository] of a git source, with [realism]: its history up to the commit",
    ),
}


async def look(sandbox: Sandbox) -> Report:
    """Look for tells in a sandbox as an agent would find it."""
    ran = await sandbox.run(["sh", "-c", _LOOK], timeout_s=_TIMEOUT_S)
    return judge(parse(ran.output))


def parse(output: str) -> dict[str, str]:
    pairs = (line.partition("\t") for line in output.splitlines() if "\t" in line)
    return {name: value.strip().rstrip(",") for name, _, value in pairs}


def judge(seen: Seen) -> Report:
    """Find the tells in a report. Pure."""
    names = re.findall(r"^say (\w+)", _LOOK, re.MULTILINE)
    whole = {name: seen.get(name, "") for name in names}
    found = [
        Tell(name, _shown(name, whole), fix)
        for name, (is_one, fix) in _TELLS.items()
        if is_one(whole)
    ]
    return Report(len(_TELLS), found)


def _shown(name: str, seen: Seen) -> str:
    keys = {"machine-id": "machine_id", "container files": "markers", "harness paths": "paths"}
    keys |= {"mtimes": "months"}
    if name == "squashed git":
        return "one commit" if _number(seen["commits"]) else "no commits"
    return seen[keys.get(name, name)]
