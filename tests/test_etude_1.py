"""The expert of examples/etude-1: its sessions match the harness, and contain nothing held out."""

from __future__ import annotations

import ast
import asyncio
import importlib
import random
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "examples" / "etude-1"
SHOP = b'''\
def cheapest(prices, limit=None):
    """The lowest price."""
    best = None
    for price in prices:
        if best is None or price < best:
            best = price
    if limit is not None and best > limit:
        return None
    return best
'''
FILES = {
    "shop/__init__.py": b"",
    "shop/cart.py": SHOP,
    "tests/test_cart.py": b"def test_cheapest():\n    assert cheapest([2, 1]) == 1\n",
}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("sessions")


def call_of(message: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    function = message["tool_calls"][0]["function"]
    return function["name"], ast.literal_eval(function["arguments"])


def calls_of(session: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [call_of(each) for each in session["messages"] if each["role"] == "assistant"]


def refused(session: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages whose calls were refused because their quote is ambiguous."""
    return [
        said
        for said, answer in pairwise(session["messages"])
        if answer["role"] == "tool" and "old stands in 2 places" in answer["content"]
    ]


def test_the_expert_reads_mends_and_submits(sessions: ModuleType) -> None:
    found = asyncio.run(sessions.sessions_of("shop", FILES, set(), 0))
    assert len(found) == sessions.PER_FUNCTION
    for session in found:
        names = [name for name, _ in calls_of(session)]
        assert names[-1] == "submit" and "read" in names and "edit" in names
        assert all(each["weight"] == 0 for each in refused(session))
        [prompt] = [each["content"] for each in session["messages"] if each["role"] == "user"]
        assert "tests/test_cart.py::test_cheapest" in prompt and "lines 1 to 9" in prompt


def test_a_change_that_mends_nothing_is_not_learnt(sessions: ModuleType) -> None:
    found = asyncio.run(sessions.sessions_of("shop", FILES, set(), 0))
    wrong = [each for session in found for each in session["messages"] if "weight" in each]
    assert wrong and all(each["weight"] == 0 for each in wrong)
    for session in found:  # each change is undone before the next
        names = [name for name, _ in calls_of(session) if name in ("edit", "undo")]
        told = refused(session)
        count = sum(each.get("weight") == 0 for each in session["messages"]) - len(told)
        assert names.count("undo") == count and names.count("edit") == 1 + count + len(told)
        assert names[-1] == "edit"


def test_a_line_that_stands_twice_is_quoted_with_those_before_it(sessions: ModuleType) -> None:
    """Immediately, or after the harness has refused the line alone; the refused edit is neither
    learnt nor undone."""
    found = asyncio.run(sessions.sessions_of("shop", FILES, set(), 0))
    told = 0
    for session in found:
        calls = [each for each in session["messages"] if each["role"] == "assistant"]
        for said in refused(session):
            told += 1
            (_, first), (name, second) = (call_of(calls[calls.index(said) + n]) for n in (0, 1))
            assert name == "edit" and second["old"].endswith("\n" + first["old"])
    assert told > 0


def test_functions_that_are_held_out_are_not_shown(sessions: ModuleType) -> None:
    other = SHOP.replace(b"The lowest price.", b"Something else.").replace(b"0", b"0  ")
    seen = {sessions.digest_of(source) for source in sessions.functions_in({"a.py": other})}
    assert asyncio.run(sessions.sessions_of("shop", FILES, seen, 0)) == []


def test_every_slip_changes_one_token_and_leaves_python(sessions: ModuleType) -> None:
    [bugs] = sessions.bugs_of("shop/cart.py", SHOP, random.Random(0), set())
    for bug in bugs:
        ast.parse(bug.after)
        assert bug.after != bug.before
        pairs = zip(bug.before.splitlines(), bug.after.splitlines(), strict=True)
        assert [n for n, (old, new) in enumerate(pairs, 1) if old != new] == [bug.line]


def test_the_corpus_has_each_file_once_and_none_that_is_held_out(sessions: ModuleType) -> None:
    corpus = importlib.import_module("corpus")
    files = {
        "cart.py": SHOP,
        "copy.py": SHOP + b"# the same\n",
        "broken.py": b"def broken(:\n",
        "empty.py": b"",
        "other.py": b"def other():\n    return 1\n",
    }
    assert list(corpus.once(corpus.documents(files, set()))) == [
        SHOP.decode(),
        files["other.py"].decode(),
    ]
    heldout = {sessions.digest_of(source) for source in sessions.functions_in({"a.py": SHOP})}
    assert list(corpus.documents(files, heldout)) == [files["other.py"].decode()]


def test_no_repository_is_on_two_sides_and_none_to_measure_with_is_learnt(
    sessions: ModuleType,
) -> None:
    listed = list(importlib.import_module("fetch").read_list(HERE / "repositories.txt"))
    assert len({line.package for line in listed}) == len(listed)
    learnt = {line.use: line.is_learnt for line in listed}
    assert learnt == {"heldout": False, "novel": False, "train": True, "sft": True}


def test_both_parts_have_the_same_tasks_and_harness() -> None:
    parts = [tomllib.loads((HERE / name).read_text()) for name in ("sft.toml", "rl.toml")]
    for part in parts:
        del part["name"], part["model"]["path"], part["stage"]
    assert parts[0] == parts[1]
