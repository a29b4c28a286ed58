"""Text that is decoded in pieces equals the text decoded at once, for all tokens and all
boundaries."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from etude.core.sampling import Request, Sample, Token, VersionSpan
from etude.model.detokenizer import (
    IncrementalDetokenizer,
    StopStringFilter,
    first_of,
)
from etude.model.output_parser import Event
from etude.model.tokenizer import ChatTokenizer
from etude.serve import answer_events
from etude.serve.engine_thread import StopStringChecker
from etude.serve.openai import types as wire
from etude.serve.openai.responses import ChatResponseBuilder, TextResponseBuilder
from tests.small_model import small_files

TOKENIZER = ChatTokenizer(small_files())
TOOLS = [{"type": "function", "function": {"name": "test", "parameters": {}}}]
WORDS = [
    "é",
    "a + b",
    "<tool_call>",
    "test</tool_call>",
    "</tool_call>",
    "<tool",
    "_call>",
    "日本",
    "\ufffd",
    "submit",
]


def random_tokens(rng: random.Random) -> list[int]:
    """Words and halves of characters; no end of a turn."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 30)):
        if rng.random() < 0.6:
            word = TOKENIZER.encode(rng.choice(WORDS))
            tokens += (
                word
                if rng.random() < 0.7
                else [t for letter in rng.choice(WORDS) for t in TOKENIZER.encode(letter)]
            )
        else:
            tokens.append(rng.randrange(TOKENIZER.vocab_size))
    return [token for token in tokens if token != TOKENIZER.eos_token_id] or TOKENIZER.encode("a")


@pytest.mark.parametrize("seed", range(30))
def test_pieces_decode_to_the_whole(seed: int) -> None:
    tokens = random_tokens(random.Random(seed))
    decoder = IncrementalDetokenizer(TOKENIZER.decode)
    pieces = [decoder.push(token) for token in tokens]
    assert "".join(pieces) + decoder.end() == TOKENIZER.decode(tokens)


@pytest.mark.parametrize("stop", [(), ("ab", "é")])
@pytest.mark.parametrize("seed", range(50))
def test_tokens_say_together_what_they_say_one_by_one(seed: int, stop: tuple[str, ...]) -> None:
    rng = random.Random(seed)
    tokens = random_tokens(rng) + [TOKENIZER.eos_token_id] * (seed % 2)
    one, several = (TOKENIZER.answer_parser((), TOOLS, stop=stop) for _ in range(2))
    alone = [event for token in tokens for event in one.push(token)]
    together: list[Event] = []
    begin = 0
    while begin < len(tokens):
        end = begin + rng.randrange(1, len(tokens) + 1)
        together += several.extend(tokens[begin:end])
        begin = end
    assert answer_events.joined(together) == answer_events.joined(alone)
    assert several.end(finished=True) == one.end(finished=True)


def test_broken_characters_of_a_vocabulary_are_alike_together_and_one_by_one() -> None:
    """Some vocabularies decode a complete character before a broken one as if both were broken."""

    def decode(tokens: Sequence[int]) -> str:
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(tokens)

    tokens = [*"日".encode(), 0xFF, *b"ab"]
    one, several = IncrementalDetokenizer(decode), IncrementalDetokenizer(decode)
    alone = "".join(map(one.push, tokens)) + one.end()
    assert several.extend(tokens) + several.end() == alone != decode(tokens)


def test_a_character_is_held_until_it_is_whole() -> None:
    tokens = [token for byte in "é日" for token in TOKENIZER.encode(byte)]
    decoder = IncrementalDetokenizer(TOKENIZER.decode)
    assert [decoder.push(token) for token in tokens] == ["", "é", "", "", "日"]


