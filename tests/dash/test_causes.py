"""Causes of failed attempts, as far as they can be read within a time limit."""

from __future__ import annotations

import math
from dataclasses import replace

from etude.core.types import Part, Score
from etude.dash.recorded import RecordedRun, clusters, evidence_of, last_tool_error
from etude.store.runs import Run
from tests.dash.recorded_store import trajectory, write_run


def test_a_conversation_that_is_damaged_is_told_and_looked_at_once() -> None:
    run = Run.open("memory:")
    write_run(run)
    run.objects.put("groups/g000001", b"?")
    recorded = RecordedRun("x", run)
    recorded.refresh()
    rows = [row for row in recorded.table.rows if row.object]
    assert recorded.causes(rows, budget_s=-1.0) == {}, "there is no time for any"
    found = recorded.causes(rows, budget_s=math.inf)
    assert found["g000001.0"] == found["g000001.1"] == ("unreadable", "")
    assert found.keys() == {row.id for row in rows}
    assert recorded.causes(rows, budget_s=-1.0) == found, "what was read costs nothing"


def test_the_evidence_is_the_last_line_that_tells_of_an_error() -> None:
    solved, failed = Part("style", 1.0, "Error"), Part("tests", 0.0, "a\nAssertionError: x\nbye")
    t = replace(trajectory("g.0", 0.0), score=Score(0.0, parts=(solved, failed)))
    assert evidence_of(t) == "tests: AssertionError: x"
    ends = (
        "=== short test summary info ===\nFAILED t.py::test_x - ...\n1 failed, 2 warnings in 0.10s"
    )
    for raised, cause in (
        ("E   KeyError: 'a'", "KeyError: 'a'"),
        ("E   AssertionError: 1 != 2\nE     one error", "AssertionError"),
        ("E   a.b.MyError", "a.b.MyError"),
        ("", "FAILED t.py::test_x - ..."),
    ):
        pytest_says = Part("tests", 0.0, f"1 failed in 9s\n{raised}\n{ends}")
        of_pytest = replace(t, score=Score(0.0, parts=(pytest_says,)))
        assert evidence_of(of_pytest) == f"tests: {cause}"
    quiet = replace(t, score=Score(0.0, parts=(replace(failed, evidence="\nfirst\nlast\n"),)))
    assert evidence_of(quiet) == "tests: first"


def test_the_newest_error_of_a_tool() -> None:
    def said(*answers: tuple[str, str]) -> str:
        told = [{"role": role, "content": content} for role, content in answers]
        return last_tool_error(replace(trajectory("g.0", 0.0), messages=told))

    old, new = ("tool", "Traceback\nKeyError: 'a'"), ("tool", "No such file\nrun: not found")
    assert said(old, new, ("tool", "ok"), ("user", "an error")) == "run: not found"
    assert said(new, old) == "KeyError: 'a'"
    assert said(("tool", "ok"), ("assistant", "error")) == ""
    assert said(old, ("tool", "   7\traise ValueError\n   8\tfail()")) == "KeyError: 'a'", "a file"
    assert said(("tool", "F\n1 failed in 2.5s\nexit code 1")) == "… failed in …s"


def test_the_same_causes_stand_together_the_largest_first() -> None:
    found = clusters([("a", ""), ("b", "x"), ("b", "x"), ("b", "y")], most=2)
    assert found == [
        {"evidence": "b", "tool": "x", "count": 2},
        {"evidence": "a", "tool": "", "count": 1},
    ]
