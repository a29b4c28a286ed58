"""Trainers, readers and the collector over faulty stores: never a wrong bit, never a committed
version lost."""

from __future__ import annotations

import contextlib
import os
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from etude.core.errors import EtudeError
from etude.store.objects import Missing, Objects
from etude.weights.collect import SKEW_S, Collected, collect, find_garbage
from etude.weights.compact import compact
from etude.weights.follow import LEASE_S, CorruptWeights, Follower, fetch
from etude.weights.manifest import Chain, End, VersionGone
from etude.weights.publish import Fenced, Publisher, SnapshotPolicy
from etude.weights.records import Epoch, manifest_key, owner_of
from tests.weights.faulty import Faulty, PowerCut
from tests.weights.test_weights import Tensors, bits, larger, moved, run, shards_of, wrong_tensors

KEEP, GRACE_S, LATE_S = 4, 100.0, 10.0
FEW = 25
EXAMPLES = int(os.environ.get("ETUDE_CHAOS_EXAMPLES", FEW))
"""More than a few take minutes; they are drawn at random each time."""
POLICY, SKIP = SnapshotPolicy(max_chain=6), 3


def weights(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(40, 5, generator=generator).bfloat16(),
        "n": torch.ones(3),
        "e": torch.zeros(0),
    }


class Plane(RuleBasedStateMachine):
    """One lineage of trainers, one of which is alive; a zombie of each that was succeeded; readers;
    a collector."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.random, self.inner = Random(seed), Objects.open("memory:")
        self.now = 1000.0
        self.committed: dict[int, Tensors] = {}
        self.published_by: dict[int, int] = {}
        self.stores: list[Faulty] = []
        self.zombies: list[Publisher] = []
        self.readers = [
            Follower(self.chain(), name=f"r{n}", now=lambda: self.now) for n in range(2)
        ]
        self.seen = [-1] * len(self.readers)
        self.current = weights(seed)
        self.trainer = self.new_trainer()

    def chain(self) -> Chain:
        store = Faulty(self.inner, Random(self.random.random()), trouble=0.03, late_s=LATE_S)
        self.stores.append(store)
        self.tick(0)
        return Chain(store, sleep=lambda seconds: None)

    def new_trainer(self) -> Publisher:
        return Publisher(self.chain(), policy=POLICY, now=lambda: self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for store in self.stores:
            store.now = self.now

    def truth(self) -> Chain:
        return Chain(self.inner)

    @rule(cut=st.none() | st.integers(0, 12))
    def publish(self, cut: int | None) -> None:
        """Take a step; the power may fail at one of its writes, and then the trainer is restarted.
        There is no other excuse for a failure: the store's errors are short, and no trainer has
        taken over."""
        store = self.trainer.chain.objects
        assert isinstance(store, Faulty)
        version = max(self.committed, default=0) + 1
        store.writes_left = cut
        given = moved(self.current, self.random.randrange(10**6), share=0.1)
        try:
            self.trainer.publish(version, given, stage="rl", step=version)
            self.trainer.wait()
            acknowledged = True
        except PowerCut:
            acknowledged = False
        store.writes_left = None
        self.tick(1.0)
        there = version in self.truth().lineage()
        assert there or not acknowledged
        if there:
            self.committed[version] = self.current = given
        if not acknowledged:
            self.trainer = self.new_trainer()

    @rule()
    def take_over(self) -> None:
        """Another trainer starts while the old one believes that it is alone."""
        self.zombies.append(self.trainer)
        self.trainer = self.new_trainer()

    @rule(look=st.booleans())
    def zombie_moves(self, look: bool) -> None:
        if not self.zombies or not self.committed:
            return
        zombie = self.zombies.pop()
        newest = max(self.truth().epochs(), key=lambda e: e.epoch)
        if zombie._epoch is None or zombie._epoch == newest.epoch:
            return  # it has not been succeeded yet
        version, truth = max(self.committed) + 1, self.truth().look()
        if not look:  # it looked for the last time before it was succeeded
            version = next(
                versions.stop for epoch, versions in truth.spans() if epoch == zombie._epoch
            )
            stale = End(
                truth.epochs[: zombie._epoch + 1],
                zombie._last.link if zombie._last else None,
                version,
            )
            zombie.chain.look = lambda: stale  # type: ignore[method-assign]
            zombie._published = lambda version: None  # type: ignore[method-assign]
        before = self.truth().lineage()
        with pytest.raises(Fenced):
            zombie.publish(version, weights(self.random.randrange(10**6)), stage="rl", step=1)
            zombie.wait()
        assert self.truth().lineage() == before

    @rule(which=st.integers(0, 1), back=st.integers(0, 6), cut=st.none() | st.integers(0, 3))
    def read(self, which: int, back: int, cut: int | None) -> None:
        reader = self.readers[which]
        if not self.committed:
            return
        version = max(max(self.committed) - back, min(self.committed))
        try:
            found = bits(reader.fetch(version))
        except (VersionGone, CorruptWeights, LookupError):
            # Stale listings may hide it for now, and old ones may be deleted; a stored one must be
            # readable.
            self.tick(2 * LATE_S)
            if version in self.truth().lineage():
                assert bits(reader.fetch(version)) == bits(self.committed[version])
            return
        assert found == bits(self.committed[version])

    @rule(which=st.integers(0, 1))
    def follow(self, which: int) -> None:
        """The newest version, as a reader sees it, never goes back."""
        newest = self.readers[which].chain.newest(self.seen[which])
        if newest is not None:
            assert newest.version > self.seen[which]
            self.seen[which] = newest.version

    @rule(which=st.integers(0, 1))
    def flip_a_bit_in_memory(self, which: int) -> None:
        reader = self.readers[which]
        if reader.held is not None:
            data = reader.held.held["w"].data
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            assert wrong_tensors(reader) == ["w"]
            reader.held = None

    @rule(which=st.integers(0, 1))
    def restart_a_reader(self, which: int) -> None:
        self.readers[which] = Follower(self.chain(), name=f"r{which}", now=lambda: self.now)

    @rule(cut=st.none() | st.integers(0, 3))
    def compact(self, cut: int | None) -> None:
        """Add routes; the process may die in between."""
        chain = self.chain()
        store = chain.objects
        assert isinstance(store, Faulty)
        store.writes_left = cut
        # a stale listing shows deleted objects
        with contextlib.suppress(Missing, CorruptWeights, PowerCut):
            compact(chain, skip=SKIP)
        self.stores.remove(store)

    @rule(seconds=st.sampled_from([1.0, GRACE_S, LEASE_S * 2]))
    def clean(self, seconds: float) -> None:
        chain = self.readers[0].chain
        with contextlib.suppress(Missing):  # a stale listing shows deleted objects
            collect(chain, keep=KEEP, grace_s=GRACE_S, now=lambda: self.now)
        self.tick(seconds)

    @invariant()
    def what_was_committed_is_there(self) -> None:
        if not getattr(self, "committed", None):
            return
        lineage = self.truth().lineage()
        newest = sorted(self.committed)[-KEEP:]
        assert set(newest) <= lineage.keys() <= self.committed.keys()
        assert bits(fetch(self.inner, newest[-1])) == bits(self.committed[newest[-1]])

    def teardown(self) -> None:
        for version in self.truth().lineage() if hasattr(self, "inner") else ():
            assert bits(fetch(self.inner, version)) == bits(self.committed[version])


TestPlane = Plane.TestCase
TestPlane.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
    derandomize=EXAMPLES == FEW,
)


@pytest.fixture
def inner() -> Objects:
    return Objects.open("memory:")


def quiet(inner: Objects) -> Faulty:
    return Faulty(inner, Random(0))


def test_a_crash_at_every_write_leaves_a_version_absent_or_whole(inner: Objects) -> None:
    steps: dict[int, Tensors] = {0: larger(1)}
    first = Publisher(Chain(inner), policy=POLICY)
    first.publish(1, steps[0], stage="rl", step=1)
    first.close()
    version, cut, current, cuts = 2, 0, steps[0], 0
    while version < 9:
        store = quiet(inner)
        trainer = Publisher(Chain(store), policy=POLICY)
        store.writes_left = cut
        given = moved(current, version)
        try:
            trainer.publish(version, given, stage="rl", step=version)
            trainer.wait()
        except PowerCut:
            cuts += 1
        there = version in Chain(inner).lineage()
        if there:
            assert bits(fetch(inner, version)) == bits(given)
            current, version, cut = given, version + 1, 0
        else:
            assert bits(fetch(inner, version - 1)) == bits(current)
            cut += 1
    assert cuts > 10
    # Remains of dead trainers are deleted, and nothing else.
    before = {v: bits(fetch(inner, v)) for v in Chain(inner).lineage()}
    now = [1000.0]
    first_round = collect(Chain(inner), keep=100, grace_s=10, now=lambda: now[0])
    assert first_round.pending and not first_round.deleted
    now[0] += 11
    assert set(collect(Chain(inner), keep=100, grace_s=10, now=lambda: now[0]).deleted) == set(
        first_round.pending
    )
    assert {v: bits(fetch(inner, v)) for v in Chain(inner).lineage()} == before
    assert find_garbage(Chain(inner), keep=100, now=now[0]) == []


def test_a_missing_difference_is_gone_around(inner: Objects) -> None:
    made = run(Publisher(Chain(inner)), larger(2), range(1, 9))
    compact(Chain(inner), skip=3)
    chain = Chain(inner, sleep=lambda s: None)
    follower = Follower(chain)
    follower.fetch(3)
    lost = chain.find(5)[1]
    for shard in lost.route.shards:
        inner.delete(f"weights/shards/{lost.epoch:06d}/{lost.version:06d}/{shard.hash}")
    assert bits(follower.fetch(8)) == bits(made[8])  # by the skip from 3 to 6
    with pytest.raises(CorruptWeights):
        Follower(chain).fetch(5)
    assert bits(follower.held.tensors() if follower.held else {}) == bits(made[8])


def test_a_lease_keeps_what_a_reader_needs_and_ends(inner: Objects) -> None:
    now = [1000.0]
    publisher = Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=3))
    current, made = larger(3), {}
    reader = Follower(Chain(inner), name="slow", now=lambda: now[0])
    for version in range(1, 13):
        publisher.publish(version, current, stage="rl", step=version)
        publisher.wait()
        made[version] = current
        if version == 2:
            reader.fetch(2)
        current = moved(current, version)
    publisher.close()

    def clean() -> None:
        for _ in range(2):
            collect(Chain(inner), keep=2, grace_s=10, now=lambda: now[0])
            now[0] += 11

    clean()
    assert min(Chain(inner).lineage()) == 1 and bits(fetch(inner, 3)) == bits(made[3])
    now[0] += LEASE_S + 200
    clean()
    kept = Chain(inner).lineage()
    assert min(kept) == 10 and max(kept) == 12
    with pytest.raises(VersionGone, match="weight version 5 was deleted"):
        reader.fetch(5)
    assert bits(reader.fetch(12)) == bits(made[12])  # from the whole version
    for version in kept:
        assert bits(fetch(inner, version)) == bits(made[version])


@pytest.mark.parametrize("late_s", [-1.0, 0.0, 1.0])
def test_a_lease_counts_a_little_longer_for_clocks_that_differ(
    inner: Objects, late_s: float
) -> None:
    run(Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=2)), larger(1), range(1, 10))
    Follower(Chain(inner), name="slow", now=lambda: 1000.0).fetch(2)
    now = 1000.0 + LEASE_S + SKEW_S + late_s
    doomed = {owner_of(key) for key in find_garbage(Chain(inner), keep=1, now=now)}
    assert ((1, 2) in doomed) == (late_s >= 0)


def test_what_is_doomed_stays_for_a_time_of_grace(inner: Objects) -> None:
    run(Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=1)), larger(1), range(1, 5))

    def clean(now: float) -> Collected:
        return collect(Chain(inner), keep=2, grace_s=10, now=lambda: now)

    first = clean(1000.0)
    assert first.deleted == () and first.pending
    assert clean(1009.0) == first
    assert len(inner.list("weights/gc")) == 1  # recorded keys are not recorded again
    assert list(Chain(inner).lineage()) == [1, 2, 3, 4]
    assert clean(1010.0) == Collected(first.pending, ())
    assert list(Chain(inner).lineage()) == [3, 4] and not inner.list("weights/gc")


def test_sixteen_versions_are_kept_unless_somebody_says_otherwise(inner: Objects) -> None:
    run(Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=1)), larger(1), range(1, 19))
    collect(Chain(inner), now=lambda: 1000.0)
    assert collect(Chain(inner), now=lambda: 4599.0).deleted == ()
    collect(Chain(inner), now=lambda: 4600.0)
    assert list(Chain(inner).lineage()) == list(range(3, 19))


def test_a_lease_on_the_newest_version_takes_nothing_from_those_that_are_kept(
    inner: Objects,
) -> None:
    made = run(Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=1)), larger(1), range(1, 10))
    Follower(Chain(inner), name="current", now=lambda: 1000.0).fetch(9)
    for _ in range(2):
        collect(Chain(inner), keep=4, grace_s=0, now=lambda: 1000.0)
    assert list(Chain(inner).lineage()) == [6, 7, 8, 9]
    assert bits(fetch(inner, 6)) == bits(made[6])


@pytest.mark.parametrize(
    "where", [manifest_key(0, 0), manifest_key(1, 1)], ids=["the claim", "the commit"]
)
def test_a_lost_answer_is_no_successor(inner: Objects, where: str) -> None:
    """The record is stored, its writer is not told, and the first reads of it are damaged."""
    store = quiet(inner)
    create, get = store.create, store.get
    lost: list[str] = []
    misread: list[str] = []

    def forgetful(key: str, data: bytes) -> bool:
        made = create(key, data)
        if key == where and not lost:
            lost.append(key)
            raise EtudeError("503")
        return made

    def damaged(key: str) -> bytes:
        data = get(key)
        if key == where and len(misread) < 3:
            misread.append(key)
            return data[:-1]
        return data

    store.create, store.get = forgetful, damaged  # type: ignore[method-assign]
    publisher = Publisher(Chain(store, sleep=lambda seconds: None))
    publisher.publish(1, larger(1), stage="rl", step=1)
    publisher.close()
    assert lost and len(misread) == 3 and Chain(inner).lineage() == {1: 1}


def test_epochs_outlive_all_versions_around_them(inner: Objects) -> None:
    """A trainer that wakes after years finds its successor at the key of its next version, not a
    free key."""
    old = Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=1))
    old.publish(1, larger(1), stage="rl", step=1)
    old.wait()
    stale = old.chain.look()
    run(Publisher(Chain(inner), policy=SnapshotPolicy(max_chain=1)), larger(2), range(2, 9))
    for _ in range(2):
        collect(Chain(inner), keep=1, grace_s=0)
    assert list(Chain(inner).lineage()) == [8]
    old.chain.look = lambda: stale  # type: ignore[method-assign]
    old._published = lambda version: None  # type: ignore[method-assign]
    old.publish(2, larger(9), stage="rl", step=2)
    with pytest.raises(Fenced):
        old.close()
    assert list(Chain(inner).lineage()) == [8] and bits(fetch(inner, 8)) == bits(
        Follower(Chain(inner)).fetch(8)
    )


def test_the_collector_leaves_the_version_that_is_being_uploaded(inner: Objects) -> None:
    publisher = Publisher(Chain(inner))
    publisher.publish(1, larger(1), stage="rl", step=1)
    publisher.wait()
    now = [1000.0]
    real = publisher.chain.put_shard

    def put_shard(epoch: int, version: int, data: bytes) -> str:
        hash = real(epoch, version, data)
        for _ in range(2):
            collect(Chain(inner), keep=1, grace_s=10, now=lambda: now[0])
            now[0] += 11
        return hash

    publisher.chain.put_shard = put_shard  # type: ignore[method-assign]
    publisher.publish(2, larger(2), stage="rl", step=2)
    publisher.close()
    assert bits(fetch(inner, 2)) == bits(larger(2))


def test_what_was_committed_before_the_fence_is_not_lost(inner: Objects) -> None:
    """A successor reads which version is the newest; before its epoch is written, the old trainer
    commits one more."""
    old = Publisher(Chain(inner))
    old.publish(1, larger(1), stage="rl", step=1)
    old.wait()
    chain = Chain(inner)
    heir = Publisher(chain)
    real = chain.create

    def create(key: str, record: object) -> bool:
        if isinstance(record, Epoch) and key == manifest_key(1, 2):
            old.publish(2, larger(2), stage="rl", step=2)
            old.wait()
        return real(key, record)

    chain.create = create  # type: ignore[method-assign]
    heir.publish(3, larger(3), stage="rl", step=3)
    heir.close()
    assert list(Chain(inner).lineage()) == [1, 2, 3]
    assert bits(fetch(inner, 2)) == bits(larger(2)) and bits(fetch(inner, 3)) == bits(larger(3))


def test_of_two_that_take_the_same_epoch_one_wins(inner: Objects) -> None:
    chain = Chain(inner)
    first, second = Publisher(Chain(inner)), Publisher(chain)
    real = chain.create

    def create(key: str, record: object) -> bool:
        if isinstance(record, Epoch):
            first.publish(1, larger(1), stage="rl", step=1)
            first.wait()
        return real(key, record)

    chain.create = create  # type: ignore[method-assign]
    second.publish(1, larger(2), stage="rl", step=1)
    with pytest.raises(Fenced):
        second.wait()
    assert bits(fetch(inner, 1)) == bits(larger(1))


def test_another_layout_of_the_trainer_is_the_same_version(inner: Objects) -> None:
    """Tensors in another order, as views of other storage: the same names and bits give the same
    root."""
    given = weights(4)
    publisher = Publisher(Chain(inner))
    publisher.publish(1, given, stage="rl", step=1)
    first = publisher.wait()
    publisher.close()
    wide = torch.zeros(80, 10).bfloat16()
    wide[::2, :5] = given["w"]
    other = {"n": given["n"].clone(), "e": torch.zeros(0), "w": wide[::2, :5]}
    again = Publisher(Chain(inner))
    again.publish(1, other, stage="rl", step=1)
    assert again.wait() == first and first is not None
    again.close()


def test_an_empty_store_and_a_lost_version(inner: Objects) -> None:
    assert Chain(inner).newest() is None and Chain(inner).lineage() == {}
    assert collect(Chain(inner)).pending == ()
    run(Publisher(Chain(inner)), larger(1), range(1, 4))
    inner.delete(manifest_key(1, 2))
    chain = Chain(inner, sleep=lambda s: None)
    with pytest.raises(EtudeError):
        Follower(chain).fetch(3)
    assert shards_of(inner, 3)
