"""The tokens of a row: every document once a pass, the same in any division, sources in proportion
to their weights."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from etude.train.stream import DocumentStream, SourceMix, TokenizedDocuments, joined

EOS = 0


def lists(count: int = 12) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(1, 16) for _ in range(rng.randint(3, 20))] for _ in range(count)]


def documents(count: int = 12) -> TokenizedDocuments:
    return TokenizedDocuments.of(lists(count), EOS)


def test_every_pass_holds_every_document_once() -> None:
    stream = DocumentStream(documents(), seed=3)
    size = sum(len(document) + 1 for document in lists())
    orders = []
    for number in range(3):
        tokens = stream.read(number * size, size).tolist()
        assert tokens[-1] == EOS
        parts = " ".join(map(str, tokens[:-1])).split(f" {EOS} ")
        orders.append(parts)
        assert sorted(parts) == sorted(" ".join(map(str, document)) for document in lists())
    assert orders[0] != orders[1] != orders[2]


def test_the_same_in_any_pieces() -> None:
    whole = DocumentStream(documents(), seed=3).read(0, 1000)
    stream = DocumentStream(documents(), seed=3)
    assert np.array_equal(
        np.concatenate([stream.read(start, 50) for start in range(0, 1000, 50)]), whole
    )
    assert np.array_equal(stream.read(700, 300), whole[700:])
    assert not np.array_equal(DocumentStream(documents(), seed=4).read(0, 1000), whole)


def test_tokens_may_lie_in_a_file(tmp_path: Path) -> None:
    there = documents()
    there.tokens_N.tofile(tmp_path / "tokens")
    mapped = TokenizedDocuments(
        np.memmap(tmp_path / "tokens", dtype=np.uint32, mode="r"), there.ends_D
    )
    assert np.array_equal(
        DocumentStream(mapped, seed=3).read(0, 500), DocumentStream(there, seed=3).read(0, 500)
    )


def test_sources_are_mixed_by_their_weights_at_any_length() -> None:
    sources = [
        (TokenizedDocuments.of([[source] * 5], EOS), weight)
        for source, weight in ((1, 5.0), (2, 3.0), (3, 2.0))
    ]
    mix = SourceMix(sources, width=6, seed=0)
    for count in (10, 100, 1000):
        shares = np.bincount(mix.sources(count), minlength=3) / count
        assert np.abs(shares - [0.5, 0.3, 0.2]).max() <= 2 / count + 0.005
    assert set(mix.rows(0, 10)[:, 0].tolist()) == {1, 2, 3}


def test_rows_follow_from_their_number_and_each_source_is_read_on() -> None:
    mix = SourceMix([(documents(), 2.0), (documents(5), 1.0)], width=16, seed=7)
    whole = mix.rows(0, 60)
    assert np.array_equal(np.concatenate([mix.rows(start, 20) for start in (0, 20, 40)]), whole)
    first = whole[mix.sources(60) == 0]
    assert np.array_equal(first.ravel(), DocumentStream(documents(), seed=7).read(0, first.size))


def test_one_source_is_read_from_end_to_end() -> None:
    rows = SourceMix([(documents(), 1.0)], width=16, seed=7).rows(3, 5)
    assert np.array_equal(rows.ravel(), DocumentStream(documents(), seed=7).read(48, 80))


def test_joined_and_none() -> None:
    both = joined([documents(3), documents(4)])
    again = TokenizedDocuments.of(lists(3) + lists(4), EOS)
    assert np.array_equal(both.tokens_N, again.tokens_N) and np.array_equal(
        both.ends_D, again.ends_D
    )
    with pytest.raises(ValueError, match="no documents"):
        DocumentStream(TokenizedDocuments.of([], EOS), seed=0)
