"""Recipes for installing and testing a repository: proposed, and kept only after they have worked.

A proposer reads the files and the earlier failures; `HeuristicProposer` looks in the places where
projects declare such things. A proposer that asks a model would have the same method.
"""

from __future__ import annotations

import configparser
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from etude.factory.task import Files, is_test_file

TOOLS = ("pytest", "coverage")
_EXTRAS = ("test", "tests", "testing", "dev", "develop", "all", "ci")
_FILES = ("test-requirements.txt", "requirements-test.txt", "requirements-tests.txt") + (
    "requirements/test.txt",
    "requirements/tests.txt",
    "requirements/testing.txt",
    "requirements_test.txt",
    "tests/requirements.txt",
    "requirements-dev.txt",
    "requirements.txt",
)
_OTHER_NAMES = {
    "yaml": "pyyaml",
    "dateutil": "python-dateutil",
    "attr": "attrs",
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "pkg_resources": "setuptools<81",
}
_USELESS = re.compile(
    r"^(pytest-(cov|xdist|benchmark|flake8|black|mypy|ruff|enabler|checkdocs|pylint|codspeed)|pip|tox|"
    r"nox|pre-commit|black|ruff|flake8.*|mypy|sphinx.*|furo|twine|build|wheel|coveralls|codecov|"
    r"isort|pylint|check-manifest|readme.renderer|towncrier|zest.*|jaraco\.packaging|rst\.linker|"
    r"bumpversion|types-.*|pyright|pytype|mkdocs.*|diff-cover|pip-tools|uv|hatch.*|numpy|pandas|"
    r"scipy|matplotlib|torch|jupyter.*|ipython|notebook|setuptools-scm|setuptools.scm)$",
    re.IGNORECASE,
)
"""Packages that tests do not need, and large ones that they skip without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Requirements of a repository, and its layout."""

    requirements: tuple[str, ...]
    pythonpath: tuple[str, ...]
    """Folders of the working copy."""
    tests: tuple[str, ...]
    """Arguments of pytest."""
    sources: tuple[str, ...]
    """Patterns of the files that are the package itself, without tests."""


class Proposer(Protocol):
    def propose(self, files: Files, failures: Sequence[str]) -> Recipe | None:
        """The next recipe to try, given the results of earlier ones; None: no idea."""


class ScriptedProposer:
    """A `Proposer` that proposes given recipes, in order."""

    def __init__(self, *recipes: Recipe) -> None:
        self._recipes = recipes

    def propose(self, files: Files, failures: Sequence[str]) -> Recipe | None:
        return self._recipes[len(failures)] if len(failures) < len(self._recipes) else None


class HeuristicProposer:
    """A `Proposer` that reads pyproject.toml, setup.cfg, tox.ini, requirements files and CI files,
    and learns from errors what else is missing."""

    def propose(self, files: Files, failures: Sequence[str]) -> Recipe | None:
        layout = find_layout(files)
        if layout is None:
            return None
        pythonpath, sources, tests = layout
        requirements = dict.fromkeys([*TOOLS, *_declared(files)])
        missing = list(dict.fromkeys(name for said in failures for name in _missing(said, files)))
        broken = [name for said in failures for name in re.findall(_NOT_FOUND, said)]
        wanted = [
            each
            for each in (*requirements, *missing)
            if _bare(each) not in {_bare(name) for name in broken}
        ]
        if failures and not missing and not broken:
            if len(failures) > 1:
                return None
            wanted = [*TOOLS, *_dependencies(_toml(files))]  # fewer, then
        return Recipe(
            requirements=tuple(dict.fromkeys(wanted)),
            pythonpath=pythonpath,
            tests=tests,
            sources=sources,
        )


_NOT_FOUND = re.compile(r"No matching distribution found for ([\w.-]+)")


def find_layout(files: Files) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] | None:
    """Folders of modules, patterns of the package's files, and arguments of pytest; None if there
    is no package or there are no tests."""
    python = [path for path in files if path.endswith(".py")]
    own = [path for path in python if not is_test_file(path)]
    roots = [""] + [top for top in ("src", "lib") if any(p.startswith(f"{top}/") for p in own)]
    sources: list[str] = []
    for root in roots:
        prefix = f"{root}/" if root else ""
        for path in own:
            inner = path.removeprefix(prefix).split("/")
            if not path.startswith(prefix):
                continue
            if len(inner) == 2 and inner[1] == "__init__.py" and inner[0] not in _NO_PACKAGE:
                sources.append(f"{prefix}{inner[0]}/*")
            elif len(inner) == 1 and inner[0] not in _NO_MODULE and (root or len(inner) == 1):
                sources.append(path)
    tests = tuple(
        sorted(
            path for path in python if re.search(r"(^|/)(test_[^/]*|[^/]*_test|tests?)\.py$", path)
        )
    )
    if not sources or not tests:
        return None
    return tuple(sorted(roots, reverse=True)), tuple(dict.fromkeys(sources)), tests


