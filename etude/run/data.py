"""What the stages before rl read, and the small files of the model, for the environment that ships."""

from __future__ import annotations

import json
from collections.abc import Sequence

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.harness.tools import SCHEMAS
from etude.model.tokenizer import ChatTokenizer, Message
from etude.tasks.corpus import documents
from etude.tasks.demos import demonstrations
from etude.tasks.factory import make_tasks

NUM_DOCUMENTS = 8192
NUM_SAMPLES = 256
HELD_BACK = 10  # one demonstration in this many decides when sft stops

Demonstration = tuple[list[int], list[bool]]


def texts(config: RunConfig) -> list[str]:
    return documents(NUM_DOCUMENTS, config.seed)


def vocabulary_texts(config: RunConfig) -> list[str]:
    """What the model will read and write, in small: the vocabulary is learnt from it."""
    shown = demonstrations(make_tasks("train", NUM_SAMPLES, config.seed), NUM_SAMPLES, config.seed)
    messages = [message for session in shown for message in session]
    said = [str(message["content"]) for message in messages if message["content"]]
    called = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    calls = [" ".join(map(str, (call["name"], *json.loads(call["arguments"]).values()))) for call in called]
    return documents(NUM_SAMPLES, config.seed) + said + calls


def sessions(config: RunConfig, count: int) -> tuple[list[list[Message]], list[list[Message]]]:
    """Demonstrations to imitate, and a few of other tasks by which to tell when to stop."""
    tasks = make_tasks("train", max(config.tasks.train, 2), config.seed)
    border = max(1, len(tasks) // HELD_BACK)
    held_back = demonstrations(tasks[:border], max(1, count // HELD_BACK), config.seed + 1)
    return demonstrations(tasks[border:], count, config.seed), held_back


def tokenize(session: Sequence[Message], tokenizer: ChatTokenizer) -> Demonstration:
    """The tokens of a session as the recorder would have recorded it, and which of them the assistant says."""
    tokens: list[int] = []
    mask: list[bool] = []
    text = ""
    for number, message in enumerate(session):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.render(session[:number], SCHEMAS, answer=True)
        whole = tokenizer.render(session[: number + 1], SCHEMAS)
        for piece, said in ((prompt.removeprefix(text), False), (whole.removeprefix(prompt), True)):
            ids = tokenizer.encode(piece)
            tokens += ids
            mask += [said] * len(ids)
        text = whole
    return tokens, mask


def check_fits(sessions: Sequence[Demonstration], context: int) -> None:
    longest = max((len(tokens) for tokens, _ in sessions), default=0)
    if longest > context:
        raise EtudeError(
            f"a demonstration has {longest} tokens, and the model's context {context}: set model.max_context to "
            f"{longest} or more, and give no model.path whose own context is shorter"
        )
