"""The evaluator beside a loop: which versions it takes, and that it holds each still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EvalDone, EvalProgress, Event
from etude.core.lineage import periodic_versions
from etude.core.types import Manifest
from etude.run.evaluator import follow, only_results
from tests.run.fake_stage import manifest

RUN = """
name = "a"
[eval]
every_steps = 3
[[stage]]
kind = "midtrain"
steps = 5
[[stage]]
kind = "rl"
steps = 8
[[stage]]
kind = "rl"
name = "more"
steps = 3
"""


def test_versions_within_loops_are_due_and_their_ends_are_not() -> None:
    """The loops make versions 2 to 9 and 10 to 12."""
    stages = parse(RUN).stage
    assert periodic_versions(stages, 3) == [4, 7]
    assert periodic_versions(stages, 4) == [5]
    assert periodic_versions(stages, 2) == [3, 5, 7, 11]


class Published:
    """Versions that appear while whoever waits for them is busy."""

    def __init__(self, newest: Sequence[int]) -> None:
        self.newest = list(newest)

    async def wait(self, after: int) -> Manifest:
        version = self.newest.pop(0)
        assert version > after
        return manifest(version)

    async def publish(self, *args: Any) -> Any: ...

    async def fetch(self, *args: Any) -> Any: ...


@pytest.mark.parametrize(
    ("newest", "taken"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [4, 7]),
        ([3, 6, 8], [4, 7]),
        ([8], [7]),  # it fell behind, or was started late
        ([4, 12], [4, 7]),
    ],
)
async def test_the_newest_version_that_is_due_is_evaluated(
    newest: list[int], taken: list[int]
) -> None:
    evaluated: list[int] = []

    async def evaluate(version: int) -> None:
        evaluated.append(version)

    published: Any = Published(newest)
    await follow([4, 7], published, evaluate)
    assert evaluated == taken


async def test_a_run_that_wants_none_ends_at_once() -> None:
    nobody: Any = None
    await follow([], nobody, nobody)


def test_only_the_result_is_told() -> None:
    told: list[Event] = []
    emit = only_results(told.append)
    emit(EvalProgress(stage="rl", split="heldout", done=1, total=2, solved=0))
    done = EvalDone(stage="rl", split="heldout", version=4, solved=1, total=2, low=0.1, high=0.9)
    emit(done)
    assert told == [done]


@pytest.mark.parametrize(
    "elsewhere",
    [
        '[tasks]\nenvironment = "http://127.0.0.1:1"',
        '[engine]\nregions = ["east"]\nvllm_urls = {east = "http://127.0.0.1:1"}',
    ],
)
def test_it_is_refused_where_sessions_or_models_are_elsewhere(elsewhere: str) -> None:
    with pytest.raises(EtudeError, match=r"eval\.every_steps evaluates beside the run"):
        parse(RUN + elsewhere)
