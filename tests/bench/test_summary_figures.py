"""The family of tasks that do not fit a window, and the figures of trained summaries, worked by
hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import aiohttp
import pytest

from etude.bench._summary_tasks import (
    END,
    KIND_OF,
    SHAPE,
    SUMMARISE_AT,
    ForgetfulAgent,
    Inventory,
    InventoryAgent,
    InventoryEnvironment,
    demonstrations,
    goods_of,
    num_tokens,
)
from etude.bench.summary import Configs, metrics
from etude.core.config import parse
from etude.core.stages import RlConfig
from etude.core.types import Attempt, Segment, Task, Transcript
from etude.harness.summary import REQUEST, Message
from etude.model.from_scratch import tokenizer_files
from etude.model.tokenizer import ChatTokenizer
from etude.sandbox.fake import FakeSandboxPool
from etude.store.rollouts import RolloutRow

Summarise = Callable[[str, str], str]
"""The text of a window and the kind that is asked for -> a summary."""
LIMITS: dict[str, Any] = {"max_turns": 24, "max_tokens": 48, "timeout_s": 60.0}


def perfect(window: str, kind: str) -> str:
    over = [END] if window.endswith(END) else []
    return " ".join(("found", *goods_of(window, kind), *over))


def empty(window: str, kind: str) -> str:
    return ""


def scripted(agent: type[InventoryAgent], summarise: Summarise) -> InventoryAgent:
    """An agent whose model reads its window and answers with all that it finds there."""

    class Scripted(agent):  # type: ignore[misc, valid-type]
        windows: list[str]

        async def _ask(
            self, url: str, key: str, schemas: Any, messages: list[Message], seed: int,
            kind: str = "turns",
        ) -> tuple[Message, int]:  # fmt: skip
            asked = messages[0]["content"].split()[1]
            *seen, last = [str(message["content"]) for message in messages]
            window = " ".join((*seen, last))
            if kind == "summary":
                return {"content": summarise(" ".join(seen), asked)}, 0
            if not last.endswith(END):
                return calling("next", "{}"), num_tokens(messages) + 5
            self.windows = [*getattr(self, "windows", ()), window]
            goods = " ".join(goods_of(window, asked))
            return calling("answer", f'{{"goods": "{goods}"}}'), 0

    return Scripted(aiohttp_session(), **LIMITS, summarise_at=SUMMARISE_AT)


def calling(name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": "call", "function": function}]}


def aiohttp_session() -> aiohttp.ClientSession:
    return None  # type: ignore[return-value]  # nobody asks over HTTP


def rewards(agent: InventoryAgent, count: int = 20) -> list[float]:
    environment = InventoryEnvironment(FakeSandboxPool(), counts={"heldout": count}, seed=3)

    async def attempt(task: Task) -> float:
        async with environment.open(task) as sandbox:
            said = await agent.run(task, sandbox, base_url="", api_key="", seed=0)
            score = await environment.score(task, sandbox, Attempt(transcript=said, segments=()))
        return score.reward

    async def all_of_them() -> list[float]:
        return [await attempt(task) for task in environment.tasks("heldout")]

    return asyncio.run(all_of_them())


def test_a_perfect_summary_solves_every_task() -> None:
    assert set(rewards(scripted(InventoryAgent, perfect))) == {1.0}


@pytest.mark.parametrize("agent", [InventoryAgent, ForgetfulAgent])
def test_without_a_summary_the_last_window_does_not_hold_the_answer(
    agent: type[InventoryAgent],
) -> None:
    earned = rewards(scripted(agent, empty), count=60)
    # Sometimes all goods of a kind happen to be on the last pages.
    assert sum(reward == 1.0 for reward in earned) <= 6


def test_a_window_that_was_summed_up_counts_its_last_answer() -> None:
    window = Segment(
        prompt=(1,), tokens=(2, 3, 4, 5), mask=(True, False, True, True),
        logprobs=(0.0,) * 4, versions=(),
    )  # fmt: skip
    environment = InventoryEnvironment(FakeSandboxPool(), counts={"heldout": 1}, seed=3)

    async def counted(*said: str) -> dict[str, float]:
        transcript = Transcript(
            messages=[{"role": "user", "content": text} for text in said], finished=True
        )
        attempt = Attempt(transcript=transcript, segments=(window, window, window))
        [task] = environment.tasks("heldout")
        async with environment.open(task) as sandbox:
            score = await environment.score(task, sandbox, attempt)
        return {part.name: part.value for part in score.parts}

    assert asyncio.run(counted(REQUEST)) == {"hits": 0, "summaries": 2, "summary_tokens": 4}
    assert asyncio.run(counted("forgotten")) == {"hits": 0, "summaries": 0, "summary_tokens": 0}


def test_the_last_window_shows_the_last_pages_alone() -> None:
    agent = scripted(InventoryAgent, empty)
    environment = InventoryEnvironment(FakeSandboxPool(), counts={"heldout": 5}, seed=3)
    rewards(agent, count=5)
    for task, window in zip(environment.tasks("heldout"), agent.windows, strict=True):  # type: ignore[attr-defined]
        shown = {word for word in window.split() if word in KIND_OF}
        last = {word for page in task.meta["pages"][-2:] for word in page.split()}
        assert shown <= last


def test_a_session_is_longer_than_the_context_and_every_window_shorter() -> None:
    windows = list(demonstrations(30, seed=1))
    tokenizer = ChatTokenizer(tokenizer_files((window["text"] for window in windows), 640))
    texts = [tokenizer.render(window["messages"], window["tools"]) for window in windows]
    assert max(len(tokenizer.encode(text)) for text in texts) <= SHAPE.max_position_embeddings
    for window, text in zip(windows, texts, strict=True):
        if window["messages"][-1]["content"]:  # a summary; answers are of any length
            assert len(tokenizer.encode(text)) == num_tokens(window["messages"])
    inventory = Inventory.draw(Random(0))
    pages = [{"role": "tool", "content": page} for page in inventory.pages]
    turns = [
        turn for page in pages for turn in (calling("next", "{}") | {"role": "assistant"}, page)
    ]
    whole = [{"role": "user", "content": inventory.prompt}, *turns]
    assert num_tokens(whole) > SHAPE.max_position_embeddings


def row(
    reward: float, *, version: int = 2, kind: str = "heldout", summaries: int = 2, tokens: int = 10
) -> RolloutRow:
    return RolloutRow(
        id="", task="", kind=kind, group="", slot=None, stage="", status="done", error=None,
        reward=reward, parts={"summaries": summaries, "summary_tokens": tokens}, flags=(),
        length=300, turns=9, versions=(version,), prompt_tokens=0, sampled_tokens=0, seconds=0.0,
        calls=9, source="", policy="", object=None,
    )  # fmt: skip


def test_figures_are_those_of_the_last_evaluation() -> None:
    old = [row(0.0, version=1, tokens=99), row(0.0, version=3, kind="train", tokens=99)]
    new = [row(1.0), row(0.5, summaries=4, tokens=50), row(1.0), row(1.0, summaries=0, tokens=0)]
    found = metrics([*old, *new])
    assert found["failures"] == 0.25
    assert found["low"] < 0.25 < found["high"]
    assert (found["tokens"], found["summaries"], found["session"]) == (70 / 8, 2.0, 300)
    assert metrics([*old, *new], min)["tokens"] == 99 / 2


def test_arms_differ_in_what_they_are_named_for() -> None:
    configs = Configs.read(seed=7, steps=5)
    parsed = {name: parse(text) for name, text in configs.arms.items()}
    loops = {name: config.stage[-1] for name, config in parsed.items()}
    trained, excluded = loops["trained"], loops["excluded"]
    assert isinstance(trained, RlConfig) and isinstance(excluded, RlConfig)
    assert trained.model_copy(update={"train_summaries": False}) == excluded
    assert (trained.train_summaries, trained.steps) == (True, 5)
    assert parsed["none"].harness.agent.endswith(":ForgetfulAgent")
    assert {config.seed for config in parsed.values()} == {7}
    base = parse(configs.base)
    assert [stage.kind for stage in base.stage] == ["sft"]
    assert base.harness.summarise_at == SUMMARISE_AT
    [tasks] = {config.tasks for config in parsed.values()}
    assert (tasks.heldout, base.tasks) == (400, tasks.model_copy(update={"heldout": 0}))
