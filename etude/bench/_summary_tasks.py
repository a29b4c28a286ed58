"""A family of tasks that do not fit one window, for `etude bench summary` and `examples/summary`.

In a session the agent turns over the pages of an inventory, one per turn. Each page names a few
goods, of eight kinds, among chatter; the task asks for the goods of one kind. After the last page
the agent answers with all of them. The pages together are longer than the model's context, so goods
that are in no summary by then are lost.

The sessions to imitate (`demonstrations`) are those of an agent that reads and answers well and
mostly writes the summaries of a general prompt: work done, findings with a section for each kind of
goods, and next steps. Sometimes a kind is missing, independent of the question. A few summaries are
focused and keep only the goods that were asked for. The model has to learn by rl which ones pay.

    python -m etude.bench._summary_tasks FOLDER [SEED]    writes the files that `summary.toml` needs
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.core.seeds import derive
from etude.core.types import Attempt, Json, Part, Score, Task, turns
from etude.harness.agent import AgentTools, Ask, CodingAgent, Opening
from etude.harness.summary import REQUEST, CarriedState, Conversation, Message
from etude.model.config import ModelConfig
from etude.model.files import hf_tensors, write_directory
from etude.model.from_scratch import tokenizer_files
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import init_from_scratch
from etude.sandbox.fake import FakeSandboxPool

WORDS_OF = {
    "fruit": "pear plum fig lime date kiwi",
    "tool": "saw axe rake hoe awl file",
    "animal": "goat pig hen cow mule duck",
    "metal": "gold iron tin zinc lead brass",
    "cloth": "wool silk flax felt lace tweed",
    "drink": "milk tea ale wine cider rum",
    "dish": "cup jar bowl pan pot plate",
    "grain": "rye oat corn rice bran malt",
    "": "again bridge came clerk cold dark day dust gate hall ink late long market mild noon rain",
}
GOODS = {kind: words.split() for kind, words in WORDS_OF.items() if kind}
CHATTER = WORDS_OF[""].split()
KIND_OF = {item: kind for kind, items in GOODS.items() for item in items}
PAGES, WORDS = 8, 15
SEEN = 2
"""Goods of each kind in an inventory."""
FOCUSED = 0.1
"""Share of the summaries to imitate that keep only the goods that were asked for."""
NEXT, ANSWER, END = "next", "answer", "end"
SUMMARISE_AT = 56
"""The same value as in `summary.toml`."""
CALL_TOKENS = 5
"""Tokens of a turn that asks for a page."""
WORD = re.compile(r"\w+|[^\w ]")
SESSIONS = 7500
"""Number of sessions to imitate."""
VOCABULARY = 640
SHAPE = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=192,
    max_position_embeddings=184,
)


@dataclass(frozen=True, slots=True)
class Inventory:
    kind: str
    """The kind of goods that is asked for."""
    pages: tuple[str, ...]

    @classmethod
    def draw(cls, random: Random, last_page: int = PAGES) -> Inventory:
        """Draw a random inventory. With a smaller `last_page` it ends early."""
        goods = [item for items in GOODS.values() for item in random.sample(items, SEEN)]
        random.shuffle(goods)
        each = len(goods) // PAGES
        pages = []
        for at in range(0, len(goods), each):
            words = goods[at : at + each] + random.choices(CHATTER, k=WORDS - each)
            random.shuffle(words)
            pages.append(" ".join(("page", *words)))
        pages = pages[:last_page]
        pages[-1] += f" {END}"
        return cls(random.choice(list(GOODS)), tuple(pages))

    @property
    def prompt(self) -> str:
        return f"find {self.kind}"

    @property
    def answer(self) -> tuple[str, ...]:
        return tuple(item for page in self.pages for item in goods_of(page, self.kind))


def goods_of(text: str, kind: str) -> list[str]:
    return [word for word in text.split() if KIND_OF.get(word) == kind]


class InventoryEnvironment:
    """Inventories by split and number."""

    def __init__(self, pool: SandboxPool, *, counts: Mapping[str, int], seed: int) -> None:
        self._counts = counts
        self._seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        return [self._task(split, number) for number in range(self._counts[split])]

    def _task(self, split: str, number: int) -> Task:
        inventory = self._inventory(split, number)
        meta = {"pages": inventory.pages}
        return Task(id=f"{split}-{number}", prompt=inventory.prompt, meta=meta)

    def _inventory(self, split: str, number: int) -> Inventory:
        return Inventory.draw(Random(derive(self._seed, split, number)))

    @contextlib.asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[Sandbox]:
        async with FakeSandboxPool().open(SandboxSpec()) as nothing:
            yield nothing

    async def score(self, task: Task, sandbox: Sandbox, attempt: Attempt) -> Score:
        """Score the answer by its share of correct goods, in any order; missing and wrong ones
        count against it. Parts of the score count the summaries and their tokens."""
        split, _, number = task.id.rpartition("-")
        right = set(self._inventory(split, int(number)).answer)
        said = _answered(attempt.transcript.messages)
        hits = len(right & set(said))
        asked = any(message.get("content") == REQUEST for message in attempt.transcript.messages)
        # Every window but the last ends with its summary, if summaries were requested.
        summaries = [len(turns(segment)[-1]) for segment in attempt.segments[:-1] if asked]
        parts = (
            Part("hits", hits, evidence=f"{' '.join(said)}; right: {' '.join(sorted(right))}"),
            Part("summaries", len(summaries)),
            Part("summary_tokens", sum(summaries)),
        )
        return Score(hits / max(len(right), len(said)), parts=parts)


def _answered(messages: Sequence[Message]) -> list[str]:
    for message in reversed(messages):
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] == ANSWER:
                return str(json.loads(call["function"]["arguments"])["goods"]).split()
    return []


class InventoryTools:
    """`harness.agent.AgentTools`: turn over a page, and answer."""

    def __init__(self, pages: Sequence[str]) -> None:
        self._pages = iter(pages)

    @property
    def schemas(self) -> list[dict[str, Json]]:
        return SCHEMAS

    async def call(self, name: str, arguments: Json) -> str:
        match name:
            case "next":
                return next(self._pages, END)
            case "answer":
                return "done"
            case _:
                return f"error: no tool {name}"

    def ends(self, name: str) -> bool:
        return name == ANSWER

    def carried(self) -> CarriedState:
        return CarriedState()


def _schema(name: str, description: str, *parameters: str) -> dict[str, Json]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


SCHEMAS = [_schema(NEXT, "The next page"), _schema(ANSWER, "All goods of the kind", "goods")]


class InventoryAgent(CodingAgent):
    """The built-in agent with these tools, and with its own windows and summaries."""

    async def open(self, task: Task, sandbox: Sandbox, seed: int) -> Opening:
        return Opening(messages=task.opening, tools=InventoryTools(task.meta["pages"]))


class ForgetfulAgent(InventoryAgent):
    """The same agent without summaries: the next window begins with the task alone."""

    async def _summarise(self, ask: Ask, talk: Conversation, tools: AgentTools, seed: int) -> None:
        talk.reopen("", tools.carried())


def demonstrations(count: int, seed: int) -> Iterator[dict[str, Json]]:
    """The windows of `count` sessions in the format of `sft`; `text` is for the vocabulary. Two of
    three sessions end after a page or two: these are cheap to learn from."""
    for number in range(count):
        random = Random(derive(seed, "demonstration", number))
        last_page = PAGES if number % 3 == 0 else random.randint(1, 2)
        for messages in demonstrate(Inventory.draw(random, last_page), random):
            said = [str(message["content"] or ANSWER) for message in messages]
            text = "\n".join((f"{NEXT} {ANSWER}", *said))
            yield {"messages": messages, "tools": SCHEMAS, "text": text}


def demonstrate(inventory: Inventory, random: Random) -> Iterator[list[Message]]:
    """The windows of one session."""
    talk = Conversation([{"role": "user", "content": inventory.prompt}], SUMMARISE_AT)
    pages = iter(inventory.pages)
    known: list[str] = []
    while not str(talk.window[-1]["content"]).endswith(END):
        page = next(pages, END)
        talk.answered(_call(NEXT), num_tokens(talk.window) + CALL_TOKENS)
        talk.add({"role": "tool", "tool_call_id": "call", "content": page})
        known += [word for word in page.split() if word in KIND_OF]
        if talk.is_full:
            is_over = page.endswith(END)
            if random.random() < FOCUSED:
                summary = focused_summary(known, inventory.kind, is_over=is_over)
            else:
                summary = general_summary(known, random, is_over=is_over)
            yield [*talk.summary_request, {"role": "assistant", "content": summary}]
            talk.reopen(summary, CarriedState())
            known = [word for word in re.findall(r"\w+", summary) if word in KIND_OF]
    answer = goods_of(" ".join(known), inventory.kind) or [random.choice(GOODS[inventory.kind])]
    talk.add(_call(ANSWER, goods=" ".join(answer)))
    yield talk.window


def general_summary(known: Sequence[str], random: Random, *, is_over: bool) -> str:
    """A general summary: work done, findings and next steps. The findings have a section for each
    kind of goods, in random order; up to two kinds are left out."""
    kinds = sorted({KIND_OF[item] for item in known})
    random.shuffle(kinds)
    left_out = random.choice((0, 0, 1, 2))
    sections = [" ".join((kind, *goods_of(" ".join(known), kind))) for kind in kinds[left_out:]]
    found = f"found {'; '.join(sections)}".rstrip()
    following = "next answer what was asked" if is_over else "next read the other pages"
    ending = [END] if is_over else []
    return "; ".join(["done read the pages so far", found, following, *ending])


def focused_summary(known: Sequence[str], kind: str, *, is_over: bool) -> str:
    found = " ".join(("found", kind, *goods_of(" ".join(known), kind)))
    return f"{found}; {END}" if is_over else found


def num_tokens(messages: Sequence[Message]) -> int:
    """The number of tokens of a window, including its tools, in the vocabulary of `prepare`, where
    every word is one token."""
    said = [
        CALL_TOKENS if message.get("tool_calls") else 2 + len(WORD.findall(message["content"]))
        for message in messages
    ]
    return 4 + sum(said)


def _call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": "call", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def prepare(folder: Path, seed: int) -> None:
    """Write `sessions.jsonl`, and `fresh/`: an untrained model with the vocabulary of these
    sessions."""
    windows = list(demonstrations(SESSIONS, seed))
    lines = [json.dumps({key: window[key] for key in ("messages", "tools")}) for window in windows]
    (folder / "sessions.jsonl").write_text("\n".join(lines) + "\n")
    files = tokenizer_files((window["text"] for window in windows[:1000]), VOCABULARY)
    shape = replace(SHAPE, vocab_size=ChatTokenizer(files).vocab_size)
    model = init_from_scratch(shape, seed)
    small = files | {"config.json": shape.to_json().encode()}
    write_directory(folder / "fresh", small, hf_tensors(model))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
