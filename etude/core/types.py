"""The data types of the whole system: frozen, complete when made, each with a record of its origin.

The token-level fields of a `Segment` and of a `Row` run in parallel: entry i of every field
describes token i. A rollout is a chain of segments: rewriting the history (a summary, a compaction)
ends one segment and opens the next. The single reward of the trajectory goes to every sampled token
of all its segments; a `Credit` adds to some of them.

All are plain dataclasses of the standard library, so that the trainer and the engine can import
them on a bare CUDA image; `store.objects` gives them a wire format.
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
"""A JSON value: None, bool, int, float, str, list or dict."""

Status = Literal["done", "truncated", "timeout", "failed"]
"""The end of an attempt. `done`: the session came to its end and was graded. `truncated`,
`timeout`: it ran out of turns or context, or out of its own time, and was graded in the state that
it had reached. `failed`: infrastructure broke; there is no score, and no statistic may count it as
a zero."""

Limit = Literal["time", "turns", "context"]
"""The limit that an unfinished session ran into."""

SegmentKind = Literal["turns", "summary", "subagent"]
"""The purpose of a context that a harness opened: to continue the conversation, to have it summed
up, or to run an agent that works for another one."""

Split = Literal["train", "heldout", "novel"]
"""A split of the tasks: those to train on; those to evaluate on, which share no program with the
training tasks; and those from templates that are never trained on."""
EVAL_SPLITS: tuple[Split, ...] = ("heldout", "novel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task as its agent sees it. Only its environment knows how it is graded."""

    id: str
    prompt: str = ""
    """The first message of the user."""
    messages: tuple[dict[str, Json], ...] = ()
    """The whole conversation that the session begins with, in OpenAI's format, instead of `prompt`:
    exactly one of the two is given."""
    sandbox: SandboxSpec = SandboxSpec()
    """The sandbox that the task is done in."""
    meta: Mapping[str, Json] = field(default_factory=dict)
    """Anything else about the task, such as its origin. Agents can read it. Tasks with the same
    `family` count as about equally hard (`core.curriculum`)."""

    @property
    def family(self) -> str:
        """The family of the task: its tasks are about equally hard, as far as the environment
        knows."""
        return str(self.meta.get("family", ""))

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            given = "both" if self.prompt else "neither"
            raise ValueError(
                f"task {self.id!r} has {given} of prompt and messages: set exactly one"
            )

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
    """All tokens after the prompt: the sampled ones, and those that the harness put between
    them."""
    mask: tuple[bool, ...]
    """True where the policy sampled the token."""
    logprobs: tuple[float, ...]
    """0.0 where the mask is False."""
    versions: tuple[VersionSpan, ...]
    """Runs over the sampled tokens, in order."""
    regions: tuple[RegionSpan, ...] = ()
    """Runs over the sampled tokens, in order."""
    sampling: tuple[SamplingSpan, ...] = ()
    """Runs over the sampled tokens, in order."""
    experts: str | None = None
    """The name of the object in the store that holds the routed experts of the first tokens, of
    prompt and tokens together. Only the name, because the ids are larger than all the rest and only
    the trainer reads them."""
    kind: SegmentKind = "turns"
    parent: int | None = None
    """The index of the segment that this one continues; None for the first of a session."""


