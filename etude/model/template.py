"""Chat templates, in the environment that they are written for: jinja2 with what Hugging Face's templates may use.

A template comes with a model, from whoever made it: it runs in a sandbox, and sees nothing but what it is handed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for trainers that learn from text. Here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """jinja2's own filter escapes for HTML; a model must see the text as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def compile_template(text: str) -> Callable[..., str]:
    """A function of keyword arguments. Both this and it raise TemplateError."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    jinja.filters["tojson"] = _to_json
    jinja.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return jinja.from_string(text).render
