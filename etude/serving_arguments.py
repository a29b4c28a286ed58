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
    parser.add_argument("--version", type=int, help="of a run's weights (default: the newest)")
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
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR|RUN",
        help="a LoRA adapter to the model; requests choose it as the model NAME",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token (default: ETUDE_TOKEN)"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=at_least_one,
        default=32,
        help="answers computed together (default: %(default)s)",
    )
    parser.add_argument(
        "--max-answers",
        type=at_least_one,
        default=256,
        help="under way at once (default: %(default)s)",
    )
    parser.add_argument(
        "--max-context",
        type=at_least_one,
        help="tokens of prompt and answer (default: the model's)",
    )
    parser.add_argument(
        "--default-max-tokens",
        type=at_least_one,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help="of an answer whose request gives no limit (default: %(default)s)",
    )
    _add_engine(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="no line for every request, no warnings"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="(default: the fastest that fits)"
    )
    parser.add_argument("--threads", type=at_least_one, help="processor threads of the engine")
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
    parser.add_argument(
        "--quantization",
        choices=("fp8",),
        help="multiply in FP8, half the bytes to read for a token (default: as stored)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="keep keys and values in FP8, half the bytes (default: auto, as computed)",
    )


def add_token(parser: argparse.ArgumentParser) -> None:
    scopes = ("session", "score", "user", "worker", "scheduler", "feedback", "admin")
    parser.add_argument("scope", choices=scopes, help="what it opens: docs/serve.md")
    parser.add_argument(
        "--subject", default="", metavar="NAME", help="whose it is; the id of a session for session"
    )
    parser.add_argument("--organisation", default="", metavar="NAME", help="that a user belongs to")
    parser.add_argument("--days", type=float, help="until it ends (default: 30, for a session 2)")


def add_gateway(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Workers are started apart, and join it: python -m etude.serve.worker --store RUN "
        "--region here --port 8101 --gateway http://127.0.0.1:8100 (docs/production.md)."
    )
    parser.add_argument("run", metavar="RUN", help="a run's directory, or its store's URL")
    parser.add_argument("--version", type=int, help="of the weights (default: the newest)")
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=8100, help="(default: %(default)s)")
    parser.add_argument(
        "--production",
        type=Path,
        metavar="FILE.toml",
        help="record users who consent, as this file says (docs/production.md)",
    )


def add_sandboxes(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "open sandboxes on this machine for runs on others ([sandbox] hosts)"
    serving = actions.add_parser("serve", help=text, description=text)
    serving.set_defaults(command="sandboxes serve", refuse=serving.error)
    serving.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    serving.add_argument("--port", type=int, default=8300, help="(default: %(default)s)")
    serving.add_argument(
        "--isolation",
        action="append",
        default=[],
        choices=("namespaces", "container", "gvisor", "vm", "process"),
        help="what is offered, the first by default (default: namespaces)",
    )
    serving.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="PATH[:PLACE]",
        help="a directory of this machine that every sandbox shows, read-only",
    )
    serving.add_argument(
        "--max-sandboxes",
        type=at_least_one,
        default=1000,
        metavar="N",
        help="open at once (default: %(default)s)",
    )
    serving.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="what requests must carry (default: $ETUDE_SANDBOX_TOKEN)",
    )


REALTIME_ACTIONS = ("status", "compare", "stop", "resume", "pin", "rollback")


def add_realtime(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="RUN.toml|ACTION",
        help="the file of a run with a table [realtime], to start it or go on; or, for a run that "
        "was started: status; compare (what all updates together have brought); stop (nothing is "
        "trained or deployed, users are served on); pin (likewise, with --version); rollback "
        "(users go back to the version before, then as stop); resume",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="for an action: which run")
    parser.add_argument("--version", type=int, help="for pin: the live version, or that before")
    parser.add_argument("--dir", metavar="DIR|URL", help="where the run lies")
    parser.add_argument("--once", action="store_true", help="end when one update has ended")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done next, and end"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file"
    )


def add_production(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, text in (
        ("status", "how much was recorded, and what was dropped"),
        ("export", "make training data of it"),
        ("delete", "delete all that is stored of a user, and prove it"),
        ("purge", "take users who were deleted out of exports"),
        ("sweep", "delete what is past its time, as the gateway does every hour"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("file", type=Path, metavar="FILE.toml", help="of production mode")
        action.add_argument("--run", metavar="RUN", help="whose store it is in, if not in the file")
        action.set_defaults(command="production", action=name)
        if name == "export":
            action.add_argument("--for", choices=("sft", "dpo", "rl"), required=True, dest="kind")
            action.add_argument(
                "target", type=Path, metavar="OUT", help="a .jsonl; for rl a directory"
            )
            action.add_argument(
                "--min-score",
                type=float,
                default=0.5,
                help="of sessions for sft (default: %(default)s)",
            )
        if name == "delete":
            action.add_argument("--user", required=True, help="as the product calls them")
        if name == "purge":
            action.add_argument("targets", type=Path, nargs="+", metavar="EXPORT")


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="URL|MODEL|RUN", help="a server; or a model or a run, served meanwhile"
    )
    parser.add_argument("--version", type=int, help="of a run's weights (default: the newest)")
    parser.add_argument("--model", help="the model's name at the server")
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--temperature",
        type=float,
        help=f"0 is greedy (default: that of the model's generation_config.json, if a directory "
        f"with one is given, or else {CHAT_TEMPERATURE})",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least_one,
        default=CHAT_MAX_TOKENS,
        help="an answer is cut after so many (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, help="of every answer (default: a new one for each)")
