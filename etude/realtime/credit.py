"""Credit without groups: baselines for one rollout per prompt.

A user asks once, so there are no other attempts at the same prompt to compare with. A baseline
predicts the reward instead, from the rewards of other sessions. Two rules keep the policy gradient
unbiased:

    it sees the prompt only     never the answer, nor anything that followed from it
    it leaves the session out   rewards of the sample's own session are not used, since the turns
                                of one session depend on each other's answers

Rewards may therefore be observed before the samples are credited, whole batches at a time. A
baseline keeps only its newest samples (`window`), and can be rebuilt by observing them again.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

WINDOW = 8192
"""Samples that a baseline remembers."""
EMBEDDING_DIM = 64
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSample:
    """The features of a rollout that were known before its answer was sampled."""

    id: str
    session: str
    """Samples of one session are never each other's baseline."""
    context: str = ""
    """The kind of request, as the product distinguishes them: a language, a feature, a model."""
    prompt: str = ""
    features: tuple[float, ...] = ()
    """Inputs of `ridge`: the same number for every sample, each of magnitude about 1."""


class Baseline(Protocol):
    """The expected reward of a sample, learnt from the rewards of others."""

    def __call__(self, sample: CreditSample) -> float: ...

    def observe(self, sample: CreditSample, reward: float) -> None: ...


def advantages(baseline: Baseline, rewarded: Sequence[tuple[CreditSample, float]]) -> list[float]:
    """Reward minus baseline for each sample of a batch; the baseline observes the batch first."""
    for sample, reward in rewarded:
        baseline.observe(sample, reward)
    return [reward - baseline(sample) for sample, reward in rewarded]


class NoBaseline:
    """Plain REINFORCE: the advantage is the reward."""

    def __call__(self, sample: CreditSample) -> float:
        return 0.0

    def observe(self, sample: CreditSample, reward: float) -> None:
        pass


class ContextMean:
    """The running mean of the sample's context, shrunk towards the mean of all contexts as if
    `prior` further samples had earned that mean."""

    def __init__(self, prior: float = 4.0, window: int = WINDOW) -> None:
        self.prior = prior
        self.window = window
        self._recent: deque[tuple[str, str, float]] = deque()
        self._sums: defaultdict[tuple[str, ...], _Sum] = defaultdict(_Sum)

    def __call__(self, sample: CreditSample) -> float:
        everywhere = self._sums[()] - self._sums["session", sample.session]
        if everywhere.count < 1:
            return 0.0
        here = (
            self._sums["context", sample.context]
            - self._sums["both", sample.context, sample.session]
        )
        mean = everywhere.total / everywhere.count
        return (here.total + self.prior * mean) / (here.count + self.prior)

    def observe(self, sample: CreditSample, reward: float) -> None:
        self._recent.append((sample.context, sample.session, reward))
        self._count(*self._recent[-1], sign=1)
        if len(self._recent) > self.window:
            self._count(*self._recent.popleft(), sign=-1)

    def _count(self, context: str, session: str, reward: float, sign: int) -> None:
        for key in (
            (),
            ("context", context),
            ("session", session),
            ("both", context, session),
        ):
            found = self._sums[key] + _Sum(sign, sign * reward)
            if found.count or not key:
                self._sums[key] = found
            else:
                del self._sums[key]


@dataclass(frozen=True, slots=True)
class _Sum:
    count: int = 0
    total: float = 0.0

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.count + other.count, self.total + other.total)

    def __sub__(self, other: _Sum) -> _Sum:
        return _Sum(self.count - other.count, self.total - other.total)


class SimilarPrompts:
    """The mean reward of the `neighbours` nearest prompts, weighted by the cosine similarity of
    their words and word pairs, together with `prior` samples that earned the mean of all."""

    def __init__(self, neighbours: int = 16, prior: float = 2.0, window: int = WINDOW) -> None:
        self.neighbours = neighbours
        self.prior = prior
        self._memory = _Memory(EMBEDDING_DIM * 4, window)

    def __call__(self, sample: CreditSample) -> float:
        memory = self._memory
        others = memory.others(sample.session)
        if not others.any():
            return 0.0
        rewards = memory.rewards[others]
        likeness = memory.rows[others] @ embed(sample.prompt, memory.dim)
        nearest = np.argsort(-likeness, kind="stable")[: self.neighbours]
        weights = np.clip(likeness[nearest], 0.0, None)
        mean = float(rewards.mean())
        near = float(weights @ rewards[nearest])
        return (near + self.prior * mean) / (float(weights.sum()) + self.prior)

    def observe(self, sample: CreditSample, reward: float) -> None:
        self._memory.add(sample.session, embed(sample.prompt, self._memory.dim), reward)


