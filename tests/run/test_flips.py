"""A bit flip at rest, in any object of a run's store: either an error that names the object, or no
effect.

The suite flips a few bits; `ETUDE_FLIPS=1000 pytest tests/run/test_flips.py` flips that many,
chosen by `ETUDE_FLIPS_SEED`.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console

from etude.commands.show import page
from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.core.events import EVENTS, StageStarted
from etude.core.ledger import Entry, Issued
from etude.core.lineage import estimator_of, stage_spans
from etude.core.sampling import VersionSpan
from etude.core.types import Group, RecomputedRow, Score, Trajectory
from etude.launch.place import RunPlace
from etude.model.directory import MODEL_FILES
from etude.run import journal
from etude.run.audit import audit
from etude.run.evaluate import Report, report_name, reports
from etude.store import checkpoints
from etude.store.checkpoints import Checkpoint, CheckpointWriter, Origin
from etude.store.experts import get_experts, put_experts
from etude.store.objects import Objects
from etude.store.rollouts import RolloutLog
from etude.store.runs import Run
from etude.store.telemetry import EventReader
from etude.weights.collect import Tombstone, collect, find_garbage
from etude.weights.compact import compact
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher, SnapshotPolicy
from tests.run.fake_stage import FIRST, stage
from tests.run.test_audit import CONFIG, LAST

FLIPS = int(os.environ.get("ETUDE_FLIPS", "48"))
SEED = int(os.environ.get("ETUDE_FLIPS_SEED", "0"))

KINDS = {
    "config.json", "model", "ledger", "groups", "batches", "recomputed", "experts", "evals",
    "rollouts", "events", "checkpoints/manifest", "checkpoints/part", "weights/versions",
    "weights/routes", "weights/shards", "weights/leases", "weights/gc",
}  # fmt: skip
"""All kinds of objects in a store."""


def kind_of(key: str) -> str:
    top, _, rest = key.partition("/")
    if top == "checkpoints":
        return f"checkpoints/{'manifest' if rest.endswith('manifest.json') else 'part'}"
    return f"weights/{rest.partition('/')[0]}" if top == "weights" else top


async def fill(objects: Objects) -> None:
    """A store as it is left by the controller, two trainers, a compactor, a collector, workers and
    an evaluation."""
    run = Run(objects)
    run.put_config(parse(CONFIG))
    for name in MODEL_FILES:
        run.put_model_file(name, b'{"name": "%b"}' % name.encode())
    experts = put_experts(objects, bytes(range(64)))

    def routed(attempt: Trajectory) -> Trajectory:
        return replace(
            attempt,
            segments=tuple(replace(segment, experts=experts) for segment in attempt.segments),
        )

    await stage(objects, seed=1, last=LAST - 1, max_lag=1, spoil=routed)
    leave_a_group_waiting(run)
    for step in run.batches():
        found = [RecomputedRow(logprobs=(-1.5,) * sum(row.mask)) for row in run.batch(step).rows]
        run.put_recomputed(step, tuple(found))
    log = run.events("trainer", EVENTS)
    for n in range(3):
        log.append(StageStarted(stage="rl", steps=4, done=n))
        log.flush()
    weights = torch.randn(60, 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    for versions in (range(1, 4), range(4, LAST)):
        publisher = Publisher(Chain(objects), policy=SnapshotPolicy(max_chain=2))
        for version in versions:
            weights = weights.clone()
            weights[version] += 1
            publisher.publish(version, {"w": weights, "n": torch.ones(3)}, stage="rl", step=version)
        publisher.close()
    compact(Chain(objects), skip=2)
    Follower(Chain(objects), name="worker-east", now=lambda: 1e9).fetch(LAST - 1)
    collect(Chain(objects), keep=2, now=lambda: 1e9)
    origin = Origin(stage="rl", parent="seed 0", config={"steps": 4}, data="batches", code="etude")
    saver = CheckpointWriter(run)
    for version in (LAST - 2, LAST - 1):
        saved = Checkpoint(
            stage="rl", step=0, version=version, lineage=(origin,), cursor={"books": "ab"}
        )
        saver.save(saved, bytes(range(256)))
    saver.wait()
    saver.close()
    report = Report(
        stage="sft", split="heldout", version=FIRST, solved=1, total=2, low=0.1, high=0.9,
        rewards={"t0": 1.0}, example=[{"role": "user", "content": "mend it"}],
    )  # fmt: skip
    run.put_eval(report_name(FIRST, "heldout"), report)


def leave_a_group_waiting(run: Run) -> None:
    """A finished group that is in no batch: the next launch trains on it."""
    group = "g000900"
    samples = (f"{group}.0", f"{group}.1")
    done = next(
        t for name in run.groups() for t in run.group(name).trajectories if t.status == "done"
    )
    segments = (replace(done.segments[0], versions=(VersionSpan(LAST - 1, 2),)),)
    done = replace(done, group=group, segments=segments)
    attempts = [replace(done, id=id, score=Score(float(n))) for n, id in enumerate(samples)]
    run.ledger.append(Issued(group=group, task=done.task, samples=samples, version=LAST - 1))
    run.put_group(
        Group(id=group, task=done.task, slot=900, admitted=LAST - 1, trajectories=tuple(attempts))
    )


class Doomed(frozenset[str]):
    """The objects that the collector would delete. A damaged route counts as missing, and then the
    collector keeps more."""

    def __eq__(self, now: object) -> bool:
        return isinstance(now, Doomed) and now <= self

    __hash__ = frozenset.__hash__


class Looks:
    """Every read of a run's store that any reader makes."""

    def __init__(self, directory: Path) -> None:
        self.place = RunPlace.of(directory)
        self.objects = Objects.open(self.place.store, create=False)
        self.run = Run(self.objects)
        self.versions = list(Chain(self.objects).lineage())

    def all(self) -> dict[str, object]:
        """The result or the error of each look, by its name."""
        return {name: self.one(look) for name, look in self.looks()}

    def one(self, look: Callable[[], object]) -> object:
        try:
            return look()
        except EtudeError as e:
            return e

    def looks(self) -> Iterator[tuple[str, Callable[[], object]]]:
        run = self.run
        yield "config", run.config
        yield "model", Run(self.objects).model_files
        yield "resume", self.resume
        yield "audit", lambda: audit(run)
        yield "show", self.show
        yield "reports", lambda: reports(run)
        yield "rollouts", lambda: RolloutLog(self.objects).rows()
        yield "events", self.events
        yield "experts", self.experts
        for step in run.batches():
            yield f"batch {step}", lambda step=step: run.batch(step)
            yield f"recomputed {step}", lambda step=step: run.recomputed(step)
        for name in run.checkpoints():
            yield f"checkpoint {name}", lambda name=name: self.checkpoint(name)
        yield "newest", lambda: Chain(self.objects).newest()
        yield "lineage", lambda: Chain(self.objects).lineage()
        yield "leases", lambda: list(Chain(self.objects).leases().values())
        yield "doomed", lambda: Doomed(find_garbage(Chain(self.objects), keep=2, now=1e9))
        yield (
            "tombstones",
            lambda: [
                Chain(self.objects).read(key, Tombstone) for key in self.objects.list("weights/gc")
            ],
        )
        for version in self.versions:
            yield f"version {version}", lambda version=version: self.version(version)

    def resume(self) -> tuple[list[Entry], journal.Recovered]:
        config = self.run.config()
        return journal.load(
            self.run, estimator_of(stage_spans(config.stage)[-1].stage, config.model.max_context)
        )

    def show(self) -> str:
        console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
        page(self.run, self.place, console, everything=True)
        return console.export_text()

    def events(self) -> object:
        """Damaged events are left out and reported: the report is then the error."""
        events = EventReader(self.run)
        found = events.new()
        return events.damaged[0] if events.damaged else found

    def experts(self) -> list[bytes]:
        groups = [self.run.group(name) for name in self.run.groups()]
        named = {
            s.experts
            for group in groups
            for t in group.trajectories
            for s in t.segments
            if s.experts
        }
        return [get_experts(self.objects, name) for name in sorted(named)]

    def checkpoint(self, name: str) -> object:
        found = checkpoints.read(self.run, name)
        return found, [
            checkpoints.read_part(self.run, found, rank) for rank in range(len(found.parts))
        ]

    def version(self, version: int) -> object:
        tensors = Follower(Chain(self.objects)).fetch(version)
        return {
            name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
        }


