"""The corpus for mid-training: Python source files of the training repositories.

    python corpus.py repositories.txt --sdists data/sdists --out data/corpus.jsonl

A file is kept if it parses, has a function, is not a duplicate, and does not share a function with
a held-out repository.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fetch import read_list
from sessions import digest_of, functions_in, heldout_functions

from etude.factory.sources import fetch

LARGEST = 100_000
"""Most characters of a file: longer ones are mostly generated."""


def documents(files: Mapping[str, bytes], heldout: set[str]) -> Iterator[str]:
    for path in sorted(files):
        functions = list(functions_in({path: files[path]}))  # empty if it does not parse
        if not functions or len(files[path]) > LARGEST:
            continue
        if heldout.isdisjoint(map(digest_of, functions)):
            yield files[path].decode()


def once(texts: Iterable[str]) -> Iterator[str]:
    """Drop duplicates, which may differ in layout and comments."""
    seen: set[bytes] = set()
    for text in texts:
        digest = hashlib.blake2b(ast.dump(ast.parse(text)).encode()).digest()
        if digest not in seen:
            seen.add(digest)
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("--sdists", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    listed = list(read_list(args.list))
    heldout = heldout_functions(listed, args.sdists)
    learnt = [args.sdists / line.filename for line in listed if line.is_learnt]
    repositories = (fetch(str(sdist), args.sdists).files for sdist in learnt)
    texts = list(once(text for files in repositories for text in documents(files, heldout)))
    half = args.out.with_suffix(".part")
    half.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    half.rename(args.out)
    print(f"{len(texts)} files, {sum(map(len, texts)):,} characters")


if __name__ == "__main__":
    main()
