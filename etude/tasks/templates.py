"""Templates of small Python functions. Each draw is a correct function with a docstring that
specifies it exactly.

A template is a function from a random generator to a `Function`. Training draws from the templates
in `TRAIN`. Those in `NOVEL` are never trained on, in any stage, and show how far a skill
generalizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

NAMES = (
    "area",
    "cost",
    "cut",
    "fee",
    "fit",
    "gain",
    "grade",
    "load",
    "mark",
    "part",
    "pay",
    "pick",
    "price",
    "rank",
    "rate",
    "score",
    "share",
    "size",
    "span",
    "step",
    "sum_up",
    "tally",
    "take",
    "total",
    "trim",
    "view",
)
OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
COMPARISONS = {
    ">": "above",
    "<": "below",
    ">=": "at least",
    "<=": "at most",
    "==": "equal to",
    "!=": "other than",
}
FOLDS = {
    "max": "the largest of",
    "min": "the smallest of",
    "sum": "the sum of",
    "len": "the number of",
}
CASES = {"upper": "in capitals", "lower": "in small letters"}

Inputs = Callable[[Random], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    template: str
    difficulty: str
    name: str
    parameters: tuple[str, ...]
    says: str
    """The docstring: a full specification."""
    body: tuple[str, ...]
    inputs: Inputs
    """Draws arguments that are worth testing with."""

    @property
    def source(self) -> str:
        lines = (
            f"def {self.name}({', '.join(self.parameters)}):",
            f'    """{self.says}"""',
            *(f"    {line}" for line in self.body),
        )
        return "\n".join(lines) + "\n"


def _numbers(count: int) -> Inputs:
    return lambda rng: [rng.randint(0, 12) for _ in range(count)]


def _list(rng: Random) -> list[Any]:
    return [[rng.randint(0, 12) for _ in range(rng.randint(4, 7))]]


def _text(rng: Random) -> list[Any]:
    return ["".join(rng.choice("abcdeABCDE") for _ in range(rng.randint(4, 7)))]


def _digit(rng: Random) -> int:
    return rng.randint(2, 9)


def scaled(rng: Random) -> Function:
    op, k = rng.choice("+-"), _digit(rng)
    left, right = rng.sample("ab", 2)
    if rng.random() < 0.5:
        says, line = (
            f"{left} {OPERATORS[op]} {k} times {right}",
            f"return {left} {op} {k} * {right}",
        )
    else:
        says, line = (
            f"{k} times {left} {OPERATORS[op]} {right}",
            f"return {k} * {left} {op} {right}",
        )
    return Function(
        template="scaled",
        difficulty="easy",
        name=rng.choice(NAMES),
        parameters=("a", "b"),
        says=says,
        body=(line,),
        inputs=_numbers(2),
    )


def shifted(rng: Random) -> Function:
    first, second, k = rng.choice("+-*"), rng.choice("+-"), _digit(rng)
    left, right = rng.sample("ab", 2)
    return Function(
        template="shifted",
        difficulty="easy",
        name=rng.choice(NAMES),
        parameters=("a", "b"),
        says=f"{left} {OPERATORS[first]} {right} {OPERATORS[second]} {k}",
        body=(f"return {left} {first} {right} {second} {k}",),
        inputs=_numbers(2),
    )


def folded(rng: Random) -> Function:
    first, second = rng.sample(sorted(FOLDS), 2)
    op, k = rng.choice("+-*"), _digit(rng)
    if rng.random() < 0.5:
        says, line = (
            f"{FOLDS[first]} xs {OPERATORS[op]} {FOLDS[second]} xs",
            f"return {first}(xs) {op} {second}(xs)",
        )
    else:
        says, line = f"{FOLDS[first]} xs {OPERATORS[op]} {k}", f"return {first}(xs) {op} {k}"
    return Function(
        template="folded",
        difficulty="easy",
        name=rng.choice(NAMES),
        parameters=("xs",),
        says=says,
        body=(line,),
        inputs=_list,
    )


def sliced(rng: Random) -> Function:
    k, fold = rng.randint(1, 3), rng.choice(sorted(FOLDS))
    part, says = rng.choice(
        [
            (f"xs[{k}:]", f"xs without the first {k}"),
            (f"xs[:{k}]", f"the first {k} of xs"),
            (f"xs[:-{k}]", f"xs without the last {k}"),
            (f"xs[-{k}:]", f"the last {k} of xs"),
        ]
    )
    op, j = rng.choice("+-*"), _digit(rng)
    return Function(
        template="sliced",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("xs",),
        says=f"{FOLDS[fold]} {says} {OPERATORS[op]} {j}",
        body=(f"part = {part}", f"return {fold}(part) {op} {j}"),
        inputs=_list,
    )


def clamped(rng: Random) -> Function:
    low, high = rng.randint(1, 4), rng.randint(6, 9)
    op, k = rng.choice("+-*"), _digit(rng)
    return Function(
        template="clamped",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("a",),
        says=f"a {OPERATORS[op]} {k} but at least {low} and at most {high}",
        body=(f"n = a {op} {k}", f"return max({low}, min(n, {high}))"),
        inputs=_numbers(1),
    )


def branched(rng: Random) -> Function:
    comparison, k, i, j = rng.choice(sorted(COMPARISONS)), _digit(rng), _digit(rng), _digit(rng)
    first, second = rng.choice("+-*"), rng.choice("+-*")
    return Function(
        template="branched",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("a",),
        says=f"a {OPERATORS[first]} {i} if a is {COMPARISONS[comparison]} {k} else a "
        f"{OPERATORS[second]} {j}",
        body=(f"if a {comparison} {k}:", f"    return a {first} {i}", f"return a {second} {j}"),
        inputs=_numbers(1),
    )


def looped(rng: Random) -> Function:
    comparison, k = rng.choice(sorted(COMPARISONS)), _digit(rng)
    says, start, line = rng.choice(
        [
            ("how many in xs are", 0, "n += 1"),
            ("the sum of those in xs that are", 0, "n += x"),
            ("the product of those in xs that are", 1, "n *= x"),
        ]
    )
    return Function(
        template="looped",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("xs",),
        says=f"{says} {COMPARISONS[comparison]} {k}",
        body=(
            f"n = {start}",
            "for x in xs:",
            f"    if x {comparison} {k}:",
            f"        {line}",
            "return n",
        ),
        inputs=_list,
    )


def listed(rng: Random) -> Function:
    comparison, k = rng.choice(sorted(COMPARISONS)), _digit(rng)
    op, j = rng.choice("+-*"), _digit(rng)
    return Function(
        template="listed",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("xs",),
        says=f"each in xs that is {COMPARISONS[comparison]} {k} {OPERATORS[op]} {j}",
        body=(f"return [x {op} {j} for x in xs if x {comparison} {k}]",),
        inputs=_list,
    )


def spelled(rng: Random) -> Function:
    case, k, j = rng.choice(sorted(CASES)), rng.randint(1, 3), rng.randint(2, 4)
    part, says = rng.choice(
        [(f"s[{k}:]", f"s without the first {k}"), (f"s[:{k}]", f"the first {k} of s")]
    )
    return Function(
        template="spelled",
        difficulty="medium",
        name=rng.choice(NAMES),
        parameters=("s",),
        says=f"{says} {CASES[case]} times {j}",
        body=(f"part = {part}", f"return part.{case}() * {j}"),
        inputs=_text,
    )


def chosen(rng: Random) -> Function:
    """Novel: a conditional expression, and two parameters compared with each other."""
    comparison, op, k = rng.choice(sorted(COMPARISONS)), rng.choice("+-*"), _digit(rng)
    left, right = rng.sample("ab", 2)
    return Function(
        template="chosen",
        difficulty="novel",
        name=rng.choice(NAMES),
        parameters=("a", "b"),
        says=f"{left} {OPERATORS[op]} {k} if a is {COMPARISONS[comparison]} b else {right}",
        body=(f"return {left} {op} {k} if a {comparison} b else {right}",),
        inputs=_numbers(2),
    )


def spread(rng: Random) -> Function:
    """Novel: two folds over two different parts of a list."""
    first, second = rng.choice(sorted(FOLDS)), rng.choice(sorted(FOLDS))
    op, k, j = rng.choice("+-*"), rng.randint(1, 3), rng.randint(1, 3)
    return Function(
        template="spread",
        difficulty="novel",
        name=rng.choice(NAMES),
        parameters=("xs",),
        says=f"{FOLDS[first]} the first {k} of xs {OPERATORS[op]} {FOLDS[second]} the last {j} of "
        f"xs",
        body=(f"head = {first}(xs[:{k}])", f"tail = {second}(xs[-{j}:])", f"return head {op} tail"),
        inputs=_list,
    )


def grown(rng: Random) -> Function:
    """Novel: a loop that keeps a running value and stops it at a limit."""
    op, k, j = rng.choice("+*"), rng.randint(2, 4), rng.randint(20, 60)
    return Function(
        template="grown",
        difficulty="novel",
        name=rng.choice(NAMES),
        parameters=("a",),
        says=f"a {OPERATORS[op]} {k} done {k} times but at most {j}",
        body=("n = a", f"for x in range({k}):", f"    n {op}= {k}", f"return min(n, {j})"),
        inputs=_numbers(1),
    )


Template = Callable[[Random], Function]
TRAIN: tuple[Template, ...] = (
    scaled,
    shifted,
    folded,
    sliced,
    clamped,
    branched,
    looped,
    listed,
    spelled,
)
NOVEL: tuple[Template, ...] = (chosen, spread, grown)
