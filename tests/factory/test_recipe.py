"""Declarations of requirements in a repository, place by place."""

from __future__ import annotations

import pytest

from etude.factory.recipe import TOOLS, HeuristicProposer, Recipe, ScriptedProposer, find_layout

PACKAGE = {"shop/__init__.py": b"", "tests/test_a.py": b""}


def wanted(files: dict[str, str], *failures: str) -> list[str]:
    """The installed requirements other than the tools."""
    told = {path: text.encode() for path, text in files.items()}
    recipe = HeuristicProposer().propose(PACKAGE | told, failures)
    assert recipe is not None and recipe.requirements[: len(TOOLS)] == TOOLS
    return list(recipe.requirements[len(TOOLS) :])


PROJECT = '[project]\nname = "my.shop"\n'


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, []),
        ({"pyproject.toml": "not = [toml"}, []),
        ({"pyproject.toml": "[project]\ndependencies = ['attrs', 3]"}, ["attrs"]),
        ({"pyproject.toml": f"{PROJECT}dependencies = ['My_Shop[extra]', 'six']"}, ["six"]),
        (  # extras named after tests are enough
            {"pyproject.toml": "[project.optional-dependencies]\ntests = ['a1']\ndev = ['b1']"},
            ["a1"],
        ),
        ({"pyproject.toml": "[project.optional-dependencies]\ndev = ['b1']\nx = ['c1']"}, ["b1"]),
        ({"pyproject.toml": "[dependency-groups]\ntest = ['a1', {include-group = 'x'}]"}, ["a1"]),
        (
            {
                "setup.cfg": "[options]\ninstall_requires =\n  six>=1\n  attrs\n"
                "[options.extras_require]\ntesting = freezegun\ndev = tool"
            },
            ["six>=1", "attrs", "freezegun"],
        ),
        ({"setup.cfg": "no section"}, []),
        ({"setup.cfg": "[options]\ninstall_requires = six\ninstall_requires = attrs"}, ["attrs"]),
        ({"setup.py": "setup(install_requires = ['six',\n \"attrs\"])"}, ["six", "attrs"]),
        ({"tox.ini": "[testenv]\ndeps =\n  py311: six\n  attrs # why"}, ["six", "attrs"]),
        # the first of the files is taken
        ({"requirements.txt": "six\n", "requirements-test.txt": "attrs\n# no\n-e .\n"}, ["attrs"]),
        ({"requirements.txt": "six ; python_version < '3'\nattrs~=1.0\ngit+https://x\n./here\n"},
         ["six ; python_version < '3'", "attrs~=1.0"]),
        # CI files are read if there are none
        ({".github/workflows/a.yaml": "run: pip3 install pip six -r x.txt ./here attrs | tee"},
         ["six", "attrs"]),
        ({".travis.yml": "- pip install setuptools six && true"}, ["six"]),
        ({".travis.yml": "- pip install six", "requirements.txt": "attrs"}, ["attrs"]),
        ({"docs/.travis.yml": "- pip install six"}, []),
        ({"requirements.txt": "pytest-cov\nnumpy>=1\nMyPy\nsphinx-rtd\nnumpydoc\n"}, ["numpydoc"]),
    ],
)  # fmt: skip
def test_what_is_declared_is_installed(files: dict[str, str], found: list[str]) -> None:
    assert wanted(files) == found


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("No module named 'six.moves'", ["attrs", "six"]),
        ("No module named 'six'\nNo module named 'six'", ["attrs", "six"]),
        ("No module named 'shop.cart'", []),  # nothing is missing: fewer, then
        ("fixture 'thing' not found", ["attrs"]),
        ("No matching distribution found for ATTRS", []),
        ("No matching distribution found for six", ["attrs"]),
        ("it broke", []),
    ],
)
def test_what_went_wrong_changes_what_is_installed(said: str, found: list[str]) -> None:
    assert wanted({"requirements.txt": "attrs"}, said) == found


def test_what_failed_once_is_remembered() -> None:
    told = ["No module named 'six'", "No matching distribution found for attrs"]
    assert wanted({"requirements.txt": "attrs"}, *told) == ["six"]


@pytest.mark.parametrize(
    ("paths", "sources"),
    [
        (["shop/__init__.py", "shop/inner/__init__.py", "test_a.py"], ("shop/*",)),
        (["shop/cart.py", "test_a.py"], None),
        (["docs/__init__.py", "tools/__init__.py", "setup.py", "conftest.py", "test_a.py"], None),
        (["shop.py", "noxfile.py", "shop_test.py"], ("shop.py",)),
        (["lib/shop.py", "tests.py"], ("lib/shop.py",)),
        (["lib/shop/__init__.py", "one/test.py"], ("lib/shop/*",)),
        (["shop.py", "tests/helper.py", "tests/data.txt"], None),
        (["shop.py", "a/__init__.py", "test_a.py"], ("shop.py", "a/*")),
    ],
)
def test_what_is_the_package_and_what_is_not(
    paths: list[str], sources: tuple[str, ...] | None
) -> None:
    found = find_layout(dict.fromkeys(paths, b""))
    assert (found and found[1]) == sources


def test_tests_and_roots_come_in_order() -> None:
    paths = ["src/b.py", "lib/a.py", "tests/test_b.py", "tests/test_a.py", "c_test.py"]
    found = find_layout(dict.fromkeys(paths, b""))
    assert found is not None
    assert found[0] == ("src", "lib", "")
    assert found[2] == ("c_test.py", "tests/test_a.py", "tests/test_b.py")


def test_a_script_of_proposals_ends() -> None:
    recipe = Recipe(requirements=(), pythonpath=(), tests=(), sources=())
    proposer = ScriptedProposer(recipe)
    assert proposer.propose({}, []) == recipe and proposer.propose({}, ["it broke"]) is None