_NO_PACKAGE = {
    "docs",
    "doc",
    "examples",
    "example",
    "benchmarks",
    "benchmark",
    "scripts",
    "tools",
} | {
    "tests",
    "test",
    "bench",
    "ci",
}
_NO_MODULE = {
    "setup.py",
    "noxfile.py",
    "conftest.py",
    "tasks.py",
    "fabfile.py",
    "versioneer.py",
} | {
    "ez_setup.py",
    "manage.py",
    "toxfile.py",
}


def _declared(files: Files) -> Iterator[str]:
    """Requirements of the package and of its tests, without those that are certainly not needed."""
    project = _toml(files)
    found = [*_dependencies(project)]
    extras = project.get("project", {}).get("optional-dependencies", {})
    groups = project.get("dependency-groups", {})
    for table in (extras, groups):
        for name in _EXTRAS[:3] if any(each in table for each in _EXTRAS[:3]) else _EXTRAS:
            found += [each for each in table.get(name, []) if isinstance(each, str)]
    found += _of_setup_cfg(files)
    found += _of_setup_py(files)
    found += _of_tox(files)
    for name in _FILES:
        if name in files:
            found += files[name].decode(errors="replace").splitlines()
            break
    else:
        found += _of_ci(files)
    own = _bare(str(project.get("project", {}).get("name", "")))
    for each in found:
        line = each.partition("#")[0].strip()
        plain = re.match(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?\s*([<>=!~][^;]*)?(;.*)?$", line)
        if plain and _bare(line) != own and not _USELESS.match(_bare(line)):
            yield line


def _toml(files: Files) -> dict[str, Any]:
    try:
        return tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _dependencies(project: dict[str, Any]) -> list[str]:
    found = project.get("project", {}).get("dependencies", [])
    return [each for each in found if isinstance(each, str)]


def _of_setup_cfg(files: Files) -> list[str]:
    parser = _ini(files, "setup.cfg")
    found = parser.get("options", "install_requires", fallback="").splitlines()
    for extra in _EXTRAS[:3]:
        found += parser.get("options.extras_require", extra, fallback="").splitlines()
    return found


def _of_setup_py(files: Files) -> list[str]:
    text = files.get("setup.py", b"").decode(errors="replace")
    lists = re.findall(r"(?:install_requires|tests_require)\s*=\s*\[([^\]]*)\]", text)
    return [each for found in lists for each in re.findall(r"""["']([^"']+)["']""", found)]


def _of_tox(files: Files) -> list[str]:
    deps = _ini(files, "tox.ini").get("testenv", "deps", fallback="").splitlines()
    return [each.rpartition(": ")[2] for each in deps]


def _of_ci(files: Files) -> list[str]:
    """Packages that the steps of CI files install by name."""
    found: list[str] = []
    for path, content in files.items():
        if re.match(r"\.github/workflows/.*\.ya?ml$|\.travis\.yml$", path):
            for line in re.findall(r"pip3? install ([^\n|&;]+)", content.decode(errors="replace")):
                found += [each for each in line.split() if re.fullmatch(r"[a-zA-Z][\w-]+", each)]
    return [each for each in found if each not in ("pip", "setuptools", "install")]


def _ini(files: Files, name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    try:
        parser.read_string(files.get(name, b"").decode(errors="replace"))
    except configparser.Error:
        return configparser.RawConfigParser()
    return parser


def _missing(said: str, files: Files) -> Iterator[str]:
    """Packages that are missing according to an output."""
    for name in re.findall(r"No module named '([\w.]+)'", said):
        top = name.partition(".")[0]
        if not any(re.search(rf"(^|/){top}(\.py$|/)", path) for path in files):
            yield _OTHER_NAMES.get(top, top.replace("_", "-"))
    for fixture in re.findall(r"fixture '(\w+)' not found", said):
        yield {"mocker": "pytest-mock", "benchmark": "pytest-benchmark"}.get(fixture, "pytest")


def _bare(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;(]", requirement.strip())[0]).lower()
