"""Tests of a task are free of chance, wherever they run."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.core.harness_config import CodeConfig
from etude.core.sandbox import SandboxPool, SandboxSpec
from etude.factory.build import Options, open_workshop
from etude.factory.candidates import Candidate, Draft
from etude.factory.grade import grade
from etude.factory.install import CopyInstaller, Installed
from etude.factory.prove import Repository, Seen, prove
from etude.factory.recipe import Recipe
from etude.factory.survey import Survey, run_suite
from etude.factory.task import RepositoryTask, pytest_argv, sandbox_env
from etude.harness.code.testing import RunTests
from etude.harness.code.tool import Workspace

GOOD = b"def total(items):\n    return sum(items)\n"
BAD = GOOD.replace(b"sum(items)", b"sum(items) + 1")
TESTS = b"""\
import time

from hypothesis import given, settings, strategies
from shop import total

drawn = []


@given(strategies.integers(0, 2**64))
def draw(number):
    drawn.append(number)


def test_total():
    draw()
    assert total([1]) == 1, f"drew {sum(drawn)}, hash {hash('red')}"


@settings(max_examples=1)
@given(strategies.just(0.3))
def test_slow(seconds):
    time.sleep(seconds)  # the deadline is 0.2 s
"""
OWN_PROFILE = b"""\
from hypothesis import settings

settings.register_profile("own", parent=settings.get_profile("default"), derandomize=False)
settings.load_profile("own")
"""
TOTAL, SLOW = "tests/test_shop.py::test_total", "tests/test_shop.py::test_slow"
INSTALLED = ("pytest", "coverage", "hypothesis")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("chance")
    place.chmod(0o755)
    installed = Installed(requirements=INSTALLED, generated={}, metadata={})
    installer = CopyInstaller(("hypothesis", "sortedcontainers"))
    installer.install_again(installed, place / "venvs" / "shop")
    return place


@pytest.fixture
async def pool(folder: Path) -> AsyncIterator[SandboxPool]:
    async with open_workshop(folder, Options()) as workshop:
        yield workshop.pool


def repository_of(profile: bytes) -> Repository:
    recipe = Recipe(
        requirements=INSTALLED, pythonpath=("",), tests=("tests",), sources=("shop.py",)
    )
    return Repository(
        name="shop",
        origin="here",
        files={"shop.py": GOOD, "tests/conftest.py": profile, "tests/test_shop.py": TESTS},
        recipe=recipe,
        survey=Survey(seconds={TOTAL: 1.0}, lines={}, start_s=2.0),
        requirements=INSTALLED,
    )


async def proven(repository: Repository, pool: SandboxPool) -> RepositoryTask:
    candidate = Candidate(
        base=repository.files,
        broken={"shop.py": BAD},
        solution={"shop.py": GOOD},
        tests=(TOTAL,),
        facts={"functions": "shop.py:total", "lines": "1"},
        shows_tests=True,
    )
    return await prove(Draft("x", "bug", lambda: candidate), repository, Seen(), pool, 1)


def chances(text: str) -> tuple[str, str]:
    """The drawn number, and a hash, which orders sets."""
    found = re.search(r"drew (\d+), hash (-?\d+)", text)
    assert found, text
    return found[1], found[2]


@pytest.mark.parametrize("profile", [b"", OWN_PROFILE], ids=["default", "own profile"])
async def test_all_see_the_same(pool: SandboxPool, profile: bytes) -> None:
    """The proof of a task, the grading of an attempt, and the agent's own test run."""
    task = await proven(repository_of(profile), pool)
    seen = [chances(task.instruction)]
    async with pool.open(task.as_task().sandbox) as sandbox:
        seen.append(chances((await grade(task, sandbox, pool)).parts[0].evidence))
        run_tests = RunTests(Workspace(sandbox, CodeConfig(), None))  # type: ignore[arg-type]
        seen.append(chances(await run_tests.call([TOTAL])))
    assert len({*seen}) == 1, seen


async def test_a_survey_draws_the_same_and_no_order_of_sets_is_relied_on(pool: SandboxPool) -> None:
    repository = repository_of(b"")
    files = {**repository.files, "shop.py": BAD}
    seen = []
    for _ in range(2):
        ran = await run_suite(
            pool, files, repository.recipe, "shop", repository.requirements, lines=False
        )
        seen.append(chances(ran.output))
    (first, some_hash), (second, other_hash) = seen
    assert first == second and some_hash != other_hash


async def test_no_machine_is_too_slow(pool: SandboxPool) -> None:
    repository = repository_of(b"")
    env = sandbox_env("shop", ("",), repository.requirements)
    async with pool.open(SandboxSpec(files=repository.files, env=env)) as sandbox:
        ran = await sandbox.run(pytest_argv((SLOW,)), timeout_s=600.0, report=True)
    assert ran.exit_code == 0, ran.output
