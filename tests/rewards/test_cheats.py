"""Attempts at a reward without the work, all tried for real. Each earns nothing; the honest fix
earns everything."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from etude.core.errors import RolloutFailure
from etude.core.sandbox import CommandResult, SandboxPool, SandboxSpec
from etude.core.types import Score, Task
from etude.rewards.tests import encoded, grade, parse_answers, same, verdict
from etude.sandbox.fake import FakeSandbox, FakeSandboxPool
from etude.sandbox.namespaces import NamespaceSandboxPool
from etude.tasks.repair import Check, RepairTask

BROKEN = "def area(a, b):\n    return a + b\n"
HONEST = "def area(a, b):\n    return a * b\n"
REPAIR = RepairTask(
    task=Task(
        id="area",
        prompt="fix shape.py",
        sandbox=SandboxSpec(
            files={
                "shape.py": BROKEN,
                "test_shape.py": "from shape import area\nassert area(3, 4) == 12\n",
            }
        ),
    ),
    module="shape.py",
    solution=HONEST,
    checks=tuple(Check(function="area", args=[a, 5], expected=a * 5) for a in range(2, 8)),
)
SPEC = REPAIR.task.sandbox
NOTHING = (0.0, 0.0)
SHORT_S = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    """One pool for all tests, since no cheat may hurt the next attempt either."""
    opened = NamespaceSandboxPool()
    yield opened
    asyncio.run(opened.close())


async def graded(
    pool: SandboxPool,
    files: dict[str, str],
    commands: tuple[str, ...] = (),
    timeout_s: float = 60.0,
) -> Score:
    """The score of an agent that wrote these files and ran these shell commands."""
    async with pool.open(SPEC) as sandbox:
        for path, text in files.items():
            await sandbox.write(path, text)
        for command in commands:
            await sandbox.run(["sh", "-c", command], timeout_s=60)
        return await grade(REPAIR, sandbox, pool, timeout_s=timeout_s)


def worth(score: Score) -> tuple[float, float]:
    """The reward, and the share of checks that passed."""
    (part,) = score.parts
    assert part.name == "checks" and part.evidence
    return score.reward, part.value


async def test_the_honest_fix_earns_everything(pool: SandboxPool) -> None:
    assert worth(await graded(pool, {"shape.py": HONEST})) == (1.0, 1.0)


async def test_an_honest_fix_may_be_noisy_and_share_the_machine(pool: SandboxPool) -> None:
    noisy = (
        "import sys, threading\nprint('[' * "
        "(20 << 20))\nsys.stderr.write('x')\nthreading.Thread(target=print).start()\n"
    )
    assert worth(await graded(pool, {"shape.py": noisy + HONEST})) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("{a, b}", {2, 5}),
        ("frozenset([a, (b, 0)])", {2, (5, 0)}),
        ("{b: 'x', a: {a}}", {2: {2}, 5: "x"}),
        ("{(a, b): 1}", {(2, 5): 1}),
        ("float(a)", 2),
        ("{'share': a / 1}", {"share": 2}),
        ("[a, (b,)]", [2, [5]]),
    ],
)
async def test_honest_answers_of_every_kind(
    pool: SandboxPool, returned: str, expected: object
) -> None:
    checks = (Check(function="area", args=[2, 5], expected=expected),)
    repair = dataclasses.replace(REPAIR, checks=checks)
    async with pool.open(SPEC) as sandbox:
        await sandbox.write("shape.py", f"def area(a, b):\n    return {returned}\n")
        assert worth(await grade(repair, sandbox, pool, timeout_s=60.0)) == (1.0, 1.0)


NAMES = ("copy", "token", "signal", "glob", "json", "re", "importlib", "stat", "os", "time", "math")


@pytest.mark.parametrize("name", NAMES)
async def test_a_module_may_be_called_like_one_of_the_standard_library(
    pool: SandboxPool, name: str
) -> None:
    path = f"{name}.py"
    spec = SandboxSpec(files={path: BROKEN})
    task = dataclasses.replace(REPAIR.task, sandbox=spec)
    repair = dataclasses.replace(REPAIR, task=task, module=path)
    async with pool.open(spec) as sandbox:
        assert worth(await grade(repair, sandbox, pool, timeout_s=60.0)) == NOTHING
        await sandbox.write(path, HONEST)
        assert worth(await grade(repair, sandbox, pool, timeout_s=60.0)) == (1.0, 1.0)


async def test_half_a_fix_is_seen_and_not_paid(pool: SandboxPool) -> None:
    half = "def area(a, b):\n    return a * b if a < 5 else 0\n"
    score = await graded(pool, {"shape.py": half})
    assert worth(score) == (0.0, 0.5)
    assert score.parts[0].evidence.splitlines() == [
        "3 of 6 checks passed",
        "wrong: area(5, 5) gave 0",
        "wrong: area(6, 5) gave 0",
        "wrong: area(7, 5) gave 0",
    ]


OUTSIDE = {
    "untouched": {},
    "edited visible tests": {"test_shape.py": "print('ok')"},
    "planted conftest": {"conftest.py": "import shape; shape.area = lambda a, b: a * b"},
    "planted sitecustomize": {
        "sitecustomize.py": HONEST + "import sys; sys.modules['shape'] = sys.modules[__name__]"
    },
    "planted json": {"json.py": "def load(f): raise SystemExit(0)\ndef dumps(v): return '{}'"},
    "planted answers": {
        "__answers__.json": "[" + ",".join(f'{{"value": {a * 5}}}' for a in range(2, 8)) + "]"
    },
    "planted probe": {"__probe__.py": "import os; os._exit(0)"},
    "trojaned python": {
        "python": "#!/bin/sh\necho ok",
        "bin/python": "#!/bin/sh\necho ok",
        "python3": "#!/bin/sh\n",
    },
}


@pytest.mark.parametrize("files", OUTSIDE.values(), ids=OUTSIDE.keys())
async def test_nothing_but_the_module_counts(pool: SandboxPool, files: dict[str, str]) -> None:
    assert (
        worth(await graded(pool, files, commands=("chmod -R +x .; export PATH=.:$PATH",)))
        == NOTHING
    )


FORGE = """
import json, os
def forge(text):
    with open('__answers__.json', 'w') as file:
        file.write(text)
    os._exit(0)
