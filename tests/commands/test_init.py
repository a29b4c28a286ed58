"""`etude init`: the written project is tried, tested and run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from glob import glob
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.commands.run_file import read_run_file
from etude.commands.trial import GIVEN, REFERENCE, SESSION, UNTOUCHED
from etude.core.stages import RlConfig
from etude.rewards.junit import parse_junit
from tests.namespaces import need_namespaces
from tests.sandbox.test_repository import git
from tests.serve.serving import write_model

ANSWER = "Here it is:\n```python\ndef add(a, b):\n    return b + a\n```\nEnjoy."


@pytest.fixture(scope="session")
def plain_pytest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pytest and no plugins: loading the plugins of ours takes seconds,
    which sandboxes would spend one after another."""
    place = tmp_path_factory.mktemp("plain") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in files(name) or pytest.fail(f"nobody knows what {name} installed"):
            if ".." not in file.parts:  # files outside of the packages are scripts
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), packages / file)
    return place


@pytest.fixture
def mounts(plain_pytest: Path) -> str:
    return f'sandbox.mounts=["{plain_pytest}"]'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "my project"
    assert main(["init", str(directory)]) == 0
    monkeypatch.chdir(directory)
    return directory


def commit(repository: Path) -> None:
    git(repository, "init", "-q")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "one")


def tried(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    main(["try", "run.toml", "--json", *argv])
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.out) if said.out else pytest.fail(said.err)
    return {trial["name"]: trial for trial in found["trials"]}


