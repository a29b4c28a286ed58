"""The data loader of mid-training: documents as rows of tokens. It has no state: the tokens of row
n follow from the seed and n alone.

Documents are one array of tokens and the end of each document in it; the array may be a
memory-mapped file, so that only the tokens that are read are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.core.seeds import derive

# In any range of its multiples modulo 1, the share that falls into an interval is about the
# interval's length.
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class TokenizedDocuments:
    """Tokenized documents: D of them, of N tokens in all, each including its final `eos`."""

    tokens_N: NDArray[np.uint32]
    ends_D: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], eos: int) -> TokenizedDocuments:
        ended = [[*document, eos] for document in documents]
        flat = [token for document in ended for token in document]
        return cls(
            np.array(flat, dtype=np.uint32),
            np.cumsum([len(document) for document in ended], dtype=np.int64),
        )


def joined(parts: Sequence[TokenizedDocuments]) -> TokenizedDocuments:
    """Concatenate documents, in memory."""
    before = np.cumsum([0, *(len(part.tokens_N) for part in parts)])
    return TokenizedDocuments(
        np.concatenate([part.tokens_N for part in parts]),
        np.concatenate([part.ends_D + size for part, size in zip(parts, before, strict=False)]),
    )


class DocumentStream:
    """The documents as one endless stream of tokens; every epoch has a new order."""

    def __init__(self, documents: TokenizedDocuments, *, seed: int) -> None:
        if not len(documents.ends_D):
            raise ValueError("there are no documents to train on")
        self._tokens_N = documents.tokens_N
        self._seed = seed
        self._starts_D = np.concatenate([[0], documents.ends_D[:-1]])
        self._lengths_D = documents.ends_D - self._starts_D
        self._size = int(documents.ends_D[-1])
        # two: a read may span the end of one
        self._pass = functools.lru_cache(maxsize=2)(self._shuffled)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        parts = []
        while count > 0:
            number, offset = divmod(start, self._size)
            order_D, ends_D = self._pass(number)
            place = int(np.searchsorted(ends_D, offset, side="right"))
            document = order_D[place]
            left = int(ends_D[place]) - offset
            end = int(self._starts_D[document] + self._lengths_D[document])
            parts.append(self._tokens_N[end - left : end][:count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts).astype(np.int64)

    def _shuffled(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The order of the documents in a pass, and the end of each in it."""
        order_D = shuffled(len(self._lengths_D), self._seed, number)
        return order_D, np.cumsum(self._lengths_D[order_D])


class SourceMix:
    """A weighted mixture of sources: rows of `width` tokens, each from one source."""

    def __init__(
        self, sources: Sequence[tuple[TokenizedDocuments, float]], *, width: int, seed: int
    ) -> None:
        # The first source keeps the seed, so that its tokens do not depend on whether there are
        # others.
        self._streams = [
            DocumentStream(documents, seed=derive(seed, "source", number) if number else seed)
            for number, (documents, _) in enumerate(sources)
        ]
        weights = np.array([weight for _, weight in sources])
        self._borders = np.cumsum(weights)[:-1] / weights.sum()
        self.width = width

    def rows(self, start: int, count: int) -> NDArray[np.int64]:
        """Rows `start` to `start + count` of an endless sequence, [count, width]."""
        source_R = self.sources(start + count)
        # rows of each source before `start`
        read_S = np.bincount(source_R[:start], minlength=len(self._streams))
        rows = []
        for source in source_R[start:]:
            rows.append(self._streams[source].read(int(read_S[source]) * self.width, self.width))
            read_S[source] += 1
        return np.stack(rows)

    def sources(self, count: int) -> NDArray[np.int64]:
        """The source of each of the first `count` rows."""
        return np.searchsorted(self._borders, np.arange(count) * GOLDEN % 1.0, side="right")


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of `count` items in an epoch."""
    return np.random.Generator(np.random.PCG64(derive(seed, "epoch", epoch))).permutation(count)
