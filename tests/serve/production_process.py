"""A gateway in production mode as a process that tests can kill. `python -m
tests.serve.production_process MODEL STORE ANSWER..` answers each request with the next of the
answers."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from etude.core.sampling import Request, Sample, Token
from etude.model.tokenizer import ChatTokenizer
from etude.serve import process
from etude.serve.answerer import ServedModel
from etude.serve.fake import Scripted
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import create_app
from etude.serve.production.config import ProductionConfig
from etude.serve.production.routes import Production
from etude.store.objects import Objects
from etude.store.production import ProductionStore


class Endless:
    """A router that answers from a script."""

    def __init__(self, tokenizer: ChatTokenizer, answers: list[str]) -> None:
        tokens = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in answers]
        self._policy = Scripted(itertools.cycle(tokens))

    async def sample(self, request: Request, session: str = "") -> Sample:
        return await self._policy.sample(request)

    def stream(self, request: Request, session: str = "") -> AsyncIterator[Token | Sample]:
        return self._policy.stream(request)


async def main(directory: Path, store: str, answers: list[str]) -> None:
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    model = ServedModel(
        tokenizer=ChatTokenizer(files), grammars=GrammarBuilder(files), max_context=4096
    )
    mode = Production(
        model,
        Endless(model.tokenizer, answers),  # type: ignore[arg-type]
        ProductionStore(Objects.open(store)),
        ProductionConfig(user_key_file="", feedback_per_minute=1e5),
        bytes(range(32)),
        "mine",
    )
    listener = process.bind("127.0.0.1", 0, None)
    async with process.serving(create_app(mode.routes(), None), listener) as running:
        print(process.url_of(listener), flush=True)
        await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
