"""Causes of a train/inference mismatch, concluded from the measurements of `run.trials`; or the
conclusion that they are unknown.

Everything here is pure. A mismatch is attributed to rounding only if it lies below a bound computed
for the very tokens that it was measured on (`model.rounding`). Above that bound there is a cause,
or the mismatch is called unexplained.

Shapes: N sampled tokens, V vocabulary, T tokens of all rows, L layers with experts, k experts of a
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.core.events import MismatchStats
from etude.model.rounding import upper_bound
from etude.run.operators import Operator

STANDS_OUT = 10.0
"""The factor by which a change must make a mismatch smaller, or larger, to count as a cause of
it."""
SETTINGS = {
    "batch": "batch: many requests at once",
    "kernels": "engine kernels: they compute something else than the model's operators for the "
    "same batch",
    "chunking": "chunking: prompts computed in chunks",
    "cache": "cache: prompts found in the prefix cache",
    "swap": "stale KV: after a swap of weights, requests use keys and values from before it",
}
SIMPLER = {
    "batch": "alone",
    "kernels": "batch",
    "chunking": "kernels",
    "cache": "kernels",
    "swap": "kernels",
}
"""Setting -> the setting that it differs from in one thing."""
SAME = 0.02
"""Two temperatures count as the same if their logarithms are no further apart."""
LIKELIER = 3.0
"""A likelihood ratio of e^3, 20 to 1, which decides at which of two temperatures tokens were
sampled."""


@dataclass(frozen=True, slots=True)
class RoundingBound:
    """The mismatch that rounding alone causes on the same tokens."""

    k3: float
    k3_max: float

    @classmethod
    def of(cls, draws: Sequence[MismatchStats]) -> RoundingBound:
        """The bound from the mismatch of several draws. k3 is half the square of a difference;
        bounds are computed for the difference, whose spread is more symmetric."""
        k3, k3_max = ([math.sqrt(getattr(gap, name)) for gap in draws] for name in ("k3", "k3_max"))
        return cls(upper_bound(k3) ** 2, upper_bound(k3_max) ** 2)

    def holds(self, gap: MismatchStats | TemperatureFit, factor: float = 1.0) -> bool:
        return gap.k3 <= factor * self.k3 and gap.k3_max <= factor * self.k3_max


@dataclass(frozen=True, slots=True)
class TopPCut:
    """A top-p that the engine sampled with and the trainer does not know: it drew only from the
    tokens that together have the probability `top_p`."""

    top_p: float
    k3: float
    """The mismatch that is left if the trainer does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureFit:
    """The temperature at which the trainer comes closest to the recorded log-probs."""

    asked: float
    fitted: float
    k3: float
    """The mismatch that is left at the fitted temperature."""
    k3_max: float
    preference: float
    """Log-likelihood of the tokens at the requested temperature, minus that at the fitted one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouterMismatch:
    """The recorded experts, compared with the choice of the trainer's router."""

    layer: int
    mismatch_frac: float
    """Share of the tokens with another choice."""
    bound: float
    """The share that rounding causes."""
    swapped: tuple[int, int] | None = None
    """Two experts; with their names exchanged in the record, both sides choose alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    gaps: dict[str, MismatchStats]
    """The mismatch by setting, in the order of the trials. The first setting is the simplest."""
    rounding: dict[str, RoundingBound]
    """The rounding bound by setting, in the same order."""
    fits: dict[str, TemperatureFit] = field(default_factory=dict)
    """Fits for the settings in which the engine was asked for a temperature of its own."""
    cut: TopPCut | None = None
    experts: tuple[LayerRouterMismatch, ...] = ()
    operators: tuple[Operator, ...] = ()
    """Operators that differ by more than rounding, in descending order of the difference."""
    argmax_flip_frac: float | None = None
    """Share of the tokens for which engine and trainer rank another token first, one request at a
    time."""
    kinds: tuple[str, str] = ("float32", "float32")
    """The dtypes that engine and trainer compute in."""

    @property
    def simplest(self) -> str:
        return next(iter(self.gaps))

    @property
    def causes(self) -> list[str]:
        found = [
            *self._settings(),
            *self._of_scale(),
            *self._of_cut(),
            *self._of_experts(),
            *grouped(self.operators),
        ]
        return [*found, *self._precision()]

    @property
    def unexplained(self) -> list[str]:
        """The mismatch left above rounding after all causes are named."""
        found = []
        if self.beyond(self.simplest):
            if not self._is_explained() and not any(self._precision()):
                found.append(self._told(self.simplest, self._where()))
        elif not self.operators:
            for name, of_this in (
                ("temperature", self._of_scale()),
                ("replay", self._of_experts()),
            ):
                if self.beyond(name) and not any(of_this):
                    found.append(self._told(name, f"{self.simplest} agrees"))
        return found

    def beyond(self, name: str) -> bool:
        """True if the mismatch of a setting is more than rounding."""
        return name in self.gaps and not self.rounding[name].holds(self.gaps[name])

    def _stands_out(self, name: str) -> bool:
        simpler = SIMPLER[name]
        if not self.beyond(name):
            return False
        return not self.beyond(simpler) or self.gaps[name].k3 > STANDS_OUT * self.gaps[simpler].k3

    def _settings(self) -> Iterable[str]:
        return (text for name, text in SETTINGS.items() if self._stands_out(name))

    def _of_scale(self) -> Iterable[str]:
        fits = [fit for name, fit in self.fits.items() if self._fits(name)]
        if fits and self._fits(self.simplest) == self.beyond(self.simplest):
            agreeing = [fit.asked for name, fit in self.fits.items() if not self.beyond(name)]
            yield of_temperature(fits, agreeing)

    def _fits(self, name: str) -> bool:
        """True if another temperature explains the mismatch, or nearly all of it."""
        if name not in self.fits or not self.beyond(name):
            return False
        fit = self.fits[name]
        if fit.k3 * STANDS_OUT < self.gaps[name].k3:
            return True
        # A gap barely above rounding can also be fitted by chance, with a temperature that is
        # hardly different.
        return self._is_all(name) and not self.operators and not same(fit.asked, fit.fitted)

    def _is_all(self, name: str) -> bool:
        fit = self.fits[name]
        # Logits that are larger by a factor have errors that are larger by it.
        return self.rounding[name].holds(fit, max(1.0, (fit.asked / fit.fitted) ** 2))

    def _of_cut(self) -> Iterable[str]:
        if self.cut is not None:
            yield (
                f"top-p: sampled with top-p {self.cut.top_p:.2f}, which the trainer does not "
                "know about"
            )

    def _of_experts(self) -> Iterable[str]:
        first = next((each for each in self.experts if each.mismatch_frac > each.bound), None)
        if first is None:
            return
        share = (
            f"{first.mismatch_frac:.1%} of the tokens in layer {first.layer}; rounding: "
            f"{first.bound:.1%}"
        )
        exchanged = (
            ""
            if first.swapped is None
            else ", experts {} and {} are swapped".format(*first.swapped)
        )
        is_nearer = self.gaps[self.simplest].k3 < self.gaps["replay"].k3
        if is_nearer and self.beyond("replay") and not self.beyond(self.simplest):
            yield (
                f"recorded experts: not the ones that the engine computed with{exchanged} ({share})"
            )
        elif exchanged and not is_nearer and self.beyond("replay"):
            # Without such a pattern, the cause of the different choice may be something before the
            # router.
            yield f"router: the engine chooses other experts than the trainer{exchanged} ({share})"

    def _precision(self) -> Iterable[str]:
        if "precision" not in self.gaps or self.beyond("precision"):
            return
        engine, trainer = self.kinds
        bound = self.rounding[self.simplest]
        if not self.beyond(self.simplest):
            if not self.rounding["precision"].holds(self.gaps[self.simplest]):
                yield (
                    f"precision: the engine computes in {engine}, the trainer in {trainer}; "
                    f"rounding to {engine} causes a k3 of up to {bound.k3:.1e} on these tokens"
                )
        elif not self._is_explained():
            yield (
                f"precision: the mismatch disappears in {trainer}, but is larger than rounding "
                f"to {engine} can cause (k3 up to {bound.k3:.1e}): something that the engine "
                f"computes in {engine} is wrong"
            )

    def _is_explained(self) -> bool:
        """True if the mismatch of the simplest setting is explained by something other than
        precision."""
        gap, bound = self.gaps[self.simplest], self.rounding[self.simplest]
        if self.operators or any(self._of_experts()):
            return True
        if self.cut is not None:
            return self.cut.k3 <= max(bound.k3, gap.k3 / STANDS_OUT)
        return self._fits(self.simplest) and self._is_all(self.simplest)

    def _where(self) -> str:
        if any(self._of_scale()):
            return f"k3 {self.fits[self.simplest].k3:.1e} remains at the temperature that fits best"
        if self.argmax_flip_frac is None:
            return "the recorded data does not tell where it arises"
        return "every operator agrees: it arises after the logits, in sampling or recording"

    def _told(self, name: str, where: str) -> str:
        gap, bound = self.gaps[name], self.rounding[name]
        return (
            f"{name}: k3 {gap.k3:.1e} and {gap.k3_max:.1e} at the worst token, while rounding "
            f"causes up to {bound.k3:.1e} and {bound.k3_max:.1e}; {where}"
        )


def of_temperature(fits: Sequence[TemperatureFit], agreeing: Sequence[float] = ()) -> str:
    """A sentence about the fits. `agreeing`: the temperatures that were requested and recorded."""
    pairs = [(fit.asked, fit.fitted) for fit in fits] + [(asked, asked) for asked in agreeing]
    asked, fitted = pairs[0]
    if len(pairs) > 1 and all(same(a / f, asked / fitted) for a, f in pairs):
        return (
            f"logits: the engine's are {asked / fitted:.3f} times the trainer's, at any temperature"
        )
    if not all(same(f, fitted) for _, f in pairs):
        told = ", ".join(f"{f:.3f} where {a:g} was requested" for a, f in pairs)
        return f"temperature: the recorded log-probs are those of temperature {told}"
    if same(fitted, 1.0):
        preference = sum(fit.preference for fit in fits)
        if preference > LIKELIER:
            return (
                "temperature: log-probs are recorded before temperature is applied; tokens are "
                "sampled after"
            )
        if preference < -LIKELIER:
            return (
                "temperature: the engine does not apply it, neither when sampling nor when "
                "recording"
            )
        return (
            "temperature: the recorded log-probs are from before it is applied; the tokens do "
            "not tell how they were sampled"
        )
    if len(pairs) > 1:
        return f"temperature: the engine computes at {fitted:.3f} whatever is requested"
    return (
        f"temperature: the recorded log-probs are those of temperature {fitted:.3f}, but the "
        f"trainer computes at {asked:g}; or the engine's logits are {asked / fitted:.3f} times "
        "the trainer's"
    )


def same(a: float, b: float) -> bool:
    return abs(math.log(a / b)) < SAME


def grouped(operators: Sequence[Operator]) -> list[str]:
    """One line for each kind of operator, however many layers have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for operator in sorted(operators, key=_place):
        kind = ".".join("*" if part.isdigit() else part for part in operator.name.split("."))
        found.setdefault((kind, operator.note), []).append(operator.name)
    return [
        f"operator: "
        f"{names[0] if len(names) == 1 else f'{kind} of {len(names)} layers, first {names[0]}'}"
        f"{f' ({note})' if note else ''}"
        for (kind, note), names in found.items()
    ]


