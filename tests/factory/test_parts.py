"""The parts of the factory that decide, without a sandbox."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from etude.cli import main
from etude.core.errors import EtudeError
from etude.factory import install
from etude.factory.candidates import _changed_tests, split_change
from etude.factory.check import stats
from etude.factory.harbor import (
    digest_of,
    pack,
    read_task,
    unpack,
    write_solve_rate,
    write_task,
)
from etude.factory.hiding import functions_of, without_functions
from etude.factory.install import write_files
from etude.factory.instruct import instruct
from etude.factory.leaks import hunks, is_leaked, windows_of, windows_of_folder
from etude.factory.mutations import MUTATIONS, SourceFile
from etude.factory.recipe import HeuristicProposer, Recipe, find_layout
from etude.factory.sources import Checkout, fetch, name_of
from etude.factory.swebench import Row, diff, patched
from etude.factory.task import RepositoryTask, is_test_file, reported_name
from tests.factory.tiny import CART, TESTS, git, make_repository

SAMPLE = b'''\
"""Many things to get wrong."""

__all__ = ["pick", "other"]


def pick(items, limit=None, *, key=None):
    """Pick some."""
    found = []
    count = 0
    for item in items:  # a comment
        if not item or item in found:
            continue
        if count >= 3 and limit is not None:
            break
        elif key:
            found.append(sorted(item, key=key))
        else:
            found.append(item)
        count += 1
    try:
        return found[1:limit] + list(divmod(count, 2))
    except (TypeError, ValueError):
        raise


def other(a):
    return a * 2
'''


def test_every_kind_of_mutation_is_found_and_leaves_python() -> None:
    file = SourceFile(SAMPLE)
    assert {site.kind for site in file.sites} == MUTATIONS.keys()
    for site in file.sites:
        mutated = file.mutated([site])
        ast.parse(mutated)
        assert mutated != SAMPLE
        changed = hunks(SAMPLE.splitlines(), mutated.splitlines())
        assert len(changed) == 1 and b"# a comment" in mutated
        # nobody notices that a docstring is missing
        assert b"Pick some." in mutated and b"Many things" in mutated


def test_several_mutations_at_once() -> None:
    file = SourceFile(SAMPLE)
    first = next(site for site in file.sites if site.function == "pick")
    second = next(site for site in file.sites if site.function == "other")
    mutated = file.mutated([first, second])
    assert len(hunks(SAMPLE.splitlines(), mutated.splitlines())) == 2


def test_functions_are_emptied_and_removed() -> None:
    file = SourceFile(SAMPLE)
    (other,) = [each for each in file.functions if each.name == "other"]
    assert file.stubbed(other).endswith(b"def other(a):\n    raise NotImplementedError\n")
    removed = file.without(other)
    assert b"other" not in removed and b'__all__ = ["pick"' in removed
    (pick,) = [each for each in file.functions if each.name == "pick"]
    assert pick.head.endswith('"""Pick some."""') and pick.body_lines[0] == 8
    assert b'"""Pick some."""\n    raise NotImplementedError' in file.stubbed(pick)


def test_tests_are_taken_out_of_their_file() -> None:
    names = {"TestCart::test_total", "TestCart::test_discount", "TestCart::test_names"}
    assert names < functions_of(TESTS.encode()).keys()
    without = without_functions(TESTS.encode(), names)
    assert b"test_total" not in without and b"parametrize" not in without
    tree = ast.parse(without)
    (cart,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert isinstance(cart.body[0], ast.Pass)
    assert functions_of(without).keys() == functions_of(TESTS.encode()).keys() - names


def test_a_copy_elsewhere_is_a_leak() -> None:
    broken = CART.replace("full * discount // 100", "full * discount // 101").encode()
    elsewhere = windows_of({"build/cart.py": CART.encode()})
    assert is_leaked(broken, CART.encode(), elsewhere.values())
    others = windows_of({"a.py": TESTS.encode(), "b.py": broken})
    assert not is_leaked(broken, CART.encode(), others.values())


def test_text_of_up_to_two_megabytes_is_looked_through(tmp_path: Path) -> None:
    line = b"x" * (2 << 17)
    for name, more in (("notes.md", b""), ("longer.md", b"x"), ("notes.so", b"")):
        (tmp_path / name).write_bytes(b"\n".join([line[1:]] * 7 + [line + more]))
    (tmp_path / "longer.md").rename(tmp_path / "other.md")
    whole = windows_of({"": (tmp_path / "notes.md").read_bytes()})[""]
    assert len(whole) == 2 and windows_of_folder(tmp_path) == whole


def test_changed_tests_come_in_the_order_of_their_files() -> None:
    """If there are many, only the first are tried, and these must always be the same."""
    paths = [f"tests/test_{n}.py" for n in range(9)]
    before = dict.fromkeys(paths, b"def test_old():\n    pass\n")
    after = {path: text + b"\n\ndef test_new():\n    pass\n" for path, text in before.items()}
    changed, others = _changed_tests(before, after, set(paths))
    assert changed == tuple(f"{path}::test_new" for path in paths)
    assert others == tuple(f"{path}::test_old" for path in paths)
    new = {"tests/test_new.py": b"def test_it():\n    pass\n", paths[0]: b"def test_x(:\n"}
    told = _changed_tests(before, after | new, {*new, paths[1]})
    assert told == ((f"{paths[1]}::test_new",), (f"{paths[1]}::test_old",)), (
        "of what can be compared"
    )


def test_a_commit_in_two_halves() -> None:
    before = {"a.py": b"x = 1\ny = 2\nz = 3\n"}
    done, rest = split_change(before, {"a.py": b"x = 2\ny = 2\nz = 4\n"}) or ({}, {})
    assert done == {"a.py": b"x = 2\ny = 2\nz = 3\n"} and rest == {"a.py": b"x = 2\ny = 2\nz = 4\n"}
    assert split_change(before, {"a.py": b"x = 2\ny = 2\nz = 3\n"}) is None


def test_the_layout_of_a_repository() -> None:
    flat = {
        "shop/__init__.py": b"",
        "shop/cart.py": b"",
        "tests/test_cart.py": b"",
        "setup.py": b"",
    }
    assert find_layout(flat) == (("",), ("shop/*",), ("tests/test_cart.py",))
    inner = {"src/shop/__init__.py": b"", "src/shop/tests/test_a.py": b"", "docs/conf.py": b""}
    assert find_layout(inner) == (("src", ""), ("src/shop/*",), ("src/shop/tests/test_a.py",))
    single = {"shop.py": b"", "test/test_shop.py": b"", "setup.py": b""}
    assert find_layout(single) == (("",), ("shop.py",), ("test/test_shop.py",))
    assert find_layout({"shop/__init__.py": b""}) is None


def test_requirements_come_from_where_people_write_them() -> None:
    files = {
        "shop/__init__.py": b"",
        "tests/test_a.py": b"",
        "pyproject.toml": b'[project]\nname = "shop"\ndependencies = ["attrs>=22"]\n'
        b'[project.optional-dependencies]\ntest = ["hypothesis", "pytest-cov", "shop[x]"]\n',
        "setup.py": b"setup(install_requires=['click>=8', 'six'], tests_require=[\"responses\"])",
        "tox.ini": b"[testenv]\ndeps =\n    pytest\n    py3: freezegun\n",
        ".github/workflows/ci.yml": b"run: pip install pyyaml && pytest\n",
    }
    proposer = HeuristicProposer()
    first = proposer.propose(files, [])
    assert first is not None
    assert {"attrs>=22", "hypothesis", "freezegun", "pyyaml", "pytest"} <= {*first.requirements}
    assert {"click>=8", "six", "responses"} <= {*first.requirements}
    assert not {"pytest-cov", "shop[x]"} & {*first.requirements}
    second = proposer.propose(files, ["E   ModuleNotFoundError: No module named 'dateutil'"])
    assert second is not None and "python-dateutil" in second.requirements
    third = proposer.propose(files, ["ERROR: No matching distribution found for freezegun"])
    assert third is not None and "freezegun" not in third.requirements


def task() -> RepositoryTask:
    return RepositoryTask(
        id="shop-bug-1",
        kind="bug",
        repository="shop",
        origin="shop@" + "0" * 40,
        instruction='Mend "it": \\ \u2713\n',
        base={"shop/cart.py": b"x = 1\n", "data.bin": b"\0\1"},
        changes={"shop/cart.py": b"x = 2\n"},
        solution={"shop/cart.py": b"x = 1\n"},
        tests={"tests/test_a.py": b""},
        fail_to_pass=("tests/test_a.py::test_a",),
        pass_to_pass=("tests/test_a.py::TestB::test_b",),
        sources=("shop/*",),
        venv="shop",
        requirements=("pytest==9.0",),
        processor_s=8.5,
        facts={"mutations": "constant", "quoted": 'a "b" \\ c'},
    )


def test_a_task_is_read_as_it_was_written(tmp_path: Path) -> None:
    place = write_task(tmp_path, task(), tmp_path / "archives")
    assert read_task(place) == task()
    write_solve_rate(place, 0.25)
    write_solve_rate(place, 0.5)
    assert read_task(place).solve_rate == 0.5
    assert {each.name for each in place.iterdir()} == {
        "task.toml", "instruction.md", "environment", "tests", "solution"
    }  # fmt: skip


class _MetByTwo(dict[str, bytes]):
    """Files that two threads begin to write before either continues."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.both = Barrier(2)

    def items(self) -> Any:
        self.both.wait(timeout=60)
        return super().items()