def turns(segment: Segment) -> list[range]:
    """The places in `segment.tokens` of each answer of the model: its unbroken runs of sampled
    tokens. Two answers are always separated by at least one other token."""
    before, now = (False, *segment.mask), (*segment.mask, False)
    edges = [*compress(count(), map(ne, before, now))]
    return [range(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def turn_places(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """The segment of each turn of a session, and the number of the turn within it."""
    return [
        (number, turn)
        for number, segment in enumerate(segments)
        for turn in range(len(turns(segment)))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAccess:
    """Access to a session for its harness: the URL, and a key that opens this session only."""

    base_url: str
    api_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """A part of the first messages of a session, before the choice of those that fit."""

    name: str
    text: str
    role: Literal["system", "user"]
    priority: int
    """Priority in the choice of parts. If not all fit, those of the lowest priority are left out;
    parts of one priority are kept or left out together. Those of priority 0 are always kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A session as the harness saw it."""

    messages: list[dict[str, Json]]
    finished: bool
    """False if the agent ran out of turns, context or its own time."""
    limit: Limit | None = None
    """The limit that an unfinished session ran into; None counts as time. A session may have lost
    time to other processes: it is graded only if it did not."""
    score: Score | None = None
    """The score that the party which ran the session gave it, for an environment that uses it."""
    prompt_parts: tuple[PromptPart, ...] = ()
    """The parts that the first messages were made from, including those that were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A finished session for the environment to score: the conversation, and the tokens that the
    model read and sampled."""

    transcript: Transcript
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a score, with its evidence. People read the evidence; no model ever sees
    it."""

    name: str
    value: float
    evidence: str = ""


def plain_text(content: Json) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", f"({part.get('type')})")) if isinstance(part, dict) else str(part)
            for part in content
        )
    return "" if content is None else str(content)


ENVIRONMENT_PART = "environment"
"""The name of the part that holds the environment's own reward, where an expression replaces it
(`rewards.reward`)."""
DETECTOR_PART = "detector"
"""The name of the part that holds the finding of the cheat detector."""


@dataclass(frozen=True, slots=True)
class Credit:
    """A process reward: the worth of one segment of an attempt, or of one turn of it."""

    value: float
    segment: int
    turn: int | None = None
    """The number of the turn, counted from 0 (see `turns`). None: every sampled token of the
    segment."""


@dataclass(frozen=True, slots=True)
class Score:
    """The worth of an attempt. Every number in it is finite."""

    reward: float
    """The reward to train on; a task counts as solved at 1."""
    parts: tuple[Part, ...] = ()
    """Further measurements, by distinct names."""
    flags: tuple[str, ...] = ()
    """Notes for people to look at. A flag that begins with `cheat:` names a trick and keeps the
    attempt from being trained on (`rewards.detector`); flags have no other effect."""
    credit: tuple[Credit, ...] = ()
    """Process rewards; those that cover the same token add up. Empty: the reward applies to all
    tokens alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The resources that an attempt used, as far as they were recorded."""

    prompt_tokens: int = 0
    """Tokens that the model read: at each call, all tokens before the answer."""
    sampled_tokens: int = 0
    seconds: float = 0.0
    """Wall-clock time of the attempt."""
    calls: int = 0
    """Answers of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A later judgement of a trajectory, such as a merge or a user's thumb; stored next to it
    (`store.feedback`)."""

    kind: str
    value: float
    time: float
    """Seconds since 1970."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One complete attempt at one task."""

    id: str
    task: str
    group: str
    segments: tuple[Segment, ...]
    """The segments; for a failed attempt, those recorded before the failure."""
    score: Score | None
    """The score; None if and only if the status is `failed`."""
    status: Status
    error: str | None = None
    """The boundary that broke, and how, with status `failed`."""
    traceback: str = ""
    """The place in the code where the failure was raised."""
    messages: list[dict[str, Json]] = field(default_factory=list)
    """The conversation as the harness saw it, for people to read; the trainer does not use it."""
    diff: str = ""
    """The agent's changes to its working copy, as a unified diff for people to read; cut off if it
    is long."""
    source: str = ""
    """The environment that the task came from, as the configuration names it."""
    policy: str = ""
    """The run whose weights acted; the segments record the versions."""
    cost: Cost = Cost()
    prompt_parts: tuple[PromptPart, ...] = ()
    """The `prompt_parts` of its `Transcript`, so that another choice of parts can be tried on
    them."""

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
    """The weight version that was live when the group got its slot: none of its tokens is older."""
    stage: str = ""
    """The stage that the group was made for."""
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One token sequence as the learner reads it."""

    sample: str
    """The id of the trajectory that the row came from."""
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    regions: tuple[RegionSpan, ...] = ()
    sampling: tuple[SamplingSpan, ...] = ()
    """The sampling parameters of each sampled token; empty: those of the stage."""
    experts: str | None = None
    """The routed experts, as in `Segment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedRow:
    """The trainer's own results for one row, for its sampled tokens in order."""

    logprobs: tuple[float, ...]
    argmax: tuple[int, ...] | None = None
    """The most likely token in each place."""
    router_mismatch: tuple[bool, ...] | None = None
    """True where the router would have chosen other experts than the engine's router did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one optimizer step. The step makes the weight version of the same number."""

    step: int
    rows: tuple[Row, ...]
    oldest: int
    """The oldest weight version that any of its tokens was sampled from."""
    reward: float | None = None
    """Mean over all attempts at its tasks, including those that are not trained on."""
    base: int | None = None
    """The version that the step starts from, if it is not the previous one: the loop does not build
    on an update that users never saw, or that was rolled back."""

    @property
    def begins_with(self) -> int:
        """The version that the step starts from."""
        return self.step - 1 if self.base is None else self.base

    @property
    def lag(self) -> int:
        """Steps between the weights that sampled the oldest token and the weights that train on
        it."""
        return self.step - 1 - self.oldest

    @property
    def lags(self) -> tuple[int, ...]:
        """The number of sampled tokens with lag 0, 1, 2, ..."""
        spans = [
            (self.step - 1 - span.version, span.count) for row in self.rows for span in row.versions
        ]
        return tuple(sum(count for lag, count in spans if lag == n) for n in range(self.lag + 1))


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A reference to one published version. The hash of its manifest also identifies every version
    before it."""

    epoch: int
    version: int
    hash: str


@dataclass(frozen=True, slots=True)
class Shard:
    """An object in the store, named by the hash of its bytes. It holds the tensors from `first` to
    `last`, by name."""

    hash: str
    bytes: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class Route:
    """A way to build a version bit for bit: a delta from `base`, or a snapshot if there is no
    base."""

    base: VersionRef | None
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published weight version. The manifest is written last, so a reader of it can read
    everything that it names."""

    version: int
    stage: str
    step: int
    """The step within the stage that made it."""
    epoch: int
    """The number of the trainer that published it, in the order in which trainers took over."""
    parent: VersionRef | None
    root: str
    """The hash of the list of all tensors with their digests: weights with equal roots are equal,
    bit for bit."""
    bytes: int
    """Size of all tensors."""
    route: Route
    adapter_of: VersionRef | None = None
    """The version that holds all other tensors, if this one holds only those of an adapter to
    it."""
    changed: dict[str, float] = field(default_factory=dict)
    """Kind of tensor -> share of its elements that differ from the parent's."""
    publisher: str = ""
    time: float = 0.0
    """Seconds since 1970, by the publisher's clock; for people only."""
    seal: str = ""
    """Proof that the manifest is complete and, if there is a key, of its author."""
