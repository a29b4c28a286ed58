"""Train/inference mismatch: the trainer's log-probs against those that the engine recorded, token
by token. Pure.

With equal weights the two should agree up to numerics; with a lag the difference also contains what
was learnt since. So the mismatch is reported for each lag, and for each region, whose machines may
have different numerics.

Shapes: N sampled tokens of a row or of all rows, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from etude.core.events import MismatchedToken, MismatchMeasured, MismatchStats
from etude.core.sampling import expand_spans
from etude.core.types import RecomputedRow, Row

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

CERTAIN_LOGPROB = math.log(0.5)
"""Above it a token was the likeliest for the engine, whatever the others were: only then can a flip
be detected."""
CONTEXT_TOKENS = 12


def measure_mismatch(
    rows: Sequence[Row], found: Sequence[RecomputedRow], *, step: int,
    decode: Callable[[Sequence[int]], str] | None = None, num_worst: int = 5,
) -> MismatchMeasured:  # fmt: skip
    """Measure the mismatch over the rows that `step` trained on, with the weights of the previous
    version."""
    pairs = _LogprobPairs(
        engine_logp_N=np.array(
            [p for row in rows for p, said in zip(row.logprobs, row.mask, strict=True) if said]
        ),
        trainer_logp_N=np.array([p for each in found for p in each.logprobs]),
        token_N=np.array(
            [t for row in rows for t, said in zip(row.tokens, row.mask, strict=True) if said]
        ),
        argmax_N=_joined([each.argmax for each in found]),
        router_mismatch_N=_joined([each.router_mismatch for each in found]),
    )
    versions = [v for row in rows for v in expand_spans(row.versions)]
    region_of = [span.region for row in rows for span in row.regions for _ in range(span.count)]
    return MismatchMeasured(
        step=step,
        all=pairs.stats(),
        by_lag={
            lag: pairs.at(where).stats() for lag, where in _groups([step - 1 - v for v in versions])
        },
        by_region={region: pairs.at(where).stats() for region, where in _groups(region_of)},
        worst=_worst_tokens(rows, pairs, versions, decode, num_worst),
    )


def router_mismatch(old_NLk: NDArray[np.int64], new_NLk: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where any layer routes to another set of experts; their order does not matter."""
    return np.asarray((np.sort(old_NLk, -1) != np.sort(new_NLk, -1)).any((1, 2)))


def mismatch_stats(
    engine_logp_N: Floats,
    trainer_logp_N: Floats,
    *,
    argmax_flip_frac: float | None = None,
    router_mismatch_frac: float | None = None,
) -> MismatchStats:
    ratio_N, k3_N = np.exp(trainer_logp_N - engine_logp_N), _k3(engine_logp_N, trainer_logp_N)
    return MismatchStats(
        num_tokens=len(ratio_N),
        k1=float((engine_logp_N - trainer_logp_N).mean()),
        k1_p99=_quantile(abs(engine_logp_N - trainer_logp_N), 0.99),
        k3=float(k3_N.mean()),
        k3_p99=_quantile(k3_N, 0.99),
        k3_max=float(k3_N.max()),
        ratio_p1=_quantile(ratio_N, 0.01),
        ratio_p99=_quantile(ratio_N, 0.99),
        ratio_max=float(ratio_N.max()),
        ess=float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
        argmax_flip_frac=argmax_flip_frac,
        router_mismatch_frac=router_mismatch_frac,
    )


def _k3(engine_logp_N: Floats, trainer_logp_N: Floats) -> Floats:
    return np.asarray(np.expm1(trainer_logp_N - engine_logp_N) - (trainer_logp_N - engine_logp_N))


def _quantile(x_N: Floats, q: float) -> float:
    return float(np.quantile(x_N, q, method="inverted_cdf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogprobPairs:
    """The log-probs of the engine and of the trainer for the same tokens."""

    engine_logp_N: Floats
    trainer_logp_N: Floats
    token_N: NDArray[np.int64]
    argmax_N: NDArray[np.int64] | None
    router_mismatch_N: NDArray[np.bool_] | None

    def at(self, where: NDArray[np.int64]) -> _LogprobPairs:
        likeliest, otherwise = self.argmax_N, self.router_mismatch_N
        return _LogprobPairs(
            engine_logp_N=self.engine_logp_N[where],
            trainer_logp_N=self.trainer_logp_N[where],
            token_N=self.token_N[where],
            argmax_N=None if likeliest is None else likeliest[where],
            router_mismatch_N=None if otherwise is None else otherwise[where],
        )

    def stats(self) -> MismatchStats:
        otherwise = self.router_mismatch_N
        return mismatch_stats(
            self.engine_logp_N,
            self.trainer_logp_N,
            argmax_flip_frac=self._argmax_flip_frac(),
            router_mismatch_frac=None if otherwise is None else float(otherwise.mean()),
        )

    def _argmax_flip_frac(self) -> float | None:
        if self.argmax_N is None:
            return None
        certain_N = self.engine_logp_N > CERTAIN_LOGPROB
        flipped_N = certain_N & (self.argmax_N != self.token_N)
        return float(flipped_N.sum() / max(1, certain_N.sum()))


def _joined(parts: Sequence[Sequence[Any] | None]) -> NDArray[Any] | None:
    given = [part for part in parts if part is not None]
    return np.array([each for part in given for each in part]) if len(given) == len(parts) else None


def _groups(keys: Sequence[Key]) -> Iterator[tuple[Key, NDArray[np.int64]]]:
    places: dict[Key, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    for key in sorted(places):  # type: ignore[type-var]
        yield key, np.array(places[key])


def _worst_tokens(
    rows: Sequence[Row], pairs: _LogprobPairs, versions: Sequence[int],
    decode: Callable[[Sequence[int]], str] | None, count: int,
) -> tuple[MismatchedToken, ...]:  # fmt: skip
    where = [(row, place) for row in rows for place, said in enumerate(row.mask) if said]
    found = []
    k3_N = _k3(pairs.engine_logp_N, pairs.trainer_logp_N)
    for n in np.argsort(-k3_N, kind="stable")[:count].tolist():
        row, place = where[n]
        seen = row.tokens[max(0, place - CONTEXT_TOKENS) : place + 1]
        found.append(
            MismatchedToken(
                sample=row.sample,
                position=place,
                token=row.tokens[place],
                text=decode(seen) if decode else "",
                old=float(pairs.engine_logp_N[n]),
                new=float(pairs.trainer_logp_N[n]),
                version=versions[n],
            )
        )
    return tuple(found)
