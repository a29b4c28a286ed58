from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from blake3 import blake3

from etude.core.errors import EtudeError
from etude.core.ledger import Batched, Dropped, Entry, Issued, Trained
from etude.store.codec import Damaged, Stamped
from etude.store.log import Log
from etude.store.objects import Objects


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Other:
    text: str


class Watched(Objects):
    """Counts the requests of a reader."""

    def __init__(self, inner: Objects) -> None:
        super().__init__(inner._store, inner.url)
        self.asked: list[str] = []

    def exists(self, key: str) -> bool:
        self.asked.append(f"exists {key}")
        return super().exists(key)

    def get(self, key: str) -> bytes:
        self.asked.append(f"get {key}")
        return super().get(key)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        self.asked.append(f"list {prefix}")
        return super().list(prefix, after=after)


def notes(objects: Objects, *, durable: bool = True) -> Log[Note]:
    return Log(objects, "notes", [Note], durable=durable, now=count(1).__next__)


def test_one_record_on_disk() -> None:
    objects = Objects.open("memory:")
    notes(objects).append(Note("hello", 1.5))
    assert objects.list("notes") == ["notes/0000000000.jsonl"]
    line = b'{"t": 1, "kind": "Note", "text": "hello", "value": 1.5}\n'
    digest = b'{"blake3": "%b"}\n' % blake3(line).hexdigest().encode()
    assert objects.get("notes/0000000000.jsonl") == line + digest


def test_entries_of_the_ledger_come_back_as_they_went_in() -> None:
    entries: list[Entry] = [
        Issued(group="g0", task="t0", samples=("g0.0", "g0.1"), version=3),
        Dropped(samples=("g0.0",), reason="failed"),
        Batched(step=4, samples=("g0.1",)),
        Trained(step=4),
    ]
    log: Log[Entry] = Log(
        Objects.open("memory:"), "ledger", (Issued, Batched, Dropped, Trained), durable=True
    )
    for entry in entries:
        log.append(entry)
    assert log.records() == entries


def test_records_appended_together_are_seen_together() -> None:
    objects = Objects.open("memory:")
    notes(objects).append(Note("a"), Note("b"))
    assert len(objects.list("notes")) == 1


def test_buffered_records_wait_for_flush() -> None:
    log = notes(Objects.open("memory:"), durable=False)
    log.append(Note("a"))
    log.append(Note("b"))
    assert log.read() == ([], 0)
    log.flush()
    log.flush()
    assert log.read() == ([Stamped(1, Note("a")), Stamped(2, Note("b"))], 1)


def test_a_tail_that_finds_nothing_new_looks_at_one_key() -> None:
    objects = Watched(Objects.open("memory:"))
    writer, reader = notes(objects), notes(objects)
    writer.append(Note("a"))
    writer.append(Note("b"))
    records, position = reader.read()
    assert [r.record.text for r in records] == ["a", "b"]
    objects.asked.clear()
    assert reader.read(position) == ([], position)
    assert objects.asked == ["exists notes/0000000002.jsonl"]
    writer.append(Note("c"))
    records, position = reader.read(position)
    assert [r.record.text for r in records] == ["c"] and position == 3


def test_a_long_log_is_not_asked_for_piece_by_piece() -> None:
    """In a bucket each request is a round trip."""
    objects = Watched(Objects.open("memory:"))
    for n in range(50):
        notes(objects).append(Note(f"{n}"))
    objects.asked.clear()
    records, position = notes(objects).read()
    assert len(records) == position == 50
    assert [each for each in objects.asked if not each.startswith("get")] == [
        "exists notes/0000000000.jsonl",
        "list notes",
        "exists notes/0000000050.jsonl",
    ]


def test_a_reader_stops_before_a_gap() -> None:
    """As if the listing had raced with the writer: segment 1 is not seen, segment 2 is."""
    objects = Objects.open("memory:")
    writer = notes(objects)
    for text in "abc":
        writer.append(Note(text))
    hidden = objects.get("notes/0000000001.jsonl")
    objects.delete("notes/0000000001.jsonl")
    records, position = writer.read()
    assert [r.record.text for r in records] == ["a"] and position == 1
    objects.put("notes/0000000001.jsonl", hidden)
    assert [r.record.text for r in writer.read(position)[0]] == ["b", "c"]


@pytest.mark.parametrize("place", [0, 1])
def test_records_that_are_lost_are_told_to_whoever_goes_on_from_them(place: int) -> None:
    """Foreign files, and segments written during the search, are not reported."""
    objects = Objects.open("memory:")
    objects.put("notes/0000000009.jsonl.bak", b"")
    objects.put("notes/9.jsonl", b"")
    for text in "abc":
        notes(objects).append(Note(text))
    assert [n.text for n in notes(objects).resume()] == ["a", "b", "c"]
    objects.delete(f"notes/000000000{place}.jsonl")
    log = notes(objects)
    for goes_on in (log.records, log.resume, lambda: log.append(Note("d"))):
        with pytest.raises(EtudeError, match=rf"notes/000000000{place}.jsonl is missing, but la"):
            goes_on()
    assert not objects.exists(f"notes/000000000{place}.jsonl"), "the place of what is lost"


class Busy(Objects):
    """A store in which another process writes just before and after every listing."""

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        listed = []
        for _ in range(2):
            notes(Objects(self._store, self.url)).append(Note("more"))
            listed = listed or super().list(prefix, after=after)
        return listed


