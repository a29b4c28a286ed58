"""The interface between an HTTP dialect and the model behind it, which reads and writes tokens.

A dialect (a folder such as `openai/`) turns a body into `core.sampling.Request`s, and samples into
a body. An `Answerer` does everything in between; each HTTP request gets a new one. The answerer
that records a session is in `gateway.py`.
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
"""Limit on the answers to one request, over all its prompts."""
MAX_ANSWERS_PER_CLIENT = 256
"""Limit on a client's concurrent answers if the server has no limit of its own."""
AT_ONCE_CHARS = 20_000
"""Longer texts are rendered and encoded on another thread, so that the server answers meanwhile.
For shorter ones, switching threads takes longer than the work."""

TemplateOptions = Mapping[str, Any]
"""Options of a request for the chat template, in addition to messages and tools."""
Show = Callable[[Request, Sample], Message]
"""Renders an answer as the message of the conversation that a dialect's client sees."""
T = TypeVar("T")


def new_completion_id() -> str:
    """A random id that nobody can guess."""
    return secrets.token_hex(12)


class Answerer(Protocol):
    """Answers the sampling requests of one HTTP request."""

    async def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: TemplateOptions
    ) -> tuple[int, ...]:
        """The tokens of a conversation, up to the point where the model continues."""

    async def sample(self, requests: Sequence[Request], show: Show, id: str) -> list[Sample]:
        """`id`: the completion's id as the client will see it, without the dialect's prefix."""

    async def stream(
        self, requests: Sequence[Request], show: Show, id: str
    ) -> list[AsyncIterator[Token | Sample]]:
        """One stream per request: its tokens one by one, then the sample that they make up."""


OpenAnswerer = Callable[[HttpRequest], Answerer]


class ConcurrencyLimit:
    """A limit on the number of answers under way at once. One client may have at most half of them,
    so that nobody can keep all others out."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.in_use = 0
        self._of_clients: Counter[str] = Counter()

    @property
    def per_client(self) -> int:
        return MAX_ANSWERS_PER_CLIENT if self.limit is None else max(1, self.limit // 2)

    def check(self, count: int, param: str = "n", client: str = "") -> None:
        """Reject a single request that asks for more answers than will ever be free."""
        limit = MAX_ANSWERS if self.limit is None else self.limit
        limit = min(limit, self.per_client) if client else limit
        if count > limit:
            message = f"{param}: at most {limit} answers at once are allowed, not {count}"
            raise ApiError(message, param=param)

    @contextmanager
    def acquire(self, count: int, client: str = "") -> Iterator[None]:
        """`client`: the client that asks, if several share this server."""
        self.check(count, client=client)
        if self.limit is not None and self.in_use + count > self.limit:
            raise _too_many(
                f"too many requests: {self.in_use} answers are in progress, and the limit "
                f"is {self.limit}"
            )
        if client and self._of_clients[client] + count > self.per_client:
            raise _too_many(
                f"too many requests: {self._of_clients[client]} answers are in progress for "
                f"this client, and the limit is {self.per_client}"
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
    return Unavailable(f"{message}; try again soon", status=429, code="too_many_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that a server serves, as every dialect sees it."""

    tokenizer: ChatTokenizer
    grammars: GrammarBuilder
    max_context: int
    name: str | None = None
    """The name by which requests must call the model, if they name one; None accepts any name,
    since harnesses use names of their own."""
    adapters: tuple[str, ...] = ()
    """Adapters to the model; clients see each as a model of its own."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """Default token limit of a chat answer."""
    concurrency: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit(None))
    metrics: Metrics = field(default_factory=Metrics)
    conversations: ConversationStore = field(default_factory=ConversationStore)

    @property
    def label(self) -> str:
        """The model's name in the list of models."""
        return self.name or "etude"

    def called(self, name: str | None) -> str:
        """The model's name in the answer. Raises if the request means another model."""
        if self.name is not None and name is not None:
            self.check_name(name)
        return name or self.label

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request selects by naming it as its model."""
        return name if name in self.adapters else None

    def check_name(self, name: str) -> None:
        if name not in (known := (self.label, *self.adapters)):
            message = (
                f"model {name[:200]!r} is not served here; available: {', '.join(map(repr, known))}"
            )
            raise ApiError(message, status=404, code="model_not_found", param="model")

    async def encode(
        self, texts: Sequence[str], param: str, contexts: int = 1, *, plain: bool = False
    ) -> list[list[int]]:
        """Encode texts. Texts that cannot fit are rejected before they are encoded, since encoding
        them may take long. `plain`: nothing in the texts is a control token."""
        most = contexts * self.max_context
        if any(self.tokenizer.exceeds(text, most) for text in texts):
            message = f"{param}: the text is too long: it cannot fit into {most} tokens"
            raise ApiError(message, code="context_length_exceeded", param=param)
        size = sum(map(len, texts))
        long = size > AT_ONCE_CHARS
        encode = self.tokenizer.encode_plain if plain else self.tokenizer.encode
        return await in_thread_if_long(size, lambda: [encode(text, long=long) for text in texts])


@dataclass(frozen=True, slots=True)
class PolicyAnswerer:
    """Answers from a policy, and records nothing."""

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
    """Turn the chat template's errors into errors of the client, who sent messages that it cannot
    render."""
    try:
        yield
    except (TypeError, ValueError, RecursionError) as e:
        raise ApiError(f"messages: the chat template rejects them: {e}", param="messages") from e


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a policy's ValueError into an error of the client: the request can never be answered."""
    try:
        yield
    except ValueError as e:
        raise ApiError(str(e)) from e


async def as_stream(sample: Sample, first: int = 0) -> AsyncIterator[Token | Sample]:
    """Stream a sample that is already complete, starting at token `first`."""
    top = sample.top_logprobs or ((),) * len(sample.tokens)
    tokens = zip(sample.tokens, sample.logprobs, expand_spans(sample.versions), top, strict=True)
    for token, logprob, version, others in islice(tokens, first, None):
        yield Token(token, logprob, version, others)
    yield sample


async def in_thread_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= AT_ONCE_CHARS else await asyncio.to_thread(work)
