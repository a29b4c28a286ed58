"""The origin of a failure: the boundary that it crossed, and the line of the user's own code."""

from __future__ import annotations

import asyncio
import json
import traceback

import pytest

from etude.core.errors import (
    EtudeError,
    RolloutFailure,
    boundary,
    error_line,
    user_code,
    user_traceback,
)
from etude.core.types import Task


def theirs() -> None:
    """Stands for user code: outside the package, and failing inside the standard library."""
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


def test_a_traceback_is_shortened_to_what_was_raised() -> None:
    def told(e: Exception) -> str:
        try:
            try:
                theirs()
            except ValueError as cause:
                raise e from cause
        except Exception:
            return traceback.format_exc()

    said = "the program ended with exit code 1; its last words: "
    whole = told(IndexError("out of range\nand more of it"))
    without_its_head = whole[whole.rindex("  File ") :]
    for each in (whole, without_its_head, f"{whole}a word of another thread\n"):
        assert error_line(said + each) == f"{said}IndexError: out of range"
    assert error_line(f"{said}loading\n{whole}") == f"{said}loading ... IndexError: out of range"
    assert error_line(whole) == "IndexError: out of range"
    grouped = told(ExceptionGroup("two", [ValueError("a"), KeyError("b")]))
    assert error_line(said + grouped) == f"{said}ExceptionGroup: two (2 sub-exceptions)"


@pytest.mark.parametrize("error", ["", "sandbox: no room", "a\nb", 'File "x", line 3'])
def test_an_error_without_a_traceback_stays_as_it_is(error: str) -> None:
    assert error_line(error) == error


def test_a_traceback_shows_the_users_own_lines_and_what_caused_it() -> None:
    try:
        try:
            theirs()
        except ValueError as cause:
            raise IndexError("out of range") from cause
    except IndexError as e:
        told = user_traceback(e)
    assert told.count(f'File "{__file__}"') == 3 and "json/decoder.py" not in told
    assert "JSONDecodeError: Expecting property name" in told
    assert told.endswith("IndexError: out of range")
    try:
        json.loads("{")
    except ValueError as e:
        e.__traceback__ = e.__traceback__.tb_next if e.__traceback__ else None
        assert "json/decoder.py" in user_traceback(e), "there is no line of theirs"
