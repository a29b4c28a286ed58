"""Sessions for imitation of an expert that knows the bug: it reads a function, fixes the changed
token, runs the test and submits.

    python sessions.py repositories.txt --sdists data/sdists --model data/model --out data/sessions

Functions come from source distributions. Tokens in them are changed as by
`etude.factory.mutations`.

The expert sees the same texts as an agent in the harness: the prompt is that of
`etude.factory.instruct`, and `read`, `edit` and `undo` are the harness's own tools, over a working
copy in memory. Only the output of test runs is made up, from the source of a test that names the
function: nothing is executed here. In half of the sessions the expert first changes other lines,
one after the other, sees the test fail and undoes each change. The model reads such a change but
does not learn it (`weight` 0). The same holds for an edit that quotes an ambiguous line; the expert
repeats it with the lines before. Sessions are written with their tokens, so that the trainer does
not need to tokenize them.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import io
import itertools
import json
import keyword
import multiprocessing
import random
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fetch import Line, read_list

from etude.commands.run_file import read_run_file
from etude.core.sandbox import CommandResult
from etude.core.types import Task
from etude.factory.instruct import instruct
from etude.factory.recipe import find_layout
from etude.factory.sources import fetch, name_of
from etude.factory.task import is_test_file
from etude.harness.code.agent import CodeAgent
from etude.model.tokenizer import ChatTokenizer
from etude.sandbox.fake import FakeSandbox
from etude.sandbox.files import to_bytes
from etude.trainer import data

HERE = Path(__file__).parent
LONGEST = 40
PER_FUNCTION = 8
PER_REPOSITORY = 400


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    """Qualified name."""
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Bug:
    """A function with one changed token."""

    path: str
    function: Function
    line: int
    before: str
    """The contents of the original file."""
    after: str


@dataclass(frozen=True, slots=True)
class Test:
    """A test that could detect the bug."""

    name: str
    """The test id of pytest."""
    line: int
    source: str


def functions_of(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[Function]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            yield Function(prefix + node.name, node.lineno, node.end_lineno)


def bugs_of(path: str, content: bytes, rng: random.Random, seen: set[str]) -> Iterator[list[Bug]]:
    """Possible bugs of each function in a file, except functions that were seen elsewhere."""
    try:
        before = content.decode()
        tree = ast.parse(before)
        tokens = list(tokenize.generate_tokens(io.StringIO(before).readline))
    except (SyntaxError, ValueError, tokenize.TokenError, RecursionError):
        return
    lines = before.splitlines(keepends=True)
    if "\r" in before or len(lines) != len(before.splitlines()) or "\f" in before:
        return
    places = {each.start: number for number, each in enumerate(tokens)}
    untouched = list(annotations_of(tree))
    for function in functions_of(tree):
        if not 3 <= function.last - function.first + 1 <= LONGEST:
            continue
        digest = digest_of("".join(lines[function.first - 1 : function.last]))
        if digest in seen:
            continue
        seen.add(digest)
        own = [
            n
            for place, n in places.items()
            if function.first <= place[0] <= function.last
            and not any(start <= place < end for start, end in untouched)
        ]
        slips = [(kind, n, text) for n in own for kind, text in slips_of(tokens, n)]
        made = (
            Bug(path, function, tokens[n].start[0], before, with_token(lines, tokens[n], text))
            for n, text in in_turn(slips, rng)
        )
        usable = (bug for bug in made if parses(bug.after, function))
        if bugs := list(itertools.islice(usable, PER_FUNCTION)):
            yield bugs


def annotations_of(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """The start and end of each annotation: no test could detect a mistake in them."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            each = getattr(node, name, None)
            if isinstance(each, ast.expr):
                end = each.end_lineno or each.lineno, each.end_col_offset or each.col_offset
                yield (each.lineno, each.col_offset), end


def in_turn(slips: list[tuple[str, int, str]], rng: random.Random) -> Iterator[tuple[int, str]]:
    """Cycle through the kinds, taking one of each, like the factory."""
    rng.shuffle(slips)
    kinds: dict[str, list[tuple[int, str]]] = {}
    for kind, number, text in slips:
        kinds.setdefault(kind, []).append((number, text))
    rounds = itertools.zip_longest(*kinds.values())
    return (each for some in rounds for each in some if each is not None)


