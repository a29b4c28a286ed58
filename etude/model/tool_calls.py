"""Parsers of the tool call syntaxes of model families. Pure.

A reader takes the text between the marks of one call and the offered tools, and returns the calls
in it; `output_parser.py` finds the marks. A body that cannot be read is still a call, named
`invalid`: the harness answers it with an error, so that the model pays for it and can learn.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each tool's parameters, by the tool's name."""

INVALID = "invalid"
_SPARE = 100
"""Levels of nesting that a call must leave unused, since it is parsed again later with more of the
stack in use."""

DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
MISTRAL_ARGUMENTS, MISTRAL_ID = "[ARGS]", "[CALL_ID]"

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>\s*)?$", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>|$))", re.DOTALL
)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class InvalidToolCall(ValueError):
    """The text between the marks of a call cannot be read."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object."""
    id: str | None = None
    """The model's own id, if its family writes one."""

    def means(self, other: Call) -> bool:
        """True if both calls mean the same, however they are spelt."""
        if self.name != other.name or self.name == INVALID:
            return self.name == other.name
        try:
            return bool(json.loads(self.arguments) == json.loads(other.arguments))
        except (ValueError, RecursionError):
            return self.arguments == other.arguments


Read = Callable[[str, Schemas], list[Call]]


def read_calls(read: Read, body: str, schemas: Schemas) -> list[Call]:
    try:
        return read(body, schemas)
    except (ValueError, RecursionError) as e:
        return [_call(INVALID, {"error": str(e)})]


def can_read(calls: Sequence[Call]) -> bool:
    """True if none of the results of `read_calls` is invalid."""
    return all(call.name != INVALID for call in calls)


def compact(body: str, schemas: Schemas) -> list[Call]:
    """`edit 3 return a + b`: the tool's name, then its arguments in the order of its schema; the
    last one takes the rest of the line. It costs a small model a fifth of the tokens of JSON."""
    name, _, rest = body.strip().partition(" ")
    parameters = list(schemas.get(name, {}).items())
    values = rest.split(" ", len(parameters) - 1) if parameters and rest else []
    if len(values) != len(parameters):
        raise InvalidToolCall(f"{name} takes {len(parameters)} arguments")
    arguments = {
        key: int(value) if schema.get("type") == "integer" and value.isdecimal() else value
        for (key, schema), value in zip(parameters, values, strict=True)
    }
    return [_call(name, arguments)]


def hermes(body: str, schemas: Schemas) -> list[Call]:
    """`{"name": "edit", "arguments": {"line": 3, "text": "return a + b"}}` as Qwen writes it, or a
    list of such objects as SmolLM2 does."""
    said = _json(body)
    calls = said if isinstance(said, list) else [said]
    if not calls:
        raise InvalidToolCall("a list of no calls")
    return [_from_object(call) for call in calls]


def llama3(body: str, schemas: Schemas) -> list[Call]:
    """`{"name": "edit", "parameters": {"line": 3}}`, several separated by semicolons."""
    decoder = json.JSONDecoder()
    calls = list[Call]()
    rest = body.strip()
    while rest:
        try:
            said, end = decoder.raw_decode(rest)
        except ValueError as e:
            raise InvalidToolCall(f"not a JSON tool call: {e}") from e
        calls += [_from_object(call) for call in (said if isinstance(said, list) else [said])]
        rest = rest[end:].lstrip(" ;\n")
    if not calls:
        raise InvalidToolCall("no call")
    return calls


def qwen3_coder(body: str, schemas: Schemas) -> list[Call]:
    """`<function=edit>`, which contains `<parameter=text>` with the raw value, on lines of its
    own."""
    found = _FUNCTION.fullmatch(body.strip())
    if found is None:
        raise InvalidToolCall("a call is <function=NAME> .. </function>")
    name = found[1].strip()
    values = {key.strip(): _on_lines(value) for key, value in _PARAMETER.findall(found[2])}
    if _PARAMETER.sub("", found[2]).strip():
        raise InvalidToolCall(f"{name}: a parameter is <parameter=NAME> .. </parameter>")
    return [_call(name, _typed(values, schemas.get(name, {})))]


def glm45(body: str, schemas: Schemas) -> list[Call]:
    """`edit`, then `<arg_key>line</arg_key><arg_value>3</arg_value>` for each argument."""
    name = body.partition("<arg_key>")[0].strip()
    rest = body.strip().removeprefix(name)
    if not name or _ARGUMENT.sub("", rest).strip():
        raise InvalidToolCall("a call is NAME, then <arg_key> and <arg_value> in turn")
    values = {key.strip(): value for key, value in _ARGUMENT.findall(rest)}
    return [_call(name, _typed(values, schemas.get(name, {})))]