def test_what_is_written_meanwhile_is_no_gap() -> None:
    busy = Busy(Objects.open("memory:")._store, "memory:")
    assert len(notes(busy).records()) >= 2


def test_a_restarted_writer_continues_after_the_last_segment() -> None:
    objects = Objects.open("memory:")
    notes(objects).append(Note("a"))
    notes(objects).append(Note("b"))
    assert [n.text for n in notes(objects).records()] == ["a", "b"]


def test_a_second_writer_is_found_out() -> None:
    objects = Objects.open("memory:")
    old, new = notes(objects), notes(objects)
    old.append(Note("a"))
    new.append(Note("b"))
    with pytest.raises(
        EtudeError,
        match=r"another process has written notes/0000000001.jsonl; stop the other process",
    ):
        old.append(Note("c"))
    assert [n.text for n in new.records()] == ["a", "b"]


def test_appends_from_many_threads_all_arrive_once() -> None:
    objects = Objects.open("memory:")
    log: Log[Note] = Log(objects, "notes", [Note], durable=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: log.append(Note(str(n))), range(500)))
    assert sorted(int(n.text) for n in log.records()) == list(range(500))


def test_a_failed_write_keeps_the_records_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects.open("memory:")
    log = notes(objects, durable=False)
    log.append(Note("a"))
    with monkeypatch.context() as broken:
        broken.setattr(objects, "create", lambda *_: (_ for _ in ()).throw(EtudeError("disk full")))
        with pytest.raises(EtudeError):
            log.flush()
    log.flush()
    assert [n.text for n in log.records()] == ["a"]


@pytest.mark.parametrize(
    "known", [True, False], ids=["the library tries again", "nobody tries again"]
)
def test_a_lost_answer_is_no_second_writer(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """The segment is stored, only the reply was lost; records that came meanwhile go into the next
    one."""
    objects = Objects.open("memory:")
    log, create = notes(objects, durable=False), objects.create

    def lost(key: str, data: bytes) -> bool:
        create(key, data)
        if known:
            return False
        raise EtudeError("503")

    log.append(Note("a"))
    with monkeypatch.context() as broken:
        broken.setattr(objects, "create", lost)
        if known:
            log.flush()
        else:
            with pytest.raises(EtudeError, match="503"):
                log.flush()
    log.append(Note("b"))
    log.flush()
    assert [n.text for n in log.records()] == ["a", "b"]


class Late(Objects):
    """Its listings are as stale as possible, and show foreign files."""

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        return [f"{prefix}/.DS_Store", f"{prefix}/foo.tmp", f"{prefix}/0000000002.jsonl.bak"]


def test_a_listing_is_not_trusted() -> None:
    inner = Objects.open("memory:")
    late = Late(inner._store, inner.url)
    for text in "abc":
        notes(late).append(Note(text))
    assert [n.text for n in notes(late).records()] == ["a", "b", "c"]


@pytest.mark.parametrize("name", [".DS_Store", "foo.tmp", "0000000000.jsonl.swp", "9", "z"])
def test_files_of_others_are_not_seen(tmp_path: Path, name: str) -> None:
    objects = Objects.open(str(tmp_path))
    notes(objects).append(Note("a"))
    (tmp_path / "notes" / name).write_bytes(b"?")
    notes(objects).append(Note("b"))
    assert [n.text for n in notes(objects).records()] == ["a", "b"]


def test_a_damaged_segment_is_named_or_left_out_and_told() -> None:
    objects = Objects.open("memory:")
    for value in range(3):
        notes(objects).append(Note("a", value))
    key = "notes/0000000001.jsonl"
    objects.put(key, objects.get(key).replace(b'"value": 1', b'"value": 9'))
    with pytest.raises(
        Damaged,
        match=rf"memory:: {key} is damaged: its digest is \w+..., but its content has \w+",
    ):
        notes(objects).read()
    told: list[Damaged] = []
    log = Log(objects, "notes", [Note], durable=False, skipped=told.append)
    assert [n.value for n in log.records()] == [0, 2] and key in str(told[0])


def test_a_record_of_an_unknown_kind_is_refused_by_name() -> None:
    objects = Objects.open("memory:")
    Log(objects, "notes", [Other], durable=True).append(Other("x"))
    with pytest.raises(EtudeError, match=r"notes/0000000000.jsonl is not a valid record \(Note\)"):
        notes(objects).read()


def test_a_record_that_json_cannot_say_is_refused_at_the_source() -> None:
    log = notes(Objects.open("memory:"))
    with pytest.raises(ValueError, match="JSON"):
        log.append(Note("loss", float("nan")))
    assert log.records() == []


WRITER = """
import sys
from etude.core.ledger import Trained
from etude.store.log import Log
from etude.store.objects import Objects
log = Log(Objects.open(sys.argv[1]), "ledger", [Trained], durable=True)
for step in range(int(sys.argv[2]), 10**9):
    log.append(Trained(step=step))
    print(step, flush=True)
"""


def test_what_append_returned_for_survives_sigkill(tmp_path: Path) -> None:
    log: Log[Trained] = Log(Objects.open(str(tmp_path)), "ledger", [Trained], durable=True)
    first = 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                confirmed = int(writer.stdout.readline())
            writer.kill()
            confirmed = max(
                [confirmed, *(int(line) for line in writer.stdout if line.endswith("\n"))]
            )
        steps = [entry.step for entry in log.records()]
        assert steps == list(range(len(steps)))
        assert confirmed in steps and len(steps) <= confirmed + 2
        first = len(steps)
