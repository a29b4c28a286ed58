"""Preparation of a source: a repository that is installed, tested and surveyed. The result is
stored next to the tasks, so it is done only once.

Recipes are proposed and tried. The best one must then work again: in another virtual environment
with the same versions, and in fresh sandboxes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.core.errors import EtudeError
from etude.core.sandbox import SandboxPool
from etude.factory.harbor import pack, unpack
from etude.factory.install import Installed, Installer, InstallFailed
from etude.factory.prove import Repository
from etude.factory.recipe import Proposer, Recipe
from etude.factory.sources import Checkout, fetch, name_of
from etude.factory.survey import SuiteRun, Survey, combine, run_suite

TRIES = 5
PLAIN_RUNS = 2
"""Runs of the whole suite, in addition to the one that records lines: tests that pass in all of
them are stable."""
_GOOD, _ENOUGH = 0.97, 0.5
"""Share of the tests that pass with a recipe that is good, and with one that is acceptable."""


class Discarded(Exception):
    """The reason why a repository yields no tasks."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """The folder, sandboxes and tools for preparing repositories."""

    folder: Path
    pool: SandboxPool
    proposer: Proposer
    installer: Installer

    @property
    def venvs(self) -> Path:
        return self.folder / "venvs"

    def place(self, name: str) -> Path:
        return self.folder / "repositories" / name

    def clone_of(self, name: str) -> Path | None:
        place = self.folder / "repositories" / f"{name}.git"
        return place if place.is_dir() else None


def is_prepared(source: str, workshop: Workshop) -> bool:
    return (workshop.place(name_of(source)) / "repository.json").is_file()


async def prepare(source: str, workshop: Workshop) -> Repository:
    """The repository of a source, loaded from disk if it was prepared before. Raises Discarded."""
    place = workshop.place(name_of(source))
    if is_prepared(source, workshop):
        return _load(place)
    try:
        checkout = await asyncio.to_thread(fetch, source, workshop.folder / "repositories")
    except EtudeError as e:
        raise Discarded(f"cannot be fetched: {e}") from e
    recipe, installed, first = await _find_recipe(checkout, workshop)
    repository = await _reproduce(checkout, recipe, installed, first, workshop)
    _save(place, repository)
    return repository


async def _find_recipe(
    checkout: Checkout, workshop: Workshop
) -> tuple[Recipe, Installed, SuiteRun]:
    """The best of a few recipes, tried one after the other."""
    failures: list[str] = []
    best: tuple[Recipe, Installed, SuiteRun] | None = None
    venv = f"{checkout.name}.try"
    for _ in range(TRIES):
        recipe = workshop.proposer.propose(checkout.files, failures)
        if recipe is None:
            break
        try:
            installed = await asyncio.to_thread(
                workshop.installer.install, checkout, recipe, workshop.venvs / venv
            )
        except InstallFailed as e:
            failures.append(str(e))
            if str(e).startswith("leak"):
                break
            continue
        files = {**checkout.files, **installed.generated}
        requirements = installed.requirements
        ran = await run_suite(workshop.pool, files, recipe, venv, requirements, lines=True)
        if best is None or len(ran.passed) > len(best[2].passed):
            best = recipe, installed, ran
        if (
            ran.passed
            and len(ran.passed) >= _GOOD * len(ran.outcomes)
            and "ERROR" not in ran.output
        ):
            break
        failures.append(ran.output)
    shutil.rmtree(workshop.venvs / venv, ignore_errors=True)
    if best is None or len(best[2].passed) <= _ENOUGH * len(best[2].outcomes):
        last = failures[-1].strip().splitlines()[-1:] if failures else ["no package with tests"]
        raise Discarded(f"no recipe works: {last[0] if last else 'no output'}")
    return best


async def _reproduce(
    checkout: Checkout, recipe: Recipe, installed: Installed, first: SuiteRun, workshop: Workshop
) -> Repository:
    """Install and test the repository a second time, by the same recipe."""
    final, half = workshop.venvs / checkout.name, workshop.venvs / f"{checkout.name}.new"
    try:
        await asyncio.to_thread(workshop.installer.install_again, installed, half)
    except InstallFailed as e:
        raise Discarded("the recipe does not work twice") from e
    shutil.rmtree(final, ignore_errors=True)
    half.rename(final)
    files = {**checkout.files, **installed.generated}
    others = [
        await run_suite(
            workshop.pool, files, recipe, checkout.name, installed.requirements, lines=False
        )
        for _ in range(PLAIN_RUNS)
    ]
    survey = combine(first, others)
    if not survey.seconds or len(survey.seconds) < _ENOUGH * len(first.passed):
        raise Discarded("the tests do not pass twice")
    return Repository(
        name=checkout.name,
        origin=checkout.origin,
        files=files,
        recipe=recipe,
        survey=survey,
        requirements=installed.requirements,
    )


def _save(place: Path, repository: Repository) -> None:
    place.mkdir(parents=True, exist_ok=True)
    pack(place / "files.tar.gz", repository.files)
    (place / "survey.bin").write_bytes(repository.survey.to_bytes())
    told = {
        "name": repository.name,
        "origin": repository.origin,
        "recipe": asdict(repository.recipe),
        "requirements": repository.requirements,
        "tests": len(repository.survey.seconds),
    }
    half = place / "repository.part"
    half.write_text(json.dumps(told, indent=1))
    half.rename(place / "repository.json")


def _load(place: Path) -> Repository:
    told = json.loads((place / "repository.json").read_text())
    recipe = Recipe(**{key: tuple(value) for key, value in told["recipe"].items()})
    return Repository(
        name=told["name"],
        origin=told["origin"],
        files=unpack(place / "files.tar.gz"),
        recipe=recipe,
        survey=Survey.from_bytes((place / "survey.bin").read_bytes()),
        requirements=tuple(told["requirements"]),
    )


def check_names(sources: Sequence[str]) -> None:
    """Refuse sources that would have the same name."""
    names: dict[str, str] = {}
    for source in sources:
        other = names.setdefault(name_of(source), source)
        if other != source:
            raise EtudeError(
                f"{other} and {source} have the same name, {name_of(source)}: give only one of them"
            )
