"""The rows of rollouts: read back unchanged, by any tool, and never if damaged."""

from __future__ import annotations

import io
from dataclasses import fields, replace

import pytest
from pyarrow import parquet

from etude.core.errors import EtudeError
from etude.core.types import Cost, Group, Part, Score, Segment, Trajectory, VersionSpan
from etude.store.codec import Damaged
from etude.store.objects import Objects
from etude.store.rollouts import RolloutFate, RolloutLog, RolloutReader, RolloutRow, group_rows

SEGMENT = Segment(
    prompt=(1, 2),
    tokens=(3, 4, 5),
    mask=(True, False, True),
    logprobs=(-1.0, 0.0, -1.0),
    versions=(VersionSpan(7, 1), VersionSpan(6, 1)),
)
DONE = Trajectory(
    id="g000004.0",
    task="t",
    group="g000004",
    segments=(SEGMENT, SEGMENT),
    score=Score(0.5, (Part("checks", 0.25, "much to read"), Part("style", 1.0)), ("odd",)),
    status="done",
    source="env.py:Own",
    policy="mine",
    cost=Cost(prompt_tokens=14, sampled_tokens=4, seconds=1.5, calls=4),
)
FAILED = Trajectory(
    id="g000004.1",
    task="t",
    group="g000004",
    segments=(),
    score=None,
    status="failed",
    error="agent: gone",
)
GROUP = Group(id="g000004", task="t", slot=4, admitted=6, stage="rl", trajectories=(DONE, FAILED))


def test_a_row_says_what_there_is_to_say() -> None:
    done, failed = group_rows(GROUP)
    assert done == RolloutRow(
        id="g000004.0",
        task="t",
        kind="train",
        group="g000004",
        slot=4,
        stage="rl",
        status="done",
        error=None,
        reward=0.5,
        parts={"checks": 0.25, "style": 1.0},
        flags=("odd",),
        length=10,
        turns=4,
        versions=(6, 7),
        prompt_tokens=14,
        sampled_tokens=4,
        seconds=1.5,
        calls=4,
        source="env.py:Own",
        policy="mine",
        object="groups/g000004",
    )
    assert (failed.reward, failed.error, failed.parts) == (None, "agent: gone", {})


def test_rows_come_back_as_they_were_written() -> None:
    objects = Objects.open("memory:")
    log = RolloutLog(objects)
    assert log.rows() == [] and log.groups() == {}
    first, second = group_rows(GROUP)
    rows = [replace(first, step=7), replace(second, dropped="failed")]
    log.append(rows)
    log.append([])
    log.put_evaluation(
        "000007.heldout", [replace(DONE, id="eval", group="e")], stage="rl", split="heldout"
    )
    RolloutLog(objects).append([replace(first, id="g000005.0", group="g000005")])
    assert objects.list("rollouts") == [
        "rollouts/0000000000.parquet",
        "rollouts/0000000001.parquet",
        "rollouts/000007.heldout.parquet",
    ]
    *trained, evaluated = RolloutLog(objects).rows()
    assert trained == [*rows, replace(first, id="g000005.0", group="g000005")]
    assert (evaluated.kind, evaluated.slot, evaluated.object) == ("heldout", None, None)
    trained_on = RolloutFate(first.reward, None)
    assert RolloutLog(objects).groups() == {
        "g000004": [trained_on, RolloutFate(None, "failed")],
        "g000005": [trained_on],
    }


def test_other_tools_read_the_files() -> None:
    objects = Objects.open("memory:")
    RolloutLog(objects).append(group_rows(GROUP))
    table = parquet.read_table(io.BytesIO(objects.get("rollouts/0000000000.parquet")))
    assert table.column_names == [field.name for field in fields(RolloutRow)]
    optional = {field.name for field in table.schema if field.nullable}
    assert optional == {"slot", "step", "dropped", "error", "reward", "object"}
    parts = [{"name": "checks", "value": 0.25}, {"name": "style", "value": 1.0}]
    assert table.column("parts").to_pylist() == [parts, []]
    assert table.column("reward").to_pylist() == [0.5, None]


def test_a_second_writer_is_found_out() -> None:
    objects = Objects.open("memory:")
    one, other = RolloutLog(objects), RolloutLog(objects)
    first, second = group_rows(GROUP)
    one.append([first])
    other.append([first])
    one._number = 0  # as if the first reply had been lost: the object is stored, and equal
    one.append([first])
    with pytest.raises(EtudeError, match="another process has written rollouts/0000000001.parquet"):
        one.append([second])


def test_no_flipped_bit_goes_unseen() -> None:
    objects = Objects.open("memory:")
    log, key = RolloutLog(objects), "rollouts/0000000000.parquet"
    log.append(group_rows(GROUP))
    whole = objects.get(key)
    for place in range(len(whole)):
        flipped = bytes([whole[place] ^ 1 << place % 8])
        objects.put(key, whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(Damaged, match=key):
            log.rows()
    objects.put(key, whole[:-20])
    with pytest.raises(Damaged, match="delete the folder rollouts/"):
        log.groups()


def test_a_file_that_is_lost_is_told() -> None:
    """No file is written in its place as if nothing came after it."""
    objects = Objects.open("memory:")
    for number in range(3):
        RolloutLog(objects).append(group_rows(replace(GROUP, id=f"g{number}", slot=number)))
    assert RolloutLog(objects).lost() is None
    objects.delete("rollouts/0000000001.parquet")
    log, reader = RolloutLog(objects), RolloutReader(objects)
    for goes_on in (log.rows, log.groups, lambda: log.append(group_rows(GROUP))):
        with pytest.raises(EtudeError, match=r"rollouts/0000000001\.parquet is missing, but later"):
            goes_on()
    assert len(reader.new()) == len(GROUP.trajectories) and reader.new() == []
    assert len(reader.damaged) == 1
