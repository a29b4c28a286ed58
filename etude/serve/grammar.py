"""Grammars for structured outputs: JSON that fits a schema, or tool calls.

A grammar is a text in the notation of llguidance, so it can be sent to a worker, where
`grammar_matcher.py` enforces it. Making one needs no model, but only the syntax in which the model
writes calls (`tool_syntax` in tokenizer_config.json), and whether the marks around a call are
tokens of their own. Whitespace between the parts of JSON is bounded, so that a weak model cannot
fill its answer with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.model.output_parser import (
    FORMATS,
    TOOL_CALL_END,
    TOOL_CALL_START,
    detect_format,
    with_think_marks_of,
)
from etude.model.tokenizer import Tool, chat_template

JSON_SPACE = {"whitespace_pattern": r"[ ]?|\n[ ]{0,16}"}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Schema = Mapping[str, Any]


def hermes_call(function: Mapping[str, Any]) -> str:
    start = json.dumps('{"name": ' + json.dumps(function["name"]) + ', "arguments": ')
    # arguments are an object even if the schema does not say so
    arguments = {**(function.get("parameters") or NO_ARGUMENTS), "type": "object"}
    return f'{start} {_json_rule(arguments)} "}}"'


def compact_call(function: Mapping[str, Any]) -> str:
    """The name, then the arguments in the order of the schema, separated by spaces. The last one
    takes the rest of the text, unless it is an integer."""
    properties: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
    values = [
        "/[0-9]+/" if isinstance(schema, dict) and schema.get("type") == "integer" else r"/[^\s]+/"
        for schema in properties.values()
    ]
    if values and values[-1] != "/[0-9]+/":
        values[-1] = r"/[^\s](.|\n)*/"
    return ' " " '.join([json.dumps(function["name"]), *values])


CALLS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "hermes": hermes_call,
    "compact": compact_call,
}


class GrammarBuilder:
    """Builds grammars for one model."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        added = {
            token["content"]: token["id"]
            for token in json.loads(files["tokenizer.json"]).get("added_tokens") or ()
        }
        template = files.get("chat_template.jinja", b"").decode() or chat_template(config) or ""
        syntax = config.get("tool_syntax") or detect_format(template)
        self._call = CALLS.get(syntax)
        self._marks_are_tokens = {TOOL_CALL_START, TOOL_CALL_END} <= added.keys()
        _, mark = with_think_marks_of(template, FORMATS[syntax]).think
        self._thought = (
            rf"thought: /(.|\n)*/ <[{added[mark]}]>"
            if mark in added
            else rf"thought[suffix={json.dumps(mark)}]: /(.|\n)*/"
        )

    @property
    def enforces_calls(self) -> bool:
        """False for model families without a grammar for calls."""
        return self._call is not None

    def text(self, schema: Schema) -> str:
        """Grammar of JSON that fits a schema."""
        return _grammar(json_schema=_spaced(schema))

    def calls(
        self, tools: Sequence[Tool], *, parallel: bool, otherwise: Schema | None = None
    ) -> str:
        """Grammar of one call, or of one or more if `parallel`; or of JSON that fits
        `otherwise`."""
        rules = [
            f"start: call{'+' if parallel else ''}{' | said' if otherwise is not None else ''}"
        ]
        rules.append(f"call: {self._mark(TOOL_CALL_START)} body {self._mark(TOOL_CALL_END)}")
        if otherwise is not None:
            rules.append(f"said: {_json_rule(otherwise)}")
        return _lark([*rules, self._body(tools)])

    def one_call_at_most(self, tools: Sequence[Tool]) -> str:
        """Grammar of any text, optionally followed by one call."""
        if self._marks_are_tokens:
            rules = [f"start: SAID? ({TOOL_CALL_START} body {TOOL_CALL_END})?", r"SAID: /(.|\n)+/"]
        else:
            rules = [
                f"start: SAID | upto body {json.dumps(TOOL_CALL_END)} |",
                r"SAID: /(.|\n)+/",
                rf"upto[suffix={json.dumps(TOOL_CALL_START)}]: /(.|\n)*/",
            ]
        return _lark([*rules, self._body(tools)])

    def after_reasoning(self, grammar: str) -> str:
        """Grammar of an answer that first ends the reasoning which the prompt has begun."""
        (answer,) = json.loads(grammar)["grammars"]
        rules = ["start: thought SPACE @answer", self._thought, r"SPACE: /\n{0,2}/"]
        return json.dumps(
            {"grammars": [{"lark_grammar": "\n".join(rules)}, {"name": "answer", **answer}]}
        )

    def _body(self, tools: Sequence[Tool]) -> str:
        assert self._call is not None
        return "body: " + " | ".join(f"({self._call(tool['function'])})" for tool in tools)

    def _mark(self, mark: str) -> str:
        return mark if self._marks_are_tokens else json.dumps(mark)


def _json_rule(schema: Schema) -> str:
    return "%json " + json.dumps(_spaced(schema))


def _spaced(schema: Schema) -> Schema:
    return {**schema, "x-guidance": JSON_SPACE}


def _lark(rules: Sequence[str]) -> str:
    return _grammar(lark_grammar="\n".join(rules) + "\n")


def _grammar(**one: Any) -> str:
    return json.dumps({"grammars": [one]})
