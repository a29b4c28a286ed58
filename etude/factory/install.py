"""Virtual environments for repositories, with what a package needs, and never the package itself.

An installed copy would be the answer to every task, within the agent's reach. Only two parts of the
package are installed: its metadata, which some programs ask for their version, and the files that
its build makes.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import venv as virtual
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from etude.factory.recipe import TOOLS, Recipe
from etude.factory.sources import Checkout
from etude.factory.task import Files

_TIMEOUT_S = 400.0
_SHOWN = 3000
_VERSION = "1.0"
_VERSION_VARIABLES = (
    "SETUPTOOLS_SCM_PRETEND_VERSION",
    "PDM_BUILD_SCM_VERSION",
    "PBR_VERSION",
    "POETRY_DYNAMIC_VERSIONING_BYPASS",
)
"""Builds that read a package's version from git, which a checkout lacks, take it from these
(hatch-vcs from the first)."""


class InstallFailed(Exception):
    """A failed installation, with its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Result of an installation."""

    requirements: tuple[str, ...]
    """Requirements with versions, which reproduce the environment."""
    generated: Files
    """Files of the package that its build makes, such as `_version.py`."""
    metadata: Files
    """The installed metadata of the package itself."""


class Installer(Protocol):
    """Maker of virtual environments."""

    def install(self, checkout: Checkout, recipe: Recipe, place: Path) -> Installed:
        """Make the environment at `place`. Raises InstallFailed."""

    def install_again(self, installed: Installed, place: Path) -> None:
        """Make the same environment at another place."""


class PipInstaller:
    """An `Installer` that uses pip and the network, and runs the code of packages that are
    built."""

    def install(self, checkout: Checkout, recipe: Recipe, place: Path) -> Installed:
        site = make_venv(place)
        pip(place, "install", *recipe.requirements)
        if own := [name for name in module_names(recipe) if _is_in(site, name)]:
            raise InstallFailed(
                f"leak: {own[0]} itself is a requirement of its tests, so it would be in every "
                f"sandbox"
            )
        frozen = pip(place, "freeze", "--all").splitlines()
        metadata, generated = built(checkout, recipe, place)
        write_files(site, metadata)
        return Installed(
            requirements=tuple(line for line in frozen if "==" in line),
            generated=generated,
            metadata=metadata,
        )

    def install_again(self, installed: Installed, place: Path) -> None:
        site = make_venv(place)
        pip(place, "install", "--no-deps", *installed.requirements)
        write_files(site, installed.metadata)


class CopyInstaller:
    """An `Installer` that copies pytest, coverage and `packages` from this Python, for repositories
    that need nothing else. It needs no network."""

    def __init__(self, packages: tuple[str, ...] = ()) -> None:
        self._packages = packages

    def install(self, checkout: Checkout, recipe: Recipe, place: Path) -> Installed:
        installed = Installed(requirements=recipe.requirements, generated={}, metadata={})
        self.install_again(installed, place)
        return installed

    def install_again(self, installed: Installed, place: Path) -> None:
        site = make_venv(place)
        for name in (*TOOLS, "pluggy", "iniconfig", "packaging", "pygments", *self._packages):
            for each in importlib.metadata.files(name) or []:
                if each.parts[0] != ".." and Path(each.locate()).is_file():
                    target = site / each
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(str(each.locate()), target)  # compiled files depend on it


def module_names(recipe: Recipe) -> list[str]:
    """The names that the package is imported by."""
    return [
        each.removesuffix("/*").removesuffix(".py").rpartition("/")[2] for each in recipe.sources
    ]


def make_venv(place: Path) -> Path:
    """Make an empty virtual environment of this Python. Return the directory of its packages."""
    virtual.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(place)
    # regardless of the umask: commands in a sandbox run as an ordinary user
    os.chmod(place, 0o755)
    return next((place / "lib").glob("python*")) / "site-packages"


def _is_in(site: Path, name: str) -> bool:
    return (site / name).exists() or (site / f"{name}.py").exists()


def pip(place: Path, *argv: str, env: Mapping[str, str] | None = None) -> str:
    """Run pip on a virtual environment, with these variables unless they are set already. Raises
    InstallFailed."""
    command = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), *argv]
    quiet = ("-q", "--disable-pip-version-check", "--no-input")
    # packages on the path of this process are not installed there
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ran = subprocess.run(
            [*command, *quiet],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**(env or {}), **outside},
        )
    except subprocess.TimeoutExpired as e:
        raise InstallFailed(f"pip {argv[0]} took more than {_TIMEOUT_S:g} s") from e
    if ran.returncode:
        raise InstallFailed((ran.stdout + ran.stderr)[-_SHOWN:])
    return ran.stdout


def built(checkout: Checkout, recipe: Recipe, place: Path) -> tuple[Files, Files]:
    """The package's metadata, and the files that its build made. Both are empty if it cannot be
    built: tests may pass without them."""
    metadata: dict[str, bytes] = {}
    generated: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="etude-build-") as scratch:
        source, target = Path(scratch, "source"), Path(scratch, "built")
        write_files(source, checkout.files)
        where = ("--target", str(target), str(source))
        try:
            versions = dict.fromkeys(_VERSION_VARIABLES, _VERSION)
            pip(place, "install", "--no-deps", "--no-compile", *where, env=versions)
        except InstallFailed:
            return {}, {}
        for file in target.glob("*.dist-info/*"):
            if file.is_file() and file.name not in ("RECORD", "direct_url.json"):
                metadata[str(file.relative_to(target))] = file.read_bytes()
        for pattern in recipe.sources:
            top = pattern.removesuffix("/*")
            inside = top.rpartition("/")[0]
            for file in sorted((target / top.rpartition("/")[2]).rglob("*.py")):
                path = f"{inside}/{file.relative_to(target)}".lstrip("/")
                if path not in checkout.files:
                    generated[path] = file.read_bytes()
    return metadata, generated


def write_files(folder: Path, files: Files) -> None:
    """Write files below a folder."""
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
