"""The mistakes that `make mutants` makes, and the code that it leaves alone."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import Result, shuffled, summary
from tests.mutants.coverage import Coverage
from tests.mutants.mutate import Mutant, compiles, mutants


def mistakes(source: str) -> set[str]:
    found = mutants("a.py", source.encode())
    return {mutant.after for mutant in found if compiles(mutant, source.encode())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x):\n    x.clip(1)\n", {"pass", "x.clip(2)", "x.clip(0)", "x"}),
        ("x = max(a, b + c)\n", {"x = (a)", "x = ((b + c))", "x = max(a, b - c)"}),
        ("f(a, flag=True)\n", {"pass", "f(a, flag=False)", "f(a, )"}),
        ("x = not a\n", {"x = a"}),
        ("x = a < b\n", {"x = a <= b"}),
        ("x = a and b\n", {"x = a or b", "x = a", "x = b"}),
        ("x = c.FLAG | c.OTHER\n", {"x = c.FLAG", "x = c.OTHER"}),
        ("x = y[a:]\n", {"x = y[:]"}),
        ("async def f(x):\n    y = await shield(x)\n", {"y = await (x)"}),
        ("def f(n=1):\n    return n\n", {"def f(n=2):", "def f(n=0):"}),
        ("@cache\ndef f():\n    return g\n", {""}),
        ("with lock:\n    x = y\n", {"if True:"}),
        ("try:\n    x = y\nexcept (A, B):\n    raise\n", {"except (A,):", "except (B,):", "pass"}),
        ("x = d['key']\n", {"x = d['key_']"}),
        ("if a:\n    x = b\n", {"if True:", "if False:"}),
        ("def f():\n    if a:\n        return 'early'\n    return b\n", {"if True:", "if False:"}),
        ("def f(self):\n    self.open = None\n    del self.slots[k]\n", {"pass"}),
    ],
)
def test_plausible_mistakes(source: str, expected: set[str]) -> None:
    assert mistakes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring: 1 + 1."""\n',
        "def f(x: dict[str, int] | None) -> tuple[int, int]: ...\n",
        "assert a < 1\n",
        "print(f'{1 + 1} things')\n",
        "def __repr__(self):\n    return a + 1\n",
        "parser.add_argument('--x', default=1, help='1')\n",
        "@dataclass(frozen=True)\nclass A:\n    x: int\n",
        "PATIENCE_S = 60.0\n",
        "x = {'description': 'one event'}\n",
        "x = zip(a, b, strict=True)\n",
        "def f(wait_s=1.0, *, poll_s=2):\n    return wait_s\n",
        "def f(indent=1):\n    return g\n",
        "def f(timeout_keep_alive=75):\n    return g\n",
    ],
)
def test_what_changes_no_behaviour_is_left_alone(source: str) -> None:
    assert mistakes(source) == set()


def test_a_mistake_in_a_default_shows_where_the_function_runs() -> None:
    (mutant, *_) = mutants(
        "a.py", b"class A:\n    def f(\n        self, n=1\n    ):\n        return n\n"
    )
    assert (mutant.function, mutant.line, mutant.first, mutant.last, mutant.imported) == (
        "A.f",
        3,
        5,
        5,
        False,
    )


def test_a_mistake_changes_its_own_place_and_no_other() -> None:
    source = "é = '€' + a\nx = b + c  # +\n".encode()
    (mutant,) = [each for each in mutants("a.py", source) if each.line == 2]
    assert mutant.apply(source).decode() == "é = '€' + a\nx = b - c  # +\n"


def test_what_is_not_decided_is_counted_as_that() -> None:
    outcomes = ["caught", "caught", "hangs", "survived", "not run", "partial"]
    results = [
        Result("a.py", line, "f", "x", f"y{line}", outcome) for line, outcome in enumerate(outcomes)
    ]
    said = summary(10, results, {results[3].key: "equivalent"})
    assert said.splitlines()[-1] == (
        "10 mutants: 3 caught, 2 survived (1 of them explained), 5 not decided; 60.0 % of those "
        "decided are caught"
    )
    assert "  = equivalent" in said and "no test runs it" in said
    assert summary(0, [], {}).startswith("0 mutants: 0 caught, 0 survived")


def test_a_change_elsewhere_leaves_the_draw_as_it_was() -> None:
    body = "".join(f"def f{n}(a, b):\n    return a + b * {n}\n\n" for n in range(2, 40))

    def drawn(source: str) -> list[tuple[bytes, bytes]]:
        data = source.encode()
        places: dict[tuple[str, int], list[Mutant]] = {}
        for mutant in mutants("m.py", data):
            places.setdefault(("m.py", mutant.line), []).append(mutant)
        lines = data.splitlines()
        return [
            (lines[mutant.line - 1], mutant.apply(data).splitlines()[mutant.line - 1])
            for mutant in shuffled(places, {"m.py": data}, seed=0)
        ]

    before, after = drawn(body), drawn("def g(a):\n    return a - 1\n\n" + body)
    assert [pair for pair in after if pair in before] == before
    assert [line for line, _ in before] != sorted(line for line, _ in before)


def test_what_an_import_computes_is_tried_by_those_who_read_it() -> None:
    """Also from another module, even if no test runs the line itself."""
    sources = {"a.py": "LIMIT = 1\nOTHER = 2\n", "b.py": "def f(x):\n    return x > a.LIMIT\n"}
    ran = {
        "import": {"a.py": [1, 2], "b.py": [1]},
        "reads": {"b.py": [2]},
        "elsewhere": {"c.py": [1]},
    }
    tests = {
        name: {"seconds": 1.0, "passed": True, "shares": []} for name in ran if name != "import"
    }
    coverage = Coverage({"test_b.py": {"lines": ran, "tests": tests}})
    coverage.__dict__["sources"] = sources
    limit, other = (
        next(
            mutant for mutant in mutants("etude/a.py", sources["a.py"].encode()) if mutant.line == n
        )
        for n in (1, 2)
    )
    assert coverage.tests_for(limit) == {"reads": 1.0}
    assert coverage.tests_for(other) == {"reads": 1.0, "elsewhere": 1.0}, "nobody knows who does"
