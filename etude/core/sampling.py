"""Requests to a policy and its answers, from the HTTP route to the sampler: one type each, whoever
passes them on.

Frozen dataclasses of the standard library, so that the engine can import them on a bare CUDA image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

Priority = Literal["interactive", "standard", "batch"]
"""Who is served first: people who wait, ordinary requests, then work that may wait."""
MIN_TEMPERATURE = 1e-3
"""Short of 0, which is the likeliest token: logits divided by less overflow, and nothing can be
drawn from that."""
MAX_PENALTY = 100.0
"""And its inverse is the smallest: beyond them logits overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. The names are those of vLLM's and OpenAI's APIs, by which they
    are read from a request and passed on to vLLM; every default leaves the model's own distribution
    as it is. A new parameter is a field here, its range in `check`, and its effect in
    `engine.sampler`."""

    temperature: float = 1.0
    """0: the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: any token may be drawn."""
    min_p: float = 0.0
    """Only tokens at least so likely, compared with the likeliest, are drawn."""
    repetition_penalty: float = 1.0
    """Above 1: what stands in the prompt or in the answer so far is less likely to be said
    again."""
    grammar: str | None = None
    """What the answer must follow, in the notation of llguidance."""

    def check(self) -> None:
        """Raises ValueError for a value that nothing can be drawn with."""
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
        """The distribution depends on the tokens before it, and so cannot be known before they
        are."""
        return self.grammar is not None or self.repetition_penalty != 1

    @property
    def untrainable(self) -> str | None:
        """Why the trainer cannot recompute the probability of a token that was drawn this way: the
        names of the parameters, or None if it can. The trainer knows logits and temperature; what
        cuts the distribution off, or depends on what was said before, it does not know."""
        return "temperature 0" if self.temperature == 0 else ", ".join(self.filters) or None


@dataclass(frozen=True, slots=True)
class SamplingSpan:
    """`count` consecutive sampled tokens that were drawn with the same parameters."""

    params: SamplingParams
    count: int


def sampling_spans(spans: Iterable[SamplingSpan]) -> tuple[SamplingSpan, ...]:
    """The same spans with equal neighbours joined."""
    joined: list[SamplingSpan] = []
    for span in spans:
        if joined and joined[-1].params == span.params:
            span = SamplingSpan(span.params, joined.pop().count + span.count)
        joined.append(span)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`count` consecutive sampled tokens that one weight version produced."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sampling request to a policy, with all the randomness of its answer: any policy with the
    same weights, asked the same, answers the same."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    params: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, and are the last of it."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer: its last token is the one that completes such a text."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report in the place of each sampled one."""
    experts_from: int | None = None
    """The first position whose routed experts are wanted, if any are: the client may know those
    before it."""
    prediction: tuple[int, ...] | None = None
    """What the answer may look like: where that is right the answer comes faster. It is the same
    answer in any case."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """More texts that the answer may repeat parts of, used in the same way."""
    priority: Priority = "standard"
    deadline_s: float | None = None
    """Seconds from now after which nobody wants the answer any more."""

    @property
    def speculates(self) -> bool:
        return self.prediction is not None or bool(self.drafts)


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token on its way, before the sample that it belongs to is whole."""

    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place with their log-probs, as many as were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A policy's answer to one request: exact token ids, and for each the log-prob under the
    distribution that it was drawn from and the weight version that computed it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    region: str = ""
    """Where it was sampled, if there are regions."""
    experts: bytes | None = None
    """Of a sparse model, from the position on that was asked for: the experts that each token was
    routed to, prompt included; the last token was never read and has none."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest in its place with their log-probs, if that was asked for."""
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    """Tokens of drafts (see `Request.prediction`) that turned out to be the ones sampled, and that
    did not."""
