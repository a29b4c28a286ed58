"""The part of a package that its installation brings along: real pip, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.factory.install import built, make_venv, pip
from etude.factory.recipe import Recipe
from etude.factory.sources import Checkout

BACKEND = b"""
import os, zipfile

def build_wheel(directory, config_settings=None, metadata_directory=None):
    version = os.environ.get("SETUPTOOLS_SCM_PRETEND_VERSION")
    if not version:
        raise LookupError("no git here to ask for a version")
    name = f"shop-{version}-py3-none-any.whl"
    info = f"shop-{version}.dist-info"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as wheel:
        wheel.writestr("shop/__init__.py", "from ._version import version")
        wheel.writestr("shop/_version.py", f"version = {version!r}")
        said = ["Metadata-Version: 2.1", "Name: shop", f"Version: {version}", ""]
        wheel.writestr(f"{info}/METADATA", os.linesep.join(said))
        said = ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
        wheel.writestr(f"{info}/WHEEL", os.linesep.join(said))
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = b"""
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.mark.parametrize("own", [None, "7.5"])
def test_a_version_that_comes_from_git_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    """As setuptools-scm and hatch-vcs write it; the user may set the version."""
    monkeypatch.delenv("SETUPTOOLS_SCM_PRETEND_VERSION", raising=False)
    if own:
        monkeypatch.setenv("SETUPTOOLS_SCM_PRETEND_VERSION", own)
    files = {"pyproject.toml": PROJECT, "backend.py": BACKEND, "src/shop/__init__.py": b""}
    recipe = Recipe(requirements=(), pythonpath=("src",), tests=("tests",), sources=("src/shop/*",))
    place = tmp_path / "venv"
    made = make_venv(place)
    metadata, generated = built(Checkout(name="shop", origin="here", files=files), recipe, place)
    assert generated == {"src/shop/_version.py": f"version = {own or '1.0'!r}".encode()}
    assert (
        f"Version: {own or '1.0'}".encode() in metadata[f"shop-{own or '1.0'}.dist-info/METADATA"]
    )
    assert not (made / "shop").exists(), "the package itself is never there"


def test_what_lies_on_the_path_of_this_process_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `freeze` would list it among the requirements that reproduce the environment."""
    info = tmp_path / "here" / "beside-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: beside\nVersion: 1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    make_venv(tmp_path / "venv")
    assert "beside" not in pip(tmp_path / "venv", "freeze", "--all")
