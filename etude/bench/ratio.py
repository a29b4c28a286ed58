"""Benchmark of the cost of inference: seconds of a CUDA device on rollouts, over those on training.

Random weights in the shape of a public model. A session has a prompt, which the attempts of a group
share, and turns: some tokens are sampled, then the output of a tool is read. `SESSIONS` of them are
under way at once, and each that ends is replaced, until a batch is full; tools take no time here,
since in a run other sessions fill the wait. The trainer then takes a step of rl on that batch:

    rollout_s              device time for the sessions of one batch
    rollout_prompt_share   share of it in passes with prompts
    train_s                a step on that batch, the median; the first one compiles
    ratio                  rollout_s / train_s
    drawn_per_s            sampled tokens over rollout_s
    cached_share           share of all prompt tokens that were in the cache
    train_tokens_per_s     all tokens of the batch over train_s

Imports torch and numpy only:

    python -m etude.bench.ratio --json [--shape qwen3-0.6b] [--context 8192] [--turns 8] [--group 8]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np
import torch

from etude.bench.engine_cuda import SHAPES, random_model
from etude.core.sampling import Request, Sample, version_spans
from etude.core.types import Batch, Row
from etude.engine.cuda import CudaRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.config import ModelConfig
from etude.train.learner import Learner
from etude.train.start import compile_layers

CONTEXT, TURNS, GROUP = 8192, 8, 8
SESSIONS = 96
STEPS = 4
PROMPT_SHARE, DRAWN_SHARE = 0.25, 0.25
"""Shares of a session's tokens; the rest is the output of tools."""
MICROBATCH_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Layout:
    """The sessions of a batch."""

    context: int = CONTEXT
    turns: int = TURNS
    group: int = GROUP
    batch: int = 64

    @property
    def prompt_tokens(self) -> int:
        return int(self.context * PROMPT_SHARE)

    @property
    def drawn_tokens(self) -> int:
        """Sampled tokens of one turn."""
        return int(self.context * DRAWN_SHARE) // self.turns

    @property
    def tool_tokens(self) -> int:
        """Tokens of tool output after every turn but the last."""
        left = self.context - self.prompt_tokens - self.turns * self.drawn_tokens
        return left // max(1, self.turns - 1)


@dataclass(slots=True)
class _Session:
    tokens: tuple[int, ...]
    turns: int = 0
    mask: tuple[bool, ...] = field(init=False)
    logprobs: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.mask = (False,) * len(self.tokens)
        self.logprobs = (0.0,) * len(self.tokens)

    def drew(self, sample: Sample) -> None:
        self.turns += 1
        self._extend(sample.tokens, True, sample.logprobs)

    def read(self, output: tuple[int, ...]) -> None:
        self._extend(output, False, (0.0,) * len(output))

    def _extend(self, tokens: tuple[int, ...], drawn: bool, logprobs: tuple[float, ...]) -> None:
        self.tokens += tokens
        self.mask += (drawn,) * len(tokens)
        self.logprobs += logprobs

    def row(self, name: str, advantage: float) -> Row:
        return Row(
            sample=name,
            tokens=self.tokens,
            mask=self.mask,
            logprobs=self.logprobs,
            advantages=tuple(advantage if drawn else 0.0 for drawn in self.mask),
            versions=version_spans([0] * sum(self.mask)),
        )


class Rollouts:
    """An engine with sessions that come and go."""

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        self.layout = layout
        model = random_model(config)
        blocks = SESSIONS * (layout.context // CudaRunner.block_size + 2)
        self._runner = CudaRunner(model, blocks, SESSIONS)
        self._engine = Engine(
            model, max_num_seqs=SESSIONS, max_batched_tokens=8192, runner=self._runner
        )
        self._rng = np.random.default_rng(0)
        self._sessions: dict[str, _Session] = {}
        self._shared: tuple[int, ...] = ()
        self._opened = 0
        for _ in range(SESSIONS):
            self._open()

    def until(self, count: int) -> list[_Session]:
        """Run until `count` sessions have ended, and return them."""
        ended: list[_Session] = []
        while len(ended) < count:
            for event in self._engine.step():
                if isinstance(event, FinishedRequest):
                    ended += self._went_on(event.id, event.sample)
        torch.cuda.synchronize()
        return ended

    def measured(self) -> tuple[list[_Session], dict[str, float]]:
        """The sessions of a batch, measured once the engine is in steady state, and the figures."""
        self.until(2 * SESSIONS)
        self._runner.trace = []
        before, began = self._engine.stats(), time.perf_counter()
        ended = self.until(self.layout.batch)
        taken = time.perf_counter() - began
        seconds = taken * self.layout.batch / len(ended)
        after = self._engine.stats()
        with_prompts = sum(
            start.elapsed_time(end)
            for shape, start, end in self._runner.trace
            if shape.tiles and end is not None
        )
        asked = after.prompt_tokens - before.prompt_tokens
        drawn = self.layout.batch * self.layout.turns * self.layout.drawn_tokens
        return ended[: self.layout.batch], {
            "rollout_s": seconds,
            "rollout_prompt_share": with_prompts / 1e3 / taken,
            "drawn_per_s": drawn / seconds,
            "cached_share": (after.cached_tokens - before.cached_tokens) / asked,
        }

    def _open(self) -> None:
        if self._opened % self.layout.group == 0:
            self._shared = self._text(self.layout.prompt_tokens)
        name = str(self._opened)
        self._opened += 1
        self._sessions[name] = _Session(self._shared)
        self._ask(name)

    def _went_on(self, name: str, sample: Sample) -> list[_Session]:
        session = self._sessions[name]
        session.drew(sample)
        if session.turns == self.layout.turns:
            self._open()
            return [self._sessions.pop(name)]
        session.read(self._text(self.layout.tool_tokens))
        self._ask(name)
        return []

    def _ask(self, name: str) -> None:
        prompt = self._sessions[name].tokens
        request = Request(prompt=prompt, max_tokens=self.layout.drawn_tokens, seed=int(name))
        self._engine.add(request, name)

    def _text(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._engine.vocab_size, count).tolist())


def run(shape: str = "qwen3-0.6b", layout: Layout = Layout()) -> dict[str, float]:  # noqa: B008
    config = replace(SHAPES[shape], max_position_embeddings=layout.context)
    sessions, figures = Rollouts(config, layout).measured()
    print(figures, file=sys.stderr, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    figures |= _trained(config, sessions)
    return figures | {"ratio": figures["rollout_s"] / figures["train_s"]}


def _trained(config: ModelConfig, sessions: list[_Session]) -> dict[str, float]:
    model = compile_layers(random_model(config).float().requires_grad_(True))
    learner = Learner(model, compute_dtype=torch.bfloat16)
    rows = tuple(session.row(f"s{n}", (-1.0) ** n) for n, session in enumerate(sessions))
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        batch = Batch(step=step, rows=rows, oldest=0)
        learner.rl_step(batch, lr=1e-6, microbatch_tokens=MICROBATCH_TOKENS)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    train_s = median(seconds[1:])
    tokens = sum(len(row.tokens) for row in rows)
    return {"train_s": train_s, "train_tokens_per_s": tokens / train_s}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure device time of rollouts over that of training."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=list(SHAPES))
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a session")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--group", type=int, default=GROUP, help="attempts at one prompt")
    options = parser.parse_args()
    layout = Layout(context=options.context, turns=options.turns, group=options.group)
    figures = run(options.shape, layout)
    print(json.dumps(figures, indent=2) if options.json else figures)


if __name__ == "__main__":
    main()
