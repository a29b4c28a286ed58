"""The user's own code: loaded by name, without shadowing any other module."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.launch.launcher import python
from etude.run.plugins import build, import_from, load
from etude.trainer.prepare import check_stage_files


def test_a_file_may_be_called_like_a_module_of_python(tmp_path: Path) -> None:
    (tmp_path / "statistics.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
    )
    first, second = (load(f"{tmp_path}/statistics.py:A", "key") for _ in range(2))
    assert first().x == 1 and first is second
    assert sys.modules["statistics"] is statistics
    # otherwise the folder would come before Python's own in a child
    assert "-P" in python("etude.trainer.trainer")


def test_a_module_lies_with_the_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package_of_losses.py").write_text("A = 1")
    (tmp_path / "token.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(EtudeError, match="the folder of the run's file and among the packages of"):
        load("my_package_of_losses:A", "key")
    for _ in range(2):
        import_from(str(tmp_path))
    assert sys.path.count(str(tmp_path)) == 1
    assert load("my_package_of_losses:A", "key") == 1
    assert load("token:tok_name", "key"), "Python's own comes first"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "losses_of_this_place.py").write_text("B = 2")
    monkeypatch.chdir(tmp_path / "here")
    import_from(None)
    assert load("losses_of_this_place:B", "key") == 2


def test_what_raises_while_it_is_loaded_says_where(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("\nx = {}['y']\n")
    for _ in range(2):  # a partly executed module is not kept
        with pytest.raises(
            EtudeError, match="mine.py cannot be loaded: KeyError in .*mine.py, line 2: 'y'"
        ):
            load(f"{file}:x", "stage.rl.loss")


def test_what_cannot_be_made_says_why(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class A:\n    def __init__(self, *, seed):\n        self.x = seed / 0\n")
    with pytest.raises(
        EtudeError, match=r"mine.py:A': ZeroDivisionError in .*mine.py, line 3: division by zero"
    ):
        build(f"{file}:A", "tasks.environment", seed=0)
    with pytest.raises(
        EtudeError,
        match=r"mine.py:A' takes \(\*, seed\), but is called with \(str, seed=.., counts=..\): .*"
        r"Accept these in its __init__, and those .* as \*\*unused",
    ):
        build(f"{file}:A", "tasks.environment", "pool", seed=0, counts={})
    file = tmp_path / "other.py"
    file.write_text("seven = 7\n")
    with pytest.raises(EtudeError, match="other.py:seven' is of type int: it must be a class"):
        build(f"{file}:seven", "tasks.environment")


@pytest.mark.parametrize("key", ["tasks.environment", "harness.agent", "stage.rl.loss"])
def test_a_file_that_is_not_there_is_told_before_anything_starts(key: str) -> None:
    config = parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1', [f"{key}=nowhere.py:A"])
    with pytest.raises(
        EtudeError, match=f"{key} = 'nowhere.py:A': /.*/nowhere.py does not exist; relative paths"
    ):
        check_stage_files(config)


def test_what_code_of_ones_own_is_refused_is_told_with_its_file(tmp_path: Path) -> None:
    code = "def make():\n    raise EtudeError('no room')\n"
    (tmp_path / "mine.py").write_text(f"from etude.core.errors import EtudeError\n{code}")
    with pytest.raises(EtudeError, match=r"^key = '.*mine\.py:make': no room$"):
        build(f"{tmp_path / 'mine.py'}:make", "key")


def test_what_a_module_refuses_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error did not come from the user's own file, so its message is shown unchanged."""
    code = "def make():\n    raise EtudeError('no room')\n"
    (tmp_path / "mine_as_module.py").write_text(f"from etude.core.errors import EtudeError\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EtudeError, match="^no room$"):
        build("mine_as_module:make", "key")


def test_what_has_no_signature_is_called_all_the_same() -> None:
    assert list(build("builtins:iter", "key", [1, 2])) == [1, 2]
