"""Requests to a policy and its samples: the same types from the HTTP route to the sampler.

Frozen dataclasses of the standard library, so that the engine can import them on a bare CUDA image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby
from typing import Literal

Priority = Literal["interactive", "standard", "batch"]
"""The priority class of a request, in the order of service: people who wait, ordinary requests,
work that may wait."""
DEFAULT_MAX_TOKENS = 2048
"""The limit of an answer in a chat whose client sets none: a model that does not stop must not hold
its place until the context is full."""
CHAT_TEMPERATURE = 0.7
CHAT_MAX_TOKENS = 512
"""Defaults of `etude chat`: at a temperature of 1.0 a small model rambles, for minutes if there is
no limit."""
MIN_TEMPERATURE = 1e-3
"""The lowest temperature other than 0, which is greedy: dividing logits by less overflows."""
MAX_PENALTY = 100.0
"""The largest repetition penalty; its inverse is the smallest. Beyond them logits overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request. The names are those of vLLM's and OpenAI's APIs, under
    which they are read from a request and passed on to vLLM; the defaults leave the model's own
    distribution unchanged. To add a parameter, add a field here, its range in `check`, and its
    effect in `engine.sampler`."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample only tokens with at least this share of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Penalty on tokens of the prompt and of the answer so far; above 1 makes them less likely."""
    grammar: str | None = None
    """The grammar that the answer must follow, in the notation of llguidance."""

    def check(self) -> None:
        """Raise ValueError for a value out of range."""
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 or at least {MIN_TEMPERATURE}, not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, not {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(
                f"repetition_penalty must be from {1 / MAX_PENALTY} to {MAX_PENALTY}, not "
                f"{self.repetition_penalty}"
            )

    @cached_property
    def filters(self) -> tuple[str, ...]:
        """The names of the parameters, other than the temperature, that change the
        distribution."""
        return tuple(
            field.name
            for field in fields(self)
            if field.name != "temperature" and getattr(self, field.name) != field.default
        )

    @property
    def reads_history(self) -> bool:
        """True if the parameters depend on the tokens before (grammar, repetition penalty)."""
        return self.grammar is not None or self.repetition_penalty != 1

    @property
    def untrainable(self) -> str | None:
        """The parameters that keep the trainer from recomputing the log-probs of sampled tokens, or
        None. The trainer knows logits and temperature, but nothing that truncates the distribution
        or depends on earlier tokens."""
        return "temperature 0" if self.temperature == 0 else ", ".join(self.filters) or None


@dataclass(frozen=True, slots=True)
class SamplingSpan:
    """A run of `count` sampled tokens with the same sampling parameters."""

    params: SamplingParams
    count: int


def sampling_spans(spans: Iterable[SamplingSpan]) -> tuple[SamplingSpan, ...]:
    """Join neighbouring spans that are equal."""
    joined: list[SamplingSpan] = []
    for span in spans:
        if joined and joined[-1].params == span.params:
            span = SamplingSpan(span.params, joined.pop().count + span.count)
        joined.append(span)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A run of `count` sampled tokens from one weight version."""

    version: int
    count: int


def version_spans(versions: Iterable[int]) -> tuple[VersionSpan, ...]:
    """Run-length form of one version per sampled token."""
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return tuple(VersionSpan(version, count) for version, count in runs)


def expand_spans(runs: Iterable[VersionSpan]) -> Iterator[int]:
    """One version per sampled token, back from the run-length form."""
    for run in runs:
        yield from [run.version] * run.count


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """A run of `count` sampled tokens from one region."""

    region: str
    count: int


def region_spans(regions: Iterable[str]) -> tuple[RegionSpan, ...]:
    """Run-length form of one region per sampled token."""
    return tuple(RegionSpan(region, len(list(run))) for region, run in groupby(regions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sampling request to a policy. Its seed determines all the randomness: the same weights
    give the same answer."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    params: SamplingParams = SamplingParams()
    adapter: str | None = None
    """The name of the adapter (LoRA) to answer with; None: the published weights without an
    adapter."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer; the answer includes the one that ended it."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer: its last token is the one that completes such a text."""
    top_logprobs: int = 0
    """The number of top log-probs to report for each sampled token."""
    experts_from: int | None = None
    """The first position whose routed experts to return; None for no routed experts."""
    prediction: tuple[int, ...] | None = None
    """Predicted output, as in OpenAI's API: a text that the answer may repeat. Correct predictions
    make the answer faster; predictions never change it."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Further texts that the answer may repeat parts of, used in the same way."""
    priority: Priority = "standard"
    deadline_s: float | None = None
    """Seconds from now after which the request is dropped."""
    begun: tuple[Token, ...] = ()
    """The beginning of the answer, sampled by another worker that is gone; the sample includes it.
    The randomness for the rest is the same as if there had been only one worker."""

    @property
    def speculates(self) -> bool:
        return self.prediction is not None or bool(self.drafts)


@dataclass(frozen=True, slots=True)
class Token:
    """A streamed token, before its sample is complete."""

    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()
    """The top log-probs at its position, as many as were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A policy's answer to one request: exact token ids, and for each the log-prob under the
    distribution that it was drawn from and the weight version that computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    regions: tuple[RegionSpan, ...] = ()
    """The regions that sampled it, if there are regions."""
    experts: bytes | None = None
    """The routed experts of each token of a sparse model, from the requested position on, prompt
    included. The last token was never computed and has none."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The top log-probs at the position of each token, if they were requested."""
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    """Draft tokens (see `Request.prediction`) that were accepted, and that were rejected."""
    gave_way: bool = False
    """True for a request of class batch that had to wait for requests of a higher class."""
    first_token_s: float | None = None
    """Time to its first token at the worker, if that is measured."""