def with_token(lines: list[str], token: tokenize.TokenInfo, text: str) -> str:
    """The file with a token replaced by `text`. If `text` is empty, the spaces after the token are
    removed too."""
    row, column = token.start
    line = lines[row - 1]
    rest = line[token.end[1] :]
    changed = line[:column] + (text + rest if text else rest.lstrip(" "))
    return "".join([*lines[: row - 1], changed, *lines[row:]])


def parses(text: str, function: Function) -> bool:
    source = textwrap.dedent("\n".join(text.splitlines()[function.first - 1 : function.last]))
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


SLIPS: dict[str, dict[str, tuple[str, ...]]] = {
    "comparison": {
        "<": ("<=",), "<=": ("<",), ">": (">=",), ">=": (">",), "==": ("!=",), "!=": ("==",),
    },
    "arithmetic": {
        "+": ("-",), "-": ("+",), "*": ("+",), "/": ("//",), "//": ("/",), "%": ("//",),
        "&": ("|",), "|": ("&",), "<<": (">>",), ">>": ("<<",), "**": ("*",),
    },
    "update": {
        "+=": ("-=", "="), "-=": ("+=", "="), "*=": ("+=", "="), "|=": ("&=", "="),
        "&=": ("|=", "="), "/=": ("=",), "//=": ("=",), "%=": ("=",),
    },
    "boolean": {"and": ("or",), "or": ("and",)},
    "constant": {"True": ("False",), "False": ("True",)},
    "jump": {"break": ("continue",), "continue": ("break",)},
}  # fmt: skip
"""The mutations of `etude.factory.mutations` that change one token, as texts."""


def slips_of(tokens: list[tokenize.TokenInfo], number: int) -> Iterator[tuple[str, str]]:
    """Possible wrong replacements of a token: the kind of mistake, and the text."""
    token, before = tokens[number], tokens[number - 1]
    text = token.string
    behind = tokens[number + 1].string if number + 1 < len(tokens) else ""
    is_number = token.type == tokenize.NUMBER and text.isdecimal() and str(int(text)) == text
    if not is_number and token.type not in (tokenize.NAME, tokenize.OP):
        return  # only these lie within a line
    if is_number:
        yield from (("constant", str(each)) for each in (int(text) + 1, int(text) - 1) if each >= 0)
    if (before.string, behind[:1]) == ("[", ":") or (before.string, behind) == (":", "]"):
        yield "bounds", ""
    if before.string == "return" and behind in ("\n", "") and text != "None":
        yield "result", "None"
    for kind, texts in SLIPS.items():
        if text in texts and (kind != "arithmetic" or ends_a_value(before)):
            yield from ((kind, each) for each in texts[text])
    match text:
        case "in" if before.string != "not":
            yield "comparison", "not in"
        case "is" if behind != "not":
            yield "comparison", "is not"
        case "not":
            yield "comparison" if before.string == "is" or behind == "in" else "condition", ""
        case "if" | "elif" if behind != "not":
            yield "condition", f"{text} not"
        case "None" if before.string == "=" and behind in (",", ")"):
            yield "default", "0"


def ends_a_value(token: tokenize.TokenInfo) -> bool:
    """True if an operator after the token is binary."""
    if token.type == tokenize.NAME:
        return not keyword.iskeyword(token.string)
    return token.type == tokenize.NUMBER or token.string in (")", "]", "}")


def digest_of(source: str) -> str:
    """A digest that is the same for functions which differ only in layout and docstrings."""
    try:
        tree = ast.parse(re.sub(r"^", " ", source, flags=re.M).join(["if 1:\n", "\n"]))
    except (SyntaxError, ValueError):
        return hashlib.blake2b("".join(source.split()).encode()).hexdigest()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.blake2b(ast.dump(tree).encode()).hexdigest()


def tests_of(files: Mapping[str, bytes], paths: tuple[str, ...]) -> list[Test]:
    found: list[Test] = []
    for path in paths:
        try:
            text = files[path].decode()
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for top in tree.body:
            inner = top.body if isinstance(top, ast.ClassDef) else [top]
            prefix = f"{top.name}::" if isinstance(top, ast.ClassDef) else ""
            for node in inner:
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                    source = ast.get_source_segment(text, node) or ""
                    found.append(Test(f"{path}::{prefix}{node.name}", node.lineno, source))
    return found