class Ridge:
    """A small value head: ridge regression of the reward on the prompt's hashed words and the
    sample's own features."""

    def __init__(self, penalty: float = 4.0, num_features: int = 0, window: int = WINDOW) -> None:
        self.penalty = penalty
        self.num_features = num_features
        dim = 1 + num_features + EMBEDDING_DIM
        self._memory = _Memory(dim, window)
        self._products = np.zeros((dim, dim))
        self._sums = np.zeros(dim)

    def __call__(self, sample: CreditSample) -> float:
        own = ~self._memory.others(sample.session)
        rows, rewards = self._memory.rows[own], self._memory.rewards[own]
        penalties = np.diag([1e-6] + [self.penalty] * (self._memory.dim - 1))
        weights = np.linalg.solve(
            self._products - rows.T @ rows + penalties, self._sums - rows.T @ rewards
        )
        return float(weights @ self._row(sample))

    def observe(self, sample: CreditSample, reward: float) -> None:
        row = self._row(sample)
        gone = self._memory.add(sample.session, row, reward)
        for sign, (each, worth) in ((1, (row, reward)), *(((-1, gone),) if gone else ())):
            self._products += sign * np.outer(each, each)
            self._sums += sign * worth * each

    def _row(self, sample: CreditSample) -> NDArray[np.float64]:
        if len(sample.features) != self.num_features:
            raise ValueError(
                f"sample {sample.id} has {len(sample.features)} features, but the baseline has "
                f"num_features = {self.num_features}"
            )
        return np.concatenate([[1.0], sample.features, embed(sample.prompt, EMBEDDING_DIM)])


BASELINE: dict[str, Callable[[], Baseline]] = {
    "none": NoBaseline,
    "context_mean": ContextMean,
    "similar_prompts": SimilarPrompts,
    "ridge": Ridge,
}


class _Memory:
    """The newest samples, each a row of numbers with its session and reward."""

    def __init__(self, dim: int, window: int) -> None:
        self.dim = dim
        self.window = window
        self._rows = np.zeros((0, dim))
        self._rewards = np.zeros(0)
        self._sessions: list[str] = []
        self._places: defaultdict[str, set[int]] = defaultdict(set)
        self._next = 0

    @property
    def rows(self) -> NDArray[np.float64]:
        return self._rows[: len(self._sessions)]

    @property
    def rewards(self) -> NDArray[np.float64]:
        return self._rewards[: len(self._sessions)]

    def others(self, session: str) -> NDArray[np.bool_]:
        """The mask of samples that do not belong to this session."""
        found = np.ones(len(self._sessions), dtype=bool)
        found[list(self._places.get(session, ()))] = False
        return found

    def add(
        self, session: str, row: NDArray[np.float64], reward: float
    ) -> tuple[NDArray[np.float64], float] | None:
        """Store a sample. Return the row and reward of the sample that it replaces, if any."""
        gone = None
        place = self._next
        if len(self._sessions) < self.window:
            self._sessions.append(session)
            self._grow()
        else:
            gone = (self._rows[place].copy(), float(self._rewards[place]))
            self._forget(place)
            self._sessions[place] = session
        self._rows[place] = row
        self._rewards[place] = reward
        self._places[session].add(place)
        self._next = (place + 1) % self.window
        return gone

    def _grow(self) -> None:
        if len(self._sessions) > len(self._rewards):
            more = min(self.window, max(256, 2 * len(self._rewards))) - len(self._rewards)
            self._rows = np.concatenate([self._rows, np.zeros((more, self.dim))])
            self._rewards = np.concatenate([self._rewards, np.zeros(more)])

    def _forget(self, place: int) -> None:
        session = self._sessions[place]
        self._places[session].discard(place)
        if not self._places[session]:
            del self._places[session]


def embed(text: str, dim: int) -> NDArray[np.float64]:
    """Embed a text as a unit vector: its words and word pairs, each hashed to an index and a sign.
    The result is the same on every machine."""
    words = [word.lower() for word in _WORD.findall(text)]
    vector = np.zeros(dim)
    for shingle in _shingles(words):
        digest = zlib.crc32(shingle.encode())
        vector[digest % dim] += 1.0 if digest >> 31 else -1.0
    length = math.sqrt(float(vector @ vector))
    return vector / length if length else vector


def _shingles(words: Sequence[str]) -> Iterable[str]:
    yield from words
    yield from (f"{first} {second}" for first, second in zip(words, words[1:], strict=False))
