"""The figures of the publishing benchmark, worked by hand from a few records; and its rewards."""

from __future__ import annotations

import pytest

from etude.bench.publish import CONFIG, Alternating, Seen, metrics
from etude.core.config import parse
from etude.core.events import Event, PublishStarted, WeightsLive
from etude.core.types import Manifest, Part, Route, Score, Shard, Task
from etude.store.codec import Stamped
from tests.bench.test_loop_figures import step


def manifest(version: int, size: int) -> Manifest:
    shards = (Shard("", size, "", ""),)
    return Manifest(
        version=version, stage="rl", step=version, epoch=1, parent=None, root="", bytes=1000,
        route=Route(None, shards), time=100.0 + 10 * version,
    )  # fmt: skip


def test_figures() -> None:
    noted: list[tuple[float, Event]] = [
        (100.0, PublishStarted(version=0, stall_s=9.0)),
        (109.0, PublishStarted(version=1, stall_s=0.1)),
        (110.0, step(1, 8.0)),
        (110.5, WeightsLive(version=1)),
        (119.0, PublishStarted(version=2, stall_s=0.3)),
        (120.0, step(2, 12.0)),
        (121.5, WeightsLive(version=2)),
    ]
    seen = Seen(equal=3, pauses_s=[0.001, 0.002, 0.009], late_bytes=1500)
    manifests = [manifest(0, 1000), manifest(1, 4), manifest(2, 6)]
    assert metrics(manifests, [Stamped(t, event) for t, event in noted], seen) == pytest.approx(
        {
            "ratio": 200.0,
            "ratio_least": 1000 / 6,
            "versions": 3,
            "equal": 3,
            "pause_ms_p50": 2.0,
            "pause_ms_max": 9.0,
            "live_s": 1.0,
            "step_s": 10.0,
            "stall_ms": 200.0,
            "stall_share": 0.02,
            "late_ratio": 1.5,
        }
    )


async def test_every_group_has_a_difference() -> None:
    class Environment:
        tasks = open = None

        async def score(self, task: Task, sandbox: object, attempt: object) -> Score:
            return Score(0.0, (Part("checks", 0.5),))

    coin = Alternating(Environment())  # type: ignore[arg-type]
    tasks = [Task(id=name, prompt="go") for name in "aabbaa"]
    scores = [await coin.score(task, None, None) for task in tasks]  # type: ignore[arg-type]
    assert [score.reward for score in scores] == [1, 0, 1, 0, 1, 0]
    assert scores[0].parts == (Part("checks", 0.5),)


def test_its_run_is_valid() -> None:
    assert parse(CONFIG.format(model='path = "/model"', steps=50)).stage[0].kind == "rl"
