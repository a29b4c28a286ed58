"""Followers behind bad links, over a real S3 server: slow, broken in mid-transfer, and shaped by
the kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.store.objects import Objects
from etude.weights.cache import HostCache
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher, SnapshotPolicy
from tests.weights.conftest import reached_by
from tests.weights.link import Link, linked
from tests.weights.test_weights import Tensors, bits, larger, run

pytestmark = pytest.mark.s3


@pytest.fixture
def link(s3_port: int) -> Iterator[Link]:
    with linked(s3_port) as made:
        yield made


def published(
    port: int, folder: str, versions: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, Tensors]:
    """Versions published by a trainer close to the store."""
    chain = Chain(Objects.open(f"{reached_by(port, monkeypatch)}/{folder}"))
    return run(
        Publisher(chain, policy=SnapshotPolicy(max_chain=5)), larger(1), range(1, versions + 1)
    )


def test_behind_a_slow_link(s3_port: int, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    made = published(s3_port, "slow", 6, monkeypatch)
    link.bytes_per_s, link.delay_s = 400e3, 0.02
    follower = Follower(
        Chain(Objects.open(f"{reached_by(link.port, monkeypatch)}/slow")), name="far"
    )
    assert bits(follower.fetch(1)) == bits(made[1])
    whole = link.carried
    for version in range(2, 7):
        assert bits(follower.fetch(version)) == bits(made[version])
    assert link.carried - whole < whole / 2  # five versions, including manifests and listings


def test_behind_a_link_that_breaks(
    s3_port: int, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections break within the whole version, which is 120 kB; still no version is wrong or
    missing."""
    made = published(s3_port, "broken", 12, monkeypatch)
    link.break_after = 50_000
    follower = Follower(Chain(Objects.open(f"{reached_by(link.port, monkeypatch)}/broken")))
    for version in (1, 2, 3, 7, 8, 12):
        assert bits(follower.fetch(version)) == bits(made[version])
        assert bits(Follower(follower.chain).fetch(version)) == bits(made[version])
    assert link.broken > 3


def test_the_workers_of_a_host_use_the_link_once(
    s3_port: int, link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = published(s3_port, "host", 3, monkeypatch)
    url = f"{reached_by(link.port, monkeypatch)}/host"
    carried = []
    for _ in range(3):
        before = link.carried
        follower = Follower(
            Chain(Objects.open(url)), cache=HostCache.beside(url, tmp_path / "cache")
        )
        assert bits(follower.fetch(3)) == bits(made[3])
        carried.append(link.carried - before)
    assert max(carried[1:]) < carried[0] / 5  # manifests and listings are read again


SHAPES = ("netem delay 20ms loss 1% rate 100mbit", "tbf rate 100mbit burst 256kb latency 200ms")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.split()[0])
def test_through_a_link_that_the_kernel_shapes(shape: str) -> None:
    """Run all of `test_s3`, in a separate network whose loopback is such a link."""
    enter = ["unshare", "--net", "sh", "-c"]
    shaping = f"ip link set lo up && tc qdisc add dev lo root {shape}"
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "tc"))
    if not tools or subprocess.run([*enter, shaping], capture_output=True, check=False).returncode:
        pytest.skip(f"this machine cannot shape a link with {shape.split()[0]}")
    tests = Path(__file__).with_name("test_s3.py")
    command = f"{shaping} && exec {sys.executable} -m pytest -q -m s3 -p no:cacheprovider {tests}"
    done = subprocess.run(
        [*enter, command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout
