"""Several trainers, each of which believes to be the only one, over a store with arbitrarily stale
listings.

Before any trainer's access to the store, others may act: they take over and publish, and readers
look. Versions that a reader could have served, and versions whose publication was acknowledged,
stay unchanged for ever.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from etude.core.errors import EtudeError
from etude.core.types import Manifest
from etude.store.objects import Objects
from etude.weights.manifest import Chain
from etude.weights.publish import Fenced, Publisher
from tests.weights.faulty import Lagging

TRAINERS, DEPTH = 4, 3
EXAMPLES = 40


class Scene:
    def __init__(self, seed: int, share: float) -> None:
        self.random = Random(seed)
        self.share = share
        self.inner = Objects.open("memory:")
        self.resting = [self.trainer() for _ in range(TRAINERS)]
        self.readers = [self.chain() for _ in range(2)]
        self.known: dict[int, Manifest] = {}
        """Versions that were served, or acknowledged."""
        self.owners: dict[int, Publisher] = {}
        self.depth = self.published = 0
        self.interruptions = 8

    def chain(self) -> Chain:
        return Chain(Lagging(self.inner, self.random, self.share), sleep=lambda seconds: None)

    def trainer(self) -> Publisher:
        made = Publisher(self.chain())
        assert isinstance(made.chain.objects, Lagging)
        made.chain.objects.pause = self.maybe_interrupt
        return made

    def truth(self) -> Chain:
        return Chain(self.inner)

    def maybe_interrupt(self) -> None:
        if self.depth < DEPTH and self.interruptions and self.random.random() < 0.2:
            self.interruptions -= 1
            self.read()
            self.publish()
            self.read()

    def read(self) -> None:
        chain = self.random.choice([*self.readers, self.chain()])
        if (newest := chain.newest()) is not None:
            self.remember(newest)

    def remember(self, manifest: Manifest) -> None:
        assert self.known.setdefault(manifest.version, manifest) == manifest
        self.check()

    def publish(self) -> None:
        """One of the idle trainers continues from the checkpoint that it believes to be the
        newest."""
        self.depth += 1
        trainer = self.resting.pop(self.random.randrange(len(self.resting)))
        epoch, head = trainer._epoch, self.truth().newest()
        version = (head.version if head else 0) + self.random.choice((1, 1, 1, 2))
        weights = {"w": torch.tensor([self.random.random()])}
        try:
            trainer.publish(version, weights, stage="rl", step=version)
            manifest = trainer.wait()
            assert manifest is not None
            self.published += 1
            self.remember(manifest)
        except Fenced:
            assert self.truth().epochs()[-1].publisher != trainer.name, "nobody has taken over"
            trainer = self.succeeded(trainer)
        except EtudeError as e:
            assert epoch is None and "already published" in str(e), e
            trainer = self.succeeded(trainer)
        if trainer._epoch is not None:
            assert self.owners.setdefault(trainer._epoch, trainer) is trainer
        self.resting.append(trainer)
        self.depth -= 1

    def succeeded(self, trainer: Publisher) -> Publisher:
        trainer._worker.shutdown(wait=False)
        trainer._pool.shutdown()
        return self.trainer()

    def check(self) -> None:
        truth = self.truth()
        for version, manifest in self.known.items():
            assert truth.find(version)[1] == manifest, f"version {version} was lost, or replaced"
        numbers = [epoch.epoch for epoch in truth.epochs()]
        assert numbers == list(range(1, len(numbers) + 1))


@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
def test_no_version_is_ever_lost_and_no_epoch_taken_twice(seed: int, share: float) -> None:
    scene = Scene(seed, share)
    for _ in range(4):
        scene.publish()
        scene.read()
    scene.check()
    lineage = scene.truth().lineage()
    assert set(scene.known) <= set(lineage) and scene.published >= 1
    for trainer in scene.resting:
        trainer._worker.shutdown()
        trainer._pool.shutdown()


def test_a_third_trainer_that_lists_nothing_loses_nothing() -> None:
    """The second has published under its epoch, and the listing of the third shows neither."""
    inner = Objects.open("memory:")
    for version in (1, 2, 3):
        publisher = Publisher(Chain(Lagging(inner, Random(0), share=0.0)))
        publisher.publish(version, {"w": torch.tensor([version])}, stage="rl", step=version)
        publisher.close()
    assert list(Chain(inner).lineage()) == [1, 2, 3]
    newest = Chain(Lagging(inner, Random(0), share=0.0)).newest()
    assert newest is not None and newest.version == 3


def test_a_claim_that_comes_between_a_claim_and_its_first_version() -> None:
    """The second trainer has claimed, and dies; the first, not told yet, can no longer publish, and
    the third continues from the first one's last version."""
    inner = Objects.open("memory:")
    first, second, third = (Publisher(Chain(inner)) for _ in range(3))
    first.publish(1, {"w": torch.tensor([1.0])}, stage="rl", step=1)
    first.wait()
    second._claim(2)
    first.publish(2, {"w": torch.tensor([2.0])}, stage="rl", step=2)
    with pytest.raises(Fenced):
        first.wait()
    third.publish(2, {"w": torch.tensor([3.0])}, stage="rl", step=2)
    manifest = third.wait()
    assert manifest is not None and manifest.epoch == 3 and manifest.parent is not None
    assert manifest.parent.version == 1 and Chain(inner).lineage() == {1: 1, 2: 3}
