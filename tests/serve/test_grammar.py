"""Grammars constrain the answer, whatever the model prefers: tokens are drawn at random here."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from etude.model.tokenizer import ChatTokenizer
from etude.serve.grammar import ANY_OBJECT, GrammarBuilder
from etude.serve.grammar_matcher import GrammarCompiler, reason
from tests.small_model import small_files

COMPACT = small_files()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "how": {"$ref": "#/$defs/how"}},
                "required": ["line", "how"],
                "additionalProperties": False,
                "$defs": {"how": {"enum": ["up", "down"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "test"}},
]
SCHEMAS: list[dict[str, Any]] = [
    {"enum": ["yes", "no", 3, None]},
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": -5, "maximum": 70},
            "b": {"type": "string", "maxLength": 6},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"$ref": "#/$defs/leaf"},
        "maxItems": 4,
        "$defs": {"leaf": {"type": "boolean"}},
    },
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{3}$"}]},
]


def files(syntax: str, *, tokens: bool) -> dict[str, bytes]:
    """The files of a model with this call syntax, with or without special tokens for the marks
    around calls."""
    config = json.loads(COMPACT["tokenizer_config.json"]) | {"tool_syntax": syntax}
    tokenizer = json.loads(COMPACT["tokenizer.json"])
    if not tokens:
        vocabulary = tokenizer["model"]["vocab"]
        for mark in ("<tool_call>", "</tool_call>"):
            vocabulary[f"unused {mark}"] = vocabulary.pop(mark)
        tokenizer["added_tokens"] = [
            t for t in tokenizer["added_tokens"] if "tool_call" not in t["content"]
        ]
    return COMPACT | {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def reasoning_files(*, tokens: bool) -> dict[str, bytes]:
    """A model whose prompts begin its reasoning, with or without tokens for the marks around it."""
    small = files("hermes", tokens=True)
    tokenizer = json.loads(small["tokenizer.json"])
    if tokens:
        marks = {"<tool_call>": "<think>", "</tool_call>": "</think>"}
        for before, after in marks.items():
            tokenizer["model"]["vocab"][after] = tokenizer["model"]["vocab"].pop(before)
        for token in tokenizer["added_tokens"]:
            token["content"] = marks.get(token["content"], token["content"])
    return small | {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "chat_template.jinja": b"{% for m in messages %}{{ m.content }}{% endfor %}<think>",
    }


def wander(small: dict[str, bytes], grammar: str, seed: int, limit: int = 300) -> str | None:
    """A random text that follows the grammar; None if it does not end within the limit."""
    rng, tokenizer = random.Random(seed), ChatTokenizer(small)
    guide = GrammarCompiler(
        small["tokenizer.json"], vocab_size=310, eos=tokenizer.eos_token_id
    ).compile(grammar)
    said: list[int] = []
    while len(said) < limit:
        allowed = np.flatnonzero(guide.allowed()).tolist()
        assert max(allowed) < tokenizer.vocab_size  # the model has more rows than there are tokens
        token = (
            tokenizer.eos_token_id
            if tokenizer.eos_token_id in allowed and rng.random() < 0.3
            else rng.choice(allowed)
        )
        guide.accept(token)
        assert guide.error is None
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(said)
        said.append(token)
    return None


@pytest.mark.parametrize("schema", SCHEMAS)
def test_json_fits_its_schema(schema: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(schema)
    for seed in range(6):
        text = wander(COMPACT, GrammarBuilder(COMPACT).text(schema), seed)
        assert text is not None
        validator.validate(json.loads(text))


def test_any_object() -> None:
    texts = [wander(COMPACT, GrammarBuilder(COMPACT).text(ANY_OBJECT), seed) for seed in range(12)]
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended and all(isinstance(value, dict) for value in ended)


@pytest.mark.parametrize(
    ("syntax", "tokens"), [("hermes", True), ("hermes", False), ("compact", True)]
)
def test_calls_can_be_read(syntax: str, tokens: bool) -> None:
    small = files(syntax, tokens=tokens)
    grammars, tokenizer = GrammarBuilder(small), ChatTokenizer(small)
    several = grammars.calls(TOOLS, parallel=True)
    one = grammars.calls(TOOLS[:1], parallel=False)
    counts = set()
    for seed in range(12):
        for grammar in (several, one):
            if (text := wander(small, grammar, seed)) is None:
                continue
            message = tokenizer.parse(tokenizer.encode(text), TOOLS, str)
            assert message["content"] is None
            names = [call["function"]["name"] for call in message["tool_calls"]]
            assert set(names) <= ({"edit"} if grammar is one else {"edit", "test"})
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                assert list(arguments) == (
                    ["line", "how"] if call["function"]["name"] == "edit" else []
                )
            counts.add(len(names) if grammar is several else -len(names))
    assert -1 in counts and min(counts) == -1 and max(counts) > 1


@pytest.mark.parametrize(
    "parameters", [{"properties": {}}, {"description": "any"}, {"type": ["object", "null"]}]
)
def test_arguments_are_an_object_whatever_the_schema_says(parameters: dict[str, Any]) -> None:
    small = files("hermes", tokens=True)
    tools = [{"type": "function", "function": {"name": "edit", "parameters": parameters}}]
    texts = [wander(small, GrammarBuilder(small).calls(tools, parallel=False), n) for n in range(9)]
    tokenizer = ChatTokenizer(small)
    for text in filter(None, texts):
        (call,) = tokenizer.parse(tokenizer.encode(text), tools, str)["tool_calls"]
        assert call["function"]["name"] == "edit"


@pytest.mark.parametrize("tokens", [True, False])
def test_at_most_one_call(tokens: bool) -> None:
    small = files("hermes", tokens=tokens)
    grammar, tokenizer = GrammarBuilder(small).one_call_at_most(TOOLS), ChatTokenizer(small)
    guides = GrammarCompiler(small["tokenizer.json"], vocab_size=300, eos=tokenizer.eos_token_id)
    call = '<tool_call>{"name": "test", "arguments": {}}</tool_call>'
    for text, end in (("", True), ("so", True), ("so" + call, True), ("<tool_call>", False)):
        guide = guides.compile(grammar)
        for token in tokenizer.encode(text):
            assert guide.allowed()[token], text
            guide.accept(token)
        assert guide.allowed()[tokenizer.eos_token_id] == end
    assert np.flatnonzero(guides_after(guides, grammar, tokenizer, "so" + call)).tolist() == [
        tokenizer.eos_token_id
    ]


def test_looking_ahead_leaves_a_guide_where_it_is() -> None:
    """Masks after each token of a draft, as far as the grammar allows it, including past the
    grammar's end."""
    tokenizer = ChatTokenizer(COMPACT)
    guides = GrammarCompiler(COMPACT["tokenizer.json"], vocab_size=310, eos=tokenizer.eos_token_id)
    grammar = GrammarBuilder(COMPACT).text(SCHEMAS[0])
    draft = tokenizer.encode(wander(COMPACT, grammar, seed=0) or "") + [tokenizer.eos_token_id, 5]
    stepped, ahead = guides.compile(grammar), guides.compile(grammar)
    for place, token in enumerate(draft[:-1]):
        assert (ahead.allowed() == stepped.allowed()).all()
        masks = ahead.allowed_after([*draft[place:]])
        assert len(masks) >= len(draft[place:-2])
        assert (ahead.allowed_after([5, *draft]) == []) or ahead.allowed()[5]
        stepped.accept(token)
        ahead.accept(token)
        if place < len(draft) - 2:
            assert (masks[0] == stepped.allowed()).all()
    assert ahead.error is None and stepped.error is None


