"""Operator-by-operator comparison: the part of the engine's model that computes something different
from the trainer's.

The engine answers a row as it always does, over its cache, first the prompt and then token after
token. But each operator is given the trainer's inputs at the same place, so that errors do not
propagate: a difference, either in the input that an operator would have had or in its output for
the trainer's input, is attributed to one place. The permitted difference is computed for each place
separately: the trainer's own operators, in the engine's dtype and with random rounding, get the
same inputs (`model.rounding`).

Shapes: T tokens of a row, X experts, k experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from etude.model.attention import CausalAttention
from etude.model.experts import Router, SparseMoE, StackedExperts
from etude.model.heads import GroupedQueryAttention, LatentAttention
from etude.model.layers import MLP, RMSNorm
from etude.model.recurrence import Recur
from etude.model.rounding import NUM_DRAWS, RandomRounding, StepwiseCausal, upper_bound
from etude.model.scoring import Scoring
from etude.model.tiled_attention import TiledCausalAttention
from etude.model.transformer import Block, Transformer

HEADS = (GroupedQueryAttention, LatentAttention)
OPERATORS = (
    nn.Embedding,
    RMSNorm,
    nn.Linear,
    Router,
    StackedExperts,
    *HEADS,
    MLP,
    SparseMoE,
    Block,
)
WHOLE, ROPE, HEAD = "model", "rope", "head"
"""Possible culprits other than operators: the code between the blocks, the angles of positions, and
the logits."""
SHIFTS = (0, 1, -1, 2, -2)
"""Shifts of positions that are searched for."""
NEAR = 0.1
"""Far above the effect of rounding on a cosine, far below that of a position on the fastest
pair."""


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    difference: float
    """Relative difference of its output from the trainer's, for the same input."""
    bound: float
    """The difference that rounding causes there."""
    note: str = ""


