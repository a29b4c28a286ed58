"""Training data of the supervised stages, as token ids: sessions to imitate, preference pairs, and
samples for a vocabulary.

Sessions come as OpenAI messages, from the built-in scripted worker or from files; an error in a
file is reported with its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.stages import BUILT_IN, MidtrainConfig
from etude.core.types import Json
from etude.harness.tools import SCHEMAS
from etude.model.tokenizer import ChatTokenizer, Message, Tool
from etude.tasks import sources
from etude.tasks.corpus import documents
from etude.tasks.demos import demonstrations
from etude.tasks.factory import make_tasks

NUM_SAMPLES = 256
HELDOUT_ONE_IN = 10  # one session in this many is held out to decide when sft stops

Demonstration = tuple[list[int], list[bool]]
"""Tokens, and a mask of the assistant's tokens."""
Overlong = Literal["error", "drop"]


def vocabulary_texts(config: RunConfig) -> list[str]:
    """Sample texts from which the vocabulary of a new model is learnt."""
    shown = demonstrations(make_tasks("train", NUM_SAMPLES, config.seed), NUM_SAMPLES, config.seed)
    messages = [message for session in shown for message in session]
    said = [str(message["content"]) for message in messages if message["content"]]
    called = [call["function"] for message in messages for call in message.get("tool_calls", [])]
    calls = [
        " ".join(map(str, (call["name"], *json.loads(call["arguments"]).values())))
        for call in called
    ]
    return documents(NUM_SAMPLES, config.seed) + said + calls + list(_samples(config))


def _samples(config: RunConfig) -> Iterator[str]:
    """The first documents of every source of the run itself."""
    for stage in config.stage:
        for source in stage.sources if isinstance(stage, MidtrainConfig) else ():
            if source.path != BUILT_IN:
                texts = (
                    text
                    for path in sources.files(source.path)
                    for _, text in sources.texts(path, source.field)
                )
                yield from islice(texts, NUM_SAMPLES)


@dataclass(frozen=True, slots=True)
class Sessions:
    train: list[Demonstration]
    heldout: list[Demonstration]
    """Held-out sessions, by which sft decides when to stop."""
    skipped: list[str]
    """File and line of the sessions that are too long."""


