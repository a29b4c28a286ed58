"""The command line. Modules are imported where they are needed, so that `etude --help` is fast and
does not load torch."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import inspect
import json
import os
import select
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from etude.arguments import parse_arguments
from etude.bench_arguments import BENCHMARKS
from etude.core.errors import EtudeError
from etude.serving_arguments import REALTIME_ACTIONS

if TYPE_CHECKING:
    from rich.console import Console

    from etude.commands.plan import Options as PlanOptions
    from etude.core.config import RunConfig
    from etude.launch.place import RunPlace
    from etude.launch.ray_plan import RayCluster

INTERRUPTED = 130
RESUMABLE = ("demo", "run", "realtime", "eval", "tasks", "images")
"""Commands that continue from the point where they were stopped."""
NOBODY_READS = 141
"""Exit code of a program ended by SIGPIPE, as in `etude .. | head`."""


def main(argv: Sequence[str] | None = None) -> int:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash of native code prints a traceback
    args = parse_arguments(argv)
    try:
        code = COMMANDS[args.command](args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _is_stdout_broken():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return NOBODY_READS
    except KeyboardInterrupt as e:
        from etude.commands.terminal import print_stopped

        resumes = args.command in RESUMABLE and not getattr(args, "dry_run", False)
        first = f"stopped; resume with: {_again(argv)}" if resumes else "stopped"
        print_stopped("\n".join([first, *getattr(e, "__notes__", ())]))
        return INTERRUPTED
    except (EtudeError, OSError, ExceptionGroup) as e:
        from etude.commands.terminal import file_error, print_error
        from etude.run.process import error_message

        if (told := file_error(e) or error_message(e)) is None:
            raise
        print_error(f"error: {told}")
        return 2


def _is_stdout_broken() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(state & select.POLLERR for _, state in poll.poll(0))


def _again(argv: Sequence[str] | None) -> str:
    given = sys.argv[1:] if argv is None else argv
    return shlex.join(["etude", *(word for word in given if word != "--fresh")])


def demo(args: argparse.Namespace) -> int:
    from etude.core.config import parse

    text = resources.files("etude.commands").joinpath("demo.toml").read_text()
    config = parse(
        text, [f"seed={args.seed}", f"name=demo-{args.seed}", *args.set], source="demo.toml"
    )
    return _train(config, args)


def run(args: argparse.Namespace) -> int:
    from etude.commands.run_file import read_run_file

    config = read_run_file(args.config, args.set)
    if config.realtime is not None:
        raise EtudeError(
            f"{args.config} has a table [realtime]: users teach this run, but `etude run` would "
            f"train on rollouts of tasks; start it with `etude realtime {args.config}`"
        )
    return _train(config, args)


def _train(config: RunConfig, args: argparse.Namespace) -> int:
    from etude.commands.show import page, print_example, print_next
    from etude.commands.terminal import say
    from etude.launch import local
    from etude.launch.check import check_start
    from etude.launch.place import RunPlace
    from etude.launch.plan import Standing, plan
    from etude.run.audit import is_finished

    place = RunPlace.of(args.dir or config.store or f"runs/{config.name}")
    console = _console(args.json)
    folder = getattr(args, "config", Path()).parent
    anew = place.begins_anew(config.name, folder, fresh=args.fresh)
    if getattr(args, "dry_run", False):
        findings = check_start(config, place, fresh=args.fresh, look=True)
        standing = None if args.fresh else Standing.of(place, config)
        planned = plan(config, place, findings, standing)
        say(_console(False), f"{planned}\n  note: {anew}" if anew else planned, indent=2)
        return 0
    if anew:
        say(console, anew, indent=2)
    there = None if args.fresh else place.find()
    before = there is not None and is_finished(there, config)
    with_dash = console.is_terminal and not args.no_dash
    options = {"resume": _again(None), "fresh": args.fresh, "dash": with_dash}
    try:
        local.execute(config, place, console, **options, cluster=_cluster(args))
    except KeyboardInterrupt as e:
        e.add_note(f"the run is in {place.absolute}")
        raise
    run = place.open()
    if before:
        console.print("this run had already finished; these are its results", highlight=False)
    print_example(run, console)
    audited = page(run, place, console)
    print_next(run, place, console)
    if args.json:
        print(json.dumps(local.summary(run, config)), flush=True)
    return 1 if audited.violations else 0


def _cluster(args: argparse.Namespace) -> RayCluster | None:
    from etude.launch.ray_plan import RayCluster

    address = getattr(args, "ray", None)
    if address is None and getattr(args, "workers", 1) > 1:
        raise EtudeError("--workers needs a cluster: add --ray ADDRESS, or leave it out")
    return RayCluster(address=address, workers=args.workers) if address else None


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    from etude.commands.plan import Options

    names = ("gpus", "gpu", "parameters", "active", "kv_bytes", "weight_bytes", "tool_s")
    return Options(**{name: getattr(args, name) for name in names})


def plan(args: argparse.Namespace) -> int:
    from etude.commands.plan import plan
    from etude.commands.run_file import read_run_file

    config = read_run_file(args.config, args.set)
    found = plan(config, _plan_options(args), _console(args.json))
    if args.json:
        print(json.dumps(found))
    return 0


def simulate(args: argparse.Namespace) -> int:
    from etude.commands.run_file import read_run_file
    from etude.commands.simulate import Options, simulate

    names = ("regions", "steps", "seeds", "first_seed")
    options = Options(plan=_plan_options(args), **{name: getattr(args, name) for name in names})
    found = simulate(read_run_file(args.config, args.set), options, _console(args.json))
    if args.json:
        print(json.dumps(found))
    return 1 if found["violations"] else 0


def export(args: argparse.Namespace) -> int:
    from etude.commands.export import Options, export
    from etude.commands.run_file import read_run_file

    sizes = ("workers", "worker_gpus", "trainer_nodes", "trainer_min_nodes", "trainer_gpus")
    names = ("target", *sizes, "image", "folder")
    options = Options(**{name: getattr(args, name) for name in names})
    export(read_run_file(args.config, ()), args.config, args.kind, options, _console(False))
    return 0


def init(args: argparse.Namespace) -> int:
    from etude.commands.init import init

    init(args.dir, args.model, args.repo, _console(False))
    return 0


def try_run(args: argparse.Namespace) -> int:
    from etude.commands.run_file import read_run_file
    from etude.commands.trial import Options, try_run

    names = ("task", "solution", "script", "no_model")
    options = Options(**{name: getattr(args, name) for name in names})
    found = try_run(read_run_file(args.config, args.set), options, _console(args.json))
    if args.json:
        print(json.dumps(found))
    return 0 if found["ok"] else 1


def evaluate(args: argparse.Namespace) -> int:
    from etude.launch import local, screen
    from etude.run.audit import evaluated_versions
    from etude.run.evaluate import pass_ks

    place, console = _existing(args.run), _console(args.json)
    if args.contamination:
        from etude.commands.contamination import contamination

        found = contamination(place, args.version, console)
        if args.json:
            print(json.dumps(found))
        return 0
    report = local.evaluate(
        place, console, version=args.version, split=args.split, samples=args.samples
    )
    console.print(screen.results([report], evaluated_versions(place.open().config())))
    at_k = {k: report.pass_at(k) for k in pass_ks(report.samples)}
    if report.samples > 1:
        console.print("  ".join(f"pass@{k} {100 * rate:.1f} %" for k, rate in at_k.items()))
    if args.json:
        fields = ("stage", "split", "version", "solved", "total", "low", "high")
        told = {name: getattr(report, name) for name in fields}
        print(json.dumps(told | ({"pass_at": at_k} if report.samples > 1 else {})))
    return 0


def compare(args: argparse.Namespace) -> int:
    from etude.commands.compare import compare

    found = compare(args.before, args.after, args.split, _console(args.json), turns=args.turns)
    if args.json:
        print(json.dumps(found))
    return 0


def audit(args: argparse.Namespace) -> int:
    from etude.run.audit import audit

    audited = audit(_existing(args.run).open())
    print(audited.equation)
    for meaning in audited.meanings:
        print(f"  {meaning}")
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

    return 0 if show(args.path, _console(False), everything=args.all) else 1


def sessions(args: argparse.Namespace) -> int:
    from etude.commands.sessions import Choice, sessions

    names = ("failed", "best", "task", "id", "count")
    choice = Choice(**{name: getattr(args, name) for name in names})
    sessions(args.run, _console(args.json), choice, as_json=args.json)
    return 0


def serve(args: argparse.Namespace) -> int:
    from etude.commands.serve import Options, serve

    given = {name: value for name, value in vars(args).items() if name != "command"}
    serve(Options(**given))
    return 0


def gateway(args: argparse.Namespace) -> int:
    from etude.commands.gateway import gateway

    names = ("host", "port", "version", "production")
    gateway(args.run, **{name: getattr(args, name) for name in names})
    return 0


def realtime(args: argparse.Namespace) -> int:
    from etude.commands import realtime

    console = _console(False)
    if args.what in REALTIME_ACTIONS:
        if args.run is None:
            raise EtudeError(f"name the run: etude realtime {args.what} RUN")
        given = {"version": args.version} if args.what == "pin" else {}
        code: int = getattr(realtime, args.what)(_existing(args.run).open(), console, **given)
        return code
    if args.run is not None:
        raise EtudeError(
            f"etude realtime {args.what} {args.run}: give an action "
            f"({', '.join(REALTIME_ACTIONS)}) and a run, or only the file of a run"
        )
    options = realtime.Options(dir=args.dir, set=args.set, once=args.once, dry_run=args.dry_run)
    return realtime.start(Path(args.what), options, console, resume=_again(None))


def production(args: argparse.Namespace) -> int:
    from etude.commands import production
    from etude.serve.production.place import Place

    place, console = Place(args.file, args.run), _console(False)
    if args.action == "export":
        production.export(place, args.kind, args.target, min_score=args.min_score, console=console)
        return 0
    given = {name: getattr(args, name) for name in ("user", "targets") if hasattr(args, name)}
    code: int = getattr(production, args.action)(place, **given, console=console)
    return code


def mismatch(args: argparse.Namespace) -> int:
    from etude.commands.mismatch import mismatch

    options = {name: getattr(args, name) for name in ("tokens", "temperature", "invariant")}
    found = mismatch(args.target, _console(args.json), **options)
    if args.json:
        print(json.dumps(found))
    return 0


def chat(args: argparse.Namespace) -> int:
    from etude.commands.chat import Settings, chat, usual_temperature

    if args.temperature is None:
        args.temperature = usual_temperature(args.target)
    names = ("model", "system", "temperature", "max_tokens", "seed")
    settings = Settings(**{name: getattr(args, name) for name in names})
    chat(args.target, args.version, settings, _console(False))
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


def token(args: argparse.Namespace) -> int:
    from etude.commands.token import make_token

    print(make_token(args.scope, args.subject, args.days, args.organisation))
    return 0


def tasks(args: argparse.Namespace) -> int:
    from etude.commands import tasks

    options = {
        name: value for name, value in vars(args).items() if name not in ("command", "action")
    }
    code: int = getattr(tasks, args.action)(**options, console=_console(args.json))
    return code


def images(args: argparse.Namespace) -> int:
    from etude.commands import images

    options = {
        name: value for name, value in vars(args).items() if name not in ("command", "action")
    }
    code: int = getattr(images, args.action)(**options, console=_console(args.json))
    return code


def keys(args: argparse.Namespace) -> int:
    from etude.commands.keys import markdown, show

    if args.markdown:
        sys.stdout.write(markdown())
    else:
        show(args.path, _console(False))
    return 0


def bench(args: argparse.Namespace) -> int:
    if args.name not in BENCHMARKS:
        raise EtudeError(
            f"there is no benchmark {args.name}: choose one of {', '.join(BENCHMARKS)}"
        )
    from etude.commands.figures import tell_figures

    module = importlib.import_module(f"etude.bench.{args.name}")
    of_sandboxes = ("simulate", "soak", "repositories")
    names = ("pairs", "model", "steps", "seed", "repo", "sessions", "shards", "kills", "gigabytes")
    options = {
        name: value
        for name in (*names, *of_sandboxes)
        if (value := getattr(args, name)) is not None
    }
    if foreign := options.keys() - inspect.signature(module.run).parameters.keys():
        raise EtudeError(f"the benchmark {args.name} has no option --{foreign.pop()}")
    tell_figures(args.name, module.run(**options), as_json=args.json)
    return 0


def _existing(run: str) -> RunPlace:
    from etude.launch.place import RunPlace

    place = RunPlace.of(run)
    place.open()
    return place


def _console(json_wanted: bool) -> Console:
    """Console for people: stderr with --json, since programs then read stdout."""
    from etude.commands.terminal import PipeConsole

    return PipeConsole(stderr=json_wanted)


def doctor(args: argparse.Namespace) -> int:
    if args.run is not None:
        from etude.commands.waiting import waiting

        return waiting(args.run, as_json=args.json)

    from etude.commands.doctor import doctor

    return doctor(as_json=args.json)


def sandboxes_serve(args: argparse.Namespace) -> int:
    from etude.commands.sandboxes import Options, serve

    given = {name: value for name, value in vars(args).items() if name != "command"}
    serve(Options(**given))
    return 0


def dash(args: argparse.Namespace) -> int:
    from etude.commands.dash import Options, dash

    given = {name: value for name, value in vars(args).items() if name != "command"}
    dash(Options(**given))
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "demo": demo,
    "run": run,
    "plan": plan,
    "simulate": simulate,
    "export": export,
    "init": init,
    "try": try_run,
    "eval": evaluate,
    "compare": compare,
    "serve": serve,
    "chat": chat,
    "token": token,
    "gateway": gateway,
    "production": production,
    "realtime": realtime,
    "sandboxes serve": sandboxes_serve,
    "mismatch": mismatch,
    "weights": weights,
    "weights import": import_weights,
    "tasks": tasks,
    "images": images,
    "audit": audit,
    "show": show,
    "sessions": sessions,
    "dash": dash,
    "keys": keys,
    "doctor": doctor,
    "bench": bench,
}

if __name__ == "__main__":
    sys.exit(main())
