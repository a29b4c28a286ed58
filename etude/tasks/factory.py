"""Repair tasks from templates: a module with one bug, tests that the agent can run, and hidden
checks that it cannot see.

The split of a program is decided by its content: the digest of a function, with its names removed,
assigns it to training or held-out. So no function of a held-out task occurs anywhere in training,
under any name.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from etude.core.sandbox import SandboxSpec
from etude.core.seeds import derive
from etude.core.types import Split, Task
from etude.tasks import bugs, templates
from etude.tasks.repair import Check, RepairTask
from etude.tasks.templates import Function

HELDOUT_SHARE = 5  # one function in this many

HARD_SHARE = 0.06  # share of the tasks with two functions
NUM_VISIBLE, NUM_HIDDEN = 4, 12
BUILTINS = frozenset(dir(builtins))

TEST = """\
from {module} import {functions}

CASES = {cases}

for function, args, expected in CASES:
    got = function(*args)
    if got != expected:
        print(f"{{function.__name__}}({{', '.join(map(repr, args))}}) is {{got!r}} not {{expected!r}}")
        raise SystemExit(1)
print("ok")
"""  # noqa: E501


def program_digest(source: str) -> str:
    """The identity of a program: its syntax tree without docstrings, with every name replaced by
    its order of first use."""
    tree = ast.parse(source)
    order: dict[str, str] = {}

    def anonymous(name: str) -> str:
        return name if name in BUILTINS else order.setdefault(name, f"v{len(order)}")

    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef():
                node.name = anonymous(node.name)
                node.body = [
                    s
                    for s in node.body
                    if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                ]
            case ast.arg():
                node.arg = anonymous(node.arg)
            case ast.Name():
                node.id = anonymous(node.id)
    return hashlib.blake2b(_dumped(tree).encode(), digest_size=8).hexdigest()


def _dumped(node: object) -> str:
    """The output of `ast.dump` in Python 3.11: later versions differ, and the held-out set must not
    depend on that."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    told = [
        f"{name}={_dumped(value)}"
        for name, value in ast.iter_fields(node)
        if name != "type_params" and (value is not None or (type(node), name) == _NONE)
    ]
    return f"{type(node).__name__}({', '.join(told)})"


_NONE = (ast.Constant, "value")
"""The one field in which None is a value, and not the lack of one."""


def split_of(function: Function) -> Split:
    if function.difficulty == "novel":
        return "novel"
    return "heldout" if int(program_digest(function.source), 16) % HELDOUT_SHARE == 0 else "train"


def functions(split: Split, rng: Random) -> Iterator[Function]:
    """An endless stream of correct functions of one split."""
    pool = templates.NOVEL if split == "novel" else templates.TRAIN
    while True:
        function = rng.choice(pool)(rng)
        if split_of(function) == split:
            yield function


def make_tasks(split: Split, count: int, seed: int) -> list[RepairTask]:
    """`count` different tasks. The same arguments yield the same tasks."""
    rng = Random(derive("tasks", split, seed))
    source = functions(split, rng)
    tasks: dict[str, RepairTask] = {}
    while len(tasks) < count:
        if (made := _make_task(source, rng, split)) is not None:
            tasks.setdefault(made.task.id, made)
    return list(tasks.values())


def _make_task(source: Iterator[Function], rng: Random, split: Split) -> RepairTask | None:
    """One task. None if the module with the bug gives the same answers as the correct one."""
    module = [next(source)]
    if split != "novel" and rng.random() < HARD_SHARE:
        module.append(next(f for f in source if f.name != module[0].name))
    correct = "\n".join(f.source for f in module)
    slip = bugs.random_mutation(correct, rng)
    broken = bugs.apply_mutation(correct, slip)
    cases = [(f.name, f.inputs(rng)) for _ in range(NUM_VISIBLE + NUM_HIDDEN) for f in module]
    right, wrong = answers(correct, cases), answers(broken, cases)
    visible = NUM_VISIBLE * len(module)
    if right[:visible] == wrong[:visible] or right[visible:] == wrong[visible:]:
        return None
    values = [json.loads(answer) for answer in right]
    shown = ", ".join(
        f"({name}, {args!r}, {answer!r})"
        for (name, args), answer in zip(cases[:visible], values, strict=False)
    )
    name = module[0].name
    path = f"{name}.py"
    test = TEST.format(module=name, functions=", ".join(f.name for f in module), cases=f"[{shown}]")
    digest = hashlib.blake2b((broken + "\0" + correct).encode(), digest_size=6).hexdigest()
    template = module[0].template if len(module) == 1 else "two functions"
    task = Task(
        id=f"{split}-{digest}",
        prompt=f"fix {path}",
        sandbox=SandboxSpec(files={path: broken, f"test_{path}": test}),
        meta={
            "module": path,
            "template": "+".join(f.template for f in module),
            "bug": slip.kind,
            "family": f"{template}: {slip.kind}",
            "difficulty": "hard" if len(module) > 1 else module[0].difficulty,
            "program": " ".join(program_digest(f.source) for f in module),
        },
    )
    checks = tuple(
        Check(function=f, args=args, expected=answer)
        for (f, args), answer in zip(cases[visible:], values[visible:], strict=True)
    )
    return RepairTask(task=task, module=path, solution=correct, checks=checks)


def answers(source: str, cases: Sequence[tuple[str, list[Any]]]) -> list[str]:
    """Answers of a module's functions, as JSON, or the name of the error that one raised. Only our
    own programs and their mutations run here, and none of them can loop for long; code that a model
    wrote never does."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    return [_answer(scope[name], args) for name, args in cases]


def _answer(function: Any, args: list[Any]) -> str:
    try:
        return json.dumps(function(*args))
    except (ArithmeticError, LookupError, NameError, TypeError, ValueError, AttributeError) as e:
        return type(e).__name__
