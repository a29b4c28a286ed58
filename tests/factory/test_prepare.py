"""Preparation of a repository: the best recipe is taken, and must work again."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.factory import images, prepare, survey_plugin
from etude.factory.image_spec import ImageSpec, Oci, Realism, Source
from etude.factory.images import build_image
from etude.factory.install import Installed, InstallFailed
from etude.factory.lived_in import live_in
from etude.factory.prepare import TRIES, Discarded, Workshop, check_names
from etude.factory.recipe import Recipe
from etude.factory.survey import SuiteRun, Survey, combine
from etude.sandbox.image import ImageStore
from tests.factory.test_images import layer_of, make_layout

RECIPES = [
    Recipe(requirements=(f"r{n}",), pythonpath=("",), tests=("tests",), sources=("shop/*",))
    for n in range(9)
]


def suite(passed: int, total: int = 10, output: str = "", **more: Any) -> SuiteRun:
    outcomes = {f"t{n}": (n < passed, n / 10) for n in range(total)}
    told = {"lines": {"shop/a.py": {1: range(total)}}, "start_s": 0.5} | more
    return SuiteRun(outcomes=outcomes, output=output, **told)


class Scripted:
    """Proposes one recipe after the other and installs them, unless it is told to fail."""

    def __init__(self, *ends: SuiteRun | str, proposals: int = 9) -> None:
        self.ends = list(ends)
        self.proposals = proposals
        self.failures: list[list[str]] = []
        self.places: list[str] = []
        self.suites: list[dict[str, Any]] = []

    def propose(self, files: object, failures: Sequence[str]) -> Recipe | None:
        self.failures.append(list(failures))
        return RECIPES[len(failures)] if len(failures) < self.proposals else None

    def install(self, checkout: object, recipe: Recipe, place: Path) -> Installed:
        place.mkdir(parents=True, exist_ok=True)
        self.places.append(place.name)
        if isinstance(self.ends[0], str):
            raise InstallFailed(self.ends.pop(0))
        made = {"shop/_version.py": b"1"}
        return Installed(requirements=("a==1",), generated=made, metadata={})

    def install_again(self, installed: Installed, place: Path) -> None:
        if self.ends and isinstance(self.ends[0], str):
            raise InstallFailed(self.ends.pop(0))
        place.mkdir(parents=True)
        (place / "new").touch()

    async def run_suite(
        self,
        pool: object,
        files: Any,
        recipe: Recipe,
        venv: str,
        requirements: Sequence[str],
        *,
        lines: bool,
    ) -> SuiteRun:
        assert requirements == ("a==1",), "those that were installed, not those asked for"
        self.suites.append({"files": set(files), "recipe": recipe, "venv": venv, "lines": lines})
        found = self.ends.pop(0)
        assert isinstance(found, SuiteRun)
        return found


async def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch, script: Scripted) -> Any:
    source = folder / "shop"
    (source / "shop").mkdir(parents=True, exist_ok=True)
    (source / "shop" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(prepare, "run_suite", script.run_suite)
    workshop = Workshop(folder / "out", None, script, script)  # type: ignore[arg-type]
    return await prepare.prepare(str(source), workshop)


async def test_the_first_recipe_that_works_is_taken_and_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "venvs" / "shop").mkdir(parents=True)
    (tmp_path / "out" / "venvs" / "shop" / "old").touch()
    script = Scripted(suite(10), suite(10), suite(9))
    found = await prepared(tmp_path, monkeypatch, script)
    assert script.failures == [[]] and script.places == ["shop.try"]
    assert [each["lines"] for each in script.suites] == [True, False, False]
    assert [each["venv"] for each in script.suites] == ["shop.try", "shop", "shop"]
    assert all(each["files"] == {"shop/a.py", "shop/_version.py"} for each in script.suites)
    assert (found.name, found.recipe, found.requirements) == ("shop", RECIPES[0], ("a==1",))
    assert set(found.files) == {"shop/a.py", "shop/_version.py"}
    assert set(found.survey.seconds) == {f"t{n}" for n in range(9)}, "what passes every time"
    venvs = tmp_path / "out" / "venvs"
    assert [path.name for path in venvs.iterdir()] == ["shop"]
    assert [path.name for path in (venvs / "shop").iterdir()] == ["new"]
    again = await prepared(tmp_path, monkeypatch, Scripted())
    assert again == found, "from the disk"


async def test_the_best_of_those_that_were_tried_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ["no such package", suite(6, output="six"), suite(8, output="eight"), suite(8), suite(7)]
    script = Scripted(*ends, suite(8), suite(8))
    found = await prepared(tmp_path, monkeypatch, script)
    assert found.recipe == RECIPES[2] and len(script.failures) == TRIES
    assert script.failures[3] == ["no such package", "six", "eight"]


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([], "no recipe works: no package with tests"),
        (["first\nlast", "second"], "no recipe works: second"),
        (["leak: shop itself"], "no recipe works: leak: shop itself"),
        ([suite(5)] * 5, "no recipe works: no output"),
        ([suite(0, 0, "all broken")] * 5, "no recipe works: all broken"),
        ([suite(10), "not again"], "the recipe does not work twice"),
        ([suite(10), suite(10), suite(4)], "the tests do not pass twice"),
        ([suite(10), suite(0), suite(10)], "the tests do not pass twice"),
    ],
)
async def test_what_does_not_work_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[Any], why: str
) -> None:
    proposals = 0 if not ends else 2 if ends[0] == "first\nlast" else 9
    script = Scripted(*ends, proposals=proposals)
    with pytest.raises(Discarded, match=why):
        await prepared(tmp_path, monkeypatch, script)
    assert not script.ends, "all of it was tried"
    assert not (tmp_path / "out" / "repositories" / "shop").exists()


async def test_half_of_the_tests_are_enough_but_errors_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Scripted(
        suite(100, 100, "ERROR tests/a.py"), suite(97, 100), suite(50, 100), suite(60, 100)
    )
    found = await prepared(tmp_path, monkeypatch, script)
    assert found.recipe == RECIPES[0] and len(script.failures) == 2
    assert len(found.survey.seconds) == 50


def test_sources_of_one_name_are_refused() -> None:
    check_names(["https://a/shop.git", "https://a/shop.git", "other"])
    with pytest.raises(EtudeError, match="have the same name, shop"):
        check_names(["https://a/shop.git", "https://b/shop"])


def test_what_passes_every_time_with_what_it_takes() -> None:
    first = SuiteRun(
        outcomes={"a": (True, 9.0), "b": (True, 9.0), "it's": (True, 9.0), "c\n": (True, 9.0)},
        lines={"shop.py": {3: [0, 1, 2], 4: [1]}},
        output="",
        start_s=9.0,
    )
    plain = dataclasses.replace(
        first, outcomes=dict.fromkeys(first.outcomes, (True, 0.5)), start_s=0.25, lines={}
    )
    flaky = dataclasses.replace(plain, outcomes=plain.outcomes | {"b": (False, 1.0)})
    assert combine(first, [plain, flaky]) == Survey(
        seconds={"a": 0.5}, lines={"shop.py": {3: frozenset({"a"}), 4: frozenset()}}, start_s=0.25
    )
    assert combine(first, []).seconds == {"a": 9.0, "b": 9.0}


class Coverage:
    """The part of coverage.py that a survey uses."""

    def __init__(self, **how: Any) -> None:
        self.how, self.context, self.calls = how, "", ["made"]

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def switch_context(self, name: str) -> None:
        self.calls.append(name)

    def get_data(self) -> Any:
        lines = {3: ["a.py::t", "", "gone"], 4: ["a.py::u", "a.py::t"]}
        return SimpleNamespace(
            measured_files=lambda: ["/work/shop/a.py"], contexts_by_lineno=lambda path: lines
        )


def test_a_survey_counts_the_cases_of_a_test_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1.0, 1.5, 1.75, 3.0, 4.0, 9.0, 9.5])
    monkeypatch.setattr(survey_plugin.time, "process_time", lambda: next(seconds))
    monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(Coverage=Coverage))
    survey = survey_plugin.Survey("/work/")
    for nodeid, outcomes in (
        ("a.py::t[1]", ["passed", "passed"]),
        ("a.py::t[x\n]", ["failed"]),
        ("a.py::u", ["passed"]),
    ):
        survey.pytest_runtest_logstart(nodeid)
        for outcome in outcomes:
            survey.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, outcome=outcome))
    session = SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path))
    survey.pytest_sessionfinish(session)
    found = json.loads(zlib.decompress((tmp_path / ".etude-survey").read_bytes()))
    assert found == {
        "tests": {"a.py::t": [False, 0.75 + 1.0], "a.py::u": [True, 0.5]},
        "lines": {"shop/a.py": {"3": [0], "4": [0, 1]}},
        "start_s": 1.0,
    }
    assert survey.coverage.calls == ["made", "start", "a.py::t", "a.py::t", "a.py::u", "stop"]
    assert survey.coverage.how["include"] == ["/work/*"]


def test_a_survey_without_lines(tmp_path: Path) -> None:
    survey = survey_plugin.Survey("")
    survey.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(rootpath=tmp_path)))
    found = json.loads(zlib.decompress((tmp_path / ".etude-survey").read_bytes()))
    assert found == {"tests": {}, "lines": {}, "start_s": 0.0} and survey.coverage is None


def test_somebody_has_a_home_and_a_name(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    (below / "a").touch()
    os.utime(below / "a", (2e9, 1.5e9))
    os.utime(below, (1e9, 1e9))
    made = tmp_path / "made"
    made.mkdir()
    live_in(Realism(hostname="desk", user="ada"), [below], made)
    for path in made.rglob("*"):
        status = path.stat()
        assert 1.5e9 - 365 * 24 * 3600 < status.st_mtime <= 1.5e9
        assert path.is_dir() or status.st_atime == status.st_mtime
    read = {str(path.relative_to(made)): path for path in made.rglob("*") if path.is_file()}
    assert read["etc/hostname"].read_text() == "desk\n"
    assert "name = Ada\n\temail = ada@desk\n" in read["etc/skel/.gitconfig"].read_text()
    assert len(read["etc/machine-id"].read_text()) == 33
    assert {"etc/skel/.bashrc", "etc/skel/.profile", "etc/skel/.bash_history"} < read.keys()
    assert (made / "etc/skel/.cache").is_dir()
    for name in ("other", "desk"):
        again = tmp_path / name
        again.mkdir()
        live_in(Realism(hostname=name, user="ada"), [], again)
        same = (again / "etc/machine-id").read_text() == read["etc/machine-id"].read_text()
        assert same is (name == "desk")


@pytest.mark.parametrize(
    ("own", "told", "work"),
    [("/", "", None), ("/app", "", "app"), ("/app", "/etc", "etc"), ("/app", "/", None)],
)
def test_an_image_without_a_working_directory_has_no_working_copy(
    tmp_path: Path, own: str, told: str, work: str | None
) -> None:
    layer = layer_of(("app/app", b"1"), ("etc/etc", b"2"))
    layout = make_layout(tmp_path / "layout", layer, workdir=own)
    store = ImageStore(tmp_path / "store")
    spec = ImageSpec(name="oci", oci=Oci(layout=str(layout), workdir=told))
    image = build_image(spec, store, lambda words: None)
    if work is None:
        assert image.work == "" and len(image.layers) == 1
    else:
        assert [path.name for path in store.layer(image.work).iterdir()] == [work]
    assert (image.hostname, image.user) == ("localhost", "")


def test_what_a_program_says_is_passed_on_and_its_end_told() -> None:
    said: list[str] = []
    script = "echo one; echo; echo '  two  '; for n in 1 2 3 4 5 6 7 8 9; do echo $n; done"
    images._run_saying(["sh", "-c", script], said.append)
    assert said == ["one", "two", *"123456789"]
    with pytest.raises(EtudeError, match="^sh failed: 6; 7; 8; 9$"):
        images._run_saying(["sh", "-c", f"{script}; exit 3"], said.append)


def test_a_folder_that_changed_is_another_layer(tmp_path: Path) -> None:
    source = tmp_path / "shop"
    source.mkdir()
    (source / "a.py").write_text("1")
    keys = [images._source_key(Source(source=str(source)))]
    (source / "a.py").write_text("2")
    keys.append(images._source_key(Source(source=str(source))))
    archive = tmp_path / "shop.zip"
    for content in (b"1", b"2"):
        archive.write_bytes(content)
        keys.append(images._source_key(Source(source=str(archive))))
    assert len({json.dumps(key) for key in keys}) == 4
    assert images._source_key(Source(source="x", commit="c")) == ["x", "c"]
    assert images._source_key(Source(source="https://host/x")) == ["https://host/x", ""]
