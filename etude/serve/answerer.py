"""What an HTTP dialect is spoken over: a model that reads and writes tokens, and whoever answers.

A dialect (a folder such as `openai/`) turns a body into `core.sampling.Request`s and samples into a
body; an `Answerer` does all that lies between, and is made for each HTTP request anew. One that
records what is said in a session is in `gateway.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from etude.core.protocols import Policy
from etude.core.sampling import DEFAULT_MAX_TOKENS, Request, Sample, Token, expand_spans
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.serve.conversations import ConversationStore
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import ApiError, Unavailable, gather
from etude.serve.metrics import Metrics

MAX_ANSWERS = 2048
"""Of one request, to all of its prompts."""
MAX_ANSWERS_PER_CLIENT = 256
"""Where there is no limit for all."""
AT_ONCE_CHARS = 20_000
"""More than this is rendered and encoded on another thread, so that the port answers meanwhile. For
less, the way there and back takes longer than the work."""

TemplateOptions = Mapping[str, Any]
"""What a request says to the chat template beyond messages and tools."""
Show = Callable[[Request, Sample], Message]
"""How a dialect shows an answer to its client, as a message of the conversation."""
T = TypeVar("T")


def new_completion_id() -> str:
    """Nobody can guess it."""
    return secrets.token_hex(12)


class Answerer(Protocol):
    """Answers the sampling requests of one HTTP request."""

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions
    ) -> tuple[int, ...]:
        """The tokens that a conversation is read as, up to where the model goes on."""

    async def sample(self, requests: Sequence[Request], show: Show, id: str) -> list[Sample]:
        """`id`: of the completion, as the client will know it but for the dialect's prefix."""

    async def stream(
        self, requests: Sequence[Request], show: Show, id: str
    ) -> list[AsyncIterator[Token | Sample]]:
        """For each request its tokens one by one, then the sample that they make."""


OpenAnswerer = Callable[[HttpRequest], Answerer]


class ConcurrencyLimit:
    """A limit on the number of answers under way at once, and on how many of them one client may
    have: half of all, so that nobody keeps all others out."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_use = 0
        self._of_clients: Counter[str] = Counter()

    @property
    def per_client(self) -> int:
        return MAX_ANSWERS_PER_CLIENT if self.limit is None else max(1, self.limit // 2)

    def check(self, count: int, param: str = "n", client: str = "") -> None:
        """Of one request: more than all that there are will never be free."""
        limit = MAX_ANSWERS if self.limit is None else self.limit
        limit = min(limit, self.per_client) if client else limit
        if count > limit:
            message = f"{param}: this server gives at most {limit} answers at once, not {count}"
            raise ApiError(message, param=param)

    @contextmanager
    def acquire(self, count: int, client: str = "") -> Iterator[None]:
        """`client`: who asks, if several share this server."""
        self.check(count, client=client)
        if self.limit is not None and self.in_use + count > self.limit:
            raise _too_many(f"{self.in_use} answers are under way, and {self.limit} are the most")
        if client and self._of_clients[client] + count > self.per_client:
            raise _too_many(
                f"{self._of_clients[client]} answers of yours are under way, and {self.per_client} "
                f"are the most for one client"
            )
        self.in_use += count
        self._of_clients[client] += count
        try:
            yield
        finally:
            self.in_use -= count
            self._of_clients[client] -= count
            if not self._of_clients[client]:
                del self._of_clients[client]


def _too_many(message: str) -> Unavailable:
    return Unavailable(f"{message}: try again soon", status=429, code="too_many_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What every dialect knows of the model that it serves."""

    tokenizer: ChatTokenizer
    grammars: GrammarBuilder
    max_context: int
    name: str | None = None
    """A request may name the model, and then by this name; None: by any, since harnesses have names
    of their own."""
    adapters: tuple[str, ...] = ()
    """Adapters to it, each a model of its own for those who ask."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """The limit of an answer in a chat whose request gives none."""
    concurrency: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(None))
    metrics: Metrics = field(default_factory=Metrics)
    conversations: ConversationStore = field(default_factory=ConversationStore)

    @property
    def label(self) -> str:
        """The name that it is listed by."""
        return self.name or "etude"

    def called(self, name: str | None) -> str:
        """The model as the answer calls it. Raises if a request means another one."""
        if self.name is not None and name is not None:
            self.check_name(name)
        return name or self.label

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request means by the name of a model."""
        return name if name in self.adapters else None

    def check_name(self, name: str) -> None:
        if name not in (known := (self.label, *self.adapters)):
            message = f"there is no model {name[:200]!r} here, only {', '.join(map(repr, known))}"
            raise ApiError(message, status=404, code="model_not_found", param="model")

    async def encode(
        self, texts: Sequence[str], param: str, contexts: int = 1, *, plain: bool = False
    ) -> list[list[int]]:
        """Texts that cannot fit are refused before they are encoded, which may take long. `plain`:
        nothing in them is a control token."""
        most = contexts * self.max_context
        if any(self.tokenizer.exceeds(text, most) for text in texts):
            message = f"{param}: the text is too long for {most} tokens, whatever they are"
            raise ApiError(message, code="context_length_exceeded", param=param)
        size = sum(map(len, texts))
        long = size > AT_ONCE_CHARS
        encode = self.tokenizer.encode_plain if plain else self.tokenizer.encode
        return await in_thread_if_long(size, lambda: [encode(text, long=long) for text in texts])


@dataclass(frozen=True, slots=True)
class PolicyAnswerer:
    """Answers from a policy, and keeps nothing."""

    model: ServedModel
    policy: Policy

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions
    ) -> tuple[int, ...]:
        def render() -> str:
            return self.model.tokenizer.render(messages, tools, answer=True, options=options)

        with template_errors():
            size = sum(len(message.get("content") or "") for message in messages)
            text = await in_thread_if_long(size, render)
            (tokens,) = await self.model.encode([text], "messages")
        return tuple(tokens)

    async def sample(self, requests: Sequence[Request], show: Show, id: str) -> list[Sample]:
        return await gather([self.policy.sample(request) for request in requests])

    async def stream(
        self, requests: Sequence[Request], show: Show, id: str
    ) -> list[AsyncIterator[Token | Sample]]:
        return [self.policy.stream(request) for request in requests]


@contextmanager
def template_errors() -> Iterator[None]:
    """Messages that the chat template cannot show are the client's mistake."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as e:
        raise ApiError(
            f"messages: the chat template cannot show them: {e}", param="messages"
        ) from e


@contextmanager
def refusals() -> Iterator[None]:
    """What a policy can never answer is the client's mistake."""
    try:
        yield
    except ValueError as e:
        raise ApiError(str(e)) from e


async def as_stream(sample: Sample, first: int = 0) -> AsyncIterator[Token | Sample]:
    """A sample that is whole already, as a stream; `first`: the token to begin with."""
    top = sample.top_logprobs or ((),) * len(sample.tokens)
    tokens = zip(sample.tokens, sample.logprobs, expand_spans(sample.versions), top, strict=True)
    for token, logprob, version, others in islice(tokens, first, None):
        yield Token(token, logprob, version, others)
    yield sample


async def in_thread_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= AT_ONCE_CHARS else await asyncio.to_thread(work)
