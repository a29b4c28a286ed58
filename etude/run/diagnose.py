"""What brings the difference between engine and trainer in. Everything is tried by itself, on the same prompts:

- *settings*: the engine answers alone, in a batch, with prompts in pieces, from its cache, after a swap of weights, and
  in the trainer's precision; the trainer recomputes each answer. A setting that alone makes the gap wider is a cause.
- *the cut*: if the engine drew from the likeliest tokens only, its log-probs are too high by just the mass that it left
  out, and from that the top-p follows.
- *operators*: every operator of the engine's model is given what the trainer's got. So an error does not travel, and
  whoever computes something else is known by name.

`diagnose` does the trials; what follows from their figures is decided in `causes`, which is pure.

Shapes: T tokens of a row, N sampled ones, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.events import Gap
from etude.core.types import Recomputed, Row, Sample
from etude.engine.engine import Engine, Finished, Request
from etude.model.attention import Causal
from etude.model.experts import Experts, Router, Routing, Stack, read_ids
from etude.model.files import weights
from etude.model.heads import GroupedHeads, LatentHeads
from etude.model.layers import MLP, RMSNorm
from etude.model.transformer import Transformer
from etude.train.loss import predicted
from etude.train.meter import meter, routed_otherwise
from etude.train.rows import Text, pack

MakeEngine = Callable[..., Engine]
Prompt = tuple[int, ...]

ROUNDING = 1e-9
"""A k3 below it is rounding, in any precision that trains."""
STANDS_OUT = 10.0
SETTINGS = {
    "alone": "one request at a time",
    "batch": "batch: many requests at once",
    "chunking": "chunking: prompts in pieces",
    "cache": "cache: prompts found in the prefix cache",
    "swap": "stale KV: requests after a swap of weights use keys and values from before it",
    "precision": "precision: the engine computes in another type than the trainer",
}


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    difference: float
    """Of its output from the trainer's, relative, for the same input."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """The engine drew from the tokens that together make up `top_p`, and the trainer does not know."""

    top_p: float
    k3: float
    """That is left if the trainer does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    gaps: dict[str, Gap]
    """By setting, in the order in which they were tried."""
    flips: float
    """Share of the tokens for which engine and trainer would have put another first, one request at a time."""
    cut: Cut | None
    operators: tuple[Operator, ...]
    """Those that differ, the one that differs most first."""

    @property
    def causes(self) -> list[str]:
        return causes(self.gaps, self.cut, self.operators)


def causes(gaps: Mapping[str, Gap], cut: Cut | None, operators: Sequence[Operator]) -> list[str]:
    """What the figures say, in words; nothing if all is rounding."""
    found = []
    simplest = gaps["alone"].k3
    for name in ("batch", "chunking", "cache", "swap"):
        if name in gaps and gaps[name].k3 > max(ROUNDING, STANDS_OUT * simplest):
            found.append(SETTINGS[name])
    if "precision" in gaps and simplest > max(ROUNDING, STANDS_OUT * gaps["precision"].k3):
        found.append(SETTINGS["precision"])
    if cut is not None:
        found.append(f"top-p: the engine draws from the likeliest {cut.top_p:.2f} only, the trainer from all tokens")
    usual = statistics.median(operator.difference for operator in operators) if len(operators) > 4 else 0.0
    for operator in operators:
        if operator.difference > max(1e-6, STANDS_OUT * usual):
            found.append(f"operator: {operator.name}{f' ({operator.note})' if operator.note else ''}")
    return found


def diagnose(
    engine_model: Transformer, trainer_model: Transformer, prompts: Sequence[Prompt], *, max_tokens: int = 16,
    temperature: float = 1.0, make_engine: MakeEngine = Engine, progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:  # fmt: skip
    """Both models hold the same weights, each in the type that its side computes in. `progress` is told what is being
    tried: all of it may take minutes."""
    trial = _Trial(trainer_model, prompts, max_tokens, temperature, make_engine)
    sampled = {}
    for name in ("alone", "batch", "chunking", "cache", "swap"):
        progress(f"the engine answers: {name}")
        sampled[name] = getattr(trial, name)(engine_model)
    kind = trainer_model.model.embed_tokens.weight.dtype
    if engine_model.model.embed_tokens.weight.dtype != kind:
        same = Transformer(engine_model.config).to(kind).compute_with(engine_model.arithmetic).requires_grad_(False)
        same.load_state_dict(engine_model.state_dict())
        progress("the engine answers: precision")
        sampled["precision"] = trial.alone(same)
    progress("the trainer recomputes the answers")
    found = {
        name: [trial.recompute(*each) for each in zip(prompts, said, strict=True)] for name, said in sampled.items()
    }
    gaps = {name: meter(trial.rows(sampled[name]), found[name], step=1).all for name in sampled}
    tops = [top[0][0] for sample in sampled["alone"] for top in sample.top]
    likeliest = [int(token) for each in found["alone"] for token in each.likeliest or ()]
    progress("operator by operator")
    return Diagnosis(
        gaps=gaps,
        flips=sum(a != b for a, b in zip(tops, likeliest, strict=True)) / len(tops),
        cut=find_cut(*trial.distributions(sampled["alone"])),
        operators=different_operators(engine_model, trainer_model, max(prompts, key=len)),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    trainer: Transformer
    prompts: Sequence[Prompt]
    max_tokens: int
    temperature: float
    make_engine: MakeEngine

    def alone(self, model: Transformer) -> list[Sample]:
        engine = self.make_engine(model, max_batch=1, prefix_cache=False)
        return [self._ask(engine, [prompt])[0] for prompt in self.prompts]

    def batch(self, model: Transformer) -> list[Sample]:
        return self._ask(self._engine(model, prefix_cache=False, step_tokens=1 << 16), self.prompts)

    def chunking(self, model: Transformer) -> list[Sample]:
        return self._ask(self._engine(model, prefix_cache=False, step_tokens=1), self.prompts)

    def cache(self, model: Transformer) -> list[Sample]:
        engine = self._engine(model)
        self._ask(engine, self.prompts)
        return self._ask(engine, self.prompts)

    def swap(self, model: Transformer) -> list[Sample]:
        """Asked before and after the weights change from others to the model's own."""
        engine, own, noise = self._engine(model), weights(model, torch.float32), torch.Generator().manual_seed(0)
        engine.load(1, {name: t * (1 + 0.2 * torch.randn(t.shape, generator=noise)) for name, t in own.items()})
        self._ask(engine, self.prompts)
        engine.load(2, own)
        return self._ask(engine, self.prompts)

    def _engine(self, model: Transformer, **settings: Any) -> Engine:
        return self.make_engine(model, max_batch=max(2, len(self.prompts)), **settings)

    def _ask(self, engine: Engine, prompts: Sequence[Prompt]) -> list[Sample]:
        for number, prompt in enumerate(prompts):
            engine.add(
                Request(
                    id=str(number), prompt=prompt, max_tokens=self.max_tokens, temperature=self.temperature,
                    seed=number, stop=frozenset(), top_logprobs=1,
                )
            )  # fmt: skip
        done: dict[str, Sample] = {}
        while not engine.idle:
            done |= {event.id: event.sample for event in engine.step() if isinstance(event, Finished)}
        return [done[str(number)] for number in range(len(prompts))]

    def rows(self, samples: Sequence[Sample]) -> list[Row]:
        return [row_of(str(number), *each) for number, each in enumerate(zip(self.prompts, samples, strict=True))]

    def recompute(self, prompt: Prompt, sample: Sample) -> Recomputed:
        logp_N, logp_NV = trainer_logprobs(self.trainer, prompt, sample, self.temperature)
        otherwise = None
        if self.trainer.config.experts and sample.experts is not None:
            tokens_1T, routing = torch.tensor([prompt + sample.tokens])[:, :-1], Routing()
            self.trainer(tokens_1T, torch.arange(tokens_1T.shape[1])[None], Causal(), routing)
            own_TLk = routing.used()[len(prompt) - 1 :]
            recorded_TLk = read_ids(sample.experts, self.trainer.config.experts).long()
            otherwise = tuple(routed_otherwise(recorded_TLk[len(prompt) - 1 :].numpy(), own_TLk.numpy()).tolist())
        return Recomputed(
            logprobs=tuple(logp_N.tolist()), likeliest=tuple(logp_NV.argmax(-1).tolist()), routed_otherwise=otherwise
        )

    def distributions(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            trainer_logprobs(self.trainer, *each, self.temperature) for each in zip(self.prompts, samples, strict=True)
        ]
        old_N = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
        return old_N, torch.cat([logp_N for logp_N, _ in found]), torch.cat([logp_NV for _, logp_NV in found])


