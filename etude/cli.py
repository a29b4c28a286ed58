"""The command line. Imports are made where they are needed, so that `etude --help` is quick and
loads no torch."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from etude.core.errors import EtudeError
from etude.core.types import EVAL_SPLITS

if TYPE_CHECKING:
    from rich.console import Console

    from etude.core.config import RunConfig
    from etude.launch.local import RunDirectory

INTERRUPTED = 130

AddCommand = Callable[..., argparse.ArgumentParser]
"""(name, function, help, json_text=..) -> the parser of a new command"""


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        code: int = args.command(args)
        return code
    except KeyboardInterrupt:
        print(f"stopped; resume with: {_again(argv)}", file=sys.stderr)
        return INTERRUPTED
    except (EtudeError, ExceptionGroup) as e:
        from etude.run.process import error_message

        if (told := error_message(e)) is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="etude", description="Train a coding model on your own product."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: object, text: str, *, json_text: str | None = None
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=command)
        if json_text:
            made.add_argument("--json", action="store_true", help=json_text)
        return made

    _add_runs(add)
    _add_serve(add("serve", serve, "serve a model directory over an OpenAI-compatible API"))
    _add_chat(add("chat", chat, "talk to a model in the terminal"))

    _add_mismatch(add)
    _add_weights(commands.add_parser("weights", help="the weights of runs and models"))

    _add_inspection(add)
    return parser


def _add_runs(add: AddCommand) -> None:
    demo_parser = add(
        "demo",
        demo,
        "train a tiny model on this machine, in minutes",
        json_text="end with one line of JSON",
    )
    demo_parser.add_argument("--seed", type=int, default=0)
    demo_parser.add_argument(
        "--dir", type=Path, help="where the run lies (default: runs/demo-SEED)"
    )
    demo_parser.add_argument(
        "--fresh", action="store_true", help="remove an earlier demo there first"
    )
    _add_set(demo_parser)

    run_parser = add(
        "run",
        run,
        "start a run, or resume an interrupted one",
        json_text="end with one line of JSON",
    )
    run_parser.add_argument("config", type=Path, metavar="RUN.toml")
    run_parser.add_argument("--dir", type=Path, help="where the run lies (default: runs/NAME)")
    run_parser.add_argument("--dry-run", action="store_true", help="print the plan and end")
    _add_set(run_parser)

    eval_parser = add(
        "eval",
        evaluate,
        "measure how much a version of a run solves",
        json_text="end with one line of JSON",
    )
    eval_parser.add_argument("run", type=Path, metavar="RUN")
    eval_parser.add_argument("--version", type=int, help="weight version (default: the newest)")
    eval_parser.add_argument("--split", choices=EVAL_SPLITS, default="heldout")


def _add_mismatch(add: AddCommand) -> None:
    mismatch_parser = add(
        "mismatch",
        mismatch,
        "how far engine and trainer are apart, and why",
        json_text="end with one line of JSON",
    )
    mismatch_parser.add_argument(
        "target", type=Path, metavar="MODEL|RUN", help="a model directory, or a run"
    )
    mismatch_parser.add_argument(
        "--tokens", type=_count, default=32, help="of each answer (default: %(default)s)"
    )
    mismatch_parser.add_argument(
        "--temperature", type=float, help="(default: that of the run's stage, or 1)"
    )
    mismatch_parser.add_argument(
        "--invariant", action="store_true", help="with invariant arithmetic on both sides"
    )


def _add_inspection(add: AddCommand) -> None:
    text = "recompute the ledger of a run from its store"
    add("audit", audit, text).add_argument("run", type=Path, metavar="RUN")
    show_parser = add("show", show, "one page about a run, or about a checkpoint and its lineage")
    show_parser.add_argument(
        "path", type=Path, metavar="RUN|CHECKPOINT", help="a checkpoint is RUN/checkpoints/NAME"
    )

    bench_parser = add("bench", bench, "run a benchmark", json_text="end with one line of JSON")
    bench_parser.add_argument("name", metavar="NAME", help="a module of etude.bench")
    bench_parser.add_argument(
        "--model", metavar="DIR", help="engine, publish, edits: a Hugging Face directory"
    )
    bench_parser.add_argument(
        "--steps", type=_count, help="publish: versions after the first (default: 50)"
    )
    bench_parser.add_argument(
        "--repo", metavar="DIR", help="edits: a git repository, for its history"
    )
    bench_parser.add_argument(
        "--pairs", metavar="DIR", help="delta: NAME_before.npy and NAME_after.npy, bf16 codes"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a Hugging Face directory"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="another address needs a token (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="0: a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--name", help="what the API calls the model (default: the directory's name)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token (default: ETUDE_TOKEN)"
    )
    parser.add_argument(
        "--max-batch",
        type=_count,
        default=32,
        help="answers computed together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-answers", type=_count, default=256, help="under way at once (default: %(default)s)"
    )
    parser.add_argument(
        "--max-context", type=_count, help="tokens of prompt and answer (default: the model's)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="(default: the fastest that fits)"
    )
    parser.add_argument("--threads", type=_count, help="processor threads of the engine")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="(default: cuda if there is one)",
    )
    parser.add_argument(
        "--invariant",
        action="store_true",
        help="the same bits whatever is answered together; slower",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "make a Hugging Face directory of a GGUF file"
    importing = actions.add_parser("import", help=text, description=text)
    importing.add_argument("file", type=Path, metavar="FILE.gguf")
    importing.add_argument("dir", type=Path, metavar="DIR", help="must not be there yet")
    importing.set_defaults(command=import_weights)
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
        action.add_argument("url", metavar="URL", help="a run's directory, or s3://, gs://, az://")
        action.set_defaults(command=weights, action=name)
        if name in ("show", "fetch", "export"):
            action.add_argument("--version", type=int, help="(default: the newest)")
        if name == "fetch":
            action.add_argument(
                "--cache", type=Path, metavar="DIR", help="leave it there for this host's workers"
            )
        if name == "compact":
            action.add_argument(
                "--skip",
                type=_count,
                default=8,
                help="versions in one route (default: %(default)s)",
            )
            action.add_argument(
                "--every", type=_seconds, metavar="S", help="go on, and look again after S seconds"
            )
        if name == "gc":
            action.add_argument(
                "--keep", type=_count, default=16, help="newest versions (default: %(default)s)"
            )
            action.add_argument(
                "--grace", type=_seconds, default=3600.0, metavar="S", help="(default: %(default)s)"
            )
        if name == "export":
            action.add_argument("target", type=Path, metavar="DIR", help="must not be there yet")
            action.add_argument(
                "--dtype", choices=("bf16", "fp8"), default="bf16", help="(default: %(default)s)"
            )


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="URL|DIR", help="a server, or a model directory to serve meanwhile"
    )
    parser.add_argument("--model", help="the model's name at the server")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=_count)
    parser.add_argument("--seed", type=int)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("seconds, 0 or more")
    return value


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=V", help="change a key of the config"
    )


def _again(argv: Sequence[str] | None) -> str:
    import shlex

    given = sys.argv[1:] if argv is None else argv
    return shlex.join(["etude", *(word for word in given if word != "--fresh")])


def demo(args: argparse.Namespace) -> int:
    from etude.core.config import parse

    text = resources.files("etude.commands").joinpath("demo.toml").read_text()
    config = parse(
        text, [f"seed={args.seed}", f"name=demo-{args.seed}", *args.set], source="demo.toml"
    )
    directory = args.dir or Path("runs") / config.name
    if args.fresh and directory.exists():
        from etude.launch.launcher import locked

        if not (directory / "config.json").is_file():
            raise EtudeError(
                f"{directory} is no run of etude: it is not removed; give another --dir"
            )
        with locked(directory):
            shutil.rmtree(directory)
    return _train(config, directory, args)


def run(args: argparse.Namespace) -> int:
    from etude.core.config import parse

    try:
        text = args.config.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise EtudeError(
            f"cannot read {args.config}: {getattr(e, 'strerror', None) or e}; give the path of a "
            f"run's TOML"
        ) from e
    config = parse(text, args.set, source=str(args.config))
    return _train(config, args.dir or Path("runs") / config.name, args)


def _train(config: RunConfig, directory: Path, args: argparse.Namespace) -> int:
    from etude.commands.show import page
    from etude.launch import local
    from etude.run.audit import is_finished
    from etude.store.runs import Run

    place, console = local.RunDirectory(directory), _console(args.json)
    if getattr(args, "dry_run", False):
        print(local.plan(config, place))
        return 0
    before = directory.joinpath("config.json").is_file() and is_finished(
        Run.open(place.store), config
    )
    local.execute(config, place, console, resume=_again(None))
    run = place.open()
    if before:
        console.print("this run was finished before; here is what it came to", highlight=False)
    audited = page(run, place, console)
    console.print(f"inspect it: etude show {directory}   etude audit {directory}", highlight=False)
    if args.json:
        print(json.dumps(local.summary(run, config)), flush=True)
    return 1 if audited.violations else 0


def evaluate(args: argparse.Namespace) -> int:
    from etude.launch import local, screen

    place, console = _existing(args.run), _console(args.json)
    report = local.evaluate(place, console, version=args.version, split=args.split)
    console.print(screen.results([report]))
    if args.json:
        fields = ("stage", "split", "version", "solved", "total", "low", "high")
        print(json.dumps({name: getattr(report, name) for name in fields}))
    return 0


def audit(args: argparse.Namespace) -> int:
    from etude.run.audit import audit

    audited = audit(_existing(args.run).open())
    print(audited.equation)
    print(f"{audited.batches} batches; lag {audited.lag_max} at most, {audited.lag_bound} allowed")
    for violation in audited.violations:
        print(f"violation: {violation}")
    for alarm in audited.alarms:
        print(f"alarm: {alarm}")
    print(
        "the ledger balances" if not audited.violations else f"{len(audited.violations)} violations"
    )
    return 1 if audited.violations else 0


def show(args: argparse.Namespace) -> int:
    from etude.commands.show import show

    show(args.path, _console(False))
    return 0


def serve(args: argparse.Namespace) -> int:
    from etude.commands.serve import Options, serve

    given = {name: value for name, value in vars(args).items() if name != "command"}
    serve(Options(**given))
    return 0


def mismatch(args: argparse.Namespace) -> int:
    from etude.commands.mismatch import mismatch

    options = {name: getattr(args, name) for name in ("tokens", "temperature", "invariant")}
    found = mismatch(args.target, _console(args.json), **options)
    if args.json:
        print(json.dumps(found))
    return 0


def chat(args: argparse.Namespace) -> int:
    from etude.commands.chat import Settings, chat

    names = ("model", "system", "temperature", "max_tokens", "seed")
    chat(args.target, Settings(**{name: getattr(args, name) for name in names}), _console(False))
    return 0


def import_weights(args: argparse.Namespace) -> int:
    from etude.commands.import_weights import import_model

    import_model(args.file, args.dir, _console(False))
    return 0


def weights(args: argparse.Namespace) -> int:
    from etude.commands import weights

    options = {
        name: value for name, value in vars(args).items() if name not in ("command", "action")
    }
    code: int = getattr(weights, args.action)(**options, console=_console(False))
    return code


def bench(args: argparse.Namespace) -> int:
    try:
        module = importlib.import_module(f"etude.bench.{args.name}")
    except ModuleNotFoundError as e:
        if e.name != f"etude.bench.{args.name}":
            raise
        known = sorted(
            p.name[:-3]
            for p in resources.files("etude.bench").iterdir()
            if p.name[:1] != "_" and p.name[-3:] == ".py"
        )
        raise EtudeError(
            f"there is no benchmark {args.name}: choose one of {', '.join(known)}"
        ) from e
    names = ("pairs", "model", "steps", "repo")
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    if foreign := options.keys() - inspect.signature(module.run).parameters.keys():
        raise EtudeError(f"the benchmark {args.name} has no option --{foreign.pop()}")
    figures: dict[str, float] = module.run(**options)
    for name, value in figures.items():
        print(f"{name:32} {value:.6g}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        from etude.store.checkpoints import git_commit

        print(
            json.dumps(
                {
                    "bench": args.name,
                    "machine": _machine(),
                    "commit": git_commit(),
                    "figures": figures,
                }
            )
        )
    return 0


def _existing(directory: Path) -> RunDirectory:
    from etude.launch.local import RunDirectory

    place = RunDirectory(directory)
    place.open()
    return place


def _console(json_wanted: bool) -> Console:
    """For people; with --json standard output belongs to programs."""
    from rich.console import Console

    return Console(stderr=json_wanted)


def _machine() -> str:
    import os

    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
