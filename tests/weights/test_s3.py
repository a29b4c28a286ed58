"""The weight plane over a real S3 server: SeaweedFS, over HTTP. `make test-s3` fetches the server
and runs this."""

from __future__ import annotations

import threading

import pytest

from etude.store.objects import Objects
from etude.weights.collect import collect
from etude.weights.compact import compact
from etude.weights.follow import Follower, fetch
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher, SnapshotPolicy
from tests.weights.conftest import reached_by
from tests.weights.test_weights import bits, larger, run

pytestmark = pytest.mark.s3


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    return reached_by(s3_port, monkeypatch)


def test_publish_follow_collect(bucket: str) -> None:
    chain = Chain(Objects.open(f"{bucket}/a"))
    made = run(Publisher(chain, policy=SnapshotPolicy(max_chain=4)), larger(1), range(1, 11))
    assert [way.target.version for way in compact(chain, skip=3)] == [6, 9]
    follower = Follower(chain, name="reader")
    for version, tensors in made.items():
        assert bits(follower.fetch(version)) == bits(tensors)
    assert bits(fetch(chain.objects, 10)) == bits(made[10])
    follower.close()
    for _ in range(2):
        collect(chain, keep=2, grace_s=0)
    kept = Chain(chain.objects).lineage()
    assert min(kept) > 1 and max(kept) == 10
    for version in kept:
        assert bits(fetch(chain.objects, version)) == bits(made[version])


def test_one_of_many_creates_wins(bucket: str) -> None:
    won = []

    def claim(n: int) -> None:
        if Objects.open(f"{bucket}/b").create("key", str(n).encode()):
            won.append(n)

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and Objects.open(f"{bucket}/b").get("key") == str(won[0]).encode()
