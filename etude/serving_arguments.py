"""The arguments of the commands that serve a model or talk to one."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.core.sampling import CHAT_MAX_TOKENS, CHAT_TEMPERATURE, DEFAULT_MAX_TOKENS


def at_least_one(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="MODEL|RUN", help="a Hugging Face directory, a run, or a run's store URL"
    )
    parser.add_argument(
        "--version", type=int, help="version of a run's weights (default: the newest)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any other needs a token (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--name", help="the model's name in the API (default: the directory's name)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR|RUN",
        help="serve a LoRA adapter of the model; requests select it as the model NAME",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token (default: ETUDE_TOKEN)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=at_least_one,
        default=32,
        help="sequences that the engine computes together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-answers",
        type=at_least_one,
        default=256,
        help="answers in progress at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-context",
        type=at_least_one,
        help="tokens of prompt and answer together (default: the model's)",
    )
    parser.add_argument(
        "--default-max-tokens",
        type=at_least_one,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="limit of an answer whose request sets none (default: %(default)s)",
    )
    _add_engine(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="print no line for each request, and no warnings"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type to compute in (default: the fastest that fits)",
    )
    parser.add_argument("--threads", type=at_least_one, help="CPU threads of the engine")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="(default: cuda if available)",
    )
    parser.add_argument(
        "--invariant",
        action="store_true",
        help="batch-invariant: the same bits whatever else is in the batch; slower",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8",),
        help="compute products in FP8, which halves the bytes read for a token (default: as "
        "stored)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8 halves the bytes of keys and values; auto keeps them as computed (default: auto)",
    )


def add_token(parser: argparse.ArgumentParser) -> None:
    scopes = ("session", "score", "user", "worker", "scheduler", "feedback", "admin")
    parser.add_argument(
        "scope", choices=scopes, help="the routes that the token opens (docs/serve.md)"
    )
    parser.add_argument(
        "--subject",
        default="",
        metavar="NAME",
        help="owner of the token; for the scope session, a session id",
    )
    parser.add_argument("--organisation", default="", metavar="NAME", help="organisation of a user")
    parser.add_argument(
        "--days", type=float, help="days until it expires (default: 30, for a session 2)"
    )


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Workers are started separately and join the gateway: python -m etude.serve.worker "
        "--store RUN --region here --port 8101 --gateway http://127.0.0.1:8100 "
        "(docs/production.md)."
    )
    parser.add_argument("run", metavar="RUN", help="a run's directory, or its store's URL")
    parser.add_argument("--version", type=int, help="version of the weights (default: the newest)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8100, help="port to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--production",
        type=Path,
        metavar="FILE.toml",
        help="record users who consent, as configured in this file (docs/production.md)",
    )


def add_sandboxes(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "offer sandboxes on this machine to runs elsewhere ([sandbox] hosts)"
    serving = actions.add_parser("serve", help=text, description=text)
    serving.set_defaults(command="sandboxes serve", refuse=serving.error)
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    serving.add_argument(
        "--port", type=int, default=8300, help="port to listen on (default: %(default)s)"
    )
    serving.add_argument(
        "--isolation",
        action="append",
        default=[],
        choices=("namespaces", "container", "gvisor", "vm", "process"),
        help="an isolation to offer; the first is the default (default: namespaces)",
    )
    serving.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="PATH[:PLACE]",
        help="mount a directory of this machine into every sandbox, read-only",
    )
    serving.add_argument(
        "--max-sandboxes",
        type=at_least_one,
        default=1000,
        metavar="N",
        help="sandboxes open at the same time (default: %(default)s)",
    )
    serving.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that requests must carry (default: $ETUDE_SANDBOX_TOKEN)",
    )


REALTIME_ACTIONS = ("status", "compare", "stop", "resume", "pin", "rollback")


def add_realtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="RUN.toml|ACTION",
        help="the file of a run with a table [realtime], to start or resume it; or an action on a "
        "started run: status; compare (the gain of all updates so far); stop (no more "
        "training or deployment, users are still served); pin (the same, with --version); "
        "rollback (users go back to the previous version, then as stop); resume",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run that an action applies to")
    parser.add_argument("--version", type=int, help="for pin: the live version or the one before")
    parser.add_argument("--dir", metavar="DIR|URL", help="where to store the run")
    parser.add_argument("--once", action="store_true", help="exit after one update")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done next, and exit"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file"
    )


def add_production(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, text in (
        ("status", "show how much was recorded and dropped"),
        ("export", "export recorded sessions as training data"),
        ("delete", "delete everything stored about a user, and prove it"),
        ("purge", "remove deleted users from exports"),
        ("sweep", "delete what is past its retention, as the gateway does every hour"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument(
            "file", type=Path, metavar="FILE.toml", help="config of production mode"
        )
        action.add_argument(
            "--run",
            metavar="RUN",
            help="the run whose store has the recordings, if the file does not name one",
        )
        action.set_defaults(command="production", action=name)
        if name == "export":
            action.add_argument("--for", choices=("sft", "dpo", "rl"), required=True, dest="kind")
            action.add_argument(
                "target", type=Path, metavar="OUT", help="a .jsonl file; for rl a directory"
            )
            action.add_argument(
                "--min-score",
                type=float,
                default=0.5,
                help="least score of a session, for sft (default: %(default)s)",
            )
        if name == "delete":
            action.add_argument("--user", required=True, help="the user, as the product names them")
        if name == "purge":
            action.add_argument("targets", type=Path, nargs="+", metavar="EXPORT")


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="URL|MODEL|RUN",
        help="a server's URL; or a model or run, served for this chat",
    )
    parser.add_argument(
        "--version", type=int, help="version of a run's weights (default: the newest)"
    )
    parser.add_argument("--model", help="the model's name on the server")
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--temperature",
        type=float,
        help="0 is greedy (default: that of the model's generation_config.json if a directory is "
        f"given that has one, else {CHAT_TEMPERATURE})",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least_one,
        default=CHAT_MAX_TOKENS,
        help="maximum tokens of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of every answer (default: a new one each time)"
    )