def _place(operator: Operator) -> list[int]:
    """The operator's layer, and its number if there are several."""
    return [int(part) for part in operator.name.split(".") if part.isdigit()]


def find_cut(old_N: Tensor, new_N: Tensor, logp_NV: Tensor, bound: RoundingBound) -> TopPCut | None:
    """The top-p that explains log-probs which are higher than they should be, if there is one."""
    k3 = _k3(new_N - old_N)
    if k3 <= bound.k3:
        return None
    sums_NV = logp_NV.double().exp().sort(-1, descending=True).values.cumsum(-1)
    last = sums_NV.shape[1] - 1
    # The recorded value is p / mass, where mass is the first of the cumulative sums that reaches
    # top-p. The sum before it does not reach top-p.
    mass_N = (new_N - old_N).double().exp()
    rank_N1 = torch.searchsorted(sums_NV, (mass_N - 1e-4)[:, None]).clamp(max=last)
    below_N1 = torch.where(rank_N1 > 0, sums_NV.gather(-1, (rank_N1 - 1).clamp(min=0)), 0.0)
    top_p = float(below_N1.max() + sums_NV.gather(-1, rank_N1).min()) / 2
    kept_N1 = torch.searchsorted(sums_NV, torch.full_like(mass_N, top_p)[:, None]).clamp(max=last)
    left = _k3(new_N - sums_NV.gather(-1, kept_N1)[:, 0].log() - old_N)
    is_cut = float((mass_N < 1 - 1e-4).double().mean()) > 0.1
    return TopPCut(top_p, left) if is_cut and left * STANDS_OUT < k3 else None


