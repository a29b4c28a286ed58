"""Answers of every family, read from token streams: the events do not depend on how they are
cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from tokenizers import AddedToken, Tokenizer

from etude.model.detokenizer import PieceStream
from etude.model.output_parser import (
    FORMATS,
    AnswerParser,
    Content,
    Event,
    MarkScanner,
    Reasoning,
    detect_format,
    schemas_of,
    with_ids,
)
from etude.model.tokenizer import ChatTokenizer, Tool
from etude.model.tool_calls import INVALID, Call, _typed
from etude.serve.answer_events import joined
from tests.small_model import small_files

TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {
                    "line": {"type": "integer"},
                    "text": {"type": "string"},
                    "flags": {"anyOf": [{"type": "array"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "test"}},
]
EOS = "<|end_of_turn|>"
REASONS = "{% if tools %}{{ tools }}{% endif %}<think></think>"


@dataclass(frozen=True)
class Answer:
    """The output of a model of the family, and the events in it."""

    family: str
    text: str
    events: Sequence[Event]
    begun: str = ""
    """The end of the prompt."""
    tokens: Sequence[str] = field(default=())
    """Marks in the vocabulary beyond those of the family."""


def call(name: str, id: str | None = None, /, **arguments: object) -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False), id)


ANSWERS = {
    "text": Answer("hermes", " Grüße <tool\n ", [Content(" Grüße <tool\n ")]),
    "hermes": Answer(
        "hermes",
        "<think>\nso\nit is\n</think>\n\nI edit. \n<tool_call>\n"
        '{"name": "edit", "arguments": {"line": 3, "text": "a < b"}}\n</tool_call>\n<tool_call>\n'
        '{"name": "test", "arguments": {}}\n</tool_call>',
        [
            Reasoning("so\nit is"),
            Content("I edit."),
            call("edit", line=3, text="a < b"),
            call("test"),
        ],
    ),
    "begun by the prompt": Answer(
        "hermes", "it is\n</think>\n\nDone", [Reasoning("it is"), Content("Done")], "<think>\n"
    ),
    "reasoning that was cut off": Answer("hermes", "<think>so it", [Reasoning("so it")]),
    "a call within reasoning": Answer(
        "hermes",
        '<think>so<tool_call>{"name": "test"}</tool_call>',
        [Reasoning("so"), call("test")],
    ),
    "a call that is never closed": Answer(
        "hermes",
        'now <tool_call>{"name": "te',
        [Content('now <tool_call>{"name": "te')],
    ),
    "text behind a call": Answer(
        "hermes",
        'a <tool_call>{"name": "test"}</tool_call> b ',
        [Content("a"), call("test"), Content("  b")],
    ),
    "a list of calls": Answer(
        "hermes",
        '<tool_call>[{"name": "test"}, {"name": "edit", "arguments": {"line": 1}}]</tool_call>',
        [call("test"), call("edit", line=1)],
    ),
    "compact": Answer(
        "compact",
        "so<tool_call>edit 3 a + b x</tool_call>",
        [Content("so"), call("edit", line=3, text="a", flags="+ b x")],
    ),
    "qwen3_coder": Answer(
        "qwen3_coder",
        "I edit.\n\n<tool_call>\n<function=edit>\n<parameter=line>\n3\n</parameter>\n"
        "<parameter=text>\nif a:\n  <p>\n</parameter> x\n</parameter>\n"
        '<parameter=flags>\n["a"]\n</parameter>\n</function>\n</tool_call>',
        [
            Content("I edit."),
            call("edit", line=3, text="if a:\n  <p>\n</parameter> x", flags=["a"]),
        ],
    ),
    "glm45": Answer(
        "glm45",
        "\n<think>so</think>\nI edit.\n<tool_call>edit\n<arg_key>line</arg_key>\n<arg_value>3"
        "</arg_value>\n<arg_key>text</arg_key>\n<arg_value> 7\n</arg_value>\n</tool_call>"
        "<tool_call>test\n</tool_call>",
        [
            Reasoning("so"),
            Content("I edit."),
            call("edit", line=3, text=" 7\n"),
            call("test"),
        ],
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek": Answer(
        "deepseek",
        "so\n</think>\n\nI edit.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n{"line": 3}\n```'
        "<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>test\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        [Reasoning("so"), Content("I edit."), call("edit", line=3), call("test")],
        "<｜Assistant｜><think>\n",
        tokens=("<｜tool▁sep｜>",),
    ),
    "deepseek 3.1": Answer(
        "deepseek",
        "<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>edit<｜tool▁sep｜>{"line": 3}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [call("edit", line=3)],
        tokens=("<｜tool▁sep｜>",),
    ),
    "kimi_k2": Answer(
        "kimi_k2",
        "I edit.<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0"
        '<|tool_call_argument_begin|>{"line": 3}<|tool_call_end|><|tool_call_begin|>'
        "functions.test:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [
            Content("I edit."),
            call("edit", "functions.edit:0", line=3),
            call("test", "functions.test:1"),
        ],
        tokens=("<|tool_call_argument_begin|>",),
    ),
    "mistral": Answer(
        "mistral",
        'I edit.[TOOL_CALLS]edit[ARGS]{"line": 3, "text": "[ARGS"}'
        "[TOOL_CALLS]test[CALL_ID]Xy1234567[ARGS]{}",
        [Content("I edit."), call("edit", line=3, text="[ARGS"), call("test", "Xy1234567")],
        tokens=("[ARGS]", "[CALL_ID]"),
    ),
    "mistral, a list": Answer(
        "mistral",
        '[TOOL_CALLS] [{"name": "edit", "arguments": {"line": 3}, "id": "Xy1234567"}, '
        '{"name": "test", "arguments": {}}]',
        [call("edit", "Xy1234567", line=3), call("test")],
    ),
    "granite": Answer(
        "granite",
        'I edit. <|tool_call|>[{"name": "edit", "arguments": {"line": 3}}, {"name": "test"}]',
        [Content("I edit."), call("edit", line=3), call("test")],
    ),
    "phi4": Answer(
        "granite",
        '<|tool_call|>[{"name": "edit", "arguments": {"line": 3}}]<|/tool_call|>',
        [call("edit", line=3)],
    ),
    "seed_oss": Answer(
        "seed_oss",
        "<seed:think>so</seed:think>I edit.<seed:tool_call>\n<function=edit>\n"
        "<parameter=line>3</parameter>\n<parameter=text>a\nb</parameter>\n</function>\n"
        "</seed:tool_call>",
        [Reasoning("so"), Content("I edit."), call("edit", line=3, text="a\nb")],
    ),
    "olmo3": Answer(
        "olmo3",
        '<think>so</think>I edit.<function_calls>\nedit(line=3, text="a\\nb", '
        "flags=[true, None, {'x': -1}])\ntest()\n</function_calls>",
        [
            Reasoning("so"),
            Content("I edit."),
            call("edit", line=3, text="a\nb", flags=[True, None, {"x": -1}]),
            call("test"),
        ],
    ),
    "llama3": Answer(
        "llama3",
        ' {"name": "edit", "parameters": {"line": 3}}; {"name": "test", "parameters": {}}',
        [call("edit", line=3), call("test")],
    ),
    "llama3 with a tag": Answer(
        "llama3",
        '<|python_tag|>{"name": "edit", "parameters": {"line": 3}}',
        [call("edit", line=3)],
    ),
    "llama3 text": Answer("llama3", "so {it} is ", [Content("so {it} is ")]),
    "llama3 other JSON": Answer("llama3", '{"a": 1}', [Content('{"a": 1}')]),
    "harmony": Answer(
        "harmony",
        "<|channel|>analysis<|message|>so <it> is<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I edit.<|end|><|start|>assistant<|channel|>commentary to=functions.edit "
        '<|constrain|>json<|message|>{"line": 3}',
        [Reasoning("so <it> is"), Content("I edit."), call("edit", line=3)],
        tokens=("<|constrain|>",),
    ),
    "harmony, the recipient first": Answer(
        "harmony",
        " to=functions.test<|channel|>commentary json<|message|>{}",
        [call("test")],
    ),
    "harmony final": Answer(
        "harmony",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>"
        " done ",
        [Reasoning("so"), Content(" done ")],
    ),
}


def tokenizer(answer: Answer, *, spelled: bool) -> ChatTokenizer:
    """A tokenizer whose vocabulary has the marks of the family, or only letters to spell them
    with."""
    made = json.loads(small_files()["tokenizer.json"])
    made["added_tokens"] = []
    vocabulary = Tokenizer.from_str(json.dumps(made))
    marks = [] if spelled else [*FORMATS[answer.family].marks, *answer.tokens]
    vocabulary.add_tokens([AddedToken(mark, normalized=False) for mark in (*marks, EOS)])
    config = {"eos_token": EOS, "tool_syntax": answer.family}
    return ChatTokenizer(
        {
            "tokenizer.json": vocabulary.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
            "chat_template.jinja": f"{REASONS}{{# {FORMATS[answer.family].think} #}}".encode(),
        }
    )


def tokens_of(text: str, marks: Sequence[str]) -> list[bytes]:
    """A text as tokens: every mark is one token, and so is the text between two marks."""
    parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks) or "(?!)", text)
    return [part.encode() for part in parts if part]


def splits(tokens: Sequence[bytes], marks: Sequence[str]) -> Iterator[list[bytes]]:
    """The same text in all other tokenizations that differ in one place, down to the bytes of a
    character; and all of it byte by byte. Marks stay whole."""
    controls = [mark.encode() for mark in marks]
    for number, token in enumerate(tokens):
        for place in range(1, len(token)) if token not in controls else ():
            yield [*tokens[:number], token[:place], token[place:], *tokens[number + 1 :]]
    yield [
        part
        for token in tokens
        for part in ([token] if token in controls else [bytes([byte]) for byte in token])
    ]


def read_bytes(answer: Answer, tokens: Sequence[bytes], marks: Sequence[str]) -> list[Event]:
    """Parse with a vocabulary of exactly these tokens."""
    controls = {
        n: token.decode()
        for n, token in enumerate(tokens)
        if token.decode(errors="replace") in marks
    }
    pieces = PieceStream(
        lambda ids: b"".join(tokens[id] for id in ids).decode(errors="replace"), controls
    )
    format = FORMATS[answer.family]
    scanner = MarkScanner([mark for mark in format.marks if mark not in marks])
    parser = AnswerParser(
        pieces, scanner,
        format.parser(schemas_of(TOOLS), reasons=True, reasoning="<think>" in answer.begun), (),
    )  # fmt: skip
    events = [event for number in range(len(tokens)) for event in parser.push(number)]
    return joined([*events, *parser.end(finished=True)])


def read(made: ChatTokenizer, tokens: Sequence[int], begun: str, *, finished: bool) -> list[Event]:
    parser = made.answer_parser(made.encode(begun), TOOLS)
    events = [event for token in tokens for event in parser.push(token)]
    events += parser.push(made.eos_token_id) if finished else []
    return joined([*events, *parser.end(finished=finished)])


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_split_gives_the_same_events(name: str, spelled: bool) -> None:
    answer = ANSWERS[name]
    marks = [] if spelled else [*FORMATS[answer.family].marks, *answer.tokens]
    tokens = tokens_of(answer.text, marks)
    assert read_bytes(answer, tokens, marks) == answer.events
    for split in splits(tokens, marks):
        assert read_bytes(answer, split, marks) == answer.events, split


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_tokenizer_gives_the_events(name: str, spelled: bool) -> None:
    answer = ANSWERS[name]
    made = tokenizer(answer, spelled=spelled)
    tokens = made.encode(answer.text)
    assert read(made, tokens, answer.begun, finished=True) == answer.events


@pytest.mark.parametrize("name", ANSWERS)
def test_text_that_spells_a_mark_is_text(name: str) -> None:
    """Holds if the vocabulary has a token for the mark: a model that quotes a format does not use
    it."""
    answer = ANSWERS[name]
    made = tokenizer(answer, spelled=False)
    letters = [token for letter in answer.text for token in made.encode(letter)]
    if answer.family in ("llama3", "harmony") or answer.begun:
        return  # their answers mean more than text even without a mark
    assert read(made, letters, "", finished=True) == [Content(answer.text)]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_may_be_cut_off_anywhere(name: str) -> None:
    """Reasoning and content before the cut are kept; a call is complete or is not a call."""
    answer = ANSWERS[name]
    made = tokenizer(answer, spelled=False)
    tokens = made.encode(answer.text)
    whole = [event for event in answer.events if isinstance(event, Call)]
    for count in range(len(tokens)):
        events = read(made, tokens[:count], answer.begun, finished=False)
        calls = [event for event in events if isinstance(event, Call)]
        assert calls == whole[: len(calls)]
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        assert "".join(e.text for e in answer.events if isinstance(e, Reasoning)).startswith(
            reasoning
        )


CALLS_TO_THE_END = {
    "mistral": '[TOOL_CALLS]edit[ARGS]{"line": 3, "text": "a; b"}',
    "granite": '<|tool_call|>[{"name": "edit", "arguments": {"line": 3, "text": "a; b"}}]',
    "llama3": '<|python_tag|>{"name": "edit", "parameters": {"line": 3, "text": "a; b"}}',
    "harmony": '<|channel|>commentary to=functions.edit<|message|>{"line": 3, "text": "a; b"}',
}
"""Calls that end where the answer does."""


@pytest.mark.parametrize("family", CALLS_TO_THE_END)
def test_a_stop_text_cuts_a_call_as_it_cuts_text(family: str) -> None:
    """The rest cannot be parsed, and the model has not ended it: it is content. A call that is
    complete before the stop text is a call."""
    text = CALLS_TO_THE_END[family]
    made = tokenizer(Answer(family, text, []), spelled=False)

    def stopped(text: str, stop: str) -> list[Event]:
        parser = made.answer_parser((), TOOLS, stop=[stop])
        events = [event for token in made.encode(text) for event in parser.push(token)]
        return joined([*events, *parser.end(finished=True)])

    shown = text.partition("; b")[0].rpartition("<|message|>")[2]  # headers are not shown
    assert stopped(text, "; b") == [Content(shown)]
    whole = [Call("edit", '{"line": 3, "text": "a; b"}')]
    assert stopped(text + "\nNext:", "\nNext:") == whole
    assert stopped(text, "never said") == whole


def test_text_is_not_held_longer_than_needed() -> None:
    made = tokenizer(ANSWERS["hermes"], spelled=True)
    parser = made.answer_parser((), TOOLS)
    shown = [
        "".join(
            event.text
            for token in made.encode(piece)
            for event in parser.push(token)
            if isinstance(event, Content)
        )
        for piece in ("so it", " is <", "to", "p> now", " <tool_call>te", "st")
    ]
    assert shown == ["so it", " is", "", " <top> now", "", ""]


@pytest.mark.parametrize(
    ("family", "body"),
    [
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("qwen3_coder", "<tool_call><function=edit>x</function></tool_call>"),
        ("qwen3_coder", "<tool_call>edit</tool_call>"),
        ("glm45", "<tool_call>edit<arg_key>line</arg_key></tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>edit<｜tool▁call▁end｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>edit<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_call_begin|>functions.edit:0<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS]edit[ARGS]3"),
        ("mistral", "[TOOL_CALLS]edit"),
        ("granite", '<|tool_call|>{"name": 3}'),
        ("olmo3", "<function_calls></function_calls>"),
        ("olmo3", "<function_calls>edit(3)</function_calls>"),
        ("olmo3", "<function_calls>edit(**x)</function_calls>"),
        ("olmo3", "<function_calls>edit(a={[1]: 2})</function_calls>"),
        ("olmo3", "<function_calls>x = edit(a=1)</function_calls>"),
        ("olmo3", "<function_calls>edit(x=open('y'))</function_calls>"),
        ("olmo3", "<function_calls>edit(x={1})</function_calls>"),
        ("olmo3", "<function_calls>edit(x=b'1')</function_calls>"),
        ("olmo3", "<function_calls>x = 1</function_calls>"),
        ("olmo3", "<function_calls>edit(</function_calls>"),
        ("olmo3", "<function_calls>edit(line=1e999)</function_calls>"),
        ("hermes", '<tool_call>{"name": "edit", "arguments": {"line": NaN}}</tool_call>'),
        ("olmo3", "<function_calls>import os</function_calls>"),
        ("harmony", "<|channel|>commentary to=functions.edit<|message|>[1]"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_invalid_one(family: str, body: str) -> None:
    made = tokenizer(Answer(family, body, []), spelled=False)
    (event,) = read(made, made.encode(body), "", finished=True)
    assert isinstance(event, Call) and event.name == "invalid"
    assert "error" in json.loads(event.arguments)


def test_an_answer_without_a_channel_is_text() -> None:
    made = tokenizer(Answer("harmony", "", []), spelled=False)
    events = read(made, made.encode("a test"), "", finished=True)
    assert joined(events) == [Content("a test")]


def test_no_two_calls_of_an_answer_have_one_id() -> None:
    """All events at once, or call by call."""
    events = [call("test", "a"), call("test"), call("edit", "a"), call("edit", "b"), call("test")]
    whole = with_ids(events, "call_{}".format)
    assert [event.id for event in whole if isinstance(event, Call)] == [
        "a", "call_1", "call_2", "b", "call_4",
    ]  # fmt: skip
    taken: set[str] = set()
    assert whole == [one for event in events for one in with_ids([event], "call_{}".format, taken)]


@pytest.mark.parametrize("name", ANSWERS)
def test_without_tools_nothing_is_called(name: str) -> None:
    answer = ANSWERS[name]
    made = tokenizer(answer, spelled=False)
    parser = made.answer_parser(made.encode(answer.begun), None)
    events = [event for token in made.encode(answer.text) for event in parser.push(token)]
    events += parser.end(finished=True)
    assert not any(isinstance(event, Call) for event in events)
    said = joined(event for event in events if isinstance(event, Reasoning))
    assert said == [event for event in answer.events if isinstance(event, Reasoning)] or (
        name == "a call within reasoning"
    )


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<|start|>assistant<|channel|>final' }}", "harmony"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ('<tool_call>\n{"name": ', "hermes"),
        ("'[TOOL_CALLS]' + call.name + '[ARGS]'", "mistral"),
        ("<seed:tool_call><function=", "seed_oss"),
        ("<function_calls>", "olmo3"),
        ("<|tool_call|>", "granite"),
        ("'<|tool|>' + tools + '<|/tool|>'", "granite"),
        ("<|start_header_id|>", "llama3"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_the_template_tells_the_family(template: str, family: str) -> None:
    assert detect_format(template) == family


def test_a_fine_tune_may_reason_with_other_marks_than_its_family() -> None:
    template = b"{# <think> </think> [TOOL_CALLS] #}"
    made = ChatTokenizer(
        small_files()
        | {"tokenizer_config.json": b'{"eos_token": "x"}', "chat_template.jinja": template}
    )
    text = "<think>it adds</think>So.[TOOL_CALLS]test[ARGS]{}"
    events = read(made, made.encode(text), "", finished=True)
    assert joined(events) == [Reasoning("it adds"), Content("So."), call("test")]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("f", '{"a": 1, "b": 2}'), ("f", '{"b":2,"a":1}'), True),
        (("f", '{"a": 1}'), ("g", '{"a": 1}'), False),
        (("f", '{"a": 1}'), ("f", '{"a": 2}'), False),
        # invalid JSON is compared as text
        (("f", "{"), ("f", "{"), True),
        (("f", "{"), ("f", "{ "), False),
        (("f", "[" * 100_000), ("f", "[" * 100_000), True),
        ((INVALID, "a"), (INVALID, "b"), True),
    ],
)
def test_calls_mean_the_same_however_they_are_spelt(
    one: tuple[str, str], other: tuple[str, str], same: bool
) -> None:
    calls = [Call(name=name, arguments=arguments) for name, arguments in (one, other)]
    assert calls[0].means(calls[1]) == calls[1].means(calls[0]) == same


def test_an_argument_is_what_its_schema_says_or_a_text() -> None:
    schema = {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "either": {"type": ["string", "integer"]},
        "list": {"type": "array"},
    }
    given = {"n": "7", "s": "7", "either": "7", "list": "[1", "unknown": "7"}
    assert _typed(given, schema) == given | {"n": 7, "either": 7}
    assert _typed({"n": "seven", "list": "[1]"}, schema) == {"n": "seven", "list": [1]}
