"""The dashboard over a run in a bucket of a real S3 server: it reads each object that it shows
once, and nothing else (`make test-s3`)."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etude.bench.dash import Client, server
from etude.core.events import EVENTS
from etude.dash.recorded import FRESH_S
from etude.store.rollouts import RolloutLog, group_rows
from etude.store.runs import Run
from tests.dash.counting import Asked, Counter, counted
from tests.dash.recorded_store import attempt, group, trajectory, write_run
from tests.weights.conftest import reached_by, s3_port  # noqa: F401

pytestmark = pytest.mark.s3

GROUPS = 40
SAID = "def f(x):\n    return x + 1\n" * 2000
BASE = "/api/runs/x"
SESSION = f"{BASE}/sessions/g000010.1"


@pytest.fixture
def bucket(
    s3_port: int,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[tuple[str, Counter]]:
    """A run with many objects that no view shows: groups, a checkpoint, weights."""
    with counted(s3_port) as counter:
        url = f"{reached_by(counter.port, monkeypatch)}/{request.node.name}/x"
        run = Run.open(url)
        write_run(run, said="")
        log = RolloutLog(run.objects)
        for number in range(10, 10 + GROUPS):
            attempts = (trajectory(f"g{number:06d}.{n}", n / 2, said=SAID) for n in range(3))
            made = group(number, *attempts)
            run.put_group(made)
            rows = [replace(row, flags=(), source="") for row in group_rows(made)]
            log.append([replace(row, dropped="no_signal") for row in rows])
        run.put_checkpoint_part("000001.000001", "00000.abc", bytes(1 << 20))
        run.objects.put("weights/objects/abc", bytes(1 << 20))
        counter.take()
        yield url, counter


def read(asked: Sequence[Asked]) -> Counts[str]:
    """Key -> number of reads."""
    return Counts(each.key.partition("/x/")[2] for each in asked if each.kind == "GET")


def figures(what: str, asked: Sequence[Asked]) -> None:
    kinds = Counts(each.kind for each in asked)
    print(f"{what}: {dict(kinds)}, {sum(each.bytes for each in asked):,} bytes")


def test_nothing_is_read_that_is_not_shown(bucket: tuple[str, Counter]) -> None:
    url, counter = bucket
    with server(url) as (client, _):
        client.get(f"{BASE}/overview")
        client.get(f"{BASE}/rollouts")
        opened = counter.take()
        figures("open and list", opened)
        folders = Counts(key.partition("/")[0] for key in read(opened))
        assert folders == {"config.json": 1, "events": 1, "ledger": 5, "rollouts": GROUPS + 2}
        assert set(read(opened).values()) == {1}

        idle(url, client, counter)

        session = client.get(SESSION)["session"]
        assert isinstance(session, dict) and SAID in session["turns"][2]["text"]
        shown = counter.take()
        figures("a session", shown)
        assert read(shown) == {"groups/g000010": 1}

        client.get(SESSION)
        tokens = client.get(f"{SESSION}/tokens")
        assert tokens["tokens"]
        again = counter.take()
        figures("the session again, and its tokens", again)
        assert {key.partition("/")[0] for key in read(again)} == {"model"}

        client.get(f"{BASE}/sessions/g000001.0/tokens?trainer=true")
        compared = counter.take()
        figures("tokens beside the trainer's", compared)
        assert read(compared) == {"groups/g000001": 1, "batches/000002": 1, "recomputed/000002": 1}


def idle(url: str, client: Client, counter: Counter) -> None:
    """Check that without anything new only keys are listed, and that only new objects are read."""
    time.sleep(FRESH_S)
    client.get(f"{BASE}/overview")
    nothing = counter.take()
    figures("nothing new", nothing)
    assert read(nothing) == {}
    assert len(nothing) <= 6

    log = Run.open(url).events("late", EVENTS)
    log.append(attempt("g000777.0"))
    log.flush()
    counter.take()
    time.sleep(FRESH_S)
    client.get(f"{BASE}/overview")
    assert set(read(counter.take())) <= {"events/late/0000000000.jsonl", "config.json"}


def test_events_of_a_long_run_are_not_listed_again(bucket: tuple[str, Counter]) -> None:
    url, counter = bucket
    log = Run.open(url).events("trainer", EVENTS)
    for number in range(60):
        log.append(attempt(f"g{number:06d}.0"))
        log.flush()
    counter.take()
    run = Run.open(url)
    assert run.processes() == ["controller", "trainer"]
    counter.take()
    assert run.processes(known=("controller", "trainer")) == ["controller", "trainer"]
    (listed,) = counter.take()
    assert listed.kind == "LIST" and listed.bytes < 2000


def test_a_folder_has_no_run(bucket: tuple[str, Counter], tmp_path: Path) -> None:
    assert Run.open("s3://weights/nothing").processes() == []
    assert Run.open(f"file:{tmp_path}").processes() == []
