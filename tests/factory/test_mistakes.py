"""Every mistake that can be made in a line, written out."""

from __future__ import annotations

import pytest

from etude.factory.mutations import SourceFile

# code in a function -> its possible replacements
MISTAKES = {
    "a < b": ["a <= b"],
    "a <= b": ["a < b"],
    "a > b": ["a >= b"],
    "a >= b": ["a > b"],
    "a == b != c": ["a != b != c", "a == b == c"],
    "a in b": ["a not in b"],
    "a not in b": ["a in b"],
    "a is b": ["a is not b"],
    "a is not b": ["a is b"],
    "a + b": ["a - b"],
    "a - b": ["a + b"],
    "a * b": ["a + b"],
    "a / b": ["a // b"],
    "a // b": ["a / b"],
    "a % b": ["a // b"],
    "a & b": ["a | b"],
    "a | b": ["a & b"],
    "a << b": ["a >> b"],
    "a >> b": ["a << b"],
    "a ** b": ["a * b"],
    "a @ b": [],
    '"x" % b': [],
    'f"x" + b': [],
    "a += b": ["pass", "a -= b", "a = b"],
    "a -= b": ["pass", "a += b", "a = b"],
    "a *= b": ["pass", "a += b", "a = b"],
    "a |= b": ["pass", "a &= b", "a = b"],
    "a &= b": ["pass", "a |= b", "a = b"],
    "a /= b": ["pass", "a = b"],
    "a and b": ["a or b", "a", "b"],
    "a or b": ["a and b", "a", "b"],
    "-a": [],
    "x if a else y": ["x if not a else y"],
    "x if not a else y": ["x if a else y"],
    "x if -a else y": ["x if not (-a) else y"],
    "x if a < b else y": ["x if a <= b else y"],
    "if(a): b": ["if not (a): b"],
    "if (a or b): c": ["if not (a or b): c", "if (a and b): c", "if a: c", "if b: c"],
    "while not a: b": ["while a: b"],
    "while a: b": [],
    "7": ["8", "6"],
    "0": ["1"],
    "0x10": [],
    "True": ["False"],
    "False": ["True"],
    "None": [],
    "sorted(a)": ["pass", "a"],
    "x = len(a + b)": ["x = (a + b)", "x = len(a - b)"],
    "x = sorted(*a)": [],
    "x = sorted(a, key=b)": ["x = sorted(a)"],
    "x = f(k=b)": ["x = f()"],
    "x = f(a, j=b, k=c)": ["x = f(a, j=b)"],
    "x = f(a, b)": ["x = f(b, a)"],
    "x = f(a, a)": [],
    "x = f(a, *b)": [],
    "x = f(a, b, c)": [],
    "x = f(a)": [],
    "f(a)": ["pass"],
    "a[b:c]": ["a[:c]", "a[b:]"],
    "a[b:]": ["a[:]"],
    "a[:b]": ["a[:]"],
    "a[::2]": ["a[::3]", "a[::1]"],
    "return a": ["return None"],
    "return": [],
    "return None": [],
    "raise a": ["pass"],
    "del a": ["pass"],
    "a; f(b)": [],
    "a: 3 = b": [],
    "def g(a=None): a": ["def g(a=0): a"],
    "def g(a=1): a": ["def g(a=2): a", "def g(a=0): a"],
    "for x in a: break": ["for x in a: continue"],
    "for x in a: continue": ["for x in a: break"],
    "try: a\n    except (b, c): d": ["try: a\n    except b: d"],
    "try: a\n    except b: d": [],
    "if a < b: c\n    else: d": ["if a < b: c\n", "if a <= b: c\n    else: d"],
    "if a < b: c\n    elif x < y: d\n    else: e": [
        "if a < b: c\n    else: e",
        "if a < b: c\n    elif x < y: d\n",
        "if a <= b: c\n    elif x < y: d\n    else: e",
        "if a < b: c\n    elif x <= y: d\n    else: e",
    ],
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_the_mistakes_of_a_line(line: str) -> None:
    head, behind = "def f(a, b):\n    ", "\n    x = y\n"
    file = SourceFile(f"{head}{line}{behind}".encode())
    found = [file.mutated([site]).decode() for site in file.sites]
    assert all(text.startswith(head) for text in found)
    made = sorted(text.removeprefix(head).replace(behind.lstrip("\n"), "") for text in found)
    assert [text.rstrip() for text in made] == sorted(each.rstrip() for each in MISTAKES[line])


def test_what_stands_outside_of_functions_and_for_readers_stays() -> None:
    source = b"x = 1 < 2\n\n\n@cache(1 < 2)\ndef f(a: 'b < c') -> 'd < e':\n    return a\n"
    file = SourceFile(source)
    assert [site.kind for site in file.sites] == ["result"]


SOURCE = b'''\
"""A module."""
__all__ = ["one", "two"]


class Shop:
    @cached
    def total(
        self, items
    ):
        """Add up.

        All of them."""
        def inner():
            return 1

        return inner()

    def names(self):
        return []


def one(): return 1


def two(a,
        b):
    # why
    return a


'''


def test_where_functions_stand() -> None:
    file = SourceFile(SOURCE)
    found = {each.name: each for each in file.functions}
    assert list(found) == ["Shop.total", "Shop.names", "one", "two"]
    total, names, one, two = found.values()
    assert [(each.first, each.last) for each in found.values()] == [
        (7, 16), (18, 19), (22, 22), (25, 28)
    ]  # fmt: skip
    assert total.head.startswith("def total(\n") and total.head.endswith('All of them."""')
    assert (names.head, list(names.body_lines)) == ("def names(self):", [19])
    assert two.head == "def two(a,\n        b):" and list(two.body_lines) == [27, 28]
    assert [each.is_method for each in found.values()] == [True, True, False, False]
    assert [each.is_decorated for each in found.values()] == [True, False, False, False]
    assert {site.function for site in file.sites} == {
        "Shop.total.inner", "Shop.total", "Shop.names", "one", "two"
    }  # fmt: skip


def test_what_is_left_without_a_function() -> None:
    file = SourceFile(SOURCE)
    total, names, one, two = file.functions
    assert file.without(one) == SOURCE.replace(b'"one", ', b"").replace(
        b"\n\n\ndef one(): return 1\n", b"\n"
    )
    gone = file.without(names)
    assert gone == SOURCE.replace(b"\n    def names(self):\n        return []\n", b"")
    stubbed = file.stubbed(two)
    assert stubbed.endswith(b"def two(a,\n        b):\n    raise NotImplementedError\n\n\n")
    assert b'All of them."""\n        raise NotImplementedError\n' in file.stubbed(total)
    assert b"inner" not in file.stubbed(total)


@pytest.mark.parametrize(
    "content", [b"def f(:\n", b"x = '\n", b"\xff\xfe\n", b"# coding: no-such\n", b"x = '\xe9'\n"]
)
def test_what_is_no_python(content: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        SourceFile(content)


@pytest.mark.parametrize(
    "content",
    [
        b"x = " + b"(" * 5000 + b"1" + b")" * 5000,
        b"x = " + b"not " * 20_000 + b"1",
        b"x = 1" + b"+1" * 20_000,
        b"x = 1\0",
    ],
    ids=["brackets", "prefixes", "sums", "null byte"],
)
def test_a_file_that_python_itself_refuses_is_none(content: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        SourceFile(content)
