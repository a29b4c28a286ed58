"""A `Policy` without a model, for tests and for trying out a harness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etude.core.types import Sample, Span


class Scripted:
    """Answers from a list; running out of answers is an error of the script. `prompts` is what it was asked."""

    def __init__(self, answers: Iterable[Sequence[int]], version: int = 0) -> None:
        self._answers = iter(answers)
        self.version = version
        self.prompts: list[tuple[int, ...]] = []

    async def sample(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, seed: int, stop: Sequence[int]
    ) -> Sample:
        self.prompts.append(tuple(prompt))
        tokens = tuple(next(self._answers))[:max_tokens]
        return Sample(
            tokens=tokens,
            logprobs=(-0.5,) * len(tokens),
            versions=(Span(self.version, len(tokens)),),
            finish="stop" if tokens[-1] in stop else "length",
        )

    async def load(self, version: int) -> None:
        self.version = version
