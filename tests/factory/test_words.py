"""Dockerfiles and specs line by line, instructions, and the functions that are worth a task."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from etude.core.errors import EtudeError
from etude.factory.candidates import Drafts
from etude.factory.dockerfile import Unsupported, instructions, read_image
from etude.factory.image_spec import read_spec
from etude.factory.instruct import TEMPLATES, instruct
from etude.factory.recipe import Recipe
from etude.factory.survey import Survey

PYTHON = f"python:{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("add.sh", "data/a.txt", "data/inner/b.txt", "x1.py", "x2.py", "set.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "add.sh").chmod(0o755)
    return tmp_path


def test_lines_of_a_dockerfile_are_whole() -> None:
    text = "# a\nFROM x\n\nRUN a \\\n  # why\n  && b \\  \n  && c\n  ENV  A=1\t B=2\n"
    assert list(instructions(text)) == ["FROM x", "RUN a && b && c", "ENV A=1 B=2"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("COPY add.sh .", {"add.sh": "add.sh"}),
        ("COPY add.sh run", {"run": "add.sh"}),
        ("COPY add.sh bin/", {"bin/add.sh": "add.sh"}),
        ("COPY /add.sh /app/bin/.", {"bin/add.sh": "add.sh"}),
        ("COPY x1.py x2.py src", {"src/x1.py": "x1.py", "src/x2.py": "x2.py"}),
        ("COPY x*.py src", {"src/x1.py": "x1.py", "src/x2.py": "x2.py"}),
        ("COPY data there", {"there/a.txt": "data/a.txt", "there/inner/b.txt": "data/inner/b.txt"}),
        ("ADD data/ .", {"a.txt": "data/a.txt", "inner/b.txt": "data/inner/b.txt"}),
        ("COPY set.tar .", {"set.tar": "set.tar"}),
        ("WORKDIR inner\nCOPY add.sh .\nWORKDIR ..", {"inner/add.sh": "add.sh"}),
    ],
)
def test_where_files_come_to_lie(folder: Path, line: str, found: dict[str, str]) -> None:
    (folder / "Dockerfile").write_text(f"FROM {PYTHON}-slim\nWORKDIR /app\n{line}\nCMD x\n")
    image = read_image(folder, ())
    assert image.workdir == "/app"
    assert image.files == {place: name.encode() for place, name in found.items()}
    programs = tuple(place for place, name in found.items() if name == "add.sh")
    assert image.executables == programs


def test_variables_in_both_forms(folder: Path) -> None:
    lines = f'FROM {PYTHON}.7\nENV A=1 B="2 3" C=x=y\nENV D four five\nWORKDIR /a/\nENV A=9\n'
    (folder / "Dockerfile").write_text(lines)
    image = read_image(folder, ())
    assert image.env == {"A": "9", "B": "2 3", "C": "x=y", "D": "four five"}
    assert (image.workdir, image.files) == ("/a", {})
    assert read_image(folder, (), workdir="/b").workdir == "/b"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ENV A", "is not an assignment"),
        ("ENV A=$B", "is not supported"),
        ("WORKDIR $HOME", "is not supported"),
        ("COPY add.sh", "is not a plain copy"),
        ("COPY $A .", "is not a plain copy"),
        ('COPY ["add.sh", "."]', "is not a plain copy"),
        ("COPY <<EOF x", "is not a plain copy"),
        ("ADD set.tar .", "downloads or unpacks set.tar"),
        ("COPY add.sh /app", "puts a file at /app, which is not inside"),
        ("COPY add.sh /apple", "puts a file at /apple, which is not inside"),
        ("FROM python:2.7", "is not supported"),
        (f"FROM {PYTHON}1", "is not supported"),
    ],
)
def test_what_a_sandbox_cannot_stand_in_for(folder: Path, line: str, why: str) -> None:
    (folder / "Dockerfile").write_text(f"WORKDIR /app\n{line}\n")
    with pytest.raises(Unsupported, match=why):
        read_image(folder, ())
    if "inside" not in why:
        assert read_image(folder, [line.replace("[", "[[]")]).workdir == "/app"


def test_an_ignore_file_changes_what_is_copied(folder: Path) -> None:
    (folder / "Dockerfile").write_text("WORKDIR /app\nENV A=1\n")
    (folder / ".dockerignore").write_text("x")
    read_image(folder, ())
    (folder / "Dockerfile").write_text("WORKDIR /app\nCOPY . .\n")
    with pytest.raises(Unsupported, match="dockerignore is not supported"):
        read_image(folder, ())


def test_a_spec_is_seen_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    path = tmp_path / "spec.toml"
    path.write_text(
        'name = "a"\n[oci]\nlayout = "layout"\n[repository]\nsource = "shop"\n[env]\nA = 1\n'
        '[pypi]\nrequirements = ["x", "y"]\n[realism]\nuser = "ada"\n'
    )
    spec = read_spec(path)
    assert spec.oci is not None and spec.oci.layout == str(tmp_path / "layout")
    assert spec.repository is not None and spec.repository.source == str(tmp_path / "shop")
    assert spec.env == {"A": "1"}
    assert spec.pypi is not None and spec.pypi.requirements == ("x", "y")
    assert spec.realism is not None and spec.realism.user == "ada" and spec.debian is None
    path.write_text('name = "a"\n[repository]\nsource = "https://h/x"\n')
    remote = read_spec(path).repository
    assert remote is not None and remote.source == "https://h/x"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "is not TOML"),
        (b'name = "a"\n[oci]\nlayout = "x"\nworkdir = "/a"\n[repository]\nsource = "y"',
         "each make the working copy"),
        (b'name = "a"\n[repository]\n', "repository.source is missing"),
        (b'name = "a"\n[realism]\n', "give at least one of"),
    ],
)  # fmt: skip
def test_a_spec_that_is_none(tmp_path: Path, text: bytes | None, why: str) -> None:
    path = tmp_path / "spec.toml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(EtudeError, match=why):
        read_spec(path)


def id_of(number: int, count: int) -> str:
    """A task's id that picks this template."""
    return next(
        str(n) for n in range(999) if hashlib.blake2b(str(n).encode()).digest()[0] % count == number
    )


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_template_says_what_it_has_words_for(kind: str) -> None:
    facts = {
        "functions": "a.py:Cart.total, a.py:names, b.py:x", "lines": "3 to 5", "head": "def f():"
    }  # fmt: skip
    words = {
        "{where}": "`a.py`, `b.py`", "{function}": "Cart.total", "{name}": "t.py::test_a",
        "{count}": "2", "{lines}": "3 to 5", "{head}": "def f():",
        "{test}": "def test_a():\n    x\n", "{error}": "boom {x}",
    }  # fmt: skip
    forms = TEMPLATES[kind]
    for number, form in enumerate(forms):
        said = instruct(
            id_of(number, len(forms)), kind, facts, ("t.py::test_a", "t.py::test_b"),
            "    def test_a():\n        x\n", "boom {x}\n",
        )  # fmt: skip
        expected = form
        for name, word in words.items():
            expected = expected.replace(name, word)
        assert said == expected


