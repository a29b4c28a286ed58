"""A real S3 server: SeaweedFS, whose program `weed` must be on the path or named by WEED."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    """A free port; SeaweedFS also listens 10,000 above it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) + 10_000 < 1 << 16:
                return port


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    weed = (
        os.environ.get("WEED")
        or shutil.which("weed")
        or pytest.skip("no SeaweedFS here: run `make test-s3`")
    )
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
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*command, "-volume.max=20"], stdout=log, stderr=log)
        try:
            make_bucket(port, Path(log.name))
            yield port
        finally:
            server.kill()
            server.wait()


def make_bucket(port: int, log: Path) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(
                urllib.request.Request(f"http://127.0.0.1:{port}/weights", method="PUT"), timeout=5
            )
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(log.read_text()[-2000:])


def reached_by(port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The bucket's URL; after this call it is accessed through this port."""
    settings = {
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_SKIP_SIGNATURE": "true",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return "s3://weights"