def fit_temperature(
    old_N: Tensor, tokens_N: Tensor, logp_NV: Tensor, asked: float
) -> TemperatureFit:
    """A least-squares fit of the logarithm of the temperature. `logp_NV`: the trainer's log-probs
    at the requested temperature."""
    logits_NV, old_N, log_scale = logp_NV.double(), old_N.double(), 0.0

    def at(log_scale: float) -> tuple[Tensor, Tensor]:
        """The log-probs of the tokens, and their derivatives by the logarithm of the scale."""
        scaled_NV = logits_NV * math.exp(log_scale)
        all_NV = torch.log_softmax(scaled_NV, -1)
        mean_N = (all_NV.exp() * scaled_NV).sum(-1)
        places = tokens_N[:, None]
        return all_NV.gather(-1, places)[:, 0], scaled_NV.gather(-1, places)[:, 0] - mean_N

    for _ in range(50):
        new_N, slope_N = at(log_scale)
        step = float(((old_N - new_N) * slope_N).sum() / (slope_N**2).sum().clamp(min=1e-30))
        log_scale = min(3.0, max(-3.0, log_scale + min(0.5, max(-0.5, step))))
        if abs(step) < 1e-9:
            break
    asked_N, fitted_N = at(0.0)[0], at(log_scale)[0]
    left_N = (fitted_N - old_N).expm1() - (fitted_N - old_N)
    return TemperatureFit(
        asked=asked,
        fitted=asked * math.exp(-log_scale),
        k3=float(left_N.mean()),
        k3_max=float(left_N.max()),
        preference=float((asked_N - fitted_N).sum()),
    )


