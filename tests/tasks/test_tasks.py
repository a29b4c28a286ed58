"""Every task has a visible bug and an answer that passes, and held-out programs occur nowhere in
training."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import islice
from random import Random

import msgspec
import pytest

from etude.tasks import bugs
from etude.tasks.corpus import documents
from etude.tasks.demos import MAX_TRIES, demonstrations, visible_report
from etude.tasks.factory import answers, functions, make_tasks, program_digest
from etude.tasks.templates import NOVEL, TRAIN

SPLITS = ("train", "heldout", "novel")


def programs(split: str) -> set[str]:
    tasks = make_tasks(split, 400 if split != "train" else 800, seed=0)  # type: ignore[arg-type]
    return {digest for made in tasks for digest in made.task.meta["program"].split()}


@pytest.mark.parametrize("split", SPLITS)
def test_the_bug_shows_and_the_solution_passes(split: str) -> None:
    for task in make_tasks(split, 60, seed=3):  # type: ignore[arg-type]
        broken, solution = task.broken, task.solution
        cases = [(check.function, check.args) for check in task.checks]
        expected = [json.dumps(check.expected) for check in task.checks]
        assert answers(solution, cases) == expected != answers(broken, cases)
        assert visible_report(task, solution) == "ok" != visible_report(task, broken)
        wrong = [
            line
            for line, other in zip(broken.splitlines(), solution.splitlines(), strict=True)
            if line != other
        ]
        assert len(wrong) == 1


def test_tasks_are_different_and_repeat_from_their_seed() -> None:
    tasks = make_tasks("train", 300, seed=1)
    assert len({made.task.id for made in tasks}) == 300
    assert tasks == make_tasks("train", 300, seed=1)
    assert tasks != make_tasks("train", 300, seed=2)
    assert len({made.task.meta["bug"] for made in tasks}) >= 5
    assert {made.task.meta["difficulty"] for made in tasks} == {"easy", "medium", "hard"}


def test_held_out_programs_occur_nowhere_in_training() -> None:
    train, heldout, novel = (programs(split) for split in SPLITS)
    assert not heldout & train and not novel & train and not novel & heldout
    # The text of mid-training and the demonstrations are drawn from the same split.
    stream = functions("train", Random(5))
    assert not heldout & {program_digest(function.source) for function in islice(stream, 2000)}


def test_renaming_makes_no_new_program() -> None:
    one = 'def area(a, b):\n    """a plus b"""\n    return a + b\n'
    other = 'def cost(x, y):\n    """the sum"""\n    return x + y\n'
    swapped = "def area(a, b):\n    return b + a\n"
    assert program_digest(one) == program_digest(other) != program_digest(swapped)
    assert program_digest("def f(xs):\n    return max(xs)\n") != program_digest(
        "def f(xs):\n    return min(xs)\n"
    )


@pytest.mark.parametrize("template", TRAIN + NOVEL, ids=lambda template: template.__name__)
def test_every_template_makes_functions_that_run(template: object) -> None:
    rng = Random(0)
    for _ in range(30):
        function = template(rng)  # type: ignore[operator]
        [answer] = answers(function.source, [(function.name, function.inputs(rng))])
        json.loads(answer)  # an error would be a bare name
        assert function.source.count('"""') == 2
        assert bugs.mutations(function.source)


def test_slips_stay_out_of_what_says_how_it_should_be() -> None:
    source = 'def area(a, b):\n    """a plus 3 times b"""\n    return a + 3 * b\n'
    assert {slip.line for slip in bugs.mutations(source)} == {3}
    assert {slip.kind for slip in bugs.mutations(source)} == {"operator", "number", "name"}
    for slip in bugs.mutations(source):
        assert bugs.apply_mutation(source, slip) != source


def test_demonstrations_end_solved_and_use_the_tools() -> None:
    tasks = make_tasks("train", 100, seed=0)
    sessions = demonstrations(tasks, 20, seed=0)
    assert sessions == demonstrations(tasks, 20, seed=0)
    for session in sessions:
        assert session[0]["content"].startswith("fix ") and session[-1]["role"] == "assistant"
        calls = [
            call["function"]["name"]
            for message in session
            for call in message.get("tool_calls", [])
        ]
        assert (
            calls[0] == "read" and calls[-1] == "submit" and 1 <= calls.count("test") <= MAX_TRIES
        )
        assert session[-2]["content"] == "ok"


def test_documents_are_correct_modules() -> None:
    texts = documents(50, seed=0)
    assert texts == documents(50, seed=0)
    assert {text.startswith("1 def ") for text in texts} == {True}


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("[n, 'ü']", '[3, "\\u00fc"]'),
        ("n / 0", "ZeroDivisionError"),
        ("[][n]", "IndexError"),
        ("{}[n]", "KeyError"),
        ("missing", "NameError"),
        ("n + 'a'", "TypeError"),
        ("int('a')", "ValueError"),
        ("n.missing", "AttributeError"),
    ],
)
def test_what_a_slip_answers_is_a_value_or_the_name_of_an_error(
    expression: str, answer: str
) -> None:
    source = f"def f(n):\n    return {expression}\n"
    assert answers(source, [("f", [3])]) == [answer]


def test_the_tasks_of_a_seed_are_the_same_in_every_version() -> None:
    """So that runs can be compared, and a run that continues is evaluated on the same tasks as
    before. A change of a template changes these numbers deliberately."""

    def digest(made: object) -> str:
        """Digest of all fields but two later ones: one is empty in every task, the other follows
        from the rest."""
        text = json.dumps(msgspec.to_builtins(made)).replace('"workdir": "", ', "")
        text = re.sub(r'"family": "[a-z: ]+", ', "", text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    tasks = {split: make_tasks(split, 150, seed=0) for split in SPLITS}  # type: ignore[arg-type]
    assert {split: digest(made) for split, made in tasks.items()} == {
        "train": "3702019d13db0a79",
        "heldout": "f8d847b812aabbd1",
        "novel": "ea6cb8323a8fed5e",
    }
    assert digest(demonstrations(tasks["train"], 100, seed=0)) == "5adea59cef373ae8"
    assert digest(documents(150, seed=0)) == "5d047a8d6b93e0da"


def test_a_family_is_a_template_and_a_kind_of_bug() -> None:
    """The curriculum infers from one task of a family how hard the next one is: both parts
    matter."""
    for made in make_tasks("train", 40, seed=0):
        meta = made.task.meta
        template = "two functions" if "+" in str(meta["template"]) else meta["template"]
        assert made.task.family == f"{template}: {meta['bug']}"


def test_a_report_is_the_last_word_of_the_tests() -> None:
    (task,) = make_tasks("train", 1, seed=0)
    assert visible_report(task, task.solution + 'print("busy")\nprint("ok")\n') == "ok"
    assert visible_report(task, 'print("ok")\n' + task.broken) != "ok"
    assert visible_report(task, 'print("ok")\nraise KeyError("x")\n') == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("[][1]", "IndexError: list index out of range"),
        ("missing", "NameError: name 'missing' is not defined"),
        ("1 + 'a'", "TypeError: "),
        ("int('x')", "ValueError: "),
        ("(1).upper()", "AttributeError: 'int' object has no attribute 'upper'"),
    ],
)
def test_what_a_broken_module_raises_is_what_its_tests_say(line: str, told: str) -> None:
    (task,) = make_tasks("train", 1, seed=0)
    assert visible_report(task, f"{line}\n").startswith(told)
