"""`etude init [DIR]`: write a small runnable project to start from: an environment over a git
repository with pytest as the judge, a program as the agent, a run file, and a test."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import unicodedata
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from etude.commands.terminal import say
from etude.core.errors import EtudeError

TEMPLATE = ".template"
POCKET = "pocket"
"""Folder of the example repository, which is created if there is no other repository."""
DEMONSTRATIONS = "demonstrations.jsonl"
RL_STAGE = """\
[[stage]]
kind = "rl"
steps = 6
groups_per_step = 4              # tasks of one step
group_size = 8                   # attempts at each, compared with each other
max_lag = 1                      # 0 waits for every session before the next step
temperature = 0.8
lr = 1e-5
warmup_steps = 2                 # with fewer steps than this, lr is never reached
threads = @THREADS@                      # of the trainer"""
SFT_STAGE = f"""\
# Untrained weights solve nothing, and rl needs some attempts that succeed. So this stage lets them
# imitate a few sessions, to show a run. With a model in `path` above, use kind = "rl" instead
# (docs/stages.md).
[[stage]]
kind = "sft"
path = "{DEMONSTRATIONS}"
max_epochs = 2
threads = @THREADS@                      # of the trainer"""


def init(directory: Path, model: Path | None, repo: Path | None, console: Console) -> None:
    """Write the project. Existing files are left alone."""
    if model is not None and not (model / "config.json").is_file():
        raise EtudeError(f"--model {model}: no such model directory; `make model` downloads one")
    if repo is not None and not repo.exists():
        raise EtudeError(f"--repo {repo}: {repo.absolute()} does not exist")
    if repo is not None and not (repo.is_dir() and _in_repository(repo)):
        below = sorted(str(path.parent) for path in repo.glob("*/.git"))[:3]
        advice = f"{' and '.join(below)} contains one" if below else "`git init` creates one"
        raise EtudeError(f"--repo {repo}: not a git repository; {advice}")
    is_made = repo is None and not _in_repository(directory)
    place = _nearest(repo or directory)
    if not is_made and _git(place, "rev-parse", "-q", "--verify", "HEAD").returncode:
        raise EtudeError(
            f"the git repository at {place} has no commits, and tasks are made from committed "
            "files: commit something first; nothing was written"
        )
    files = {
        path: text
        for path, text in _templates(resources.files("etude.commands").joinpath("project")).items()
        if (is_made or not path.startswith(f"{POCKET}/"))
        and (model is None or path != DEMONSTRATIONS)
    }
    if directory.exists() and not directory.is_dir():
        raise EtudeError(f"{directory} is a file: choose a directory to write to")
    if taken := sorted(path for path in files if (directory / path).exists()):
        raise EtudeError(
            f"{directory} already contains {', '.join(taken)}: nothing was written; choose "
            "another directory"
        )
    values = {
        "REPOSITORY": _repository(repo, is_made),
        "NAME": _name(directory),
        "MODEL": _model_lines(model),
        "MOUNTS": ", ".join(map(_quoted, _mounts())),
        "STAGE": SFT_STAGE if model is None else RL_STAGE,
        "THREADS": str(len(os.sched_getaffinity(0))),
    }
    for path, text in files.items():
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    if is_made:
        _commit(directory / POCKET)
    source = repo or (directory / POCKET if is_made else "the git repository around it")
    _tell(directory, sorted(files), f"{source}{', made for you' if is_made else ''}", console)


def _name(directory: Path) -> str:
    """The run's name: that of its folder, in the characters that the name of a run may have."""
    plain = unicodedata.normalize("NFKD", directory.resolve().name).encode("ascii", "ignore")
    return re.sub("[^A-Za-z0-9]+", "-", plain.decode()).strip("-") or "mine"


def _repository(repo: Path | None, is_made: bool) -> str:
    """The repository's path as a Python expression."""
    if repo is not None:
        return f"Path({_quoted(str(repo.resolve()))})"
    return f'Path(__file__).parent / "{POCKET}"' if is_made else "Path(__file__).parent"


