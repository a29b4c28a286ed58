"""Search for text that was quoted from memory, and patches over several files."""

from __future__ import annotations

import difflib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.harness.code.matching import NoMatch, ReadLines, replace
from etude.harness.code.output import clip
from etude.harness.code.patches import PatchError, after_changes, parse_patch, patched

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


def test_places_that_overlap_are_replaced_as_exact_ones_are() -> None:
    text = "  x = 1\n" * 3 + "end"
    exact, _ = replace(text, "  x = 1\n  x = 1\n", "  y\n", everywhere=True)
    spaced, how = replace(text, "x  = 1\nx  = 1", "y", everywhere=True)
    assert (spaced, how) == (exact, "white space") and exact == "  y\n  x = 1\nend"


few = st.lists(st.sampled_from(["a\n", "b\n"]), max_size=4).map(tuple)


@given(few, few, few, few, st.sampled_from(["above", "read", "below"]))
def test_what_was_read_is_found_again(
    above: tuple[str, ...],
    read: tuple[str, ...],
    below: tuple[str, ...],
    new: tuple[str, ...],
    where: str,
) -> None:
    """After a change above, within or below it. The boundary lines tell the three parts apart."""
    old = {"above": ("<\n", *above, "[\n"), "read": ("(\n", *read, ")\n"), "below": ("]\n", *below)}
    start = len(old["above"])
    seen = ReadLines([*old["above"], *old["read"], *old["below"]], start, start + len(old["read"]))
    first, *_ = old[where]
    last = old[where][1:][-1:] if where != "below" else ()
    now = old | {where: (first, *new, *last)}
    assert seen.parts_of("".join(map("".join, now.values()))) == tuple(map("".join, now.values()))


def test_a_change_that_reaches_beyond_what_was_read_belongs_to_it() -> None:
    seen = ReadLines(["a\n", "b\n", "c\n", "d\n", "e"], 2, 4)
    assert seen.parts_of("a\nB\nC\nd\ne") == ("a\n", "B\nC\nd\n", "e")
    assert seen.parts_of("a\nb\nc\nD\nE") == ("a\nb\n", "c\nD\nE", "")
    assert seen.parts_of("") == ("", "", "")


def test_one_line_that_is_only_alike_is_another_line() -> None:
    text = "def test():\n    self.assertEqual(compute(2), 1)\n"
    for old in ("    self.assertEqual(compute(1), 1)\n", "self.assertEqual(compute(1), 1)"):
        with pytest.raises(NoMatch, match=r"most like it are these lines(?s:.)*compute\(2\)"):
            replace(text, old, "pass")


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
    with pytest.raises(NoMatch, match=r"in 3 places \(lines 2, 4, 7\)"):
        replace("\na\nb\na\nb\nc\na\nb", "a\nb", "x")


def test_two_places_that_differ_in_white_space_only_are_no_one_place() -> None:
    text = "if a:\n    go( 1 )\nelse:\n  go(1 )\n"
    with pytest.raises(NoMatch, match=r"2 places \(lines 2, 4\)"):
        replace(text, "go(1)", "go(2)")