class OperatorTrace:
    """The inputs and outputs of each operator of a model, over one row that is read in one or many
    passes. With `given`, operators get the inputs of that trace."""

    def __init__(self, given: OperatorTrace | None = None) -> None:
        self.inputs: dict[str, list[tuple[Any, ...]]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.ranks: dict[str, Tensor] = {}
        """The ranking of all experts by the routers, in the trace that is given to others."""
        self._given = given
        self._names: dict[int, str] = {}
        self._start = self._stop = 0

    def __enter__(self) -> OperatorTrace:
        self._hooks = (
            register_module_forward_pre_hook(self._before),  # type: ignore[arg-type]
            register_module_forward_hook(self._after),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def input(self, name: str, place: int) -> Tensor:
        return torch.cat([args[place] for args in self.inputs[name]])

    def output(self, name: str) -> Tensor:
        return torch.cat(self.outputs[name])

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if isinstance(module, Transformer):
            self._names = {
                id(part): name
                for name, part in module.named_modules()
                if isinstance(part, OPERATORS)
            }
            self._start, self._stop = self._stop, self._stop + args[0].numel()
        name = self._names.get(id(module))
        if name is None:
            return None
        self.inputs.setdefault(name, []).append(args)
        if (
            self._given is None
            or name not in self._given.inputs
            or isinstance(module, nn.Embedding)
        ):
            return None
        return tuple(self._instead(name, place, x) for place, x in enumerate(args))

    def _instead(self, name: str, place: int, x: Any) -> Any:
        assert self._given is not None
        if not isinstance(x, Tensor):
            return x
        return self._given.input(name, place)[self._start : self._stop].to(x.dtype)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if isinstance(module, Router):
            output = self._choice(name, module, args[0], *output)
        self.outputs.setdefault(name, []).append(output)

    def _choice(
        self, name: str, router: Router, x_NE: Tensor, ids_Nk: Tensor, weights_Nk: Tensor
    ) -> Tensor:
        """The weights of the chosen experts, and the trainer's ranking of them. If two experts are
        nearly equal, it does not matter which was chosen."""
        if self._given is None:
            bias_X = router.e_score_correction_bias
            self.ranks[name] = router.scores(x_NE) + (0 if bias_X is None else bias_X)
            ranks_NX = self.ranks[name]
        else:
            ranks_NX = self._given.ranks[name][self._start : self._stop]
        chosen = (weights_Nk, ranks_NX.gather(-1, ids_Nk))
        return torch.cat([x.sort(-1).values.float() for x in chosen], -1)


def differences(trace: OperatorTrace, reference: OperatorTrace) -> dict[tuple[str, str], float]:
    """(part to blame, place of the observation) -> relative difference."""
    found: dict[tuple[str, str], float] = {}
    for name in trace.outputs.keys() & reference.outputs.keys():
        found[name, f"{name} out"] = _relative(trace.output(name), reference.output(name))
        for place, blamed in _inputs_of(name, trace.inputs[name][0], reference.outputs):
            found[blamed, f"{name} in {place}"] = _relative(
                trace.input(name, place), reference.input(name, place)
            )
    return found


def _inputs_of(name: str, args: Sequence[Any], traced: Iterable[str]) -> Iterable[tuple[int, str]]:
    """The inputs of an operator that other parts are to blame for, with those parts. Experts and
    their weights belong to the router."""
    parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    parent = next((above for above in parents if above in traced), WHOLE)
    for place, x in enumerate(args[:3]):
        if (
            isinstance(x, Tensor)
            and x.is_floating_point()
            and not (place and name.endswith(".experts"))
        ):
            yield place, ROPE if place else parent


def _relative(x: Tensor, reference: Tensor) -> float:
    return float(
        (x.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-30)
    )


class SingleRowAttention:
    """The trainer's attention for a single row with this many tokens; scores are multiplied by
    `factor`."""

    def __init__(self, model: Transformer, length: int, factor: float = 1.0) -> None:
        self._attend = (TiledCausalAttention if model.invariant else CausalAttention)([length])
        self.latent = self._attend.latent
        self._factor = factor

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        scoring: Scoring | None = None,
    ) -> Tensor:
        scale = (scale or q.shape[-1] ** -0.5) * self._factor
        return self._attend(layer, q, k, v, scale, scoring)

    def recurrence(self, shape: torch.Size) -> Recur:
        assert isinstance(self._attend, CausalAttention)
        return self._attend.recurrence(shape)


@torch.no_grad()
def different_operators(
    engine: Transformer,
    trainer: Transformer,
    rounded: Transformer,
    tokens: Sequence[int],
    answer: Callable[[], object],
) -> tuple[Operator, ...]:
    """The engine's operators that differ by more than rounding, in descending order of the
    difference. `rounded`: the trainer's model in the engine's dtype; `answer` lets the engine read
    `tokens`. A part that differs hides the whole that contains it."""
    tokens_T, positions_T = torch.tensor(tokens), torch.arange(len(tokens))
    with OperatorTrace() as reference:
        hidden_TE = trainer(tokens_T, positions_T, SingleRowAttention(trainer, len(tokens)))
    logits_TV = trainer.logits(hidden_TE)
    with OperatorTrace(reference) as seen:
        answer()
    measured = differences(seen, reference)
    kind = engine.model.embed_tokens.weight.dtype
    measured[HEAD, HEAD] = _relative(engine.logits(hidden_TE.to(kind)), logits_TV)

    draws = []
    for seed in range(NUM_DRAWS):
        with RandomRounding(seed), OperatorTrace(reference) as drawn:
            rounded(tokens_T, positions_T, StepwiseCausal([len(tokens)]))
            logits = rounded.logits(hidden_TE.to(kind))
        draws.append(differences(drawn, reference) | {(HEAD, HEAD): _relative(logits, logits_TV)})
    bounds = {place: upper_bound([draw[place] for draw in draws]) for place in draws[0]}
    return blamed(measured, bounds, Notes(engine, trainer, seen, reference))


def blamed(
    measured: dict[tuple[str, str], float], bounds: dict[tuple[str, str], float], notes: Notes
) -> tuple[Operator, ...]:
    found: dict[str, Operator] = {}
    # An operator whose weights or epsilon differ from the trainer's is at fault even where the
    # difference does not show.
    for (name, where), difference in sorted(measured.items(), key=lambda item: -item[1]):
        bound = bounds.get((name, where), math.inf)
        if name not in found and (
            difference > bound or (difference > 0 and notes.holds_otherwise(name))
        ):
            found[name] = Operator(name, difference, bound)
    inner = [
        each for each in found.values() if not any(_contains(each.name, other) for other in found)
    ]
    return tuple(Operator(each.name, each.difference, each.bound, notes.of(each)) for each in inner)


def _contains(whole: str, part: str) -> bool:
    return part.startswith(f"{whole}.") or (whole == WHOLE and part != WHOLE)


@dataclass(frozen=True, slots=True)
class Notes:
    """Explanations of an operator that differs."""

    engine: Transformer
    trainer: Transformer
    seen: OperatorTrace
    reference: OperatorTrace

    def of(self, operator: Operator) -> str:
        if operator.name == ROPE:
            return self._rope()
        if operator.name in (WHOLE, HEAD):
            return ""
        if held := self.holds_otherwise(operator.name):
            return held
        if isinstance(self.trainer.get_submodule(operator.name), HEADS):
            return self._scores(operator)
        return ""

    def holds_otherwise(self, name: str) -> str:
        """A different epsilon, or different weights."""
        if name in (WHOLE, ROPE, HEAD):
            return ""
        engine, trainer = self.engine.get_submodule(name), self.trainer.get_submodule(name)
        if (
            isinstance(engine, RMSNorm)
            and isinstance(trainer, RMSNorm)
            and engine.eps != trainer.eps
        ):
            return f"epsilon is {engine.eps:g} in the engine and {trainer.eps:g} in the trainer"
        own, other = dict(engine.named_parameters()), dict(trainer.named_parameters())
        changed = [
            key
            for key, p in other.items()
            if key in own and not torch.equal(own[key], p.to(own[key].dtype))
        ]
        return f"other weights: {', '.join(changed)}" if changed else ""

    def _rope(self) -> str:
        """A note on the angles: those of other positions, or not of the trainer's table at all."""
        name = next(name for name, part in self.trainer.named_modules() if isinstance(part, Block))
        angles_T = torch.stack([self.seen.input(name, place).float() for place in (1, 2)], 1)
        table, count = self.trainer.rope_of(0), len(angles_T)
        places = [(torch.arange(count) + shift).clamp(0, len(table) - 1) for shift in SHIFTS]
        distance_ST = torch.stack([(table[at] - angles_T).flatten(1).norm(dim=1) for at in places])
        moved = [SHIFTS[best] for best in distance_ST.argmin(0).tolist() if SHIFTS[best]]
        # The angles of a nearby position agree up to rounding; those of another table do not.
        if not moved or float(distance_ST.amin(0).max()) > NEAR:
            return "its angles are not those of the trainer's table"
        return (
            f"{len(moved)} of {count} tokens have other positions, the first one off by "
            f"{moved[0]:+d}"
        )

    def _scores(self, operator: Operator) -> str:
        """A note if attention differs by a factor of its scores; otherwise empty."""
        part = self.trainer.get_submodule(operator.name)
        x, cos, sin = (self.reference.input(operator.name, place) for place in range(3))
        inner = f"{operator.name}.o_proj"
        engines = self.seen.input(inner, 0)
        mixed: list[Tensor] = []

        def off_by(log_factor: float) -> float:
            part(x, cos, sin, SingleRowAttention(self.trainer, len(x), math.exp(log_factor)))
            return _relative(engines, mixed.pop())

        hook = part.o_proj.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))  # type: ignore[union-attr]
        factor = minimum(off_by, -2.0, 2.0)
        left = off_by(factor)
        hook.remove()
        if left > max(operator.bound, operator.difference / 10):
            return ""
        return f"its attention scores are {math.exp(factor):.3f} times the trainer's"


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum by golden-section search; the function must have only one."""
    ratio = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if function(left) < function(right):
            high = right
        else:
            low = left
    return (low + high) / 2
