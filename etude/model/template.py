"""Chat templates, in the environment that they are written for: jinja2 with the extensions that
Hugging Face's templates may use.

A template comes with a model, from an untrusted author: it runs in a sandbox, and sees only its
arguments.

Templates disagree about the calls of a message. Most want the arguments as an object, and a text
next to the calls, if only an empty one; DeepSeek's want the arguments as the original text, and no
content for a message that only calls. A template that gets the other form breaks, or leaves the
call out. No template states what it wants, so each is tried: it is shown a call in every form, and
gets the first form that it shows in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part, for trainers that learn from text. Here it
    changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with a short path to the keys of messages. jinja2 itself fails twice before
    it decides that a dict has no such key, for every key of every message that a template asks
    for."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or hasattr(dict, attribute):
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON without escapes, unlike jinja2's own filter, which escapes for HTML; a model must see
    the original text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_template(text: str) -> Callable[..., str]:
    """Compile to a function of keyword arguments. Both this and that function raise
    TemplateError."""
    jinja = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    jinja.filters["tojson"] = _to_json
    jinja.globals |= {"raise_exception": _raise, "strftime_now": _now}
    template = jinja.from_string(text)
    # Copied on every render, which takes longer from a chain of dicts than from one.
    template.globals = dict(template.globals)
    return template.render


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template wants a message that calls tools."""

    as_text: bool = False
    """Arguments are JSON text; otherwise an object."""
    silent: str | None = ""
    """The content of a message that only calls."""
    short_ids: bool = False
    """Ids have nine letters and digits, as Mistral requires."""

    def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """Convert a message as clients send it, or as trainers write it, to this form."""
        if self.short_ids and isinstance(message.get("tool_call_id"), str):
            message = message | {"tool_call_id": _short(message["tool_call_id"])}
        if not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            arguments = call["function"]["arguments"]
            if self.as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not self.as_text and isinstance(arguments, str):
                arguments = json.loads(arguments)
            call = call | {"function": call["function"] | {"arguments": arguments}}
            if self.short_ids and isinstance(call.get("id"), str):
                call["id"] = _short(call["id"])
            calls.append(call)
        return message | {"tool_calls": calls, "content": message.get("content") or self.silent}


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


FORMS = [
    CallForm(as_text, silent, short_ids)
    for short_ids in (False, True)
    for silent in ("", None)
    for as_text in (False, True)
]

_TRIED = {"name": "some_tool", "arguments": {"some_key": "some_value"}}
_TRIED_TOOL = {
    "type": "function",
    "function": {
        "name": "some_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {"some_key": {"type": "string"}}},
    },
}


def call_form(render: Callable[..., str], **special: str) -> CallForm:
    """The first form in which a template shows a call; the usual one if it shows none."""
    calls = [{"id": "call_0123456789", "type": "function", "function": _TRIED}]
    asked = {"role": "user", "content": "Go on."}

    def shows(form: CallForm) -> bool:
        messages = [asked, form.shape({"role": "assistant", "content": None, "tool_calls": calls})]
        try:
            text = render(
                messages=messages,
                tools=[_TRIED_TOOL],
                documents=None,
                add_generation_prompt=False,
                **special,
            )
        except (TemplateError, TypeError):
            return False
        shown = text.rpartition(asked["content"])[2]
        # no dict in Python's notation
        return "some_tool" in shown and "some_value" in shown and "{'" not in shown

    return next((form for form in FORMS if shows(form)), CallForm())
