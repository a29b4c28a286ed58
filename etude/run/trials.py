"""Trials of the train/inference mismatch: the measurements from which `run.diagnose` concludes its
causes.

Each trial runs separately, on the same prompts:

- *settings*: the engine answers alone, in a batch operator by operator, with its own kernels, with
  prompts in chunks, from its cache, after a weight swap, at another temperature, and in the
  trainer's precision; the trainer recomputes each answer, also with the recorded experts.
- *rounding*: the trainer's model recomputes the same tokens in the engine's dtype, with random
  rounding (`model.rounding`).
- *operators*: each operator of the engine's model gets the inputs of the trainer's operator
  (`run.operators`).

Shapes: N sampled tokens of all rows, V vocabulary, T tokens that were read of all rows, L layers
with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.events import MismatchStats
from etude.core.sampling import Request, Sample, SamplingParams
from etude.core.types import RecomputedRow, Row
from etude.engine.engine import Constraint, Engine, FinishedRequest
from etude.engine.select import select_runner
from etude.model.experts import Routing, read_ids
from etude.model.files import hf_state_dict
from etude.model.rounding import NUM_DRAWS, RandomRounding, StepwiseCausal
from etude.model.transformer import Transformer
from etude.run.diagnose import (
    Diagnosis,
    LayerRouterMismatch,
    RoundingBound,
    TemperatureFit,
    TopPCut,
    compare_experts,
    find_cut,
    fit_temperature,
)
from etude.run.operators import different_operators
from etude.train.loss import predicting_states
from etude.train.mismatch import measure_mismatch, mismatch_stats, router_mismatch
from etude.train.packing import RolloutSequence, pack_rollouts

MakeEngine = Callable[..., Engine]
Prompt = tuple[int, ...]

OTHER_TEMPERATURE = 0.5
"""Factor on the requested temperature: errors in handling a temperature do not show at 1."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    row: Row
    experts_TLk: Tensor | None = None
    """The recorded experts, from the first token on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Some answers, recomputed by a model."""

    logp_N: Tensor
    logp_NV: Tensor
    used_TLk: Tensor | None


def diagnose(
    engine_model: Transformer, trainer_model: Transformer, prompts: Sequence[Prompt], *,
    max_tokens: int = 16, temperature: float = 1.0, make_engine: MakeEngine = Engine,
    progress: Callable[[str], None] = lambda text: None,
) -> Diagnosis:  # fmt: skip
    """Run all trials and diagnose the mismatch. Both models hold the same weights, each in the
    dtype that its side computes in. `progress` is called with the name of the current trial: all of
    them may take minutes."""
    trials = _Trials(engine_model, prompts, max_tokens, temperature, make_engine)
    kind, trained = _kind(engine_model), _kind(trainer_model)
    sampled: dict[str, list[Sample]] = {}
    for name in ("alone", "batch", "kernels", "chunking", "cache", "swap", "temperature"):
        progress(f"sampling with the engine: {name}")
        sampled[name] = getattr(trials, name)()
    if kind != trained:
        progress("sampling with the engine: precision")
        sampled["precision"] = trials.precision(trained)

    judge = MismatchTrials(trainer_model, progress)
    for name, samples in sampled.items():
        answers = [
            _answer(str(number), *each, trainer_model)
            for number, each in enumerate(zip(prompts, samples, strict=True))
        ]
        at = (temperature or 1.0) * (OTHER_TEMPERATURE if name == "temperature" else 1.0)
        judge.add_setting(name, answers, at, trained if name == "precision" else kind)

    progress("comparing operator by operator")
    number = max(range(len(prompts)), key=lambda number: len(prompts[number]))
    row = prompts[number] + sampled["alone"][number].tokens
    operators = different_operators(
        engine_model,
        trainer_model,
        judge.rounded(kind),
        row[:-1],
        lambda: trials.follow(prompts[number], row),
    )
    tops = [top[0][0] for sample in sampled["alone"] for top in sample.top_logprobs]
    return judge.diagnosis(operators=operators, tops=tops, kinds=(_name(kind), _name(trained)))


def diagnose_recorded(
    trainer: Transformer, answers: Sequence[RecordedAnswer], temperature: float, kind: torch.dtype
) -> Diagnosis:
    """Diagnose answers that were recorded with the trainer's weights, by an engine that computes in
    `kind`."""
    judge = MismatchTrials(trainer)
    judge.add_setting("recorded", answers, temperature, kind)
    return judge.diagnosis(kinds=(_name(kind), _name(_kind(trainer))))