@torch.no_grad()
def trainer_logprobs(model: Transformer, prompt: Prompt, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    mask = [False] * len(prompt) + [True] * len(sample.tokens)
    states = predicted(model, pack([Text(prompt + sample.tokens, mask)]))
    return model.logprobs(*states, temperature)


def row_of(name: str, prompt: Prompt, sample: Sample) -> Row:
    blank = len(prompt)
    return Row(
        sample=name,
        tokens=prompt + sample.tokens,
        mask=(False,) * blank + (True,) * len(sample.tokens),
        logprobs=(0.0,) * blank + sample.logprobs,
        advantages=(0.0,) * (blank + len(sample.tokens)),
        versions=sample.versions,
    )


def find_cut(old_N: Tensor, new_N: Tensor, logp_NV: Tensor) -> Cut | None:
    """The top-p that explains log-probs which are higher than they should be, if there is one."""
    k3 = _k3(new_N - old_N)
    if k3 < ROUNDING:
        return None
    sums_NV = logp_NV.double().exp().sort(-1, descending=True).values.cumsum(-1)
    last = sums_NV.shape[1] - 1
    # Recorded is p / mass, where mass is the first of the sums that reaches top-p. The sum before does not reach it.
    mass_N = (new_N - old_N).double().exp()
    rank_N1 = torch.searchsorted(sums_NV, (mass_N - 1e-4)[:, None]).clamp(max=last)
    below_N1 = torch.where(rank_N1 > 0, sums_NV.gather(-1, (rank_N1 - 1).clamp(min=0)), 0.0)
    top_p = float(below_N1.max() + sums_NV.gather(-1, rank_N1).min()) / 2
    kept_N1 = torch.searchsorted(sums_NV, torch.full_like(mass_N, top_p)[:, None]).clamp(max=last)
    left = _k3(new_N - sums_NV.gather(-1, kept_N1)[:, 0].log() - old_N)
    is_cut = float((mass_N < 1 - 1e-4).double().mean()) > 0.1
    return Cut(top_p, left) if is_cut and left * STANDS_OUT < k3 else None


def _k3(log_ratio_N: Tensor) -> float:
    return float((log_ratio_N.double().expm1() - log_ratio_N.double()).mean())


OPERATORS = (RMSNorm, nn.Linear, Router, Stack, GroupedHeads, LatentHeads, MLP, Experts)


@torch.no_grad()
def different_operators(engine: Transformer, trainer: Transformer, prompt: Prompt) -> tuple[Operator, ...]:
    """A part that differs hides the whole that contains it."""
    given: dict[str, tuple[Any, ...]] = {}
    theirs: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            given[name], theirs[name] = inputs, _tensor(output)

        return hook

    parts = {name: part for name, part in trainer.named_modules() if isinstance(part, OPERATORS)}
    hooks = [part.register_forward_hook(listen(name)) for name, part in parts.items()]
    tokens_1T = torch.tensor([prompt])
    trainer(tokens_1T, torch.arange(len(prompt))[None], Causal())
    for hook in hooks:
        hook.remove()
    kind = engine.model.embed_tokens.weight.dtype
    found: dict[str, Operator] = {}
    for name in sorted(given, key=len, reverse=True):
        inputs = tuple(x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() else x for x in given[name])
        part = engine.get_submodule(name)
        error = _tensor(part(*inputs)).to(theirs[name].dtype) - theirs[name]
        difference = float(error.norm() / theirs[name].norm())
        if difference > 0 and not any(inner.startswith(f"{name}.") for inner in found):
            found[name] = Operator(name, difference, _note(part, parts[name]))
    return tuple(sorted(found.values(), key=lambda operator: -operator.difference))


def _tensor(output: Any) -> Tensor:
    first: Tensor = output[-1] if isinstance(output, tuple) else output
    return first


def _note(engine: nn.Module, trainer: nn.Module) -> str:
    if isinstance(engine, RMSNorm) and isinstance(trainer, RMSNorm) and engine.eps != trainer.eps:
        return f"epsilon is {engine.eps:g} in the engine and {trainer.eps:g} in the trainer"
    own, other = dict(engine.named_parameters()), dict(trainer.named_parameters())
    changed = [name for name, p in other.items() if name in own and not torch.equal(own[name].to(p.dtype), p)]
    return f"other weights: {', '.join(changed)}" if changed else ""