def _quoted(text: str) -> str:
    """A string literal that is valid in both Python and TOML."""
    return json.dumps(text, ensure_ascii=False)


def _templates(folder: Traversable, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for each in folder.iterdir():
        if each.is_dir():
            found |= _templates(each, f"{prefix}{each.name}/")
        elif each.name.endswith(TEMPLATE):
            found[prefix + each.name.removesuffix(TEMPLATE)] = each.read_text()
    return found


def _in_repository(directory: Path) -> bool:
    """True if the directory, or its nearest existing parent, is in a git repository."""
    return _git(_nearest(directory), "rev-parse", "--is-inside-work-tree").returncode == 0


def _nearest(directory: Path) -> Path:
    place = directory.absolute()
    return next(each for each in (place, *place.parents) if each.is_dir())


def _commit(place: Path) -> None:
    for argv in (("init", "-q"), ("add", "."), ("commit", "-qm", "small sums and words")):
        done = _git(place, *argv)
        if done.returncode:
            raise EtudeError(f"git {argv[0]} in {place}: {done.stderr.strip()}")


def _git(place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    somebody = {"NAME": "etude init", "EMAIL": "etude@localhost"}
    env = {f"GIT_{who}_{n}": v for who in ("AUTHOR", "COMMITTER") for n, v in somebody.items()}
    try:
        return subprocess.run(
            ["git", *argv],
            cwd=place,
            env=os.environ | env,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as e:
        raise EtudeError("tasks come from a git repository, but git is not installed") from e


def _model_lines(model: Path | None) -> str:
    if model is None:
        return (
            "# Untrained weights, which solve no task. For a model that can code:\n"
            '# path = "DIR"                 # a Hugging Face directory; `make model` fetches one'
        )
    return f"path = {_quoted(str(model.resolve()))}"


def _mounts() -> list[str]:
    """The current Python environment if it has pytest; otherwise one that the user has to
    create."""
    found = importlib.util.find_spec("pytest")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(sys.prefix):
        return [".venv"]
    taken = Path(sys.prefix).is_relative_to("/work")
    return [f"{sys.prefix}:/opt/venv" if taken else sys.prefix]


def _described_tasks(directory: Path, source: str) -> str:
    """A summary of the tasks that the written environment finds. Errors of the environment are only
    reported, since the user can change its code."""
    make = runpy.run_path(str(directory / "environment.py"))["Functions"]
    splits = ("train", "heldout")
    try:
        environment = make(None, counts=dict.fromkeys(splits, sys.maxsize), seed=0)
        train, heldout = (len(environment.tasks(split)) for split in splits)
    except (ValueError, SyntaxError, EtudeError) as e:
        return f"[yellow]warning:[/] there are no tasks yet: {escape(str(e))}"
    left_out = "".join(
        f"\n[yellow]warning:[/] {escape(path)} is left out: {escape(why)}"
        for path, why in environment.left_out.items()
    )
    return (
        f"its tasks are {train + heldout} functions of {escape(source)}: {train} for training, "
        f"{heldout} held out{left_out}"
    )


def _tell(directory: Path, files: list[str], source: str, console: Console) -> None:
    say(console, f"wrote {', '.join(files)} to {directory}")
    say(console, Text.from_markup(_described_tasks(directory, source)))
    if _mounts() == [".venv"]:
        say(
            console,
            f"Etude's environment, {sys.prefix}, has no pytest: create an environment with "
            "pytest and what your code needs, or change `mounts` in run.toml",
        )
    if directory.resolve() != Path.cwd():
        say(console, f"  cd {shlex.quote(str(directory))}")
    if _mounts() == [".venv"]:
        console.print("  python -m venv .venv && .venv/bin/pip install pytest", highlight=False)
    for line in ("etude try run.toml", f"{_pytest()} test_environment.py", "etude run run.toml"):
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def _pytest() -> str:
    """The command that runs pytest. A test of the project imports etude, so it must run where etude
    is installed."""
    if _mounts() != [".venv"]:
        return "pytest"
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install pytest && {python} -m pytest"
