"""A `Policy` without a model, for tests and for trying out a harness."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from etude.core.sampling import Request, Sample, Token, VersionSpan
from etude.serve.answerer import as_stream


class Scripted:
    """A policy that answers from a list; running out of answers is an error of the script. `asked`
    collects the requests. It ends answers only at the token limit and reports stop tokens, and
    ignores everything else that could end an answer."""

    def __init__(self, answers: Iterable[Sequence[int]], version: int = 0) -> None:
        self._answers = iter(answers)
        self.version = version
        self.asked: list[Request] = []

    async def sample(self, request: Request) -> Sample:
        self.asked.append(request)
        tokens = tuple(next(self._answers))[: request.max_tokens]
        return Sample(
            tokens=tokens,
            logprobs=(-0.5,) * len(tokens),
            versions=(VersionSpan(self.version, len(tokens)),),
            finish_reason="stop" if tokens[-1] in request.stop_token_ids else "length",
        )

    async def stream(self, request: Request) -> AsyncIterator[Token | Sample]:
        async for event in as_stream(await self.sample(request)):
            yield event

    async def load(self, version: int) -> None:
        self.version = version