def is_told(before: object, after: object, key: str) -> bool:
    """True if an outcome is the same, or names the object to blame: in an error, as one of several,
    or in an alarm."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(is_told(*pair, key) for pair in zip(before, after, strict=True))
    return (
        before == after
        or (isinstance(after, EtudeError) and key in str(after))
        or key in _alarms(after)
    )


def _alarms(outcome: object) -> str:
    """The lines of `etude show`, and the audit's findings, that mention damage."""
    if isinstance(outcome, str):
        return "\n".join(re.findall(r"^alarm: .*", outcome, re.MULTILINE))
    return "\n".join(map(str, getattr(outcome, "alarms", [])))


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("etude.weights.manifest.FIRST_RETRY_S", 0.0)
    await fill(Objects.open(str(tmp_path)))
    return tmp_path


async def test_a_flipped_bit_is_told_or_changes_nothing(store: Path) -> None:
    looks, random = Looks(store), Random(SEED)
    before = looks.all()
    assert not [error for error in before.values() if isinstance(error, Exception)]
    assert before == looks.all() and looks.resume()[1].waiting
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for key in looks.objects.list(""):
        by_kind[kind_of(key)].append(key)
    assert by_kind.keys() == KINDS
    told: Counter[str] = Counter()
    for number in range(FLIPS):
        key = random.choice(by_kind[sorted(by_kind)[number % len(by_kind)]])
        path = store / key
        data = path.read_bytes()
        bit = random.randrange(8 * len(data))
        path.write_bytes(
            data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        )
        after = looks.all()
        path.write_bytes(data)
        silent = [name for name in before if not is_told(before[name], after.get(name), key)]
        assert not silent, f"bit {bit} of {key} (seed {SEED}) changed {silent} without a word"
        told[kind_of(key)] += any(before[name] != after[name] for name in before)
    print(f"{told.total()} of {FLIPS} flips were told, the others had no effect: {dict(told)}")
    assert before == looks.all()