def in_bytes(pieces: list[bytes]) -> Callable[[Sequence[int]], str]:
    """Decode as a byte-level vocabulary does: tokens may end within a character."""
    return lambda tokens: b"".join(pieces[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("seed", range(50))
def test_a_stop_text_is_seen_with_its_last_byte(seed: int) -> None:
    rng = random.Random(seed)
    data = "".join(rng.choice("ab é日🙂") for _ in range(30)).encode()
    cuts = [0, *sorted(rng.sample(range(1, len(data)), 20)), len(data)]
    pieces = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    stop = "".join(rng.choice("ab é日🙂") for _ in range(rng.randrange(1, 4)))
    decoder, finder = IncrementalDetokenizer(in_bytes(pieces)), StopStringFilter([stop])
    shown, seen = "", 0
    while not finder.found and seen < len(pieces):
        shown += finder.push(decoder.push(seen))
        seen += 1
    shown += finder.push(decoder.end()) + finder.end()
    whole = data.decode()
    assert shown == (whole[: whole.index(stop)] if stop in whole else whole)
    assert seen == next(
        (n for n in range(len(pieces) + 1) if stop.encode() in b"".join(pieces[:n])), len(pieces)
    )


def test_an_answer_ends_with_the_token_that_ends_its_stop_text() -> None:
    """Even if that token also contains the first byte of a character, as tokens of large
    vocabularies do."""
    files = small_files()
    spelled = json.loads(files["tokenizer.json"])
    both = len(spelled["model"]["vocab"])
    spelled["model"]["vocab"]["bæ"] = both  # a vocabulary of bytes spells E6 as æ
    spelled["model"]["merges"].append(["b", "æ"])
    tokenizer = ChatTokenizer(files | {"tokenizer.json": json.dumps(spelled).encode()})
    assert tokenizer.decode([both, *TOKENIZER.encode("日")[1:]]) == "b日"
    assert StopStringChecker(tokenizer, ("b",))(both)
    assert not StopStringChecker(tokenizer, ("b日",))(both)


@pytest.mark.parametrize("seed", range(30))
def test_a_stop_text_is_found_across_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("abc") for _ in range(40))
    stops = [
        "".join(rng.choice("abc") for _ in range(rng.randrange(2, 6)))
        for _ in range(rng.randrange(1, 5))
    ]
    cuts = [0, *sorted(rng.sample(range(1, 40), 8)), 40]
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    finder, shown, read = StopStringFilter(stops), "", 0
    while not finder.found and read < len(pieces):
        shown += finder.push(pieces[read])
        read += 1
    shown += finder.end()
    seen = "".join(pieces[:read])
    assert finder.found == (first_of(stops, text) is not None)
    assert shown == seen[: first_of(stops, seen)]
    # and it stopped as early as possible
    assert first_of(stops, "".join(pieces[: read - 1])) is None


def sample_of(tokens: list[int], finish: Any) -> Sample:
    top = tuple(((token, -0.5), (1, -1.5)) for token in tokens)
    logprobs = tuple(-0.01 * n for n in range(len(tokens)))
    return Sample(
        tokens=tuple(tokens),
        logprobs=logprobs,
        versions=(VersionSpan(3, len(tokens)),),
        finish_reason=finish,
        top_logprobs=top,
    )


def stopped(tokens: list[int], stops: tuple[str, ...]) -> Sample:
    """As a policy answers: up to the token that completes a stop text, or the end of the turn."""
    decoder, finder = IncrementalDetokenizer(TOKENIZER.decode), StopStringFilter(stops)
    for count, token in enumerate(tokens, 1):
        finder.push(decoder.push(token))
        if finder.found:
            return sample_of(tokens[:count], "stop")
    return (
        sample_of([*tokens, TOKENIZER.eos_token_id], "stop")
        if len(tokens) % 2
        else sample_of(tokens, "length")
    )


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", ["chat", "calls", "text"])
def test_what_is_streamed_is_what_is_answered_at_once(seed: int, kind: str) -> None:
    rng = random.Random(seed)
    stops = ("b", "日本") if seed % 3 == 0 else ()
    sample = stopped(random_tokens(rng), stops)
    ask = Request(
        prompt=(1, 2),
        max_tokens=99,
        seed=seed,
        stop_token_ids=(TOKENIZER.eos_token_id,),
        stop=stops,
        top_logprobs=2,
    )
    shown: dict[str, Any] = {
        "tokenizer": TOKENIZER,
        "model": "m",
        "with_ids": True,
        "with_logprobs": True,
    }
    form: ChatResponseBuilder | TextResponseBuilder
    if kind in ("chat", "calls"):
        form = ChatResponseBuilder(**shown, prompt=(1, 2), tools=TOOLS if kind == "calls" else None)
    else:
        form = TextResponseBuilder(**shown)
    follower, pieces = form.stream(0, ask), []
    for token, logprob, top in zip(
        sample.tokens, sample.logprobs, sample.top_logprobs, strict=True
    ):
        pieces.append(follower.push(Token(token, logprob, 3, top)))
    pieces.append(follower.push(sample))
    whole = msgspec.to_builtins(form.choice(0, ask, sample))
    assert joined(msgspec.to_builtins([piece for piece in pieces if piece is not None])) == whole


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice assembled from its pieces, as a client does it."""
    last = pieces[-1]
    whole: dict[str, Any] = {
        "index": 0,
        "finish_reason": last["finish_reason"],
        "weight_version": last["weight_version"],
    }
    assert all(piece["finish_reason"] is None for piece in pieces[:-1])
    whole["token_ids"] = [id for piece in pieces for id in piece["token_ids"]]
    logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    whole["logprobs"] = {
        name: [x for part in logprobs for x in part[name]]
        if logprobs[0][name] is not None
        else None
        for name in logprobs[0]
    }
    if "text" in last:
        return whole | {
            "text": "".join(p["text"] for p in pieces),
            "prompt_token_ids": pieces[0]["prompt_token_ids"],
        }
    assert [piece["delta"].get("role") for piece in pieces] == ["assistant"] + [None] * (
        len(pieces) - 1
    )
    content = "".join(piece["delta"].get("content") or "" for piece in pieces)
    calls = [call for piece in pieces for call in piece["delta"].get("tool_calls") or ()]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not calls else None,
    }
    return whole | {"message": message | ({"tool_calls": calls} if calls else {})}


def test_a_schema_for_every_type_that_is_sent() -> None:
    for kind in (wire.ChatCompletion, wire.Completion, wire.ChatChunk, wire.TextChunk):
        assert msgspec.json.schema(kind)
