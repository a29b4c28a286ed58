"""The contamination probe: the texts that it asks for, those that it does not, and its result."""

from __future__ import annotations

from dataclasses import replace

from etude.core.contamination import Probe, count, find_probes
from etude.core.sandbox import SandboxSpec
from etude.core.types import Task

SOURCE = "".join(f"def function_{n}(value):\n    return value * {n * n + 7}\n\n" for n in range(20))
TESTS = "".join(f"def test_{n}():\n    assert total({n}) == {n * 31}\n" for n in range(20))
TASK = Task(
    id="t",
    prompt="mend the invoices",
    sandbox=SandboxSpec(
        files={
            "ledger/reconciliation.py": SOURCE,
            "ledger/invoices.py": "x = 1\n",
            "tests/test_totals.py": TESTS,
            "logo.png": b"\x89PNG",
        }
    ),
)


def test_names_tests_and_sources_are_asked_for() -> None:
    probes = find_probes(TASK, most=9)
    found = {(probe.kind, probe.prefix.splitlines()[-1][:20]) for probe in probes}
    assert ("path", "ledger/re") in found and ("path", "tests/te") in found
    assert {probe.kind for probe in probes} == {"path", "test", "source"}
    for probe in probes:
        assert probe.expected not in probe.prefix
        assert probe.prefix.startswith("mend the invoices")
    by_kind = {probe.kind: probe for probe in probes if probe.kind != "path"}
    assert by_kind["source"].expected in SOURCE and by_kind["test"].expected in TESTS


def test_what_can_be_guessed_or_was_told_is_not_asked_for() -> None:
    probes = find_probes(TASK, most=9)
    assert not any("invoices" in probe.expected for probe in probes), "the prompt says it"
    repeated = Task(
        id="t", prompt="go", sandbox=SandboxSpec(files={"a.py": "value = compute(total)\n" * 40})
    )
    assert find_probes(repeated, most=9) == [], "too short a name, and its text repeats itself"


def test_as_many_as_wanted_and_the_same_again() -> None:
    assert find_probes(TASK, most=2, seed=5) == find_probes(TASK, most=2, seed=5)
    assert len(find_probes(TASK, most=2)) == 2


def test_only_what_is_finished_letter_by_letter_counts() -> None:
    probes = [
        Probe(task=f"t{n}", kind="path", prefix="src/re", expected="gression.py") for n in range(3)
    ]
    said = ["gression.py\nsrc/", "gressions.py", "gression_py"]
    found = count(list(zip(probes, said, strict=True)))
    assert (found["path"].completed, found["path"].total) == (1, 3)
    assert found["path"].example is probes[0] and found.keys() == {"path"}
    low, high = found["path"].interval
    assert low < 1 / 3 < high


def test_the_order_in_which_files_are_listed_changes_nothing() -> None:
    backwards = dict(reversed(TASK.sandbox.files.items()))
    other = replace(TASK, sandbox=replace(TASK.sandbox, files=backwards))
    for most in (2, 9):
        assert find_probes(other, most=most, seed=5) == find_probes(TASK, most=most, seed=5)
