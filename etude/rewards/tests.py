"""Verdict on an attempt by hidden questions about a module.

Only the text of the module is taken from the agent's sandbox. It is put over the pristine files of
the task in a fresh sandbox, where a probe calls the module and writes down its answers. The
expected answers never enter any sandbox: they are compared on the host. The module shares a process
with the probe and can forge anything that the probe writes, but to forge the right answers it must
compute them, and that is the task.

Failures of the agent's code (it is missing, crashes, exits, hangs) earn 0. Failures on our side
raise.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import replace
from pathlib import PurePosixPath

from etude.core.sandbox import Sandbox, SandboxPool
from etude.core.types import Json, Part, Score
from etude.tasks.repair import Check, RepairTask

_PROBE, _ANSWERS = "__probe__.py", "__answers__.json"
_SHOWN = 5
"""Wrong answers that the evidence shows."""

_PROBE_TEXT = f"""\
import sys

beside, loaded = sys.path.pop(0), set(sys.modules)
import importlib, importlib.util, json
for name in set(sys.modules) - loaded:  # the module may be called like any of these
    del sys.modules[name]
sys.path.insert(0, beside)

def load(name):
    for each in [each for each in sys.modules if each.partition(".")[0] == name.partition(".")[0]]:
        del sys.modules[each]
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, f"{{beside}}/{{name}}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def encoded(value):
    if isinstance(value, dict):
        return {{"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}}
    if isinstance(value, (set, frozenset)):
        return {{"set": [encoded(item) for item in value]}}
    return [encoded(item) for item in value] if isinstance(value, (list, tuple)) else value

def ask(module, function, args):
    try:
        return json.dumps({{"value": encoded(getattr(module, function)(*args))}})
    except BaseException as e:
        return json.dumps({{"error": type(e).__name__}})

name, questions = json.load(sys.stdin)
module = load(name)
answers = [ask(module, function, args) for function, args in questions]
with open({_ANSWERS!r}, "w") as file:
    file.write("[" + ",".join(answers) + "]")
"""


async def grade(
    repair: RepairTask, sandbox: Sandbox, pool: SandboxPool, *, timeout_s: float
) -> Score:
    """The reward is 1.0 if every check is answered right, else 0.0. The part `checks` is the share
    of right answers, with the wrong ones as evidence."""
    assert repair.checks, f"task {repair.task.id} has no checks"
    try:
        edited = await sandbox.read(repair.module)
    except (FileNotFoundError, ValueError) as e:
        return _worthless(f"the module cannot be read: {e}")
    spec = repair.task.sandbox
    files = {**spec.files, repair.module: edited, _PROBE: _PROBE_TEXT}
    async with pool.open(replace(spec, files=files)) as fresh:
        questions = [[check.function, check.args] for check in repair.checks]
        stdin = json.dumps([module_name(repair.module), questions])
        ran = await fresh.run(["python", _PROBE], timeout_s=timeout_s, stdin=stdin)
        if ran.exit_code is None:
            return _worthless(f"the module did not end within {timeout_s:g} s")
        try:
            answers = parse_answers(await fresh.read(_ANSWERS))
        except (FileNotFoundError, ValueError) as e:
            said = ran.output.strip().splitlines() or [""]
            return _worthless(f"the module gave no answers ({e}); its last words: {said[-1][:200]}")
    return verdict(repair.checks, answers)


def module_name(path: str) -> str:
    """`shop/cart.py` -> `shop.cart`"""
    return ".".join(PurePosixPath(path).with_suffix("").parts)


def parse_answers(text: str) -> list[Json]:
    """The answers that the probe wrote. ValueError for anything but a JSON list: the graded code
    can write any text."""
    try:
        answers = json.loads(text)
    except RecursionError as e:
        raise ValueError("the answers are nested too deeply") from e
    if not isinstance(answers, list):
        raise ValueError("the answers are not a list")
    return answers


def verdict(checks: tuple[Check, ...], answers: list[Json]) -> Score:
    if len(answers) != len(checks):
        return _worthless(f"{len(answers)} answers to {len(checks)} questions")
    wrong = [
        (check, answer)
        for check, answer in zip(checks, answers, strict=True)
        if not (
            isinstance(answer, dict)
            and answer.keys() == {"value"}
            and same(answer["value"], check.expected)
        )
    ]
    right = len(checks) - len(wrong)
    evidence = [
        f"{right} of {len(checks)} checks passed",
        *(f"wrong: {_told(check, answer)}" for check, answer in wrong[:_SHOWN]),
        *([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []),
    ]
    return Score(float(not wrong), (Part("checks", right / len(checks), "\n".join(evidence)),))


def _told(check: Check, answer: Json) -> str:
    """The answer to a check. The expected one is left out, so that showing this to a model by
    mistake does not give it away."""
    call = f"{check.function}({', '.join(map(reprlib.repr, check.args))})"
    match answer:
        case {"value": value}:
            return f"{call} gave {reprlib.repr(value)}"
        case {"error": error}:
            return f"{call} raised {reprlib.repr(error)}"
    return f"{call} gave no answer, but {reprlib.repr(answer)}"


def _worthless(evidence: str) -> Score:
    return Score(0.0, (Part("checks", 0.0, evidence),))


def same(answer: Json, expected: object) -> bool:
    """True if equal by `==`, recursively, as in the tests that the agent sees: 2.0 is 2. But True
    is not 1, and a tuple counts as a list. `answer`: as the probe encodes it."""
    try:
        return _canonical(answer) == _canonical(encoded(expected))
    except (RecursionError, ValueError):
        return False


def encoded(value: object) -> Json:
    """A value as JSON that preserves sets and keys that are not text, which JSON cannot. The probe
    has a function like it."""
    match value:
        case dict():
            return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
        case set() | frozenset():
            return {"set": [encoded(item) for item in value]}
        case list() | tuple():
            return [encoded(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    raise ValueError(f"{type(value).__name__} is not an answer type")


def _canonical(value: Json) -> str:
    """A text that is the same for equal values. Hashes would not do: those of numbers can be made
    to collide, and comparing thousands of such values would take long."""
    match value:
        case bool() | None | str():
            return json.dumps(value)
        case int():
            return hex(value)
        case float():
            if value != value:
                raise ValueError("NaN is equal to nothing")
            return hex(int(value)) if value.is_integer() else repr(value)
        case list():
            return f"[{','.join(map(_canonical, value))}]"
        case {"set": list(items)} if len(value) == 1:
            return f"set({','.join(sorted(set(map(_canonical, items))))})"
        case {"dict": list(items)} if len(value) == 1:
            return f"dict({','.join(sorted(map(_canonical, items)))})"
    raise ValueError("not an answer of the probe")
