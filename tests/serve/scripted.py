"""A model that reasons and calls tools by a script, behind the public API, for testing with clients
by others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.types import ASGIApp

from etude.model.tokenizer import ChatTokenizer
from etude.serve.access import OneToken
from etude.serve.answerer import PolicyAnswerer, ServedModel
from etude.serve.dialects import public_routes
from etude.serve.fake import Scripted
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import create_app
from tests.small_model import small_files

TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | tojson }}{{ eos_token }}{% endif %}
{%- for m in messages %}<|{{ m.role if m.role in ('user', 'tool') else 'assistant' if m.role == \
'assistant' else 'user' }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": {{ call.function.name | tojson }}, \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def model_files() -> dict[str, bytes]:
    """A vocabulary whose marks of calls are tokens, and whose marks of reasoning are spelt."""
    files = small_files(context=4096)
    config = json.loads(files["tokenizer_config.json"]) | {"tool_syntax": "hermes"}
    return files | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }


FILES = model_files()
TOKENIZER = ChatTokenizer(FILES)


def call(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{said}</tool_call>"


def answers(texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, with the end-of-sequence token."""
    return [[*TOKENIZER.encode(text), TOKENIZER.eos_token_id] for text in texts]


def scripted_app(policy: Scripted, token: str | None = None) -> ASGIApp:
    model = ServedModel(tokenizer=TOKENIZER, grammars=GrammarBuilder(FILES), max_context=4096)
    answerer = PolicyAnswerer(model, policy)
    routes = public_routes(model, lambda http: answerer, dict)
    return create_app(routes, OneToken(token) if token else None, model.metrics)


def prompts(policy: Scripted) -> list[str]:
    """The prompts that the model was given, as text."""
    return [TOKENIZER.decode(request.prompt) for request in policy.asked]
