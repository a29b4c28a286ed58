"""The user's own code, by name: `module:name`, or `path/to/file.py:name`.

A run's config contains only the name. To resume the run on another machine, bring the code along.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from etude.core.errors import EtudeError, user_code
from etude.core.schema import is_file


def import_from(folder: str | None) -> None:
    """Make modules in the folder of a run's file importable; None is the directory in which etude
    was started."""
    if (place := folder or os.getcwd()) not in sys.path:
        sys.path.append(place)  # last: a user's file called token.py must not replace Python's


def load(reference: str, key: str) -> Any:
    """The object that `reference` names; `key` is the config key that holds it."""
    place, _, name = reference.partition(":")
    check_file(reference, key)
    with user_code(f"{key} = {reference!r}: {place} cannot be loaded"):
        try:
            module = (
                _from_file(Path(place)) if is_file(reference) else importlib.import_module(place)
            )
        except SyntaxError as e:
            raise EtudeError(
                f"{key} = {reference!r}: {e.filename or place}, line {e.lineno}: {e.msg}"
            ) from e
        except (ImportError, OSError) as e:
            raise EtudeError(
                f"{key} = {reference!r}: {place} cannot be loaded ({e}); modules are searched in "
                f"the folder of the run's file and among the packages of {sys.prefix}"
            ) from e
    if not hasattr(module, name):
        raise EtudeError(
            f"{key} = {reference!r}: {place} does not define {name!r}; define it there, or use "
            "another name"
        )
    return getattr(module, name)


def check_file(reference: str, key: str) -> None:
    """Check that the file exists, before anything is started: the cheapest mistake to find."""
    place, _, _ = reference.partition(":")
    if is_file(reference) and not Path(place).is_file():
        raise EtudeError(
            f"{key} = {reference!r}: {Path(place).absolute()} does not exist; relative paths "
            f"start at the folder of the run's file, not where etude is started ({os.getcwd()})"
        )


def build(reference: str, key: str, *args: Any, **options: Any) -> Any:
    """Load an object and call it."""
    make = load(reference, key)
    _check_call(make, f"{key} = {reference!r}", args, options)
    with user_code(f"{key} = {reference!r}"):
        try:
            return make(*args, **options)
        except EtudeError as e:
            if not is_file(reference):
                raise
            raise EtudeError(f"{key} = {reference!r}: {e}") from e


def _check_call(make: Any, what: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse an object that cannot be called with these arguments, and name them."""
    if not callable(make):
        raise EtudeError(f"{what} is of type {type(make).__name__}: it must be a class")
    try:
        signature = inspect.signature(make)
    except ValueError:  # some objects written in C have no signature
        return
    try:
        signature.bind(*args, **options)
    except TypeError as e:
        given = [*(type(arg).__name__ for arg in args), *(f"{option}=.." for option in options)]
        raise EtudeError(
            f"{what} takes {signature}, but is called with ({', '.join(given)}): {e}. Accept "
            "these in its __init__, and those that you do not need as **unused"
        ) from e


def _from_file(path: Path) -> ModuleType:
    name = str(path.resolve())  # not the stem, which another module may have
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, name)
        spec.loader.exec_module(module)
        undo.pop_all()
    return module
