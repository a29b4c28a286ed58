"""Mutations: one token of a function's body becomes another of its kind.

The same list of substitutions serves to make a bug and, in reverse, to try repairs: a worker knows
which kinds of mistakes exist, but not where one is, nor which.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from random import Random

KINDS: dict[str, tuple[str, ...]] = {
    "operator": ("+", "-", "*"),
    "update": ("+=", "-=", "*="),
    "comparison": (">", "<", ">=", "<=", "==", "!="),
    "fold": ("max", "min", "sum", "len"),
    "case": ("upper", "lower"),
    "number": tuple("0123456789"),
    "name": ("a", "b"),
}
TOKEN = re.compile(r"[A-Za-z_]+|\d+|[+\-*]=|[<>=!]=|[<>+\-*]|\S")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one line: line `line` (counted from 1) becomes `text`."""

    kind: str
    line: int
    text: str


def mutations(source: str) -> list[Mutation]:
    """Every change of one token of the code to another of its kind, in the order of the text.
    Signatures and docstrings stay, since they specify the code."""
    found: list[Mutation] = []
    for number, line in enumerate(source.splitlines(), start=1):
        if line.startswith("def ") or line.lstrip().startswith('"""'):
            continue
        for match in TOKEN.finditer(line):
            token = match[0]
            for kind, tokens in KINDS.items():
                if token in tokens:
                    found += [
                        Mutation(kind, number, line[: match.start()] + other + line[match.end() :])
                        for other in tokens
                        if other != token
                    ]
    return found


def random_mutation(source: str, rng: Random) -> Mutation:
    """A random mutation; every kind that the code allows is equally likely. Results that are not
    valid Python are skipped."""
    offered = mutations(source)
    kinds = sorted({slip.kind for slip in offered})
    while True:
        kind = rng.choice(kinds)
        slip = rng.choice([slip for slip in offered if slip.kind == kind])
        if _parses(apply_mutation(source, slip)):
            return slip


def apply_mutation(source: str, slip: Mutation) -> str:
    lines = source.splitlines()
    lines[slip.line - 1] = slip.text
    return "\n".join(lines) + "\n"


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