def test_tasks_that_share_files_are_written_at_the_same_time(tmp_path: Path) -> None:
    files, place = _MetByTwo({"a.py": b"x = 1\n"}), tmp_path / "shared.tar.gz"
    with ThreadPoolExecutor(2) as threads:
        for writing in [threads.submit(pack, place, files) for _ in range(2)]:
            writing.result()
    assert unpack(place) == {"a.py": b"x = 1\n"}
    assert [*tmp_path.iterdir()] == [place]


def test_an_answer_that_never_ends_is_ended_by_what_it_computes(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a():\n    while True:\n        pass\n")
    looping = replace(task(), pass_to_pass=(), processor_s=1.0)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(looping.argv, cwd=tmp_path, env={**env, "ETUDE_REPORT": "report.xml"})
    assert done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    assert not (tmp_path / "report.xml").exists()


def test_a_task_of_others_is_told_to_need_a_container(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = tmp_path / "tasks" / "one"
    tmp_path.mkdir(parents=True)
    (tmp_path / "task.toml").write_text('schema_version = "1.1"\n[verifier]\ntimeout_sec = 60\n')
    (tmp_path / "instruction.md").write_text("Do it.\n")
    with pytest.raises(EtudeError, match="container"):
        read_task(tmp_path)
    assert main(["tasks", "show", str(tmp_path)]) == 0
    assert "Do it." in capsys.readouterr().out
    assert stats(tmp_path.parent).kinds["harbor"] == 1


def test_patches_apply() -> None:
    before = {"a.py": b"x = 1\ny = 2", "b.py": b"z\n"}
    after = {"a.py": b"x = 1\ny = 3", "new.py": b"n\n"}
    assert patched(before, diff(before, after)) == after
    before = {"a.py": b"x = 1\n\f\ny\r = 2\n# \xc2\x85\xff\n", "b.py": b"z\n"}
    after = {"a.py": before["a.py"].replace(b"2", b"3"), "b.py": b"z\n\f\n"}
    assert patched(before, diff(before, after)) == after
    with pytest.raises(EtudeError, match="does not apply"):
        patched({"a.py": b"other\n"}, diff(before, after))


def test_a_row_that_is_none_is_told() -> None:
    with pytest.raises(EtudeError, match="rows:3: .*'repo'"):
        Row.from_json({"instance_id": "x"}, "rows:3")


def test_names() -> None:
    assert reported_name("tests/test_a.py::TestB::test_c") == "tests.test_a.TestB::test_c"
    assert name_of("https://host/people/more-itertools.git") == "more-itertools"
    assert name_of("Some_Package==1.2.3") == "some-package"
    assert name_of("some_package-1.2.3.tar.gz") == "some-package"
    assert is_test_file("pkg/tests/helper.py") and not is_test_file("pkg/testimony.py")


def test_a_folder_is_fetched_without_caches(tmp_path: Path) -> None:
    for path in ("shop/a.py", "build/lib/shop/a.py", "shop/__pycache__/a.pyc", "x.egg-info/b"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("a")
    assert fetch(str(tmp_path), tmp_path / "clones").files.keys() == {"shop/a.py"}
    with pytest.raises(EtudeError, match="not a folder, an archive"):
        fetch("./nothing/here", tmp_path)


def test_git_repositories_are_fetched_by_path_and_by_url(tmp_path: Path) -> None:
    clones, repository = tmp_path / "clones", make_repository(tmp_path / "shop")
    git(repository, "clone", "-q", "--bare", ".", str(tmp_path / "bare"))
    by_path = fetch(str(repository), clones)
    for source in (str(tmp_path / "bare"), f"file://{repository}/"):
        other = fetch(source, tmp_path / "others")
        assert other.files == by_path.files and other.git is not None
        assert other.origin.rpartition("@")[2] == by_path.origin.rpartition("@")[2]
    assert fetch(str(tmp_path / "bare"), clones).git != by_path.git  # a clone of its own


def test_what_a_build_makes_is_brought_along_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(place: Path, *argv: str, **options: object) -> str:
        if argv[0] == "freeze":
            return "pytest==9.0\n"
        if "--target" in argv:
            target = Path(argv[argv.index("--target") + 1])
            made = {"_version.py": b"version = '7'\n", "cart.py": b"x = 1\n"}
            write_files(target / "shop", made)
            write_files(target / "shop-7.dist-info", {"METADATA": b"Name: shop\n", "RECORD": b""})
        return ""

    monkeypatch.setattr(install, "pip", pip)
    checkout = Checkout(name="shop", origin="shop", files={"src/shop/cart.py": b"x = 1\n"})
    recipe = Recipe(requirements=(), pythonpath=("src",), tests=(), sources=("src/shop/*",))
    installed = install.PipInstaller().install(checkout, recipe, tmp_path / "venv")
    assert installed.generated == {"src/shop/_version.py": b"version = '7'\n"}
    assert installed.metadata == {"shop-7.dist-info/METADATA": b"Name: shop\n"}
    assert not [*(tmp_path / "venv").rglob("shop/*.py")]


def test_without_libcst_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "etude.factory.mutations")
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(EtudeError, match=r"pip install 'etude\[tasks\]'"):
        importlib.import_module("etude.factory.mutations")


def test_what_the_user_says() -> None:
    facts = {"functions": "shop/cart.py:Cart.total", "head": "def total(self):"}
    test = "    def test_total(self):\n        assert 1\n"
    for number in range(12):
        for kind in ("bug", "bugs", "stub", "removal"):
            said = instruct(
                f"{kind}-{number}", kind, facts, ("a.py::test_total",), test, "boom {x}"
            )
            assert ("shop/cart.py" in said or "test_total" in said) and "    def" not in said
    message = "Add totals (#12)\n\nMore.\n\nFixes #3\nSigned-off-by: A <a@b.c>"
    said = instruct("x", "split", {"message": message}, ("t",), test, "")
    assert (
        said.startswith("Add totals\n\nMore.") and "Signed" not in said and "Do the rest." in said
    )


def test_a_task_with_a_link_to_elsewhere_is_not_read(tmp_path: Path) -> None:
    """Agents are shown its content."""
    place = write_task(tmp_path / "tasks", task(), tmp_path / "archives")
    (place / "tests" / "same").symlink_to(place / "instruction.md")
    read_task(place)
    (tmp_path / "secret").write_text("x")
    for target in (tmp_path / "secret", tmp_path / "missing", place / "tests"):
        link = place / "solution" / "files" / "notes"
        link.symlink_to(target)
        with pytest.raises(EtudeError, match="solution/files/notes is a link"):
            read_task(place)
        link.unlink()


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ("No module named 'yaml'", "pyyaml"),
        ("No module named 'attr'", "attrs"),
        ("No module named 'PIL.Image'", "pillow"),
        ("No module named 'bs4'", "beautifulsoup4"),
        ("No module named 'sklearn'", "scikit-learn"),
        ("No module named 'cv2'", "opencv-python"),
        ("No module named 'pkg_resources'", "setuptools<81"),
        ("No module named 'typing_extensions'", "typing-extensions"),
        ("fixture 'mocker' not found", "pytest-mock"),
        ("fixture 'benchmark' not found", "pytest-benchmark"),
    ],
)
def test_what_an_error_says_is_missing_is_added(said: str, added: str) -> None:
    files = {"shop/__init__.py": b"", "tests/test_a.py": b""}
    recipe = HeuristicProposer().propose(files, [f"E   {said}"])
    assert recipe is not None and recipe.requirements == ("pytest", "coverage", added)


def test_a_module_of_its_own_is_not_installed_and_ideas_end() -> None:
    files = {
        "shop/__init__.py": b"",
        "shop/cart.py": b"",
        "tests/test_a.py": b"",
        "pyproject.toml": b'[project]\ndependencies = ["attrs"]\n'
        b'[project.optional-dependencies]\ntest = ["hypothesis"]\n',
    }
    proposer = HeuristicProposer()

    def wanted(*failures: str) -> tuple[str, ...] | None:
        recipe = proposer.propose(files, failures)
        return None if recipe is None else recipe.requirements

    assert wanted() == ("pytest", "coverage", "attrs", "hypothesis")
    assert wanted("No module named 'cart'") == ("pytest", "coverage", "attrs"), "fewer, then"
    assert wanted("it broke", "it broke again") is None
    assert proposer.propose({"README.md": b""}, []) is None


def test_files_have_the_same_identity_in_any_order() -> None:
    files = {"a.py": b"one", "b.py": b"two"}
    identity = digest_of(files)
    assert digest_of(dict(reversed(files.items()))) == identity
    for other in ({"a.py": b"two", "b.py": b"one"}, {"a.py": b"one"}, {**files, "c.py": b""}):
        assert digest_of(other) != identity