class MismatchTrials:
    """Recomputes answers with the trainer's model, exactly and with random rounding, setting after
    setting."""

    def __init__(
        self, trainer: Transformer, progress: Callable[[str], None] = lambda text: None
    ) -> None:
        self._trainer = trainer
        self._progress = progress
        self._rounded: dict[torch.dtype, Transformer] = {}
        self._draws: dict[Any, list[Recomputation]] = {}
        self._gaps: dict[str, MismatchStats] = {}
        self._bounds: dict[str, RoundingBound] = {}
        self._fits: dict[str, TemperatureFit] = {}
        self._cut: TopPCut | None = None
        self._experts: tuple[LayerRouterMismatch, ...] = ()
        self._likeliest: list[int] = []

    def rounded(self, kind: torch.dtype) -> Transformer:
        """The trainer's model in another dtype."""
        if kind not in self._rounded:
            self._rounded[kind] = in_type(self._trainer, kind)
        return self._rounded[kind]

    @torch.no_grad()
    def add_setting(
        self, name: str, answers: Sequence[RecordedAnswer], temperature: float, kind: torch.dtype
    ) -> None:
        is_first = not self._gaps
        self._progress(f"recomputing with the trainer: {name}")
        found = [recompute(self._trainer, answer, temperature) for answer in answers]
        rows = [answer.row for answer in answers]
        self._gaps[name] = measure_mismatch(
            rows, [_recomputed(*each) for each in zip(answers, found, strict=True)], step=1
        ).all
        new_N = torch.cat([each.logp_N for each in found])
        draws = self._drawn(answers, temperature, kind, replay=False)
        bound = self._bounds[name] = RoundingBound.of(
            [_mismatch_stats(draw.logp_N, new_N) for draw in draws]
        )

        old_N, tokens_N = recorded(rows)
        if is_first or name == "temperature":
            logp_NV = torch.cat([each.logp_NV for each in found])
            asked = mean_temperature(answers, temperature)
            self._fits[name] = fit_temperature(old_N, tokens_N, logp_NV, asked)
            if is_first:
                self._likeliest = logp_NV.argmax(-1).tolist()
                self._cut = find_cut(old_N, new_N, logp_NV, bound)
                self._judge_experts(answers, found, draws, temperature, kind)

    def _judge_experts(
        self, answers: Sequence[RecordedAnswer], found: Sequence[Recomputation],
        draws: Sequence[Recomputation], temperature: float, kind: torch.dtype,
    ) -> None:  # fmt: skip
        config = self._trainer.config.experts
        if config is None or any(answer.experts_TLk is None for answer in answers):
            return
        old_N, _ = recorded([answer.row for answer in answers])
        new_N = torch.cat(
            [
                recompute(self._trainer, answer, temperature, replay=True).logp_N
                for answer in answers
            ]
        )
        replayed = self._drawn(answers, temperature, kind, replay=True)
        self._gaps["replay"] = _mismatch_stats(old_N, new_N)
        self._bounds["replay"] = RoundingBound.of(
            [_mismatch_stats(draw.logp_N, new_N) for draw in replayed]
        )

        is_known_T = torch.cat([_replay(answer)[:, 0, 0] >= 0 for answer in answers])
        recorded_TLk = torch.cat([_replay(answer) for answer in answers])[is_known_T]
        own_TLk = torch.cat([_used(each) for each in found])[is_known_T]
        drawn_TLk = [_used(draw)[is_known_T] for draw in draws]
        self._experts = compare_experts(recorded_TLk, own_TLk, drawn_TLk, config.layers)

    def _drawn(
        self,
        answers: Sequence[RecordedAnswer],
        temperature: float,
        kind: torch.dtype,
        *,
        replay: bool,
    ) -> list[Recomputation]:
        """The draws for a setting; settings that gave the same tokens share their draws."""
        rows = tuple((each.row.tokens, each.row.mask, each.row.sampling) for each in answers)
        key = (rows, temperature, kind, replay)
        if key not in self._draws:
            self._progress(f"rounding the trainer's model at random, {NUM_DRAWS} times")
            model = self.rounded(kind)
            self._draws[key] = [
                draw(model, answers, temperature, seed, replay) for seed in range(NUM_DRAWS)
            ]
        return self._draws[key]

    def diagnosis(self, *, tops: Sequence[int] = (), **known: Any) -> Diagnosis:
        """The diagnosis. `tops`: the likeliest tokens of the first setting, as the engine reported
        them."""
        if tops:
            pairs = zip(tops, self._likeliest, strict=True)
            known["argmax_flip_frac"] = sum(a != b for a, b in pairs) / len(tops)
        return Diagnosis(
            gaps=self._gaps,
            rounding=self._bounds,
            fits=self._fits,
            cut=self._cut,
            experts=self._experts,
            **known,
        )