def guides_after(guides: GrammarCompiler, grammar: str, tokenizer: ChatTokenizer, text: str) -> Any:
    guide = guides.compile(grammar)
    for token in tokenizer.encode(text):
        guide.accept(token)
    return guide.allowed()


def test_json_or_calls() -> None:
    small = files("hermes", tokens=True)
    grammar = GrammarBuilder(small).calls(TOOLS, parallel=True, otherwise=SCHEMAS[0])
    texts = [wander(small, grammar, seed) for seed in range(20)]
    tokenizer = ChatTokenizer(small)
    said = [tokenizer.parse(tokenizer.encode(text), TOOLS, str) for text in texts if text]
    assert {"tool_calls" in message for message in said} == {True, False}
    assert all("tool_calls" in m or json.loads(m["content"]) in SCHEMAS[0]["enum"] for m in said)


@pytest.mark.parametrize(
    "schema", [{"type": "wat"}, {"not": {}}, {"type": "object", "properties": 3}]
)
def test_a_schema_that_cannot_be_enforced_is_refused(schema: dict[str, Any]) -> None:
    guides = GrammarCompiler(COMPACT["tokenizer.json"], vocab_size=300, eos=0)
    with pytest.raises(ValueError, match="grammar or JSON schema: "):
        guides.compile(GrammarBuilder(COMPACT).text(schema))