@pytest.mark.parametrize("answer", [ANSWER, "def add(a, b): return a - b", "I cannot."])
def test_pytest_is_the_judge_and_the_agent_a_program(
    answer: str, mounts: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_namespaces()
    Path("script.txt").write_text(answer)
    by_name = tried(capsys, "--set", mounts, "--script", "script.txt")
    rewards = {name: trial["score"]["reward"] for name, trial in by_name.items()}
    assert rewards == {UNTOUCHED: 0.0, REFERENCE: 1.0, SESSION: float(answer == ANSWER)}
    assert "12 passed" in by_name[REFERENCE]["score"]["parts"][0]["evidence"]
    said = by_name[SESSION]["messages"][-1]["content"]
    written = answer != "I cannot."
    assert said == (
        "add was written into sums.py\n" if written else "the answer has no function add\n"
    )
    assert ("+" in by_name[SESSION]["diff"]) == written


def test_without_pytest_an_attempt_fails_and_earns_no_zero(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_namespaces()
    by_name = tried(capsys, "--set", "sandbox.mounts=[]", "--no-model")
    assert "there is no pytest in the sandbox" in by_name[REFERENCE]["error"]


def test_its_test_passes(plain_pytest: Path, project: Path) -> None:
    text = Path("run.toml").read_text().replace("train = 64", "train = 1")
    text = text.replace("heldout = 16", "heldout = 1").replace("# isolation", "isolation")
    mounts = next(line for line in text.splitlines() if line.startswith("mounts"))
    Path("run.toml").write_text(text.replace(mounts, f'mounts = ["{plain_pytest}"]'))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_environment.py"]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(argv, env=plain, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_repository_around_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "shop"
    (repository / "tests").mkdir(parents=True)
    (repository / "cart.py").write_text(
        "import os\n\n\nclass Cart: ...\n\n\ndef total(prices):\n"
        '    """Return the sum."""\n    return sum(prices)\n\n\n'
        'def most(prices):\n    """Return the highest."""\n    best = max(prices)\n'
        "    return best\n"
        '\n\ndef untested():\n    """Return 1."""\n    return 1\n\n\ndef silent(prices): return 0\n'
    )
    (repository / "tests" / "test_cart.py").write_text(
        "from cart import most, silent, total\n\n\ndef test_it(): ...\n"
    )
    commit(repository)
    model = write_model(tmp_path / "model")
    directory = repository / "training" / "first"
    assert main(["init", str(directory), "--model", str(model)]) == 0
    written = {"agent.py", "environment.py", "run.toml", "solve.py", "test_environment.py"}
    assert {path.name for path in directory.iterdir()} == {*written, ".gitignore"}
    monkeypatch.chdir(directory)
    config = read_run_file(Path("run.toml"))
    assert config.model.path == str(model) and config.name == "first"
    (stage,) = config.stage
    assert isinstance(stage, RlConfig) and stage.warmup_steps < stage.steps / 2
    from etude.run.plugins import build

    environment = build(
        config.tasks.environment, "k", None, counts={"train": 9, "heldout": 9}, seed=0
    )
    (task,) = environment.tasks("train")
    assert task.id == "cart.py:total" and task.meta == {"path": "cart.py", "function": "total"}
    assert "return sum" not in task.prompt + str(task.sandbox.files)
    assert "best = max" in task.sandbox.files["cart.py"]
    (heldout,) = environment.tasks("heldout")
    assert heldout.sandbox.files["cart.py"].count("raise NotImplementedError") == 1
    assert "best" not in heldout.sandbox.files["cart.py"]
    capsys.readouterr()
    assert main(["init", str(directory)]) == 2
    assert "already contains .gitignore, agent.py, environment.py" in capsys.readouterr().err


def test_a_repository_elsewhere_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / 'the "shop"'
    (repository / "src").mkdir(parents=True)
    functions = (f'def f{n}():\n    """Return {n}."""\n    return {n}\n' for n in range(2))
    (repository / "src" / "cart.py").write_text("\n\n".join(functions))
    (repository / "test_cart.py").write_text(
        "from src.cart import f0, f1\n\n\ndef test_it(): ...\n"
    )
    assert main(["init", str(tmp_path / "mine"), "--repo", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'} does not exist" in capsys.readouterr().err
    argv = ["init", str(tmp_path / "mine"), "--repo", str(repository)]
    assert main(argv) == 2
    assert "not a git repository" in capsys.readouterr().err
    git(repository, "init", "-q")
    assert main(argv) == 2
    assert "has no commit" in capsys.readouterr().err and not (tmp_path / "mine").exists()
    commit(repository)
    assert main([*argv[:-1], str(tmp_path)]) == 2
    assert f"not a git repository; {repository} contains one" in capsys.readouterr().err
    assert main(argv) == 0
    told = capsys.readouterr().out
    found = f"its tasks are 2 functions of {repository}: 1 for training, 1 held out\n"
    assert found in told and "pocket" not in told and "warning" not in told
    monkeypatch.chdir(tmp_path / "mine")
    assert not Path("pocket").exists()
    from etude.run.plugins import build

    counts = {"train": 9, "heldout": 9}
    environment = build("environment.py:Functions", "k", None, counts=counts, seed=0)
    tasks = {task.id for split in counts for task in environment.tasks(split)}
    assert tasks == {"src/cart.py:f0", "src/cart.py:f1"}


TESTS = """
import unittest

import pytest
from money import add, negate


@pytest.fixture
def test_data():
    return 1


@pytest.mark.parametrize("number", [1, 2])
def test_negate(number):
    assert negate(number) == -number


class TestMoney:
    def test_add(self, test_data):
        assert add(test_data, 1) == 2

    def helper(self): ...

    class TestMore:
        def test_nothing(self):
            assert add(0, 0) == 0


class Unit(unittest.TestCase):
    def test_unit(self):
        self.assertEqual(add(1, 1), 2)


class TestNotCollected:
    def __init__(self): ...

    def test_never(self): ...
"""


def test_tests_are_found_where_pytest_finds_them(
    plain_pytest: Path, project: Path, tmp_path: Path
) -> None:
    from etude.run.plugins import load

    money = "def add(a, b):\n    return a + b\n\n\ndef negate(a):\n    return -a\n"
    (tmp_path / "money.py").write_text(money)
    (tmp_path / "test_money.py").write_text(TESTS)
    argv = [str(plain_pytest / "bin" / "python"), "-m", "pytest", "-q", "--junitxml=report.xml"]
    subprocess.run([*argv, "test_money.py"], cwd=tmp_path, check=True, capture_output=True)
    reported = parse_junit((tmp_path / "report.xml").read_bytes())
    found = set(load("environment.py:find_tests", "k")("test_money.py", TESTS))
    assert found == {name.partition("[")[0] for name in reported} and len(found) == 4


def make_shop(repository: Path) -> Path:
    repository.mkdir()
    functions = (f'def f{n}():\n    """Return {n}."""\n    return {n}\n' for n in range(2))
    (repository / "cart.py").write_text("\n\n".join(functions))
    tests = "import cart\n\n\nclass TestCart:\n"
    tests += "".join(
        f"    def test_f{n}(self):\n        assert cart.f{n}() == {n}\n" for n in range(2)
    )
    (repository / "test_cart.py").write_text(tests)
    return repository


def test_a_file_that_ends_the_process_is_not_paid_where_tests_are_in_classes(
    tmp_path: Path, mounts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = make_shop(tmp_path / "shop")
    commit(repository)
    (tmp_path / "cheat").mkdir()
    (tmp_path / "cheat" / "cart.py").write_text("import os\n\nos._exit(0)\n")
    assert main(["init", str(tmp_path / "mine"), "--repo", str(repository)]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    keys = ("--set", "sandbox.isolation=process", "--set", mounts)
    by_name = tried(capsys, *keys, "--no-model", "--solution", str(tmp_path / "cheat"))
    rewards = {name: trial["score"]["reward"] for name, trial in by_name.items()}
    assert rewards == {UNTOUCHED: 0.0, REFERENCE: 1.0, GIVEN: 0.0}


@pytest.mark.parametrize(
    ("text", "why"),
    [("x = 1\n", "has 0 functions with a docstring"), ("print 1\n", "old.py is left out: Missing")],
)
def test_a_repository_without_tasks_is_told_of(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = tmp_path / "shop"
    repository.mkdir()
    (repository / "old.py").write_text(text)
    commit(repository)
    assert main(["init", str(tmp_path / "mine"), "--repo", str(repository)]) == 0
    told = capsys.readouterr().out
    assert "warning: there are no tasks yet: " in told and why in told


def test_a_file_of_another_python_costs_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    repository = make_shop(tmp_path / "shop")
    (repository / "old.py").write_text("print 1\n")
    commit(repository)
    assert main(["init", str(tmp_path / "mine"), "--repo", str(repository)]) == 0
    told = capsys.readouterr().out
    assert "its tasks are 2 functions" in told and "warning: old.py is left out: Missing" in told


def test_a_module_that_is_not_found_is_told_apart(
    tmp_path: Path, mounts: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = make_shop(tmp_path / "shop")
    (repository / "src").mkdir()
    (repository / "cart.py").rename(repository / "src" / "cart.py")
    commit(repository)
    assert main(["init", str(tmp_path / "mine"), "--repo", str(repository)]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    capsys.readouterr()
    keys = ("--set", "sandbox.isolation=process", "--set", mounts)
    main(["try", "run.toml", "--no-model", "--json", *keys])
    assert any("pythonpath" in line for line in json.loads(capsys.readouterr().out)["look"])


def test_a_model_is_named_by_its_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / 'my "model"')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["init", "mine", "--model", '../my "model"']) == 0
    named = tomllib.loads(Path("mine/run.toml").read_text())["model"]["path"]
    assert named == str((tmp_path / 'my "model"').resolve())


@pytest.mark.parametrize(
    ("folder", "name"),
    [("prémier pas", "premier-pas"), ("_shop.v2", "shop-v2"), ("仓库", "mine")],
)
def test_a_run_is_named_after_its_folder_in_letters_that_it_may_have(
    folder: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / folder)]) == 0
    assert read_run_file(tmp_path / folder / "run.toml").name == name
    commands = [line.split() for line in capsys.readouterr().out.splitlines() if line[:4] == "  cd"]
    assert shlex.split(" ".join(commands[0])) == ["cd", str(tmp_path / folder)]


def test_a_place_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file")]) == 2
    assert "is a file: choose a directory to write to" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "file" / "mine")]) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_its_test_is_run_where_etude_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("etude.commands.init.importlib.util.find_spec", lambda name: None)
    assert main(["init", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    assert ".venv/bin/pip install pytest\n" in told
    assert f"&& {sys.executable} -m pytest test_environment.py\n" in told


def test_every_template_is_in_the_package() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    place = root / "etude" / "commands"
    packed = {file for each in patterns for file in glob(each, root_dir=place, recursive=True)}
    there = {str(file.relative_to(place)) for file in place.rglob("*.template")}
    assert there <= packed, "a dot at the beginning is not matched by a star"


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "new"), "--model", str(tmp_path)]) == 2
    assert "no such model directory" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.e2e
def test_it_runs(mounts: str, project: Path) -> None:
    keys = ["sandbox.isolation=process", mounts, "tasks.heldout=1"]
    keys += ["harness.max_tokens=4", "engine.threads=1", "stage.sft.max_epochs=1"]
    argv = [sys.executable, "-m", "etude", "run", "run.toml"]
    argv += [part for key in keys for part in ("--set", key)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0/1" in done.stdout


def test_a_function_stays_on_its_side_when_others_come(project: Path) -> None:
    from etude.run.plugins import load

    choose = load("environment.py:choose_held_out", "k")
    many = [f"a.py:f{number}" for number in range(200)]
    assert 30 < len(choose(many)) < 70
    assert choose(many[:100]) == choose(many) & set(many[:100])
    for few in ([many[0], many[1]], sorted(choose(many))[:3], sorted(set(many) - choose(many))[:3]):
        assert 0 < len(choose(few)) < len(few)