@dataclass(frozen=True, slots=True)
class _Trials:
    model: Transformer
    prompts: Sequence[Prompt]
    max_tokens: int
    at: float
    make_engine: MakeEngine

    def alone(self, model: Transformer | None = None, **options: Any) -> list[Sample]:
        engine = self.make_engine(model or self.model, max_num_seqs=1, prefix_cache=False)
        asked = enumerate(self.prompts)
        return [self._ask(engine, [prompt], seed=number, **options)[0] for number, prompt in asked]

    def batch(self) -> list[Sample]:
        # For a single request the model's operators are run one by one.
        by_operator = select_runner(self.model, 1, None)
        return self._ask(
            self._engine(prefix_cache=False, max_batched_tokens=1 << 16, runner=by_operator),
            self.prompts,
        )

    def kernels(self) -> list[Sample]:
        return self._ask(self._engine(prefix_cache=False, max_batched_tokens=1 << 16), self.prompts)

    def chunking(self) -> list[Sample]:
        return self._ask(self._engine(prefix_cache=False, max_batched_tokens=1), self.prompts)

    def cache(self) -> list[Sample]:
        engine = self._engine()
        self._ask(engine, self.prompts)
        return self._ask(engine, self.prompts)

    def swap(self) -> list[Sample]:
        """Answers from before and after the weights change from other weights to the model's
        own."""
        engine = self._engine()
        own = hf_state_dict(self.model, torch.float32)
        noise = torch.Generator().manual_seed(0)
        engine.load_weights(
            1,
            {
                name: t * (1 + 0.2 * torch.randn(t.shape, generator=noise))
                for name, t in own.items()
            },
        )
        self._ask(engine, self.prompts)
        engine.load_weights(2, own)
        return self._ask(engine, self.prompts)

    def temperature(self) -> list[Sample]:
        return self.alone(temperature=OTHER_TEMPERATURE * (self.at or 1.0))

    def precision(self, kind: torch.dtype) -> list[Sample]:
        return self.alone(in_type(self.model, kind).compute_with(self.model.arithmetic))

    def follow(self, prompt: Prompt, row: Sequence[int]) -> None:
        """Have the engine answer with the rest of the row."""
        engine = self.make_engine(self.model, max_num_seqs=1, prefix_cache=False)
        said = _ForcedTokens(row[len(prompt) :], self.model.config.vocab_size)
        self._ask(engine, [prompt], constraint=said, max_tokens=len(row) - len(prompt))

    def _engine(self, **settings: Any) -> Engine:
        return self.make_engine(self.model, max_num_seqs=max(2, len(self.prompts)), **settings)

    def _ask(
        self, engine: Engine, prompts: Sequence[Prompt], *, seed: int = 0,
        temperature: float | None = None, max_tokens: int | None = None,
        constraint: Constraint | None = None,
    ) -> list[Sample]:  # fmt: skip
        """Sample an answer to each prompt. `seed`: of the first one; a prompt has the same seed in
        each setting."""
        params = SamplingParams(temperature=self.at if temperature is None else temperature)
        for number, prompt in enumerate(prompts):
            request = Request(
                prompt=prompt,
                max_tokens=max_tokens or self.max_tokens,
                seed=seed + number,
                params=params,
                top_logprobs=1,
                experts_from=0,
            )
            engine.add(request, str(number), constraint=constraint)
        done: dict[str, Sample] = {}
        while not engine.idle:
            done |= {
                event.id: event.sample
                for event in engine.step()
                if isinstance(event, FinishedRequest)
            }
        return [done[str(number)] for number in range(len(prompts))]


