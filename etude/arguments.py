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
from etude.weights_arguments import add_weights

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
        parser.error(f"unknown command {first}: {meant}`etude --help` lists all commands")
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
    add_serve(add("serve", "serve a model, or the weights of a run, over an OpenAI-compatible API"))
    add_chat(add("chat", "chat with a model in the terminal"))
    add_token(add("token", "make a token for a gateway, signed with its secret (ETUDE_SECRET)"))
    add_gateway(add("gateway", "serve a run's workers to a product's users under one URL"))
    text = "run sandboxes for other machines"
    add_sandboxes(commands.add_parser("sandboxes", help=text, description=text))
    text = "manage what was recorded of users"
    add_production(commands.add_parser("production", help=text, description=text))
    add_realtime(
        add("realtime", "learn from users: train on their feedback, test the updates, deploy them")
    )

    _add_mismatch(add)
    text = "inspect and export the weights of runs and models"
    add_weights(commands.add_parser("weights", help=text, description=text))

    text = "make tasks from repositories: build, check and view them"
    add_tasks(commands.add_parser("tasks", help=text, description=text))
    text = "build images for sandboxes: systems, packages and repositories"
    add_images(commands.add_parser("images", help=text, description=text))
    _add_inspection(add)
    return parser, commands.choices


def _add_runs(add: AddCommand) -> None:
    demo_parser = add(
        "demo",
        "train a tiny model on this machine in a few minutes",
        json_text="end with one line of JSON",
    )
    demo_parser.add_argument("--seed", type=int, default=0)
    demo_parser.add_argument(
        "--dir", metavar="DIR|URL", help="where to store the run (default: runs/demo-SEED)"
    )
    demo_parser.add_argument(
        "--fresh", action="store_true", help="delete an earlier demo there first"
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
        help="where to store the run (default: `store` in the file, or runs/NAME in this folder)",
    )
    run_parser.add_argument(
        "--fresh", action="store_true", help="delete an earlier run there first"
    )
    run_parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that a start checks, print the plan, then exit",
    )
    run_parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on a Ray cluster: auto, HOST:PORT, or local to start one here (default: no "
        "cluster)",
    )
    run_parser.add_argument(
        "--workers", type=at_least_one, default=1, metavar="N",
        help="workers in each region, with --ray (default: %(default)s)",
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
        "evaluate a version of a run on its tasks",
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
        help="attempts per task, for pass@k (default: 1)",
    )
    eval_parser.add_argument(
        "--contamination",
        action="store_true",
        help="test for contamination instead: does the model complete names and files of tasks "
        "that it should not know?",
    )


def _add_cluster(add: AddCommand) -> None:
    last = "end with one line of JSON"
    text = "plan the best split of GPUs between trainer and engines, and the time of a step"
    planning = add("plan", text, json_text=last)
    text = "simulate a run in virtual time: its speed on N GPUs, and random faults"
    simulating = add("simulate", text, json_text=last)
    for parser in (planning, simulating):
        parser.add_argument("config", type=Path, metavar="RUN.toml")
        parser.add_argument("--gpus", type=at_least_one, required=True, metavar="N")
        parser.add_argument("--gpu", choices=GPUS, default="h200", help="(default: %(default)s)")
        parser.add_argument(
            "--parameters",
            type=float,
            metavar="N",
            help="parameters of a model other than the file's",
        )
        parser.add_argument(
            "--active", type=float, metavar="N", help="parameters used for each token"
        )
        parser.add_argument(
            "--kv-bytes", type=float, metavar="N", help="bytes of keys and values per token"
        )
        parser.add_argument(
            "--weight-bytes",
            type=float,
            default=2.0,
            help="bytes per weight in the engines; 1 for FP8 (default: 2)",
        )
        parser.add_argument(
            "--tool-s",
            type=float,
            default=0.0,
            help="seconds that a session spends in tools (default: 0)",
        )
        _add_set(parser)
    simulating.add_argument(
        "--regions", type=at_least_one, default=1, metavar="R", help="regions (default: 1)"
    )
    simulating.add_argument(
        "--steps", type=at_least_one, default=12, help="steps of the run (default: %(default)s)"
    )
    simulating.add_argument(
        "--seeds",
        type=int,
        default=0,
        metavar="N",
        help="number of random fault schedules (default: none)",
    )
    simulating.add_argument(
        "--first-seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the first schedule (default: 0)",
    )


