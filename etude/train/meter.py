"""How far the trainer's log-probs are from those that the engine recorded, token by token. Pure.

At equal weights the two should agree, and what is left is the numerics; with a lag there is also what was learnt since.
So the gap is given for each lag, and for each region, where other machines may compute otherwise.

Shapes: N sampled tokens of a row or of all rows, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from etude.core.events import Gap, Metered, Worst
from etude.core.types import Recomputed, Row, unspan

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

CERTAIN = math.log(0.5)
"""Above it a token was the likeliest for the engine, whatever the others were: only then a flip is known."""
CONTEXT_TOKENS = 12


def meter(
    rows: Sequence[Row], found: Sequence[Recomputed], *, step: int,
    decode: Callable[[Sequence[int]], str] | None = None, num_worst: int = 5,
) -> Metered:  # fmt: skip
    """`step` trained on the rows, with the weights of the version before it."""
    tokens = _Tokens(
        old_N=np.array([p for row in rows for p, said in zip(row.logprobs, row.mask, strict=True) if said]),
        new_N=np.array([p for each in found for p in each.logprobs]),
        token_N=np.array([t for row in rows for t, said in zip(row.tokens, row.mask, strict=True) if said]),
        likeliest_N=_joined([each.likeliest for each in found]),
        routed_otherwise_N=_joined([each.routed_otherwise for each in found]),
    )
    versions = [v for row in rows for v in unspan(row.versions)]
    region_of = [stay.region for row in rows for stay in row.regions for _ in range(stay.count)]
    return Metered(
        step=step,
        all=tokens.gap(),
        by_lag={lag: tokens.at(where).gap() for lag, where in _groups([step - 1 - v for v in versions])},
        by_region={region: tokens.at(where).gap() for region, where in _groups(region_of)},
        worst=_worst(rows, tokens, versions, decode, num_worst),
    )


def routed_otherwise(old_NLk: NDArray[np.int64], new_NLk: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether any layer has another set of experts; their order does not count."""
    return np.asarray((np.sort(old_NLk, -1) != np.sort(new_NLk, -1)).any((1, 2)))


def gap(old_N: Floats, new_N: Floats, *, flips: float | None = None, routed_otherwise: float | None = None) -> Gap:
    ratio_N, k3_N = np.exp(new_N - old_N), _k3(old_N, new_N)
    return Gap(
        num_tokens=len(ratio_N),
        k1=float((old_N - new_N).mean()),
        k1_p99=_quantile(abs(old_N - new_N), 0.99),
        k3=float(k3_N.mean()),
        k3_p99=_quantile(k3_N, 0.99),
        k3_max=float(k3_N.max()),
        ratio_p1=_quantile(ratio_N, 0.01),
        ratio_p99=_quantile(ratio_N, 0.99),
        ratio_max=float(ratio_N.max()),
        effective=float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
        flips=flips,
        routed_otherwise=routed_otherwise,
    )


def _k3(old_N: Floats, new_N: Floats) -> Floats:
    return np.asarray(np.expm1(new_N - old_N) - (new_N - old_N))


def _quantile(x_N: Floats, q: float) -> float:
    return float(np.quantile(x_N, q, method="inverted_cdf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    old_N: Floats
    new_N: Floats
    token_N: NDArray[np.int64]
    likeliest_N: NDArray[np.int64] | None
    routed_otherwise_N: NDArray[np.bool_] | None

    def at(self, where: NDArray[np.int64]) -> _Tokens:
        likeliest, otherwise = self.likeliest_N, self.routed_otherwise_N
        return _Tokens(
            old_N=self.old_N[where],
            new_N=self.new_N[where],
            token_N=self.token_N[where],
            likeliest_N=None if likeliest is None else likeliest[where],
            routed_otherwise_N=None if otherwise is None else otherwise[where],
        )

    def gap(self) -> Gap:
        otherwise = self.routed_otherwise_N
        return gap(
            self.old_N,
            self.new_N,
            flips=self._flips(),
            routed_otherwise=None if otherwise is None else float(otherwise.mean()),
        )

    def _flips(self) -> float | None:
        if self.likeliest_N is None:
            return None
        certain_N = self.old_N > CERTAIN
        flipped_N = certain_N & (self.likeliest_N != self.token_N)
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


def _worst(
    rows: Sequence[Row], tokens: _Tokens, versions: Sequence[int], decode: Callable[[Sequence[int]], str] | None,
    count: int,
) -> tuple[Worst, ...]:  # fmt: skip
    where = [(row, place) for row in rows for place, said in enumerate(row.mask) if said]
    found = []
    for n in np.argsort(-_k3(tokens.old_N, tokens.new_N), kind="stable")[:count].tolist():
        row, place = where[n]
        seen = row.tokens[max(0, place - CONTEXT_TOKENS) : place + 1]
        found.append(
            Worst(
                sample=row.sample,
                place=place,
                token=row.tokens[place],
                text=decode(seen) if decode else "",
                old=float(tokens.old_N[n]),
                new=float(tokens.new_N[n]),
                version=versions[n],
            )
        )
    return tuple(found)
