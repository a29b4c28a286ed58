"""The layer that makes a sandbox look like somebody's machine: a user with a home and a history, a
hostname, a machine id. `sandbox.tells` looks for the signs that it hides."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from etude.factory.image_spec import Realism
from etude.sandbox.image import walk

_YEAR_S = 365 * 24 * 3600
_PROFILE = """\
# ~/.bashrc
case $- in
    *i*) ;;
      *) return;;
esac
HISTCONTROL=ignoreboth
HISTSIZE=1000
shopt -s histappend
alias ll='ls -alF'
alias gs='git status'
export EDITOR=vim
"""
_HISTORY = """\
git pull
ls
vim README.md
git status
git log --oneline | head
grep -rn TODO . | head
python -m pytest -x -q
git diff
git add -p
git commit
cd ..
df -h
tmux attach
cd -
git checkout -b wip
python -m pytest -q
git stash
git pull --rebase
git stash pop
ll
"""


def live_in(wanted: Realism, below: Sequence[Path], made: Path) -> None:
    """Write the layer over those below it."""
    etc, skel = made / "etc", made / "etc" / "skel"
    skel.mkdir(parents=True)
    (etc / "hostname").write_text(f"{wanted.hostname}\n")
    (etc / "machine-id").write_text(f"{_digest(wanted.hostname, wanted.user)[:32]}\n")
    (skel / ".bashrc").write_text(_PROFILE)
    (skel / ".profile").write_text('[ -n "$BASH_VERSION" ] && . "$HOME/.bashrc"\n')
    (skel / ".bash_history").write_text(_HISTORY)
    address = f"{wanted.user}@{wanted.hostname}"
    name = wanted.user.capitalize()
    (skel / ".gitconfig").write_text(f"[user]\n\tname = {name}\n\temail = {address}\n")
    (skel / ".cache").mkdir()
    spread_times(made, until_s=_newest(below) or _newest([made]))


def spread_times(directory: Path, until_s: float) -> None:
    """Spread modification times over a year; the same path always has the same age."""
    for path, _ in walk(directory):
        name = os.path.relpath(path, directory)
        ago = int(_digest(name)[:8], 16) % _YEAR_S
        os.utime(path, (until_s - ago, until_s - ago), follow_symlinks=False)


def _newest(layers: Sequence[Path]) -> float:
    return max((status.st_mtime for each in layers for _, status in walk(each)), default=0.0)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()
