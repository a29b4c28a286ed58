"""Fetch the source distributions of `repositories.txt` and verify their digests.

    python fetch.py repositories.txt data/sdists

Existing files are not fetched again.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit


class Line(NamedTuple):
    """A line of the list."""

    use: str
    """`heldout`: tasks for evaluation. `novel`: tasks for the final evaluation, by which nothing is
    chosen. `train`: tasks and sessions for training. `sft`: sessions alone."""
    filename: str
    sha256: str
    licence: str

    @property
    def is_learnt(self) -> bool:
        return self.use in ("train", "sft")

    @property
    def package(self) -> str:
        stem = self.filename.removesuffix(".zip").removesuffix(".tar.gz")
        return re.sub(r"[-_.]+", "-", stem.rpartition("-")[0]).lower()


def read_list(path: Path) -> Iterator[Line]:
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            yield Line(*line.split(maxsplit=3))


def fetch(line: Line, folder: Path) -> None:
    place = folder / line.filename
    if place.exists():
        return
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = f"{index}/{line.package}/"
    links = re.findall(r'href="([^"]+)"', download(page).decode())
    urls = [urljoin(page, html.unescape(link)).partition("#")[0] for link in links]
    url = next(u for u in urls if PurePosixPath(urlsplit(u).path).name == line.filename)
    packed = download(url)
    if hashlib.sha256(packed).hexdigest() != line.sha256:
        raise SystemExit(f"{line.filename} has another digest than {line.sha256}")
    half = place.with_name(f"{place.name}.part")
    half.write_bytes(packed)
    half.rename(place)


def download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return bytes(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda line: fetch(line, args.folder), read_list(args.list)))


if __name__ == "__main__":
    main()