class Runner:
    """Made-up output of pytest. A test passes if the file has its original contents."""

    def __init__(self, bug: Bug, test: Test, rng: random.Random) -> None:
        self._bug = bug
        self._test = test
        self._rng = rng

    def __call__(self, files: dict[str, Any], argv: Any) -> CommandResult:
        if "pytest" not in argv:
            return CommandResult(exit_code=0, output="")
        took = f"{self._rng.randint(1, 40) / 100:.2f}s"
        if to_bytes(files[self._bug.path]) == self._bug.before.encode():
            dots = self._rng.choice((1, 1, 1, 1, 2, 3, 6))
            passed = "." * dots
            return CommandResult(exit_code=0, output=f"{passed}\n{dots} passed in {took}\n")
        return CommandResult(exit_code=1, output=self._failure(took))

    def _failure(self, took: str) -> str:
        test, rng = self._test, self._rng
        lines = test.source.splitlines()
        asserts = [n for n, line in enumerate(lines) if "assert" in line] or [len(lines) - 1]
        at = rng.choice(asserts)
        name = test.name.partition("::")[2].replace("::", ".")
        path = test.name.partition("::")[0]
        where = f"{path}:{test.line + at}: in {name.rpartition('.')[2]}\n    {lines[at].strip()}\n"
        error = rng.choice(("assert False", "AssertionError", "AssertionError: not equal"))
        bug = self._bug
        if rng.random() < 0.4:
            short = bug.function.name.rpartition(".")[2]
            where += f"{bug.path}:{bug.line}: in {short}\n"
            where += f"    {bug.after.splitlines()[bug.line - 1].strip()}\n"
            error = rng.choice(("TypeError", "ValueError", "IndexError: list index out of range"))
        return (
            f"F\n{' FAILURES ':=^80}\n{f' {name} ':_^80}\n{where}E   {error}\n"
            f"{' short test summary info ':=^80}\nFAILED {test.name} - {error}\n"
            f"{' stopping after 1 failures ':!^80}\n1 failed in {took}\n"
        )


class Expert:
    """One session of the expert with the tools of the harness."""

    def __init__(self, agent: CodeAgent, bug: Bug, test: Test, rng: random.Random) -> None:
        self._agent = agent
        self._bug = bug
        self._test = test
        self._rng = rng
        self._messages: list[dict[str, Any]] = []

    async def run(self, wrong: list[tuple[int, str]]) -> dict[str, Any]:
        """Run the session. `wrong` are changes to try first, each a line number and its new
        text."""
        bug = self._bug
        sandbox = FakeSandbox({bug.path: bug.after}, Runner(bug, self._test, self._rng))
        first, last = bug.function.first, bug.function.last
        facts = {"functions": f"{bug.path}:{bug.function.name}", "lines": f"{first} to {last}"}
        id = str(self._rng.random())
        prompt = instruct(id, "token", facts, (self._test.name,), "", "").strip() + "\n"
        opening = await self._agent.open(Task(id=id, prompt=prompt), sandbox, 0)
        self._messages, self._tools = list(opening.messages), opening.tools
        self._sandbox = sandbox
        if self._rng.random() < 0.2:
            await self._call("run_tests", tests=[self._test.name])
        await self._call("read", path=bug.path, start=first, end=last)
        for line, text in wrong:
            await self._put(line, text, weight=0)
            await self._call("run_tests", tests=[self._test.name])
            await self._call("undo")
        await self._put(bug.line, bug.before.splitlines()[bug.line - 1])
        if self._rng.random() < 0.95:
            await self._call("run_tests", tests=[self._test.name])
        await self._call("submit")
        assert await sandbox.read(bug.path) == bug.before
        return {"messages": self._messages, "tools": self._tools.schemas}

    async def _put(self, line: int, text: str, weight: int = 1) -> None:
        """Replace a line. The edit quotes it with as many of the preceding lines as make the quote
        unique in the function, which is the part of the file that was read."""
        lines = (await self._sandbox.read(self._bug.path)).splitlines()
        first, last = self._bug.function.first - 1, self._bug.function.last
        read = "\n".join(lines[first:last])
        start = line - 1
        is_told = self._rng.random() < 0.5  # that it is ambiguous
        while read.count("\n".join(lines[start:line])) > 1 and start > first:
            start -= 1
        path, old = self._bug.path, "\n".join(lines[start:line])
        new = "\n".join([*lines[start : line - 1], text])
        if is_told and start < line - 1:
            await self._call("edit", 0, refused=True, path=path, old=lines[line - 1], new=text)
        await self._call("edit", weight, path=path, old=old, new=new)

    async def _call(
        self, name: str, weight: int = 1, *, refused: bool = False, **arguments: Any
    ) -> None:
        id = f"call_{len(self._messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": id, "type": "function", "function": function}
        said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        self._messages.append(said if weight else said | {"weight": 0})
        answer = await self._tools.call(name, arguments)
        if name != "submit":
            self._messages.append({"role": "tool", "tool_call_id": id, "content": answer})
        if answer.startswith("error") != refused:
            raise ValueError(answer)