SELF: dict[str, Any] = {"$ref": "#"}
MANY = [{"type": "function", "function": {"name": f"t{n}", "parameters": {}}} for n in range(2001)]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (
            GrammarBuilder(COMPACT).text({"type": "string", "pattern": "(a"}),
            "regex parse error: unclosed group",
        ),
        (
            GrammarBuilder(COMPACT).text({"type": "string", "pattern": "a(?=b)"}),
            "look-around, .* is not supported",
        ),
        (GrammarBuilder(COMPACT).text(SELF), "no text satisfies it$"),
        (GrammarBuilder(COMPACT).calls(MANY, parallel=True), "it is too large to enforce"),
    ],
)
def test_why_a_grammar_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        guide = GrammarCompiler(COMPACT["tokenizer.json"], vocab_size=300, eos=0).compile(grammar)
        for _ in range(3):
            guide.accept(int(guide.allowed().nonzero()[0][-1]))
        raise ValueError(guide.error)


@pytest.mark.parametrize(
    "said", ["panic: assertion failed: x < y\n<state>", "Parser Error: Current row has 2001 items"]
)
def test_what_is_too_large_is_said_to_be(said: str) -> None:
    assert reason(said).startswith("it is too large")


@pytest.mark.parametrize("where", ["file", "config"])
def test_calls_are_enforced_where_the_template_is_of_a_family_with_a_grammar(where: str) -> None:
    config = json.loads(COMPACT["tokenizer_config.json"])
    config.pop("tool_syntax", None)

    def enforced(template: str) -> bool:
        told = config | ({"chat_template": template} if where == "config" else {})
        given = COMPACT | {"tokenizer_config.json": json.dumps(told).encode()}
        given["chat_template.jinja"] = template.encode() if where == "file" else b""
        return GrammarBuilder(given).enforces_calls

    assert enforced("{{ messages }}<tool_call>") and not enforced("{{ messages }}<|python_tag|>")


@pytest.mark.parametrize("tokens", [True, False])
def test_reasoning_that_the_prompt_has_begun_comes_before_the_answer(tokens: bool) -> None:
    """Even if the reasoning looks like the answer. The parser finds both."""
    small = reasoning_files(tokens=tokens)
    grammars, tokenizer = GrammarBuilder(small), ChatTokenizer(small)
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": "a"}]))
    assert tokenizer.begins_reasoning(prompt) and not tokenizer.begins_reasoning(prompt[:1])
    compiler = GrammarCompiler(small["tokenizer.json"], vocab_size=310, eos=tokenizer.eos_token_id)
    for grammar in (grammars.text(SCHEMAS[1]), grammars.calls(TOOLS, parallel=True)):
        guide = compiler.compile(grammars.after_reasoning(grammar))
        for token in tokenizer.encode('well {"a": 1, "b": "x"}'):
            assert guide.allowed()[token] and not guide.allowed()[tokenizer.eos_token_id]
            guide.accept(token)
    guide = compiler.compile(grammars.after_reasoning(grammars.text(SCHEMAS[1])))
    answer = tokenizer.encode('well {}</think>\n\n{"a": 3, "b": "x"}')
    for token in (*answer, tokenizer.eos_token_id):
        assert guide.allowed()[token]
        guide.accept(token)
    assert guide.error is None
    said = tokenizer.parse([*answer, tokenizer.eos_token_id], None, str, prompt)
    assert (said["reasoning_content"], said["content"]) == ("well {}", '{"a": 3, "b": "x"}')