def compare_experts(
    recorded_TLk: Tensor, own_TLk: Tensor, draws_TLk: Sequence[Tensor], layers: Sequence[int]
) -> tuple[LayerRouterMismatch, ...]:
    """Compare the experts by layer. `draws_TLk`: the choices of the trainer's routers with random
    rounding."""
    shares = [_otherwise(drawn_TLk, own_TLk) for drawn_TLk in draws_TLk]
    found = []
    for place, (layer, otherwise) in enumerate(
        zip(layers, _otherwise(recorded_TLk, own_TLk), strict=True)
    ):
        bound = upper_bound([share[place] for share in shares])
        swapped = (
            _swapped(recorded_TLk[:, place], own_TLk[:, place], bound)
            if otherwise > bound
            else None
        )
        found.append(
            LayerRouterMismatch(layer=layer, mismatch_frac=otherwise, bound=bound, swapped=swapped)
        )
    return tuple(found)


def _otherwise(a_TLk: Tensor, b_TLk: Tensor) -> list[float]:
    """The share of the tokens with another set of experts, by layer."""
    differs_TL = (a_TLk.sort(-1).values != b_TLk.sort(-1).values).any(-1)
    return [float(share) for share in differs_TL.double().mean(0)]


def _swapped(recorded_Tk: Tensor, own_Tk: Tensor, bound: float) -> tuple[int, int] | None:
    """The two experts that replace each other wherever the choices differ."""
    size = int(max(recorded_Tk.max(), own_Tk.max())) + 1
    is_recorded, is_own = (
        torch.zeros(len(ids), size).scatter_(-1, ids, 1.0) for ids in (recorded_Tk, own_Tk)
    )
    # [a, b]: how often a was recorded but not chosen where b was chosen but not recorded
    instead = (
        ((is_recorded > is_own).float().T @ (is_own > is_recorded).float())
        if size
        else torch.zeros(1, 1)
    )
    a, b = divmod(int((instead + instead.T).argmax()), size)
    renamed = torch.arange(size)
    renamed[a], renamed[b] = b, a
    (left,) = _otherwise(renamed[recorded_Tk][:, None], own_Tk[:, None])
    return (min(a, b), max(a, b)) if left <= bound else None


def _k3(log_ratio_N: Tensor) -> float:
    return float((log_ratio_N.double().expm1() - log_ratio_N.double()).mean())
