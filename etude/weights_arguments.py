"""The arguments of `etude weights`."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.serving_arguments import at_least_one


def add_weights(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "convert a GGUF file to a Hugging Face directory"
    importing = actions.add_parser("import", help=text, description=text)
    importing.add_argument("file", type=Path, metavar="FILE.gguf")
    importing.add_argument(
        "dir", type=Path, metavar="DIR", help="a directory that does not exist yet"
    )
    importing.set_defaults(command="weights import", refuse=importing.error)
    for name, text in (
        ("log", "list the versions, their sizes and their readers"),
        ("show", "show a version: its routes, and what changed in it"),
        ("verify", "build every version by every route and check every tensor"),
        ("fetch", "download and check a version"),
        ("compact", "add routes that skip versions, for readers that fell behind"),
        ("gc", "delete objects that are no longer needed"),
        ("export", "export a version as a Hugging Face directory"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("url", metavar="RUN|URL", help="a run's directory, or its store's URL")
        action.set_defaults(command="weights", action=name, refuse=action.error)
        if name in ("show", "fetch", "export"):
            action.add_argument("--version", type=int, help="weight version (default: the newest)")
        if name == "fetch":
            action.add_argument(
                "--cache",
                type=Path,
                metavar="DIR",
                help="keep it in this cache for the workers of this host",
            )
        if name == "compact":
            _add_compact(action)
        if name == "gc":
            _add_gc(action)
        if name == "export":
            action.add_argument(
                "target", type=Path, metavar="DIR", help="a directory that does not exist yet"
            )
            action.add_argument(
                "--dtype",
                choices=("bf16", "fp8"),
                default="bf16",
                help="format of the weights (default: %(default)s)",
            )
            action.add_argument(
                "--adapter", action="store_true", help="only the LoRA adapter, in PEFT's format"
            )


def _add_compact(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--skip",
        type=at_least_one,
        default=8,
        help="versions that one route skips (default: %(default)s)",
    )
    action.add_argument(
        "--every",
        type=_seconds,
        metavar="S",
        help="keep running, and check again every S seconds",
    )


def _add_gc(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--keep",
        type=at_least_one,
        default=16,
        help="newest versions to keep (default: %(default)s)",
    )
    action.add_argument(
        "--grace",
        type=_seconds,
        default=3600.0,
        metavar="S",
        help="time an unused object is kept before it is deleted (default: %(default)s)",
    )


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return value