LINES = st.lists(st.sampled_from(["a", "b", "  c", "d = 1", "", "-- e"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(before=LINES, after=LINES, around=st.sampled_from([0, 1, 20]))
def test_any_unified_diff_gives_the_file_that_it_was_made_from(
    before: list[str], after: list[str], around: int
) -> None:
    old, new = ("\n".join(lines) + "\n" for lines in (before, after))
    names = ("a/f.txt", "b/f.txt")
    diff = "\n".join(difflib.unified_diff(before, after, *names, lineterm="", n=around))
    if before == after:
        return
    [change] = parse_patch(diff)
    assert change.path == "f.txt" and patched(old, change) == new


def test_a_line_that_looks_like_a_header_is_a_line() -> None:
    before, after = "select 1;\n-- old\nselect 2;\n", "select 1;\n-- new\nselect 2;\n"
    hunk = " select 1;\n--- old\n+-- new\n select 2;\n"
    for head in ("--- a/q.sql\n+++ b/q.sql\n@@ -1,3 +1,3 @@\n", "*** Update File: q.sql\n@@\n"):
        [change] = parse_patch(f"{head}{hunk}")
        assert (change.path, patched(before, change)) == ("q.sql", after)
    twice = f"--- q\n+++ q\n@@ -1,3 +1,3 @@\n{hunk}--- r\n+++ r\n@@ -1,3 +1,3 @@\n{hunk}"
    assert [(each.path, patched(before, each)) for each in parse_patch(twice)] == [
        ("q", after),
        ("r", after),
    ]


def test_a_hunk_that_only_adds_comes_behind_the_line_that_it_names() -> None:
    diff = "--- a/f\n+++ b/f\n@@ -{},0 +2 @@\n+new\n"
    texts = [patched("one\ntwo\n", parse_patch(diff.format(n))[0]) for n in (0, 1, 2, 9)]
    assert texts == ["new\none\ntwo\n", "one\nnew\ntwo\n", *["one\ntwo\nnew\n"] * 2]


def test_a_file_that_git_renames() -> None:
    renamed = "diff --git a/g b/h\nsimilarity index 90%\nrename from g\nrename to h\n"
    hunk = "index 1..2 100644\n--- a/g\n+++ b/h\n@@ -1 +1 @@\n-x\n+y\n"
    for patch, text in ((renamed, "x\n"), (renamed + hunk, "y\n")):
        changes = parse_patch(f"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n{patch}")
        before = {"f": "one\ntwo\n", "g": "x\n", "h": None}
        assert after_changes(before, changes) == {"f": "one\n2\n", "g": None, "h": text}
    with pytest.raises(PatchError, match="cannot copy a file"):
        parse_patch(renamed.replace("rename", "copy"))


def test_sections_of_a_patch_stand_on_one_another_and_none_overwrites_a_file() -> None:
    sections = "*** Update File: f\n-a\n+A\n*** Update File: f\n-c\n+C\n"
    assert after_changes({"f": "a\nb\nc\n"}, parse_patch(sections)) == {"f": "A\nb\nC\n"}
    anew = parse_patch("*** Delete File: f\n*** Add File: f\n+new\n")
    assert after_changes({"f": "a\n"}, anew) == {"f": "new\n"}
    there = {"f": "a\n", "g": "b\n"}
    for wrong in ("*** Add File: g\n+x\n", "*** Update File: f\n*** Move to: g\n-a\n+b\n"):
        with pytest.raises(PatchError, match="g is there already: update it"):
            after_changes(there, parse_patch(wrong))
    with pytest.raises(PatchError, match="there is no file f"):
        after_changes(there, parse_patch("*** Delete File: f\n*** Update File: f\n-a\n+b\n"))


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
    for nameless in ("--- /dev/null\n+++ /dev/null\n", "rename to f\n"):
        with pytest.raises(PatchError, match="no name in it"):
            parse_patch(nameless)


def test_of_a_long_output_beginning_end_and_errors_stay() -> None:
    lines = [f"line {n}" for n in range(1000)]
    lines[500] = "ValueError: the cause"
    lines[1] = "\x1b[31mred\x1b[0m"
    shown = clip("\n".join(lines), 1000)
    assert len(shown) < 1200
    assert shown.startswith("line 0\nred\n") and shown.endswith("line 999")
    assert "501: ValueError: the cause" in shown and "of 1000 lines left out" in shown
    assert clip("50%\r100%\nok\n", 100) == "100%\nok"


def test_names_in_sections_are_without_the_space_around_them() -> None:
    (moved, deleted) = parse_patch(
        "*** Begin Patch\n*** Update File:  a.py \n*** Move to:  b.py \t\n@@\n-x\n+y\n"
        "*** Delete File: c.py  \n*** End Patch\n"
    )
    assert (moved.path, moved.to, moved.kind) == ("a.py", "b.py", "update")
    assert (deleted.path, deleted.to, deleted.kind) == ("c.py", "", "delete")


REPEATED = "def f():\n    return 1\n\ndef g():\n    return 1\n\ndef h():\n    return 1\n"


@pytest.mark.parametrize(
    ("hunk", "after"),
    [
        # the first place after the named line
        (
            "@@ def g():\n-    return 1\n+    return 2",
            REPEATED.replace("1", "2", 2).replace("2", "1", 1),
        ),
        # a unique place needs no anchor, and a wrong anchor does no harm
        ("@@ nowhere\n def g():\n+    x = 0", REPEATED.replace("g():\n", "g():\n    x = 0\n")),
        # no place after the anchor
        ("@@ def h():\n-def f():\n+def e():", REPEATED.replace("def f", "def e")),
        ("@@ def g():\n+    x = 0", REPEATED.replace("g():\n", "g():\n    x = 0\n")),
        ("@@ -99,0 +99 @@\n+# end", REPEATED + "# end\n"),
    ],
)
def test_an_anchor_says_which_place_is_meant(hunk: str, after: str) -> None:
    [change] = parse_patch(f"*** Begin Patch\n*** Update File: a.py\n{hunk}\n*** End Patch\n")
    assert patched(REPEATED, change) == after


@pytest.mark.parametrize(
    ("hunk", "told"),
    [
        ("@@\n+x = 0", "hunk 1: it only adds, and does not say where: give lines around it"),
        ("@@\n-return 7", "its lines stand nowhere in the file"),
        ("@@\n-    return 1", r"its lines stand in 3 places \(lines 2, 5, 8\): give more around"),
        ("@@ def x():\n+x = 0", r"the line after @@, 'def x\(\):', stands nowhere: name another"),
        ("@@ return 1\n+x = 0", "'return 1', stands in 3 places: name another, or none"),
        ("@@\n-    return 1\nreturn 2", "a.py: the line 'return 2' begins with none of"),
    ],
)
def test_a_hunk_that_fits_nowhere_says_why(hunk: str, told: str) -> None:
    with pytest.raises(PatchError, match=told):
        [change] = parse_patch(f"*** Update File: a.py\n{hunk}\n")
        patched(REPEATED, change)


def test_what_comes_before_a_file_belongs_to_none() -> None:
    for line in ("@@ -1 +1 @@", "*** Move to: b.py"):
        with pytest.raises(PatchError, match=f"'{re.escape(line)}' comes before any file is named"):
            parse_patch(f"so be it\n{line}\n*** Update File: a.py\n")
    [change] = parse_patch("so be it\n*** Delete File: a.py\n+text\n")
    assert (change.kind, change.path, change.hunks) == ("delete", "a.py", [])


def test_white_space_in_a_text_is_a_part_of_it() -> None:
    file = 'def f(s):\n    return "no" if s else " parse %r" // s\n'
    wanted = '    return "no" if s else "parse %r" // s'
    with pytest.raises(NoMatch, match='" parse %r"'):
        replace(file, wanted, wanted.replace("//", "%"))
    spaced = 'return "no"  if s else " parse %r"//s'
    mended, how = replace(file, spaced, spaced.replace("//", "%"))
    assert how == "white space" and mended == file.replace(" if", "  if").replace(" // ", "%")