def deepseek(body: str, schemas: Schemas) -> list[Call]:
    """The kind of call, a separator, the name, and JSON in a code block (V3, R1); or the name, a
    separator and JSON (V3.1)."""
    head, separator, rest = body.partition(DEEPSEEK_SEPARATOR)
    if not separator:
        raise InvalidToolCall(f"a call has {DEEPSEEK_SEPARATOR} in it")
    name, fence, block = rest.partition("```json")
    if not fence:
        return [_call(head.strip(), _object(rest))]
    return [_call(name.strip(), _object(block.strip().removesuffix("```")))]


def kimi_k2(body: str, schemas: Schemas) -> list[Call]:
    """`functions.edit:0`, which is the id of the call, a separator and JSON."""
    head, separator, rest = body.partition(KIMI_ARGUMENTS)
    id = head.strip()
    found = _KIMI_ID.fullmatch(id)
    if not separator or found is None:
        raise InvalidToolCall(f"a call is functions.NAME:NUMBER{KIMI_ARGUMENTS} and an object")
    return [_call(found[1], _object(rest), id)]


def mistral(body: str, schemas: Schemas) -> list[Call]:
    """`edit[ARGS]{"line": 3}`, before the arguments perhaps `[CALL_ID]` and the id (Devstral); or a
    list of objects with their ids (earlier models)."""
    head, separator, rest = body.partition(MISTRAL_ARGUMENTS)
    if not separator or head.lstrip().startswith("["):
        return hermes(body, schemas)
    name, _, id = (part.strip() for part in head.partition(MISTRAL_ID))
    return [_call(name, _object(rest), id or None)]


def olmo3(body: str, schemas: Schemas) -> list[Call]:
    """`edit(line=3, text="return a + b")`, each call on lines of its own, in Python, possibly with
    JSON's literals."""
    try:
        statements = ast.parse(body.strip()).body
    except (SyntaxError, ValueError, MemoryError) as e:
        raise InvalidToolCall("a call is NAME(argument=value, ..)") from e
    if not statements:
        raise InvalidToolCall("no call")
    return [_from_python(statement) for statement in statements]


def _from_python(statement: ast.stmt) -> Call:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args:
        raise InvalidToolCall("a call is NAME(argument=value, ..)")
    arguments: dict[str, Any] = {}
    try:
        for word in call.keywords:
            if word.arg is None:
                raise InvalidToolCall("a call is NAME(argument=value, ..)")
            arguments[word.arg] = ast.literal_eval(_JsonWords().visit(word.value))
        return _call(ast.unparse(call.func), arguments)
    except TypeError as e:  # a set, bytes, or an invalid key
        raise InvalidToolCall(f"arguments are such as JSON has: {e}") from e


class _JsonWords(ast.NodeTransformer):
    WORDS = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.WORDS[node.id]) if node.id in self.WORDS else node


def harmony(name: str, body: str) -> list[Call]:
    """A message to `functions.NAME`; its text is the object of arguments."""
    return [_call(name, _object(body or "{}"))]


def _from_object(said: Any) -> Call:
    if not isinstance(said, dict) or "name" not in said:
        raise InvalidToolCall("not a JSON tool call: no name")
    arguments = said.get("arguments", said.get("parameters", {}))
    if not isinstance(said["name"], str) or not isinstance(arguments, dict):
        raise InvalidToolCall("a tool call needs a name and an object of arguments")
    id = said.get("id")
    return _call(said["name"], arguments, id if isinstance(id, str) and id else None)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise InvalidToolCall(f"not a JSON tool call: {e}") from e


def _object(text: str) -> dict[str, Any]:
    said = _json(text)
    if not isinstance(said, dict):
        raise InvalidToolCall("the arguments of a call are an object")
    return said


def _on_lines(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _typed(values: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert texts to the types of the schema: values that are not strings in it are JSON."""
    return {key: _value(text, schema.get(key)) for key, text in values.items()}


def _value(text: str, schema: Any) -> Any:
    kinds = _kinds(schema) - {"string"}
    try:
        value = json.loads(text) if kinds else text
    except ValueError:
        return text
    return value if any(isinstance(value, _TYPES[kind]) for kind in kinds) else text


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type") or [
        kind
        for option in schema.get("anyOf") or schema.get("oneOf") or ()
        for kind in _kinds(option)
    ]
    return {kinds} & _TYPES.keys() if isinstance(kinds, str) else _TYPES.keys() & set(kinds)


def _call(name: str, arguments: dict[str, Any], id: str | None = None) -> Call:
    """Build a call. Raises for arguments that could not be sent or parsed again: infinity and
    numbers of thousands of digits, halves of surrogate pairs, and objects nested deeper than the
    stack."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    json.dumps([name, text, id], ensure_ascii=False).encode()
    json.loads("[" * _SPARE + text + "]" * _SPARE)
    return Call(name, text, id)
