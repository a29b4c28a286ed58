"""The weight plane over a real S3 server: SeaweedFS, over HTTP. `make test-s3` fetches the server and runs this."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.store.objects import Objects
from etude.weights.collect import collect
from etude.weights.compact import compact
from etude.weights.follow import Follower, fetch
from etude.weights.manifest import Chain
from etude.weights.publish import Policy, Publisher
from tests.weights.test_weights import bits, larger, run

pytestmark = pytest.mark.s3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    weed = os.environ.get("WEED") or shutil.which("weed") or pytest.skip("no SeaweedFS here: run `make test-s3`")
    folder, port = tmp_path_factory.mktemp("s3"), free_port()
    ports = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
    command = [
        str(weed),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-s3",
        f"-s3.port={port}",
        *ports,
        "-volume.max=20",
    ]
    settings = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_SKIP_SIGNATURE": "true",
    }  # fmt: skip
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            make_bucket(settings["AWS_ENDPOINT"], "weights", Path(log.name))
            with pytest.MonkeyPatch.context() as patch:
                for name, value in settings.items():
                    patch.setenv(name, value)
                yield "s3://weights"
        finally:
            server.kill()


def make_bucket(endpoint: str, name: str, log: Path) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=5)
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(log.read_text()[-2000:])


def test_publish_follow_collect(bucket: str) -> None:
    chain = Chain(Objects.open(f"{bucket}/a"))
    made = run(Publisher(chain, policy=Policy(max_chain=4)), larger(1), range(1, 11))
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