async def sessions_of(
    name: str, files: Mapping[str, bytes], seen: set[str], seed: int
) -> list[dict[str, Any]]:
    """The sessions over functions of a repository."""
    config = read_run_file(HERE / "rl.toml")
    assert config.harness.code is not None
    limits = {"max_turns": 1, "max_tokens": 1, "timeout_s": 1.0}
    agent = CodeAgent(None, code=config.harness.code, **limits)  # type: ignore[arg-type]
    layout = find_layout(files)
    if layout is None:
        return []
    rng = random.Random(f"{seed} {name}")
    tests = tests_of(files, layout[2])
    own = [
        path
        for path in sorted(files)
        if path.endswith(".py")
        and not is_test_file(path)
        and any(fnmatchcase(path, each) for each in layout[1])
    ]
    functions = [bugs for path in own for bugs in bugs_of(path, files[path], rng, seen)]
    rng.shuffle(functions)
    found: list[dict[str, Any]] = []
    for turn in range(PER_FUNCTION):
        for bugs in functions:
            if turn >= len(bugs) or len(found) >= PER_REPOSITORY or not tests:
                continue
            bug = bugs[turn]
            test = rng.choice(naming(tests, bug.function.name) or tests)
            try:
                session = await Expert(agent, bug, test, rng).run(wrong_edits(bugs, bug, rng))
            except (ValueError, AssertionError):  # an ambiguous quote, for example
                continue
            found.append(session)
    return found


def naming(tests: list[Test], function: str) -> list[Test]:
    """The tests that mention a function."""
    short = re.escape(function.rpartition(".")[2].strip("_")) or "."
    return [test for test in tests if re.search(rf"\b{short}\b", test.source)]


def wrong_edits(bugs: list[Bug], bug: Bug, rng: random.Random) -> list[tuple[int, str]]:
    """Up to three changes of the same function that do not fix the bug."""
    others = [each for each in bugs if each.line != bug.line]
    count = rng.choice((0, 0, 0, 1, 2, 3))
    chosen = {each.line: each for each in rng.sample(others, min(count, len(others)))}
    return [(line, each.after.splitlines()[line - 1]) for line, each in chosen.items()]


def functions_in(files: Mapping[str, bytes]) -> Iterator[str]:
    """The source of every function."""
    for path, content in files.items():
        if not path.endswith(".py"):
            continue
        try:
            text = content.decode()
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def heldout_functions(listed: list[Line], sdists: Path) -> set[str]:
    """Digests of the functions that must not be learnt."""
    heldout = [sdists / line.filename for line in listed if not line.is_learnt]
    files = (fetch(str(sdist), sdists).files for sdist in heldout)
    return {digest_of(source) for each in files for source in functions_in(each)}


def write(job: tuple[Path, Path, Path, set[str], int]) -> tuple[str, int]:
    """Write the sessions of a repository to a file. An existing file is complete."""
    sdist, model, out, seen, seed = job
    place = out / f"{name_of(str(sdist))}.jsonl"
    if not place.exists():
        files = fetch(str(sdist), out).files
        found = asyncio.run(sessions_of(place.stem, files, set(seen), seed))
        tokenizer = ChatTokenizer({each.name: each.read_bytes() for each in model.glob("*.j*")})
        half = place.with_suffix(".part")
        with half.open("w") as file:
            for session in found:
                [(tokens, mask)] = data.tokenize(session["messages"], tokenizer, session["tools"])
                told = {"vocabulary": tokenizer.vocabulary, "tokens": tokens, "mask": mask}
                file.write(json.dumps(session | told) + "\n")
        half.rename(place)
    return place.stem, sum(1 for _ in place.open())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("--sdists", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="whose tokens they are")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    listed = list(read_list(args.list))
    seen = heldout_functions(listed, args.sdists)
    learnt = [args.sdists / line.filename for line in listed if line.is_learnt]
    jobs = [(sdist, args.model, args.out, seen, args.seed) for sdist in learnt]
    total = 0
    with multiprocessing.Pool(args.jobs) as pool:
        for name, count in pool.imap_unordered(write, jobs):
            total += count
            print(f"{name}: {count}", flush=True)
    print(f"{total} sessions over functions of {len(jobs)} repositories", flush=True)


if __name__ == "__main__":
    main()