class _ForcedTokens:
    """A constraint that allows only one token at each position."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._tokens = list(tokens)
        self._vocab_size = vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        allowed_V = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed_V[self._tokens[0]] = True
        return allowed_V

    def allowed_after(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
        return []

    def accept(self, token: int) -> None:
        del self._tokens[0]


def recompute(
    model: Transformer, answer: RecordedAnswer, temperature: float, *, replay: bool = False
) -> Recomputation:
    """Recompute an answer as the trainer does. `temperature`: for a row that does not record its
    own; `replay`: with the recorded experts."""
    routing = Routing(_replay(answer) if replay else None) if model.config.experts else None
    packed = pack_rollouts([_sequence(answer, temperature)])
    states = predicting_states(model, packed, routing)
    logp_N, logp_NV = model.logprobs(*states, packed.temperature_N)
    return Recomputation(
        logp_N=logp_N, logp_NV=logp_NV, used_TLk=routing.chosen() if routing else None
    )


def draw(
    model: Transformer,
    answers: Sequence[RecordedAnswer],
    temperature: float,
    seed: int,
    replay: bool,
) -> Recomputation:
    """Recompute with random rounding, and with log-probs computed as the engine's sampler does."""
    packed = pack_rollouts([_sequence(answer, temperature) for answer in answers])
    routing = None
    if model.config.experts:
        routing = Routing(torch.cat([_replay(answer) for answer in answers]) if replay else None)
    with RandomRounding(seed):
        hidden_TE = model(
            packed.tokens_T, packed.positions_T, StepwiseCausal(packed.lengths), routing
        )
        logits_NV = model.logits(hidden_TE[packed.logits_indices_N])
        if packed.temperature_N is not None:
            logits_NV = logits_NV / packed.temperature_N[:, None]
        p_NV = torch.softmax(logits_NV, -1)
        # Probabilities too small for float32 are never sampled by an engine, though another
        # temperature may have sampled such a token.
        is_tiny_NV = p_NV < torch.finfo(torch.float32).tiny
        logp_NV = torch.where(is_tiny_NV, torch.log_softmax(logits_NV, -1), p_NV.log())
    logp_N = logp_NV.gather(-1, packed.targets_N[:, None])[:, 0]
    return Recomputation(
        logp_N=logp_N, logp_NV=logp_NV.new_empty(0), used_TLk=routing.chosen() if routing else None
    )


def recorded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """The log-probs of all sampled tokens, and the tokens."""
    said = [
        (logprob, token)
        for row in rows
        for logprob, token, sampled in zip(row.logprobs, row.tokens, row.mask, strict=True)
        if sampled
    ]
    return torch.tensor([logprob for logprob, _ in said]), torch.tensor(
        [token for _, token in said]
    )


def in_type(model: Transformer, kind: torch.dtype) -> Transformer:
    """A model of the plain definition, with the same weights."""
    other = Transformer(model.config).to(kind).requires_grad_(False)
    other.load_state_dict(model.state_dict())
    return other


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


def _answer(name: str, prompt: Prompt, sample: Sample, model: Transformer) -> RecordedAnswer:
    experts = None
    if model.config.experts and sample.experts is not None:
        experts = read_ids(sample.experts, model.config.experts).long()
    return RecordedAnswer(row_of(name, prompt, sample), experts)


def mean_temperature(answers: Sequence[RecordedAnswer], default: float) -> float:
    """The temperature of the answers, or the geometric mean if there are several: the fit is a
    factor on all of them."""
    found = np.concatenate([_sequence(answer, default).temperatures for answer in answers])
    first = float(found[0])
    return first if (found == first).all() else float(np.exp(np.log(found).mean()))


def _sequence(answer: RecordedAnswer, temperature: float = 1.0) -> RolloutSequence:
    return RolloutSequence.from_row(answer.row, 0, temperature=temperature)


def _replay(answer: RecordedAnswer) -> Tensor:
    """The recorded experts of all tokens that are read; -1 where none were recorded."""
    ids_TLk = answer.experts_TLk
    assert ids_TLk is not None
    length = _sequence(answer).length
    rest = ids_TLk.new_full((max(0, length - len(ids_TLk)), *ids_TLk.shape[1:]), -1)
    return torch.cat((ids_TLk[:length], rest))


def _used(each: Recomputation) -> Tensor:
    assert each.used_TLk is not None
    return each.used_TLk


def _recomputed(answer: RecordedAnswer, found: Recomputation) -> RecomputedRow:
    otherwise = None
    if answer.experts_TLk is not None and found.used_TLk is not None:
        places_N = _sequence(answer).loss_positions - 1
        both = (ids_TLk.numpy()[places_N] for ids_TLk in (_replay(answer), found.used_TLk))
        otherwise = tuple(router_mismatch(*both).tolist())
    return RecomputedRow(
        logprobs=tuple(found.logp_N.tolist()),
        argmax=tuple(found.logp_NV.argmax(-1).tolist()),
        router_mismatch=otherwise,
    )


def _mismatch_stats(old_N: Tensor, new_N: Tensor) -> MismatchStats:
    return mismatch_stats(old_N.double().numpy(), new_N.double().numpy())


def _kind(model: Transformer) -> torch.dtype:
    return model.model.embed_tokens.weight.dtype


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
