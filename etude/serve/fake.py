"""A `Policy` without a model, for tests and for trying out a harness."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from etude.core.protocols import Ask, Token
from etude.core.sampling import VersionSpan
from etude.core.types import Sample
from etude.serve.api import as_stream


class Scripted:
    """Answers from a list; running out of answers is an error of the script. `asked` is what it was
    asked. Of what ends an answer it knows only the length and the stop tokens."""

    def __init__(self, answers: Iterable[Sequence[int]], version: int = 0) -> None:
        self._answers = iter(answers)
        self.version = version
        self.asked: list[Ask] = []

    async def sample(self, ask: Ask) -> Sample:
        self.asked.append(ask)
        tokens = tuple(next(self._answers))[: ask.max_tokens]
        return Sample(
            tokens=tokens,
            logprobs=(-0.5,) * len(tokens),
            versions=(VersionSpan(self.version, len(tokens)),),
            finish_reason="stop" if tokens[-1] in ask.stop else "length",
        )

    async def stream(self, ask: Ask) -> AsyncIterator[Token | Sample]:
        async for event in as_stream(await self.sample(ask)):
            yield event

    async def load(self, version: int) -> None:
        self.version = version