def test_long_texts_are_shortened_and_no_error_is_a_failure() -> None:
    facts = {"functions": "a.py:f"}
    form = TEMPLATES["bug"].index(next(each for each in TEMPLATES["bug"] if "used to" in each))
    id = id_of(form, len(TEMPLATES["bug"]))
    for count in (40, 41):
        test = "".join(f"line {n}\n" for n in range(count))
        said = instruct(id, "bug", facts, ("t",), test, "")
        assert ("line 39\n...\n```" in said) is (count == 41)
        assert ("line 39\n```" in said) is (count == 40)
        assert "line 40" not in said and "```\na failure\n```" in said


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Add x (#12)", "Add x"),
        ("  Add x\n\nFixes #3\n", "Add x"),
        ("Add x\n\nCloses: #3\nCo-authored-by: A <a@b>\nbody", "Add x\n\nbody"),
        ("Add x gh-44 and more", "Add x and more"),
        ("Fixes #3 in passing", "Fixes in passing"),
        ("gh-7 Add x", "Add x"),
    ],
)
def test_words_of_a_commit_without_numbers(message: str, said: str) -> None:
    for kind, rest in (("history", ""), ("split", "\n\nPart of this is in the working copy")):
        found = instruct("x", kind, {"message": message}, ("t",), "", "")
        assert found.startswith(said + rest) and (kind == "split" or found == said)
    assert instruct("x", "row", {"message": message}, ("t",), "", "") == message


@pytest.mark.parametrize(
    ("covered", "tests", "is_one"), [(2, 1, False), (3, 1, True), (3, 20, True), (3, 21, False)]
)
def test_a_function_worth_deleting_is_run_and_not_by_all(
    covered: int, tests: int, is_one: bool
) -> None:
    body = b"".join(b"    x = %d\n" % n for n in range(5))
    files = {"shop/a.py": b"def f():\n" + body}
    names = [f"t.py::test_{n}" for n in range(tests)]
    survey = Survey(
        seconds=dict.fromkeys([*names, *(f"o{n}" for n in range(40 - tests))], 0.0),
        lines={"shop/a.py": {line: frozenset(names) for line in range(2, 2 + covered)}},
        start_s=0.0,
    )
    recipe = Recipe(requirements=(), pythonpath=(), tests=(), sources=("shop/*",))
    drafts = Drafts("shop", files, recipe, survey, None, kinds=("stub", "removal"))
    (made,) = [draft.make() for draft in drafts.all()]
    assert (made is not None) is is_one
    if made is not None:
        assert made.tests == tuple(sorted(names)) and made.solution == files
        assert made.facts["functions"] == "shop/a.py:f"
