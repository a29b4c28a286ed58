"""Text, chat messages and token ids, from the files of a Hugging Face directory. No torch in here: the gateway uses it.

`tokenizer.json` is read by `tokenizers`, `chat_template.jinja` by a sandboxed `jinja2`, and the end of a turn and the
way that the model writes tool calls stand in `tokenizer_config.json` (`eos_token`, `tool_syntax`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_SPARE = 100
"""Levels of nesting that a call leaves unused, since it is read again with more of the stack in use than here."""


class BadCall(ValueError):
    """The text between the tool-call marks cannot be read."""


def parse_compact(body: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """`edit 3 return a + b`: the tool's name, then its arguments in the order of its schema; the last one takes the
    rest of the line. It costs a small model a fifth of the tokens that JSON would."""
    name, _, rest = body.strip().partition(" ")
    parameters = list(tools.get(name, {}).items())
    values = rest.split(" ", len(parameters) - 1) if parameters and rest else []
    if len(values) != len(parameters):
        raise BadCall(f"{name} takes {len(parameters)} arguments")
    return name, {key: _typed(value, schema) for (key, schema), value in zip(parameters, values, strict=True)}


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    return int(value) if schema.get("type") == "integer" and value.isdecimal() else value


def parse_hermes(body: str, tools: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """`{"name": "edit", "arguments": {"line": 3, "text": "return a + b"}}`, as Qwen and SmolLM write it."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError) as e:
        raise BadCall(f"not a JSON tool call: {e}") from e
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise BadCall("a tool call needs a name and an object of arguments")
    return name, arguments


SYNTAX: dict[str, Callable[[str, Mapping[str, Mapping[str, Any]]], tuple[str, dict[str, Any]]]] = {
    "compact": parse_compact,
    "hermes": parse_hermes,
}


class ChatTokenizer:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        self._parse = SYNTAX[config.get("tool_syntax", "hermes")]
        eos = config["eos_token"]
        self.eos_text: str = eos if isinstance(eos, str) else eos["content"]
        eos_id = self._tokenizer.token_to_id(self.eos_text)
        if eos_id is None:
            raise ValueError(f"tokenizer_config.json: eos_token {self.eos_text!r} is not in the vocabulary")
        self.eos: int = eos_id
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._template = jinja.from_string(files["chat_template.jinja"].decode())

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, answer: bool = False) -> str:
        """The text that the model reads. With `answer` it ends where the model is to go on. Raises ValueError for
        messages that the template cannot show."""
        shown = [_arguments_as_objects(message) for message in messages]
        tool_list = [tool["function"] for tool in tools]
        try:
            return self._template.render(
                messages=shown, tools=tool_list or None, add_generation_prompt=answer, eos_token=self.eos_text
            )
        except TemplateError as e:
            raise ValueError(f"chat template: {e}") from e

    def parse(self, text: str, tools: Sequence[Tool], call_id: Callable[[int], str]) -> Message:
        """The assistant message that a sampled text says. A call that cannot be read is still a call, named `invalid`:
        the harness answers it with an error, so that the model pays for it and can learn."""
        text = text.removesuffix(self.eos_text)
        schemas = {t["function"]["name"]: t["function"].get("parameters", {}).get("properties", {}) for t in tools}
        calls = []
        for number, match in enumerate(CALL.finditer(text)):
            try:
                function = _on_the_wire(*self._parse(match[1], schemas))
            except (ValueError, RecursionError) as e:
                function = _on_the_wire("invalid", {"error": str(e)})
            calls.append({"id": call_id(number), "type": "function", "function": function})
        content = CALL.sub("", text)
        message: Message = {"role": "assistant", "content": content if content or not calls else None}
        return message | ({"tool_calls": calls} if calls else {})


def _on_the_wire(name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """A call as OpenAI's wire format has it. Raises for what could not be sent or read again: numbers of thousands of
    digits, halves of surrogate pairs, and objects that are nested deeper than the stack."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    json.dumps(function, ensure_ascii=False).encode()
    json.loads("[" * _SPARE + function["arguments"] + "]" * _SPARE)
    return function


def _arguments_as_objects(message: Message) -> Message:
    """OpenAI's wire format carries the arguments of a call as a JSON string; templates expect the object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        calls.append(
            call
            | {"function": function | {"arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}}
        )
    return message | {"tool_calls": calls}