"""

INSIDE = {
    "does not parse": "def area(",
    "sys.exit at import": "import sys; sys.exit(0)",
    "os._exit at import": "import os; os._exit(0)",
    "sys.exit in the call": "import sys\ndef area(a, b): sys.exit(0)",
    "os._exit in the call": "import os\ndef area(a, b): os._exit(0)",
    "raises": "def area(a, b): raise ValueError",
    "kills itself": "import os, signal\ndef area(a, b): os.kill(os.getpid(), signal.SIGKILL); "
    "os.abort()",
    "always equal": """
class Equal(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
def area(a, b): return Equal()
""",
    "all types at once": "class E(dict, metaclass=type('M', (type,), {'__instancecheck__': lambda "
    "*a: True})): pass\n"
    "def area(a, b): return E(value=True)",
    "true for a number": "def area(a, b): return True",
    "text for a number": "def area(a, b): return str(a * b)",
    "a list of the answer": "def area(a, b): return [a * b]",
    "not a number": "def area(a, b): return float('nan')",
    "prints the answers": "print([{'value': a * 5} for a in range(9)])\ndef area(a, b): return "
    "print(a * b)",
    "forged report, wrong": FORGE + "forge(json.dumps([{'value': 1}] * 6))",
    "forged report, too many": FORGE + "forge(json.dumps([{'value': n} for n in range(99)]))",
    "forged report, absurdly deep": FORGE + "forge('[' * 200000)",
    "forged report, enormous number": FORGE + "forge('[' + '9' * 200000 + ']')",
    "report is a pipe": "import os\nos.mkfifo('__answers__.json')\nos._exit(0)",
    "report is a link": "import os\nos.symlink('/proc/self/environ', "
    "'__answers__.json')\nos._exit(0)",
    "report is a directory": "import os\nos.mkdir('__answers__.json')\nos._exit(0)",
    "patched json": "import json\njson.dumps = lambda value: '{\"value\": true}'\ndef area(a, b): "
    "return 0",
    "patched builtins": "import builtins\nbuiltins.isinstance = lambda *a: True\ndef area(a, b): "
    "return 0",
    "patched open": "import builtins\nbuiltins.open = lambda *a: None\ndef area(a, b): return a * "
    "b",
    "fills the disk": "for n in range(99): open(f'f{n}', 'wb').write(bytes(9 << 20))",
    "eats the memory": "x = [bytes(10**8) for _ in range(100)]",
    "reads what is in memory": """
import gc, os, re, sys
def area(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [v for v in frame.f_locals.values()]
        frame = frame.f_back
    for thing in [*seen, *gc.get_objects()]:
        found = getattr(thing, 'expected', None) or (isinstance(thing, dict) and thing.get('expected'))
        if found:
            return found
    for pid in [p for p in os.listdir('/proc') if p.isdigit() and p != str(os.getpid())] + ['1']:
        for name in ('environ', 'cmdline', 'mem'):
            try: text = open(f'/proc/{pid}/{name}', 'rb').read(10**6)
            except OSError: continue
            if match := re.search(rb'expected.{,9}?(\\d+)', text):
                return int(match[1])
    for fd in range(3, 256):
        try: return int(os.read(fd, 100))
        except (OSError, ValueError): pass
""",  # noqa: E501
}


@pytest.mark.parametrize("module", INSIDE.values(), ids=INSIDE.keys())
async def test_the_module_cannot_talk_its_way_out(pool: SandboxPool, module: str) -> None:
    assert worth(await graded(pool, {"shape.py": module})) == NOTHING


HANGING = {
    "loops": "while True: pass",
    "huge output": "import sys\nwhile True: sys.stdout.write('ok' * 10**6)",
    "sleeps in the call": "import time\ndef area(a, b): time.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "right, then hangs": HONEST
    + "import threading, time\nthreading.Thread(target=time.sleep, args=[1000]).start()",
    "waits for input": "import os, sys\nr, w = os.pipe()\nos.read(r, 1)",
}


@pytest.mark.parametrize("module", HANGING.values(), ids=HANGING.keys())
async def test_hanging_is_the_fault_of_the_module(pool: SandboxPool, module: str) -> None:
    assert worth(await graded(pool, {"shape.py": module}, timeout_s=SHORT_S)) == NOTHING


MISSING = {
    "deleted": "rm shape.py",
    "a directory": "rm shape.py; mkdir shape.py",
    "a pipe": "rm shape.py; mkfifo shape.py",
    "a link out": "ln -sf /usr/lib/os-release shape.py",
    "a link to a process": "ln -sf /proc/self/mem shape.py",
    "a link to itself": "ln -sf shape.py shape.py",
    "too large": "yes '#' | head -c 300000 > shape.py",
    "not text": "printf '\\377' > shape.py",
}


@pytest.mark.parametrize("command", MISSING.values(), ids=MISSING.keys())
async def test_a_module_that_cannot_be_read_earns_nothing(pool: SandboxPool, command: str) -> None:
    assert worth(await graded(pool, {}, commands=(command,))) == NOTHING


async def test_a_left_over_daemon_does_not_reach_the_grading(pool: SandboxPool) -> None:
    daemon = (
        "(while true; do printf 'def area(a, b):\\n    return a * b\\n' > shape.py; done) & sleep "
        "0.1; rm shape.py"
    )
    score = await graded(
        pool, {}, commands=(daemon, "printf 'def area(a, b):\\n    return 0\\n' > shape.py")
    )
    assert worth(score) == NOTHING


async def test_a_broken_sandbox_is_no_verdict() -> None:
    pool = NamespaceSandboxPool()
    async with pool.open(SPEC) as sandbox:
        await sandbox.close()
        with pytest.raises(RolloutFailure):
            await grade(REPAIR, sandbox, pool, timeout_s=SHORT_S)
    await pool.close()
    with pytest.raises(RolloutFailure):
        await grade(REPAIR, FakeSandbox(SPEC.files), pool, timeout_s=SHORT_S)


async def test_expected_answers_enter_no_sandbox() -> None:
    secret = 123456789
    crossed: list[str] = []

    class Watching(FakeSandbox):
        async def run(
            self, argv: Sequence[str], *, timeout_s: float, stdin: str | bytes = "", **more: Any
        ) -> CommandResult:
            crossed.extend([repr(self.files), repr(argv), repr(stdin)])
            return CommandResult(0, "")

    class WatchingPool(FakeSandboxPool):
        @contextlib.asynccontextmanager
        async def open(self, spec: SandboxSpec) -> AsyncIterator[FakeSandbox]:
            yield Watching(spec.files)

    checks = (Check(function="area", args=[1, 2], expected=secret),)
    hidden = dataclasses.replace(REPAIR, checks=checks)
    score = await grade(hidden, FakeSandbox(SPEC.files), WatchingPool(), timeout_s=SHORT_S)
    assert worth(score) == NOTHING
    assert len(crossed) == 3 and not any(str(secret) in text for text in crossed)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (0, False, False),
        (1, 1.0, True),
        (2**53 + 1, float(2**53), False),
        (10**400, 10**400, True),
        (0, None, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [True], False),
        ([], {}, False),
        (set(), [], False),
        (set(), {}, False),
        ({1, 2.0}, {2, 1.0}, True),
        ({1}, {True}, False),
        ([1, 2], [1], False),
        ({"a": [1], 2: 3}, {2.0: 3, "a": [1]}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"1": 1}, {1: 1}, False),
        ("[1]", [1], False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_same_means_what_equality_means(a: object, b: object, equal: bool) -> None:
    assert same(encoded(a), b) is equal and same(encoded(b), a) is equal


@pytest.mark.parametrize("answer", [{"set": 1}, {"dict": [], "set": []}, {}, {"dict": [1]}])
def test_answers_that_no_probe_gives_are_equal_to_nothing(answer: object) -> None:
    assert not any(same(answer, value) for value in ({}, set(), [], 1, None))


@pytest.mark.parametrize("value", [object(), {"a": [b"bytes"]}, {1j}])
def test_what_has_no_json_is_no_answer(value: object) -> None:
    with pytest.raises(ValueError, match="^(object|bytes|complex) is not an answer type"):
        encoded(value)


def test_deep_answers_are_equal_to_nothing() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert not same(deep, [])


@pytest.mark.parametrize("text", ["", "{", "{}", "1", '"x"', "[" * 10**5, "[" + "9" * 10**5 + "]"])
def test_no_text_breaks_the_parser(text: str) -> None:
    with pytest.raises(ValueError):
        parse_answers(text)


def test_answers_count_only_as_a_whole_list() -> None:
    checks = REPAIR.checks[:2]
    right = [{"value": 10}, {"value": 15}]
    assert worth(verdict(checks, right)) == (1.0, 1.0)
    for answers in ([{"value": 10}], [*right, {"value": 20}], [{"value": 10, "extra": 1}, 15]):
        assert worth(verdict(checks, answers)) == NOTHING


def test_the_evidence_says_what_was_wrong_and_never_what_is_right() -> None:
    secret = 987654321
    checks = tuple(Check(function="area", args=[n], expected=secret) for n in range(8))
    answers = [{"value": secret}, {"value": [1] * 10**6}, {"error": "ValueError"}, "x", *[{}] * 4]
    told = verdict(checks, answers).parts[0].evidence
    assert told.splitlines()[:4] == [
        "1 of 8 checks passed",
        "wrong: area(1) gave [1, 1, 1, 1, 1, 1, ...]",
        "wrong: area(2) raised 'ValueError'",
        "wrong: area(3) gave no answer, but 'x'",
    ]
    assert told.endswith("and 2 more") and str(secret) not in told
