"""The arguments of the command line. It imports no command, so that `etude --help` is fast."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from etude import __version__
from etude.bench_arguments import add_bench
from etude.core.placement import GPUS
from etude.core.types import EVAL_SPLITS
from etude.serving_arguments import (
    add_chat,
    add_gateway,
    add_production,
    add_realtime,
    add_sandboxes,
    add_serve,
    add_token,
    at_least_one,
)
from etude.task_arguments import add_images, add_tasks

RUN = "a run's directory, or the URL of its store (s3://, gs://, az://)"
AddCommand = Callable[..., argparse.ArgumentParser]
"""(name, help, json_text=..) -> the parser of a new command"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. `command` in the result is the name of the command. An unknown
    argument is an error of that command, which prints the command's own usage."""
    parser, commands = _build_parser()
    first = next(iter(sys.argv[1:] if argv is None else argv), "-")
    if not first.startswith("-") and first not in commands:
        near = get_close_matches(first, commands, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        parser.error(f"there is no command {first}: {meant}`etude --help` lists them")
    args, unknown = parser.parse_known_args(argv)
    refuse = vars(args).pop("refuse", parser.error)
    if unknown:
        refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return args


class _Parser(argparse.ArgumentParser):
    """A parser that wraps its errors at the width of the terminal. Without a command it prints its
    help, which lists the commands."""

    def error(self, message: str) -> NoReturn:
        if message.endswith((": COMMAND", ": ACTION")):
            self.print_help(sys.stderr)
            self.exit(2)
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            message = textwrap.fill(f"{self.prog}: error: {message}", width, break_long_words=False)
            message = message.removeprefix(f"{self.prog}: error: ")
        super().error(message)


def _build_parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Build the parser. Return it with the names of the commands."""
    parser = _Parser(prog="etude", description="Train a coding model on your own product.")
    parser.add_argument("--version", action="version", version=f"etude {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, *, json_text: str | None = None) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=name, refuse=made.error)
        if json_text:
            made.add_argument("--json", action="store_true", help=json_text)
        return made

    _add_runs(add)
    add_serve(add("serve", "serve a model, or what a run trained, by an OpenAI-compatible API"))
    add_chat(add("chat", "talk to a model in the terminal"))
    add_token(add("token", "make a token for a gateway, with its secret (ETUDE_SECRET)"))
    add_gateway(add("gateway", "one URL before the workers of a run, for a product's users"))
    text = "sandboxes for other machines"
    add_sandboxes(commands.add_parser("sandboxes", help=text, description=text))
    text = "what was recorded of users"
    add_production(commands.add_parser("production", help=text, description=text))
    add_realtime(add("realtime", "users teach the model: train, try and deploy what they say"))

    _add_mismatch(add)
    text = "the weights of runs and models"
    _add_weights(commands.add_parser("weights", help=text, description=text))

    text = "tasks from repositories: build, check, look at"
    add_tasks(commands.add_parser("tasks", help=text, description=text))
    text = "images for sandboxes: systems, packages and repositories, built once"
    add_images(commands.add_parser("images", help=text, description=text))
    _add_inspection(add)
    return parser, commands.choices


def _add_runs(add: AddCommand) -> None:
    demo_parser = add(
        "demo",
        "train a tiny model on this machine, in minutes",
        json_text="end with one line of JSON",
    )
    demo_parser.add_argument("--seed", type=int, default=0)
    demo_parser.add_argument(
        "--dir", metavar="DIR|URL", help="where the run lies (default: runs/demo-SEED)"
    )
    demo_parser.add_argument(
        "--fresh", action="store_true", help="remove an earlier demo there first"
    )
    _add_no_dash(demo_parser)
    _add_set(demo_parser)

    run_parser = add(
        "run",
        "start a run, or resume an interrupted one",
        json_text="end with one line of JSON",
    )
    run_parser.add_argument("config", type=Path, metavar="RUN.toml")
    run_parser.add_argument(
        "--dir",
        metavar="DIR|URL",
        help="where the run lies (default: `store` of the file, or runs/NAME of this folder)",
    )
    run_parser.add_argument(
        "--fresh", action="store_true", help="remove an earlier run there first"
    )
    run_parser.add_argument(
        "--dry-run", action="store_true", help="check all that a start checks, print the plan, end"
    )
    run_parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="on a Ray cluster: auto, HOST:PORT, or local to make one here (default: no cluster)",
    )
    run_parser.add_argument(
        "--workers", type=at_least_one, default=1, metavar="N",
        help="in each region, with --ray (default: %(default)s)",
    )  # fmt: skip
    _add_no_dash(run_parser)
    _add_set(run_parser)

    _add_cluster(add)
    _add_export(add)
    _add_init(add)
    _add_try(add)

    _add_eval(add)
    _add_compare(add)


def _add_eval(add: AddCommand) -> None:
    eval_parser = add(
        "eval",
        "measure how much a version of a run solves",
        json_text="end with one line of JSON",
    )
    eval_parser.add_argument("run", metavar="RUN", help=RUN)
    eval_parser.add_argument("--version", type=int, help="weight version (default: the newest)")
    eval_parser.add_argument("--split", choices=EVAL_SPLITS, default="heldout")
    eval_parser.add_argument(
        "--samples",
        type=at_least_one,
        default=1,
        metavar="N",
        help="attempts at each task, for pass@k (default: 1)",
    )
    eval_parser.add_argument(
        "--contamination",
        action="store_true",
        help="instead: does it finish names and files of tasks that it should not know?",
    )


def _add_cluster(add: AddCommand) -> None:
    last = "end with one line of JSON"
    text = "how GPUs are best split between trainer and engines, and how long a step takes"
    planning = add("plan", text, json_text=last)
    text = "play a run under virtual time: its speed on so many GPUs, and schedules of faults"
    simulating = add("simulate", text, json_text=last)
    for parser in (planning, simulating):
        parser.add_argument("config", type=Path, metavar="RUN.toml")
        parser.add_argument("--gpus", type=at_least_one, required=True, metavar="N")
        parser.add_argument("--gpu", choices=GPUS, default="h200", help="(default: %(default)s)")
        parser.add_argument(
            "--parameters", type=float, metavar="N", help="of another model than the file's"
        )
        parser.add_argument(
            "--active", type=float, metavar="N", help="of those, how many a token meets"
        )
        parser.add_argument(
            "--kv-bytes", type=float, metavar="N", help="of its keys and values, for each token"
        )
        parser.add_argument(
            "--weight-bytes", type=float, default=2.0, help="of engines; 1: fp8 (default: 2)"
        )
        parser.add_argument(
            "--tool-s", type=float, default=0.0, help="of a session, in tools (default: 0)"
        )
        _add_set(parser)
    simulating.add_argument(
        "--regions", type=at_least_one, default=1, metavar="R", help="(default: 1)"
    )
    simulating.add_argument(
        "--steps", type=at_least_one, default=12, help="of the run itself (default: %(default)s)"
    )
    simulating.add_argument(
        "--seeds", type=int, default=0, metavar="N", help="schedules of faults (default: none)"
    )
    simulating.add_argument("--first-seed", type=int, default=0, metavar="N", help="(default: 0)")


def _add_export(add: AddCommand) -> None:
    parser = add("export", "write a run down for a cluster's own scheduler")
    parser.add_argument(
        "kind", type=_scheduler, metavar="{k8s,slurm}", help="manifests, or batch files"
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml")
    parser.add_argument("target", type=Path, metavar="DIR", help="must not be there yet")
    for name, default, text in (
        ("--workers", 1, "in each region"),
        ("--worker-gpus", 1, "of each worker"),
        ("--trainer-nodes", 1, "machines that train"),
        ("--trainer-gpus", 1, "of each of them; 0: on the CPU"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--trainer-min-nodes",
        type=at_least_one,
        metavar="N",
        help="go on with so few when others are lost, and with all when they return (default: all)",
    )
    parser.add_argument("--image", default="etude:latest", help="k8s (default: %(default)s)")
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="the folder of RUN.toml as the cluster's machines see it, where its relative paths "
        "start (default for slurm: where it is; k8s: none)",
    )


def _scheduler(name: str) -> str:
    if name not in ("k8s", "slurm"):
        raise argparse.ArgumentTypeError(
            f"{name!r} is neither k8s nor slurm; the weights of a run are exported by "
            f"`etude weights export RUN DIR`"
        )
    return name


def _add_compare(add: AddCommand) -> None:
    parser = add(
        "compare",
        "compare two versions on the same tasks: paired, with interval and p-value",
        json_text="end with one line of JSON",
    )
    newest = "(default: the newest that was evaluated)"
    parser.add_argument("before", metavar="RUN[@VERSION]", help=f"the version to beat {newest}")
    parser.add_argument(
        "after",
        metavar="RUN[@VERSION]",
        nargs="+",
        help=f"the other version {newest}; several, such as seeds: their mean at each task",
    )
    parser.add_argument("--split", choices=EVAL_SPLITS, default="heldout")
    parser.add_argument(
        "--turns",
        type=at_least_one,
        metavar="N",
        help="count an attempt as solved only if it ended within N answers of the model",
    )


def _add_init(add: AddCommand) -> None:
    parser = add("init", "write a small project that runs: environment, agent, run file, test")
    parser.add_argument(
        "dir", type=Path, nargs="?", default=Path(), metavar="DIR", help="(default: here)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face directory (default: fresh weights)",
    )
    parser.add_argument(
        "--repo",
        type=Path,
        metavar="PATH",
        help="a git repository, or a folder in one, to take tasks from (default: the one around "
        "DIR, else a small one that is made)",
    )


def _add_try(add: AddCommand) -> None:
    text = "try a task of a run: score nothing, a solution, and one session; writes no run"
    parser = add("try", text, json_text="end with one line of JSON")
    parser.add_argument("config", type=Path, metavar="RUN.toml")
    parser.add_argument("--task", metavar="ID", help="(default: the first one)")
    parser.add_argument(
        "--solution",
        type=Path,
        metavar="PATH",
        help="score this too: a directory of files, a .patch, or FILE:PLACE in the working copy",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="answers for the session in place of a model's: text with lines of --- between, or a "
        ".jsonl of texts or messages",
    )
    parser.add_argument("--no-model", action="store_true", help="no session with the model")
    _add_set(parser)


def _add_mismatch(add: AddCommand) -> None:
    mismatch_parser = add(
        "mismatch",
        "how far engine and trainer are apart, and why",
        json_text="end with one line of JSON",
    )
    mismatch_parser.add_argument("target", metavar="MODEL|RUN", help="a model directory, or a run")
    mismatch_parser.add_argument(
        "--tokens", type=at_least_one, default=32, help="of each answer (default: %(default)s)"
    )
    mismatch_parser.add_argument(
        "--temperature", type=float, help="(default: that of the run's stage, or 1)"
    )
    mismatch_parser.add_argument(
        "--invariant", action="store_true", help="with invariant arithmetic on both sides"
    )


def _add_dash(add: AddCommand) -> None:
    parser = add("dash", "look at runs in a browser, in whatever state they are")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    parser.add_argument(
        "--host", default="127.0.0.1", help="another address needs a token (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8765, help="0: a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token (default: ETUDE_TOKEN)"
    )


def _add_inspection(add: AddCommand) -> None:
    text = "recompute the ledger of a run from its store"
    add("audit", text).add_argument("run", metavar="RUN", help=RUN)
    _add_sessions(add)
    _add_dash(add)
    show_parser = add("show", "what became of a run, or a checkpoint and its lineage")
    show_parser.add_argument(
        "--all", action="store_true", help="with the plan, a session and the lineage"
    )
    show_parser.add_argument(
        "path", metavar="RUN|CHECKPOINT", help="a checkpoint is RUN/checkpoints/NAME"
    )

    keys_parser = add("keys", "the keys of a run's config: type, default and meaning")
    keys_parser.add_argument(
        "path", nargs="?", metavar="PATH", help="a table or a key, such as stage.rl or stage.rl.lr"
    )
    keys_parser.add_argument("--markdown", action="store_true", help="all of them, as a page")

    doctor_parser = add(
        "doctor",
        "what this machine has for sandboxes; or what each unfinished rollout of a run waits for",
        json_text="print one line of JSON instead",
    )
    doctor_parser.add_argument("run", nargs="?", metavar="RUN", help="(default: this machine)")

    add_bench(add("bench", "run a benchmark", json_text="end with one line of JSON"))


def _add_sessions(add: AddCommand) -> None:
    parser = add(
        "sessions",
        "read what agent and model said",
        json_text="a line of JSON for each session, instead of text",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--failed", action="store_true", help="those that failed")
    which.add_argument("--best", action="store_true", help="those with the highest reward first")
    which.add_argument("--task", metavar="ID", help="those at one task")
    which.add_argument("--id", metavar="SESSION", help="one of them")
    parser.add_argument(
        "-n",
        type=at_least_one,
        default=1,
        dest="count",
        metavar="N",
        help="sessions to show whole (default: %(default)s)",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "make a Hugging Face directory of a GGUF file"
    importing = actions.add_parser("import", help=text, description=text)
    importing.add_argument("file", type=Path, metavar="FILE.gguf")
    importing.add_argument("dir", type=Path, metavar="DIR", help="must not be there yet")
    importing.set_defaults(command="weights import", refuse=importing.error)
    for name, text in (
        ("log", "the chain of versions, with sizes, and who reads which"),
        ("show", "one version: its routes, and what changed in it"),
        ("verify", "build every version by every route and check every tensor"),
        ("fetch", "download and check a version"),
        ("compact", "add routes over several versions, for readers that fell behind"),
        ("gc", "delete what nobody needs any more"),
        ("export", "make a Hugging Face directory of a version"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("url", metavar="RUN|URL", help="a run's directory, or its store's URL")
        action.set_defaults(command="weights", action=name, refuse=action.error)
        if name in ("show", "fetch", "export"):
            action.add_argument("--version", type=int, help="(default: the newest)")
        if name == "fetch":
            action.add_argument(
                "--cache", type=Path, metavar="DIR", help="leave it there for this host's workers"
            )
        if name == "compact":
            action.add_argument(
                "--skip",
                type=at_least_one,
                default=8,
                help="versions in one route (default: %(default)s)",
            )
            action.add_argument(
                "--every", type=_seconds, metavar="S", help="go on, and look again after S seconds"
            )
        if name == "gc":
            action.add_argument(
                "--keep",
                type=at_least_one,
                default=16,
                help="newest versions (default: %(default)s)",
            )
            action.add_argument(
                "--grace", type=_seconds, default=3600.0, metavar="S", help="(default: %(default)s)"
            )
        if name == "export":
            action.add_argument("target", type=Path, metavar="DIR", help="must not be there yet")
            action.add_argument(
                "--dtype", choices=("bf16", "fp8"), default="bf16", help="(default: %(default)s)"
            )
            action.add_argument(
                "--adapter", action="store_true", help="the LoRA adapter alone, as PEFT reads it"
            )


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("seconds, 0 or more")
    return value


def _add_no_dash(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-dash", action="store_true", help="no link to a dashboard on the terminal"
    )


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="change a key of the config"
    )
