"""The arguments of the commands that make tasks and images."""

from __future__ import annotations

import argparse
from pathlib import Path

from etude.serving_arguments import at_least_one


def add_tasks(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="tasks")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=text, description=text)
        made.add_argument("--json", action="store_true", help="end with one line of JSON")
        return made

    build = add("build", "make proven tasks from repositories; the same command goes on with it")
    build.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a git URL, a folder, an sdist, the name of a package, or a .jsonl of SWE-bench rows",
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR")
    build.add_argument(
        "--limit", type=at_least_one, help="tasks in DIR (default: 50 for each source)"
    )
    build.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="only these: token, bug, bugs, stub, removal, history, split (default: all)",
    )
    build.add_argument(
        "--heldout",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="more sources, for evaluation only: none of their tasks are trained on",
    )
    build.add_argument(
        "--novel",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="more sources for evaluation, to be kept for the final one (etude eval --split novel)",
    )
    check = add("check", "prove every task again: the solution passes, an empty change fails")
    check.add_argument("--repeat", type=at_least_one, default=5, help="so often (default: 5)")
    for each in (build, check):
        each.add_argument(
            "--jobs", type=at_least_one, help="sandboxes at once (default: the cores)"
        )
    for each in (check, add("stats", "count the tasks of a folder")):
        each.add_argument("dir", type=Path, metavar="DIR")
    show = add("show", "a task: what is asked for, the change that solves it, its tests")
    show.add_argument("dir", type=Path, metavar="DIR", help="of all tasks, or of one")
    show.add_argument("task", nargs="?", metavar="ID", help="(default: a list)")


def add_images(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="images")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "build an image; the same command goes on with one that broke off"),
        ("list", "the images of this machine"),
        ("show", "one image: its layers, and what is in them"),
        ("lint", "what gives its sandboxes away, and a score"),
        ("remove", "remove an image, and the layers that no other has"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--json", action="store_true", help="end with one line of JSON")
        action.add_argument(
            "--store",
            type=Path,
            metavar="DIR",
            help="where images lie (default: $ETUDE_IMAGES, or ~/.cache/etude/images)",
        )
        if name == "build":
            action.add_argument("spec", type=Path, metavar="SPEC.toml")
        elif name != "list":
            action.add_argument("name", metavar="IMAGE")
