"""A real `etude serve` over a tiny model, as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig
from tests.small_model import sharp, small_files

FILES = small_files()


def write_model(directory: Path) -> Path:
    write_directory(
        directory, FILES, hf_state_dict(sharp(ModelConfig.from_json(FILES["config.json"]), seed=0))
    )
    return directory


def start(model: Path, *arguments: str, token: str | None = None) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-m",
        "etude",
        "serve",
        str(model),
        "--port",
        "0",
        "--threads",
        "1",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "ETUDE_TOKEN"}
    if token is not None:
        environment["ETUDE_TOKEN"] = token
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@contextmanager
def serving(model: Path, *arguments: str, token: str | None = None) -> Iterator[str]:
    """Yield the URL of a server. The server must stop cleanly and print nothing."""
    child = start(model, "--quiet", *arguments, token=token)
    try:
        assert child.stdout is not None
        url = child.stdout.readline().rpartition(" ")[2].strip().removesuffix("/v1")
        assert url, child.communicate()[1]
        yield url
        child.terminate()
        assert child.communicate()[1] == ""
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()
