"""The data types of the whole system. Frozen, complete when made, and each carries its origin.

Token-level fields of a `Segment` and a `Row` run in parallel: position i of every field speaks of
token i. A rollout is a chain of segments: rewriting the history (a summary, a compaction) ends one
segment and opens the next. The one reward of the trajectory goes to every sampled token of all of
them; a `Credit` adds to some.

Plain dataclasses of the standard library, so that the trainer and the engine can import them on a
bare CUDA image; `store.objects` gives them a wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from operator import ne
from typing import Any, Literal

from etude.core.sampling import RegionSpan, SamplingSpan, VersionSpan
from etude.core.sandbox import SandboxSpec

Json = Any
"""A value that JSON can say: None, bool, int, float, str, list, dict."""

Status = Literal["done", "truncated", "timeout", "failed"]
"""`done`: the session came to an end and was graded. `truncated`, `timeout`: it ran out of turns or
context, or of time of its own, and was graded as it stood. `failed`: infrastructure broke; there is
no score, and no statistic may count it as a zero."""

Limit = Literal["time", "turns", "context"]
"""Of a session."""

SegmentKind = Literal["turns", "summary", "subagent"]
"""Why a harness opened a context: to go on with the conversation, to have it summed up, or for an
agent that works for another one."""

Split = Literal["train", "heldout", "novel"]
"""Of tasks: those to train on; those to evaluate on, which share no program with these; and those
from templates that are never trained on."""
EVAL_SPLITS: tuple[Split, ...] = ("heldout", "novel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as its agent sees it. How it is graded, its environment knows."""

    id: str
    prompt: str = ""
    """What the user says first."""
    messages: tuple[dict[str, Json], ...] = ()
    """Or the whole conversation that the session begins with, as in OpenAI's API: exactly one of
    the two is given."""
    sandbox: SandboxSpec = SandboxSpec()
    """Where it is done."""
    meta: Mapping[str, Json] = field(default_factory=dict)
    """What else there is to say of it, such as where it came from. Agents can read it. Tasks with
    the same `family` count as about as hard (`core.curriculum`)."""

    @property
    def family(self) -> str:
        """Tasks of one family are about as hard, as far as its environment knows."""
        return str(self.meta.get("family", ""))

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            given = "both" if self.prompt else "neither"
            raise ValueError(f"task {self.id!r} has {given} of prompt and messages: give one")

    @property
    def opening(self) -> list[dict[str, Json]]:
        """The messages that the session begins with."""
        return [dict(message) for message in self.messages] or [
            {"role": "user", "content": self.prompt}
        ]


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
    kind: SegmentKind = "turns"
    parent: int | None = None
    """The index of the segment that it goes on from; None for the first of a session."""


def turns(segment: Segment) -> list[range]:
    """The places in `segment.tokens` of each answer of the model: its unbroken runs of sampled
    tokens. Between two answers something always stands."""
    before, now = (False, *segment.mask), (*segment.mask, False)
    edges = [*compress(count(), map(ne, before, now))]
    return [range(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def turn_places(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Where each turn of a session is: its segment, and its number there."""
    return [
        (number, turn)
        for number, segment in enumerate(segments)
        for turn in range(len(turns(segment)))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccess:
    """What a harness is given of its session: where, and the key that opens this session only."""

    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of the first messages of a session, before it was decided which of them fit."""

    name: str
    text: str
    role: Literal["system", "user"]
    priority: int
    """Where not all fit, those of the lowest priority are left out; parts of one priority stay or
    go together. Those of priority 0 stay in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A session as the harness saw it."""

    messages: list[dict[str, Json]]
    finished: bool
    """False if the agent ran out of turns, context or time of its own."""
    limit: Limit | None = None
    """If it is not finished, what it ran out of; time, if that is not said. Time may have been lost
    to others: such a session is graded only if it was not."""
    score: Score | None = None
    """What whoever ran the session says that it was worth, if its environment is to hear it."""
    prompt_parts: tuple[PromptPart, ...] = ()
    """What the first messages were made of, with what was left out of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A session that is over, for the environment to score: the conversation, and the tokens that
    the model read and said."""

    transcript: Transcript
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a score, with its evidence for people to read; no model ever sees that."""

    name: str
    value: float
    evidence: str = ""


def plain_text(content: Json) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"({part.get('type')})")) if isinstance(part, dict) else str(part)
            for part in content
        )
    return "" if content is None else str(content)


ENVIRONMENT_PART = "environment"
"""What the environment said, where an expression says otherwise (`rewards.reward`)."""
DETECTOR_PART = "detector"
"""What the detector of cheats found."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A process reward: what one segment of an attempt, or one turn of it, was worth."""

    value: float
    segment: int
    turn: int | None = None
    """Counted from 0 (`turns`). None: every sampled token of the segment."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an attempt was worth. Every number in it is finite."""

    reward: float
    """What is trained on; a task counts as solved at 1."""
    parts: tuple[Part, ...] = ()
    """What else was measured, by names that differ."""
    flags: tuple[str, ...] = ()
    """What somebody should look at. One that begins with `cheat:` names a trick, and keeps the
    attempt from being trained on (`rewards.detector`); nothing else is computed from them."""
    credit: tuple[Credit, ...] = ()
    """Process rewards; those that cover the same token add up. None: the reward speaks for all
    tokens alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an attempt used, as far as it was recorded."""

    prompt_tokens: int = 0
    """Read by the model: at each call, all tokens before the answer."""
    sampled_tokens: int = 0
    seconds: float = 0.0
    """From its start to its end."""
    calls: int = 0
    """Answers of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A word on a trajectory that came later, such as a merge or a user's thumb; kept beside it
    (`store.feedback`)."""

    kind: str
    value: float
    time: float
    """Seconds since 1970."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one task, whole."""

    id: str
    task: str
    group: str
    segments: tuple[Segment, ...]
    """Of one that failed, what was recorded before."""
    score: Score | None
    """None if and only if the status is `failed`."""
    status: Status
    error: str | None = None
    """For `failed`: the boundary that broke, and how."""
    traceback: str = ""
    """For `failed`: where in the code it was raised."""
    messages: list[dict[str, Json]] = field(default_factory=list)
    """The conversation as the harness saw it, for people to read; the trainer never looks."""
    diff: str = ""
    """What the agent changed in its working copy, as a unified diff, for people to read; the first
    part of a long one."""
    source: str = ""
    """Where the task came from: the environment, as the configuration names it."""
    policy: str = ""
    """Who acted: the run whose weights these were; segments say which versions of them."""
    cost: Cost = Cost()
    prompt_parts: tuple[PromptPart, ...] = ()
    """As of its `Transcript`, so that another choice can be tried on what was there."""

    @property
    def reward(self) -> float | None:
        return None if self.score is None else self.score.reward

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
    stage: str = ""
    """The one that it was made for."""
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
    base: int | None = None
    """The version that the step begins with, if that is not the one before: an update that users
    never saw, or that was taken back, is not built on."""

    @property
    def begins_with(self) -> int:
        """The version that the step begins with."""
        return self.step - 1 if self.base is None else self.base

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
    adapter_of: VersionRef | None = None
    """The version that has all other tensors, if this one has those of an adapter to it alone."""
    changed: dict[str, float] = field(default_factory=dict)
    """Sort of tensor -> share of its elements that differ from the parent's."""
    publisher: str = ""
    time: float = 0.0
    """Seconds since 1970, by the publisher's clock; for people only."""
    seal: str = ""
    """What proves that it is whole, and if there is a key, who wrote it."""
