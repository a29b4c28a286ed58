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

    build = add("build", "make verified tasks from repositories; run it again to continue")
    build.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a git URL, a folder, an sdist, a package name, or a .jsonl of SWE-bench rows",
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR")
    build.add_argument(
        "--limit", type=at_least_one, help="limit of tasks in DIR (default: 50 per source)"
    )
    build.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="only these kinds: token, bug, bugs, stub, removal, history, split (default: all)",
    )
    build.add_argument(
        "--heldout",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="more sources, whose tasks are only used for evaluation",
    )
    build.add_argument(
        "--novel",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="the same, but kept for the final evaluation (etude eval --split novel)",
    )
    check = add("check", "verify every task again: its solution passes, an empty change fails")
    check.add_argument(
        "--repeat", type=at_least_one, default=5, help="repetitions for each task (default: 5)"
    )
    for each in (build, check):
        each.add_argument(
            "--jobs",
            type=at_least_one,
            help="sandboxes at the same time (default: the number of cores)",
        )
    for each in (check, add("stats", "count the tasks in a folder")):
        each.add_argument("dir", type=Path, metavar="DIR")
    show = add("show", "show a task: its prompt, its solution and its tests")
    show.add_argument("dir", type=Path, metavar="DIR", help="folder of all tasks, or of one")
    show.add_argument("task", nargs="?", metavar="ID", help="the task to show (default: list all)")


def add_images(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="images")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("build", "build an image; run it again to continue an interrupted build"),
        ("list", "list the images on this machine"),
        ("show", "show an image: its layers and their contents"),
        ("lint", "score how well an image hides that it is a sandbox, and list what gives it away"),
        ("remove", "remove an image, and layers that no other image uses"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--json", action="store_true", help="end with one line of JSON")
        action.add_argument(
            "--store",
            type=Path,
            metavar="DIR",
            help="directory of the images (default: $ETUDE_IMAGES, or ~/.cache/etude/images)",
        )
        if name == "build":
            action.add_argument("spec", type=Path, metavar="SPEC.toml")
        elif name != "list":
            action.add_argument("name", metavar="IMAGE")