def built_in_sessions(
    config: RunConfig, count: int, tokenizer: ChatTokenizer, context: int
) -> Sessions:
    """Sessions of the scripted worker, and a few for other tasks that are held out."""
    tasks = make_tasks("train", max(config.tasks.train, 2), config.seed)
    border = max(1, len(tasks) // HELDOUT_ONE_IN)
    heldout = demonstrations(tasks[:border], max(1, count // HELDOUT_ONE_IN), config.seed + 1)
    shown = demonstrations(tasks[border:], count, config.seed)
    rows = [
        [row for session in some for row in tokenize(session, tokenizer)]
        for some in (shown, heldout)
    ]
    check_fits(rows[0] + rows[1], context)
    return Sessions(rows[0], rows[1], [])


def check_fits(
    sessions: Sequence[Demonstration], context: int, where: str = "a demonstration"
) -> None:
    longest = max((len(tokens) for tokens, _ in sessions), default=0)
    if longest > context:
        raise EtudeError(
            f"{where} has {longest} tokens, but the model's context is {context}: set "
            f"model.max_context to {longest} or more, without a model.path whose own context is "
            f"shorter"
        )


def read_sessions(
    pattern: str, tokenizer: ChatTokenizer, context: int, overlong: Overlong
) -> Sessions:
    """Sessions from files. Held-out ones are chosen by their content, so that a session and its
    copies stay together."""
    found: list[tuple[int, list[Demonstration]]] = []
    skipped: list[str] = []
    for where, record in _records(pattern):
        messages, tools = _messages(record, "messages", where), _tools(record, where)
        rows = _recorded(record, tokenizer, where) or _rendered(messages, tools, tokenizer, where)
        if not rows:
            raise EtudeError(f"{where}: the assistant says nothing to imitate; remove the line")
        if _fits(rows, context, overlong, where, skipped):
            digest = hashlib.blake2b(
                json.dumps(messages, sort_keys=True).encode(), digest_size=8
            ).digest()
            found.append((int.from_bytes(digest), rows))
    digests = {digest for digest, _ in found}
    if len(digests) < 2:
        raise EtudeError(
            f"{pattern}: sft needs at least two different sessions that fit, one of them for "
            f"validation"
        )
    # with few sessions, chance may put all on one side
    border = min(max(2**64 // HELDOUT_ONE_IN, 1 + min(digests)), max(digests))
    shown, heldout = (
        [row for digest, rows in found if (digest < border) == held for row in rows]
        for held in (0, 1)
    )
    return Sessions(shown, heldout, skipped)


def read_preferences(
    pattern: str, tokenizer: ChatTokenizer, context: int, overlong: Overlong
) -> tuple[list[tuple[Demonstration, Demonstration]], list[str]]:
    """Pairs (chosen, rejected) of every line that fits, and file and line of those that do not."""
    pairs: list[tuple[Demonstration, Demonstration]] = []
    skipped: list[str] = []
    for where, record in _records(pattern):
        prompt, tools = _messages(record, "prompt", where), _tools(record, where)
        answers = [
            _answer(record, key, prompt, tools, tokenizer, where) for key in ("chosen", "rejected")
        ]
        if answers[0] == answers[1]:
            raise EtudeError(f"{where}: chosen and rejected are the same; remove the line")
        if _fits(answers, context, overlong, where, skipped):
            pairs.append((answers[0], answers[1]))
    if not pairs:
        raise EtudeError(f"{pattern}: no pair fits into the model's context of {context} tokens")
    return pairs, skipped


def _records(pattern: str) -> Iterator[tuple[str, sources.Record]]:
    return (found for path in sources.files(pattern) for found in sources.records(path))


def _fits(
    rows: Sequence[Demonstration], context: int, overlong: Overlong, where: str, skipped: list[str]
) -> bool:
    if overlong == "error":
        check_fits(rows, context, where)
    fits = max(len(tokens) for tokens, _ in rows) <= context
    if not fits:
        skipped.append(where)
    return fits


def _answer(
    record: Json,
    key: str,
    prompt: list[Message],
    tools: list[Tool],
    tokenizer: ChatTokenizer,
    where: str,
) -> Demonstration:
    said = record.get(key)
    if isinstance(said, str):
        said = [{"role": "assistant", "content": said}]
    answer = _messages({key: [said] if isinstance(said, dict) else said}, key, where)
    rows = _rendered([*prompt, *answer], tools, tokenizer, where, first=len(prompt))
    if len(rows) != 1:
        raise EtudeError(
            f"{where}: {key} makes {len(rows)} token sequences instead of one: it needs an "
            f"answer of the assistant, and exactly one if the chat template changes earlier "
            f"turns"
        )
    return rows[0]


def _recorded(record: Json, tokenizer: ChatTokenizer, where: str) -> list[Demonstration]:
    """The exact tokens that a session was recorded with, if they are of this vocabulary: nothing is
    tokenised again."""
    if record.get("vocabulary") != tokenizer.vocabulary:
        return []
    tokens, mask = record.get("tokens"), record.get("mask")
    if (
        not isinstance(tokens, list)
        or not isinstance(mask, list)
        or len(tokens) != len(mask)
        or not all(type(id) is int and 0 <= id < tokenizer.vocab_size for id in tokens)
        or not all(isinstance(counts, bool) for counts in mask)
        or True in mask[:1]
    ):
        raise EtudeError(
            f"{where}: tokens and mask are invalid: export the session again, or remove both so "
            f"that its messages are used"
        )
    return [(tokens, mask)] if any(mask) else []


def _rendered(
    messages: list[Message], tools: list[Tool], tokenizer: ChatTokenizer, where: str, first: int = 0
) -> list[Demonstration]:
    try:
        return tokenize(messages, tokenizer, tools, first=first)
    except ValueError as e:
        raise EtudeError(f"{where}: {e}; fix or remove the line") from e


def tokenize(
    session: Sequence[Message],
    tokenizer: ChatTokenizer,
    tools: Sequence[Tool] = SCHEMAS,
    *,
    first: int = 0,
) -> list[Demonstration]:
    """A session as the recorder would have recorded it: its tokens, and a mask of the assistant's
    tokens, from message `first` on. If the template shows earlier turns differently once later ones
    follow, a new row begins there, just as the recorder begins a new segment. Raises ValueError for
    messages that the template cannot show."""
    rows: list[Demonstration] = []
    text = ""
    for number, message in enumerate(session):
        if message["role"] != "assistant" or number < first:
            continue
        prompt = tokenizer.render(session[:number], tools, answer=True)
        whole = tokenizer.render(session[: number + 1], tools)
        said, end, rest = whole.removeprefix(prompt).rpartition(tokenizer.eos_token)
        if not whole.startswith(prompt) or not end or rest.strip():
            raise ValueError(
                f"message {number + 1}: the chat template does not render it as an answer to "
                f"the messages before it that ends with {tokenizer.eos_token!r}, so its tokens "
                f"cannot be found"
            )
        if not rows or not prompt.startswith(text):
            rows.append(([], []))
            text = ""
        tokens, mask = rows[-1]
        # Text after the end of the answer is not the model's: it belongs to the next prompt.
        for piece, counts in (
            (prompt.removeprefix(text), False),
            (said + end, message.get("weight", 1) != 0),
        ):
            ids = tokenizer.encode(piece)
            tokens += ids
            mask += [counts] * len(ids)
        text = prompt + said + end
    return [row for row in rows if any(row[1])]


def _messages(record: Json, key: str, where: str) -> list[Message]:
    messages = record.get(key)
    if not isinstance(messages, list) or not messages:
        raise EtudeError(f"{where}: {key!r} is not a list of messages: write it as in OpenAI's API")
    for number, message in enumerate(messages, start=1):
        if wrong := _wrong(message):
            raise EtudeError(f"{where}: {key} {number}: {wrong}; write it as in OpenAI's API")
    return messages


def _wrong(message: Json) -> str | None:
    """The fault of a message, or None; checked so that templates see only well-formed messages."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return "it is not an object with a role"
    calls = message.get("tool_calls") or []
    if not isinstance(message.get("content"), str) and not (
        message.get("content") is None and calls
    ):
        return "its content is not a string"
    if not isinstance(calls, list):
        return "its tool_calls is not a list"
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return "a tool call has no function name"
        try:
            arguments = function.get("arguments")
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError as e:
            return f"the arguments of {function['name']} are not valid JSON ({e})"
        if not isinstance(arguments, dict):
            return f"the arguments of {function['name']} are not an object"
    return None


def _tools(record: Json, where: str) -> list[Tool]:
    tools = record.get("tools") or []
    named = isinstance(tools, list) and all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not named:
        raise EtudeError(
            f"{where}: tools is not a list of functions with names: write it as in OpenAI's API"
        )
    return list(tools)
