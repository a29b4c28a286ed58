"""The data types of the whole system. Frozen, complete when made, and each carries its origin.

Token-level fields of a `Segment` and a `Row` run in parallel: position i of every field speaks of
token i. A rollout is a chain of segments: rewriting the history (a summary, a compaction) ends one
segment and opens the next, and the one reward of the trajectory credits every sampled token of all
of them.

Plain dataclasses of the standard library, so that the trainer and the engine can import them on a
bare CUDA image; `store.objects` gives them a wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from etude.core.sampling import SamplingSpan, VersionSpan

Json = Any
"""A value that JSON can say: None, bool, int, float, str, list, dict."""

Status = Literal["done", "timeout", "failed"]
"""`done`: the session came to an end and was graded. `timeout`: it ran out of time or turns of its
own and was graded as it stood. `failed`: infrastructure broke; there is no score, and no statistic
may count it as a zero."""

Split = Literal["train", "heldout", "novel"]
"""Of tasks: those to train on; those to evaluate on, which share no program with these; and those
from templates that are never trained on."""
EVAL_SPLITS: tuple[Split, ...] = ("heldout", "novel")

Source = Literal["simulated", "production"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One hidden test case: call `function` with `args`. The answer that is `expected` never enters
    any sandbox."""

    function: str
    args: list[Json]
    expected: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task that can be graded. The agent sees `prompt` and `files`; only the grader reads
    `checks`."""

    id: str
    prompt: str
    files: dict[str, str]
    """The working copy: path -> text."""
    editable: tuple[str, ...]
    """The files that the grader takes over from the agent's sandbox; everything else it takes from
    `files`."""
    checks: tuple[Check, ...]
    meta: dict[str, str]
    """Where the task came from: `template`, `bug`, `difficulty`, `program` (digest of the correct
    program)."""


@dataclass(frozen=True, slots=True)
class RegionSpan:
    """`count` consecutive sampled tokens that one region produced."""

    region: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A policy's answer to one prompt: exact token ids, and for each the log-prob under the
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
    """Tokens of drafts (see `Ask.prediction`) that turned out to be the ones sampled, and that did
    not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One unbroken token context of a session, exactly as the engine saw it."""

    prompt: tuple[int, ...]
    """The tokens before the first sampled one."""
    tokens: tuple[int, ...]
    """Everything after the prompt: sampled tokens, and what the harness put between them."""
    mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """0.0 where the mask is False."""
    versions: tuple[VersionSpan, ...]
    """Over the sampled tokens, in order."""
    regions: tuple[RegionSpan, ...] = ()
    """Likewise."""
    sampling: tuple[SamplingSpan, ...] = ()
    """Over the sampled tokens, in order."""
    experts: str | None = None
    """The object in the store that says which experts the first tokens (of prompt and tokens
    together) were routed to. A name only: the ids themselves are larger than all the rest, and only
    the trainer reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one task, whole."""

    id: str
    task: str
    group: str
    segments: tuple[Segment, ...]
    scores: dict[str, float] | None
    """Named and finite; None if and only if the status is `failed`."""
    status: Status
    error: str | None = None
    """For `failed`: the boundary that broke, and how."""
    messages: list[dict[str, Json]] = field(default_factory=list)
    """The conversation as the harness saw it, for people to read; the trainer never looks."""
    source: Source = "simulated"

    @property
    def reward(self) -> float | None:
        return None if self.scores is None else self.scores["reward"]

    @property
    def num_sampled(self) -> int:
        return sum(sum(segment.mask) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task that were started together; they are each other's baseline."""

    id: str
    task: str
    slot: int
    admitted: int
    """The weight version that was live when the group was given its slot: no token of it is
    older."""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence as the learner reads it."""

    sample: str
    """The trajectory that it came from."""
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    regions: tuple[RegionSpan, ...] = ()
    sampling: tuple[SamplingSpan, ...] = ()
    """What each sampled token was drawn with; empty: what its stage says."""
    experts: str | None = None
    """As in `Segment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedRow:
    """The trainer's own results for one row, for its sampled tokens in order."""

    logprobs: tuple[float, ...]
    argmax: tuple[int, ...] | None = None
    """The most likely token in each place."""
    router_mismatch: tuple[bool, ...] | None = None
    """Whether a router, left alone, would have chosen other experts than the engine's did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one optimizer step. The step makes the weight version of the same number."""

    step: int
    rows: tuple[Row, ...]
    oldest: int
    """The oldest weight version that any token of it was sampled from."""
    reward: float | None = None
    """Mean over all attempts at its tasks, also those that are not trained on."""

    @property
    def lag(self) -> int:
        """Steps between the weights that sampled the oldest token and the weights that train on
        it."""
        return self.step - 1 - self.oldest

    @property
    def lags(self) -> tuple[int, ...]:
        """How many sampled tokens have lag 0, 1, 2, ..."""
        spans = [
            (self.step - 1 - span.version, span.count) for row in self.rows for span in row.versions
        ]
        return tuple(sum(count for lag, count in spans if lag == n) for n in range(self.lag + 1))


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A reference to one published version: the hash of its manifest identifies everything before
    it too."""

    epoch: int
    version: int
    hash: str


@dataclass(frozen=True, slots=True)
class Shard:
    """An object in the store, by the hash of its bytes. It holds tensors from `first` to `last`, by
    name."""

    hash: str
    bytes: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Route:
    """A route to the bits of a version: a delta from `base`, or a snapshot if there is none."""

    base: VersionRef | None
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published weight version. It is written last, so whoever reads it can read all that it
    names."""

    version: int
    stage: str
    step: int
    """The step within the stage that made it."""
    epoch: int
    """Which trainer, in the order in which they took over."""
    parent: VersionRef | None
    root: str
    """The hash of the list of all tensors with their digests: equal roots are equal weights, bit
    for bit."""
    bytes: int
    """Of all tensors."""
    route: Route
    changed: dict[str, float] = field(default_factory=dict)
    """Sort of tensor -> share of its elements that differ from the parent's."""
    publisher: str = ""
    time: float = 0.0
    """Seconds since 1970, by the publisher's clock; for people only."""
    seal: str = ""
    """What proves that it is whole, and if there is a key, who wrote it."""
