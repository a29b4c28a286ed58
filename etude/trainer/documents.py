"""Tokenized documents for mid-training: the ids of a source are in a cached, memory-mapped file.

The files are in the user's cache, under a name derived from all their inputs: the source's files
(path, size, modification time), the vocabulary, and the held-out rule. A later run with the same
inputs uses the file again, and the cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etude.core.errors import EtudeError
from etude.core.stages import BUILT_IN, MidtrainConfig, SourceConfig
from etude.model.tokenizer import ChatTokenizer
from etude.tasks import corpus as built_in
from etude.tasks import sources
from etude.train.stream import TokenizedDocuments, joined

NUM_BUILT_IN = 8192
FORMAT = 1  # of the cached files
PARTS = ("train", "heldout")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of mid-training, and those held out for evaluation."""

    sources: tuple[tuple[TokenizedDocuments, float], ...]
    """The documents of each source, with its weight."""
    heldout: TokenizedDocuments
    about: str
    """The number of documents, and a digest of all of them."""


def read_corpus(stage: MidtrainConfig, files: Mapping[str, bytes], seed: int) -> Corpus:
    """Read the documents of a stage. `files`: those of the model, including the tokenizer."""
    tokenizer, rule = ChatTokenizer(files), _heldout_rule(stage)
    key = json.dumps(
        [
            FORMAT,
            hashlib.sha256(files["tokenizer.json"]).hexdigest(),
            tokenizer.eos_token_id,
            rule.key,
        ]
    )
    parts = [_part(source, tokenizer, rule, key, seed) for source in stage.sources]
    for source, part in zip(stage.sources, parts, strict=True):
        if not len(part.train.ends_D):
            raise EtudeError(
                f"{source.path}: no documents are left to train on: all are empty or held out"
            )
    heldout_parts = parts
    if stage.heldout_path is not None:
        everything = _Rule("all", lambda text: True)
        heldout_parts = [
            _part(
                SourceConfig(path=stage.heldout_path),
                tokenizer,
                everything,
                key + everything.key,
                seed,
            )
        ]
    digest = hashlib.sha256(
        "".join(part.digest for part in [*parts, *heldout_parts]).encode()
    ).hexdigest()
    counts = (
        sum(len(part.train.ends_D) for part in parts),
        sum(len(part.heldout.ends_D) for part in heldout_parts),
    )
    return Corpus(
        sources=tuple(
            (part.train, source.weight) for part, source in zip(parts, stage.sources, strict=True)
        ),
        heldout=joined([part.heldout for part in heldout_parts]),
        about=f"{counts[0]} documents and {counts[1]} held out, sha256 {digest}",
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The documents of a source, and a digest of all its tokens."""

    train: TokenizedDocuments
    heldout: TokenizedDocuments
    digest: str


@dataclass(frozen=True, slots=True)
class _Rule:
    key: str
    """A string that identifies the rule."""
    is_heldout: Callable[[str], bool]


def _heldout_rule(stage: MidtrainConfig) -> _Rule:
    """The rule for held-out documents; it looks at the text alone, so a copy of a held-out document
    is held out too, in any file."""
    if stage.heldout_path is None:
        return _Rule(
            f"{stage.heldout_frac!r}",
            lambda text: int.from_bytes(_hash(text)) < stage.heldout_frac * 2**64,
        )
    known = {_hash(text) for text in _texts(SourceConfig(path=stage.heldout_path))}
    return _Rule(
        hashlib.sha256(b"".join(sorted(known))).hexdigest(), lambda text: _hash(text) in known
    )


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _texts(source: SourceConfig) -> Iterator[str]:
    return (
        text for path in sources.files(source.path) for _, text in sources.texts(path, source.field)
    )


def _part(
    source: SourceConfig, tokenizer: ChatTokenizer, rule: _Rule, key: str, seed: int
) -> _Part:
    if source.path == BUILT_IN:
        texts = built_in.documents(NUM_BUILT_IN, seed)
        train, heldout = (
            TokenizedDocuments.of(
                (tokenizer.encode(t) for t in texts if rule.is_heldout(t) == is_held),
                tokenizer.eos_token_id,
            )
            for is_held in (False, True)
        )
        return _Part(train, heldout, hashlib.sha256(train.tokens_N.tobytes()).hexdigest())
    stats = [(str(path.absolute()), path.stat()) for path in sources.files(source.path)]
    made_of = json.dumps(
        [key, source.field, [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]]
    )
    folder = cache() / hashlib.sha256(made_of.encode()).hexdigest()[:32]
    if not folder.is_dir():
        try:
            _write(folder, _texts(source), tokenizer, rule)
        except OSError as e:
            raise EtudeError(
                f"cannot write the tokens of {source.path} to {folder.parent} ({e.strerror}): "
                f"free some space there, or set XDG_CACHE_HOME to another directory"
            ) from e
    train, heldout = (_mapped(folder, name) for name in PARTS)
    return _Part(train, heldout, (folder / "digest").read_text())


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etude" / "tokens"


def _write(folder: Path, texts: Iterable[str], tokenizer: ChatTokenizer, rule: _Rule) -> None:
    """Write the folder atomically; if two processes write the same one, either wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as holder:
        unfinished = Path(holder) / folder.name
        unfinished.mkdir()
        ends = {name: array("q") for name in PARTS}
        digest = hashlib.sha256()
        with (
            (unfinished / "train.tokens").open("wb") as train,
            (unfinished / "heldout.tokens").open("wb") as heldout,
        ):
            for text in texts:
                name, file = ("heldout", heldout) if rule.is_heldout(text) else ("train", train)
                ids = array("I", [*tokenizer.encode(text), tokenizer.eos_token_id])
                ids.tofile(file)
                ends[name].append((ends[name][-1] if ends[name] else 0) + len(ids))
                digest.update(ids)
        for name in PARTS:
            (unfinished / f"{name}.ends").write_bytes(ends[name].tobytes())
        (unfinished / "digest").write_text(digest.hexdigest())
        try:
            unfinished.rename(folder)
        except OSError:  # a nonempty folder is not replaced: another process was faster
            if not folder.is_dir():
                raise


def _mapped(folder: Path, name: str) -> TokenizedDocuments:
    ends_D = np.fromfile(folder / f"{name}.ends", dtype=np.int64)
    if not len(ends_D):  # an empty file cannot be mapped
        return TokenizedDocuments(np.empty(0, dtype=np.uint32), ends_D)
    return TokenizedDocuments(
        np.memmap(folder / f"{name}.tokens", dtype=np.uint32, mode="r"), ends_D
    )
