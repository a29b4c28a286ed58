"""Whose fault it was: the boundary that a failure crossed, and the line of the user's own code."""

from __future__ import annotations

import asyncio
import json

import pytest

from etude.core.errors import EtudeError, RolloutFailure, boundary, user_code
from etude.core.types import Task


def theirs() -> None:
    """Stands for user code: outside of the package, and failing inside of the standard library."""
    json.loads("{")


def test_the_users_own_line_is_named() -> None:
    with pytest.raises(EtudeError) as told, user_code("tasks.environment = 'mine:Env'"):
        theirs()
    first = theirs.__code__.co_firstlineno
    place = f"JSONDecodeError in {__file__}, line {first + 2}: "
    assert str(told.value).startswith(f"tasks.environment = 'mine:Env': {place}")
    assert isinstance(told.value.__cause__, json.JSONDecodeError)


def test_code_without_a_file_is_not_the_users_place() -> None:
    with pytest.raises(EtudeError) as told, user_code("tasks"):
        Task(id="t", prompt="a", messages=({"role": "user", "content": "b"},))
    assert f"ValueError in {__file__}, line " in str(told.value)


def test_what_has_a_name_already_keeps_it() -> None:
    with pytest.raises(EtudeError, match="^the file is missing$"), user_code("outer"):
        raise EtudeError("the file is missing")


def test_a_boundary_makes_a_failed_rollout_of_anything_but_the_end_of_the_task() -> None:
    async def cross(error: BaseException) -> None:
        async with boundary("sandbox"):
            raise error

    with pytest.raises(
        RolloutFailure, match=f"^sandbox: OSError in {__file__}, line [0-9]+: gone$"
    ):
        asyncio.run(cross(OSError("gone")))
    with pytest.raises(RolloutFailure, match="^harness: timed out$"):
        asyncio.run(cross(RolloutFailure("harness: timed out")))
    with pytest.raises(RolloutFailure, match="^sandbox: EtudeError"):
        asyncio.run(cross(EtudeError("a user's mistake, but in a rollout")))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cross(asyncio.CancelledError()))
