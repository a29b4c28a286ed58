"""Where a text stands that was quoted from memory, and patches over several files."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.harness.code.matching import NoMatch, replace
from etude.harness.code.output import clip
from etude.harness.code.patches import PatchError, parse_patch, patched

TEXT = """\
class Cart:
    def total(self, discount=0):
        full = sum(self.items)
        reduced = full - full * discount // 100
        return max(reduced, 0)

    def names(self):
        return sorted(self.found)
"""


def test_what_stands_there_is_replaced_as_it_is() -> None:
    assert replace("a b c", "b", "d") == ("a d c", "exact")
    assert replace("a b b", "b", "d", everywhere=True) == ("a d d", "exact")


def test_white_space_is_forgiven_and_the_indentation_of_the_file_stays() -> None:
    old = "full = sum( self.items )\nreduced = full-full*discount // 100"
    new = "full = sum(self.items)\nif discount:\n    reduced = full"
    text, how = replace(TEXT, old, new)
    assert how == "white space"
    assert text == TEXT.replace(
        "        reduced = full - full * discount // 100\n",
        "        if discount:\n            reduced = full\n",
    )


def test_a_slip_in_one_line_of_several_is_forgiven() -> None:
    old = "        full = sum(self.item)\n        reduced = full - full * discount // 100\n"
    text, how = replace(TEXT, old, "        reduced = 0\n")
    assert how == "fuzzy" and "reduced = 0\n        return max" in text
    assert "sum(" not in text


@pytest.mark.parametrize(
    ("old", "told"),
    [
        ("", "old is empty"),
        ("return", r"old stands in 2 places \(lines 5, 8\).*set all to true"),
        ("zzz", "stands nowhere in the file: read it again"),
        (
            "    def totals(self, discount, tax, place):\n        fill = sum(self.things)\n",
            "most like it are these lines",
        ),
    ],
)
def test_what_is_not_clear_is_an_error_that_says_what_to_do(old: str, told: str) -> None:
    with pytest.raises(NoMatch, match=told):
        replace(TEXT, old, "x")
    with pytest.raises(NoMatch, match="nothing would change"):
        replace(TEXT, "Cart", "Cart")


def test_two_places_that_differ_in_white_space_only_are_no_one_place() -> None:
    text = "if a:\n    go( 1 )\nelse:\n  go(1 )\n"
    with pytest.raises(NoMatch, match=r"2 places \(lines 2, 4\)"):
        replace(text, "go(1)", "go(2)")


LINES = st.lists(st.sampled_from(["a", "b", "  c", "d = 1", "", "e"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(before=LINES, after=LINES)
def test_any_unified_diff_gives_the_file_that_it_was_made_from(
    before: list[str], after: list[str]
) -> None:
    old, new = ("\n".join(lines) + "\n" for lines in (before, after))
    diff = "\n".join(difflib.unified_diff(before, after, "a/f.txt", "b/f.txt", lineterm="", n=20))
    if before == after:
        return
    [change] = parse_patch(diff)
    assert change.path == "f.txt" and patched(old, change) == new


def test_a_patch_in_sections() -> None:
    changes = parse_patch(
        "*** Begin Patch\n*** Update File: cart.py\n@@     def names(self):\n"
        "-        return sorted(self.found)\n+        return self.found\n\n"
        "*** Add File: new.py\n+x = 1\n+\n+y = 2\n*** Delete File: old.py\n*** End Patch\n"
    )
    assert [(change.path, change.kind) for change in changes] == [
        ("cart.py", "update"),
        ("new.py", "add"),
        ("old.py", "delete"),
    ]
    assert patched(TEXT, changes[0]) == TEXT.replace("sorted(self.found)", "self.found")
    assert patched("", changes[1]) == "x = 1\n\ny = 2\n"


def test_line_numbers_are_hints_which_decide_between_places_that_are_alike() -> None:
    text = "a\nx\nb\nx\nc\n"
    assert (
        patched(text, parse_patch("--- f\n+++ f\n@@ -4,1 +4,1 @@\n-x\n+y\n")[0])
        == "a\nx\nb\ny\nc\n"
    )
    wrong = parse_patch("--- f\n+++ f\n@@ -9,2 +9,2 @@\n b\n-x\n+y\n")[0]
    assert patched(text, wrong) == "a\nx\nb\ny\nc\n"
    with pytest.raises(PatchError, match="f, hunk 1: its lines stand in 2 places"):
        patched(text, parse_patch("--- f\n+++ f\n@@ -7,1 +7,1 @@\n-x\n+y\n")[0])
    with pytest.raises(PatchError, match="no file is named"):
        parse_patch("hello")


def test_of_a_long_output_beginning_end_and_errors_stay() -> None:
    lines = [f"line {n}" for n in range(1000)]
    lines[500] = "ValueError: the cause"
    lines[1] = "\x1b[31mred\x1b[0m"
    shown = clip("\n".join(lines), 1000)
    assert len(shown) < 1200
    assert shown.startswith("line 0\nred\n") and shown.endswith("line 999")
    assert "501: ValueError: the cause" in shown and "of 1000 lines left out" in shown
    assert clip("50%\r100%\nok\n", 100) == "100%\nok"