def _add_export(add: AddCommand) -> None:
    parser = add("export", "export a run for a cluster's own scheduler")
    parser.add_argument(
        "kind",
        type=_scheduler,
        metavar="{k8s,slurm}",
        help="Kubernetes manifests, or Slurm batch files",
    )
    parser.add_argument("config", type=Path, metavar="RUN.toml")
    parser.add_argument(
        "target", type=Path, metavar="DIR", help="a directory that does not exist yet"
    )
    for name, default, text in (
        ("--workers", 1, "workers in each region"),
        ("--worker-gpus", 1, "GPUs of each worker"),
        ("--trainer-nodes", 1, "machines of the trainer"),
        ("--trainer-gpus", 1, "GPUs of each trainer machine; 0: train on the CPU"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--trainer-min-nodes",
        type=at_least_one,
        metavar="N",
        help="keep training with as few as N machines when others are lost, and with all once "
        "they return (default: all)",
    )
    parser.add_argument(
        "--image", default="etude:latest", help="container image for k8s (default: %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="the folder of RUN.toml as the cluster's machines see it; its relative paths start "
        "there (default for slurm: where it is; for k8s: none)",
    )


def _scheduler(name: str) -> str:
    if name not in ("k8s", "slurm"):
        raise argparse.ArgumentTypeError(
            f"{name!r} is neither k8s nor slurm; to export the weights of a run, use `etude "
            "weights export RUN DIR`"
        )
    return name


def _add_compare(add: AddCommand) -> None:
    parser = add(
        "compare",
        "compare two versions on the same tasks: paired, with interval and p-value",
        json_text="end with one line of JSON",
    )
    newest = "(default: the newest one evaluated)"
    parser.add_argument(
        "before", metavar="RUN[@VERSION]", help=f"the version to compare with {newest}"
    )
    parser.add_argument(
        "after",
        metavar="RUN[@VERSION]",
        nargs="+",
        help=f"the other version {newest}; with several, such as seeds, their mean at each task",
    )
    parser.add_argument("--split", choices=EVAL_SPLITS, default="heldout")
    parser.add_argument(
        "--turns",
        type=at_least_one,
        metavar="N",
        help="count an attempt as solved only if it took at most N answers of the model",
    )


def _add_init(add: AddCommand) -> None:
    parser = add("init", "create a small working project: environment, agent, run file, test")
    parser.add_argument(
        "dir",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="where to create it (default: here)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face directory (default: untrained weights)",
    )
    parser.add_argument(
        "--repo",
        type=Path,
        metavar="PATH",
        help="a git repository, or a folder in one, to make tasks from (default: the repository "
        "around DIR, or else a small example)",
    )


def _add_try(add: AddCommand) -> None:
    text = "try a task of a run: score no change, a solution and one session, without a run"
    parser = add("try", text, json_text="end with one line of JSON")
    parser.add_argument("config", type=Path, metavar="RUN.toml")
    parser.add_argument("--task", metavar="ID", help="the task to try (default: the first one)")
    parser.add_argument(
        "--solution",
        type=Path,
        metavar="PATH",
        help="also score this solution: a directory of files, a .patch, or FILE:PATH in the "
        "working copy",
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="answers to use instead of a model's: text with lines of --- between them, or a "
        ".jsonl of texts or messages",
    )
    parser.add_argument("--no-model", action="store_true", help="skip the session with the model")
    _add_set(parser)


def _add_mismatch(add: AddCommand) -> None:
    mismatch_parser = add(
        "mismatch",
        "measure how far engine and trainer are apart, and why",
        json_text="end with one line of JSON",
    )
    mismatch_parser.add_argument("target", metavar="MODEL|RUN", help="a model directory, or a run")
    mismatch_parser.add_argument(
        "--tokens",
        type=at_least_one,
        default=32,
        help="tokens of each answer (default: %(default)s)",
    )
    mismatch_parser.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature (default: that of the run's stage, or 1)",
    )
    mismatch_parser.add_argument(
        "--invariant", action="store_true", help="use batch-invariant arithmetic on both sides"
    )


def _add_dash(add: AddCommand) -> None:
    parser = add("dash", "open the dashboard: view running and finished runs in a browser")
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any other needs a token (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8765,
        help="port to listen on; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token (default: ETUDE_TOKEN)"
    )


def _add_inspection(add: AddCommand) -> None:
    text = "recompute the ledger of a run from its store"
    add("audit", text).add_argument("run", metavar="RUN", help=RUN)
    _add_sessions(add)
    _add_dash(add)
    show_parser = add("show", "show the results of a run, or a checkpoint and its lineage")
    show_parser.add_argument(
        "--all", action="store_true", help="also show the plan, a session and the lineage"
    )
    show_parser.add_argument(
        "path", metavar="RUN|CHECKPOINT", help="a checkpoint is RUN/checkpoints/NAME"
    )

    keys_parser = add("keys", "list the keys of a run's config: type, default and meaning")
    keys_parser.add_argument(
        "path", nargs="?", metavar="PATH", help="a table or a key, such as stage.rl or stage.rl.lr"
    )
    keys_parser.add_argument(
        "--markdown", action="store_true", help="print all keys as a Markdown page"
    )

    doctor_parser = add(
        "doctor",
        "show what this machine can use for sandboxes, or what a run's unfinished rollouts "
        "wait for",
        json_text="print one line of JSON instead",
    )
    doctor_parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run to diagnose (default: this machine)"
    )

    add_bench(add("bench", "run a benchmark", json_text="end with one line of JSON"))


def _add_sessions(add: AddCommand) -> None:
    parser = add(
        "sessions",
        "read sessions: what agent and model said",
        json_text="print a line of JSON for each session instead of text",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--failed", action="store_true", help="only sessions that failed")
    which.add_argument("--best", action="store_true", help="sessions with the highest reward first")
    which.add_argument("--task", metavar="ID", help="only sessions of one task")
    which.add_argument("--id", metavar="SESSION", help="one session")
    parser.add_argument(
        "-n",
        type=at_least_one,
        default=1,
        dest="count",
        metavar="N",
        help="number of sessions to show in full (default: %(default)s)",
    )


def _add_no_dash(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-dash", action="store_true", help="print no link to a dashboard")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="change a key of the config"
    )
