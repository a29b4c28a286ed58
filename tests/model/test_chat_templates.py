"""Chat templates render the same bytes as in `transformers`, and directories that `transformers`
writes are read.

The templates were written for this test in the manner of the families; each relies on other
features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from etude.core.errors import EtudeError
from etude.model.directory import read_model_files
from etude.model.from_scratch import tokenizer_files
from etude.model.template import compile_template
from etude.model.tokenizer import ChatTokenizer

FILES = tokenizer_files(["def area(a, b):\n    return a * b\n"] * 3, 320)

TEMPLATES = {
    # Every turn between marks; a system turn is added in front if there is none. (SmolLM2, Qwen2)
    "marks": """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",  # noqa: E501
    # Tools as JSON within the system turn, calls and answers between tags. (Qwen2.5, Hermes)
    "tools": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",  # noqa: E501
    # A namespace that is carried through a backward loop, with an early exit. (Qwen3)
    "namespace": """\
{%- set ns = namespace(last=0, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- set ns.found = true %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 < ns.last and message.role == 'tool' %}{%- continue %}{%- endif %}
    {{- message.role | upper ~ '|' ~ (message.content if message.content is string else '')|trim ~ eos_token }}
{%- endfor %}
{{- ns.found ~ (tools | default([], true) | length) }}""",  # noqa: E501
    # The first token written by the template, the date, JSON over several lines. (Llama 3)
    "header": """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "Today: " + date_string + "\\n" }}
{%- for t in tools or [] %}{{- t | tojson(indent=4) ~ "\\n\\n" }}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'ipython' %}{{- raise_exception('no') }}{%- endif %}
{%- generation %}{{- '<|' + message.role + '|>' + (message.content or '') | trim + '<|eot|>' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}""",  # noqa: E501
}

CALLS_AS_TEXT = {
    # Arguments are joined to texts with `+`, and a message calls if its content is none. (DeepSeek
    # V3, R1)
    "none": """\
{%- set ns = namespace(is_first=true, is_tool=false) -%}
{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
    {%- set ns.is_tool = false %}{%- set ns.is_first = true %}
    {%- for tool in message['tool_calls'] %}
        {{- '<｜Assistant｜><｜calls｜>' if ns.is_first else '\\n' }}
        {{- '<｜call｜>' + tool['type'] + '<｜sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
        {{- tool['function']['arguments'] + '\\n```<｜call end｜>' }}
        {%- set ns.is_first = false %}
    {%- endfor %}
    {{- '<｜calls end｜>' + eos_token }}
{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
    {{- '<｜outputs end｜>' if ns.is_tool else '<｜Assistant｜>' }}
    {{- message['content'].split('</think>')[-1] + eos_token }}
    {%- set ns.is_tool = false %}
{%- endif %}
{%- if message['role'] == 'tool' %}
    {{- ('' if ns.is_tool else '<｜outputs｜>') + '<｜output｜>' + message['content'] + '<｜output end｜>' }}
    {%- set ns.is_tool = true %}
{%- endif %}
{%- endfor -%}
{%- if ns.is_tool %}{{ '<｜outputs end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{%- endif %}""",  # noqa: E501
    # The same, but a message calls if it has calls, and may have a text too. (DeepSeek V3.1)
    "beside": """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
    {{- '<｜Assistant｜></think>' + (message['content'] or '') + '<｜calls｜>' }}
    {%- for tool in message['tool_calls'] %}
        {{- '<｜call｜>' + tool['function']['name'] + '<｜sep｜>' + tool['function']['arguments'] + '<｜call end｜>' }}
    {%- endfor %}
    {{- '<｜calls end｜>' + eos_token }}
{%- elif message['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + message['content'] + eos_token }}
{%- elif message['role'] == 'tool' %}{{ '<｜output｜>' + message['content'] + '<｜output end｜>' }}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{%- endif %}""",  # noqa: E501
    # Without `+`: an object would be shown in Python's notation.
    "printed": """\
{%- for message in messages %}{{ message.role }}:{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments }}]{%- endfor %}
{%- endfor %}""",  # noqa: E501
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Writes <text> & more; schön",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "test", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "Grüße <b>&amp;</b> 'x' \"y\" 日本"}],
    "system": [{"role": "system", "content": " S "}, {"role": "user", "content": "a\n"}],
    "turns": [
        {"role": r, "content": f"{r} {{{{ {n} }}}}"}
        for n, r in enumerate(["user", "assistant", "user"])
    ],
    "calls": [
        {"role": "user", "content": "fix"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("edit", line=3, text='é "<q>"\n'), call("test")],
        },
        {"role": "tool", "content": "ok"},
        {"role": "tool", "content": "1 passed"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "thanks"},
    ],
}


def theirs(template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(FILES["tokenizer.json"].decode()),
        bos_token="<|user|>",
        eos_token="<|end|>",
        chat_template=template,
    )


def as_on_the_wire(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as clients send them: arguments as text, null content if an assistant only calls."""
    copies = json.loads(json.dumps(messages))
    for message in copies:
        if message.get("tool_calls"):
            message["content"] = message["content"] or None
        for made in message.get("tool_calls", []):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
    return copies  # type: ignore[no-any-return]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("where", ["jinja", "config", "named"])
def test_templates_render_the_same_bytes(template: str, where: str, tmp_path: Path) -> None:
    reference = theirs(TEMPLATES[template])
    reference.save_pretrained(tmp_path)
    if where != "jinja":
        (tmp_path / "chat_template.jinja").unlink()
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        named = [
            {"name": n, "template": t} for n, t in (("rag", "no"), ("default", TEMPLATES[template]))
        ]
        config["chat_template"] = TEMPLATES[template] if where == "config" else named
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = ChatTokenizer(read_model_files(tmp_path))
    for messages in CHATS.values():
        for tools in (TOOLS, []):
            for answer in (True, False):
                expected = reference.apply_chat_template(
                    messages, tools=tools or None, tokenize=False, add_generation_prompt=answer
                )
                assert tokenizer.render(as_on_the_wire(messages), tools, answer=answer) == expected


@pytest.mark.parametrize("template", CALLS_AS_TEXT)
def test_templates_that_want_arguments_as_text_get_them(template: str) -> None:
    """The text equals that of transformers for messages with text arguments and null content."""
    special = json.dumps({"bos_token": "<|user|>", "eos_token": "<|end|>"}).encode()
    files = {
        "chat_template.jinja": CALLS_AS_TEXT[template].encode(),
        "tokenizer_config.json": special,
    }
    tokenizer, reference = ChatTokenizer(FILES | files), theirs(CALLS_AS_TEXT[template])
    for sent in (as_on_the_wire(CHATS["calls"]), CHATS["turns"]):
        for answer in (True, False):
            expected = reference.apply_chat_template(
                sent, tokenize=False, add_generation_prompt=answer
            )
            assert tokenizer.render(sent, answer=answer) == expected
            # A recorder leaves out null values.
            short = [
                {key: value for key, value in message.items() if value is not None}
                for message in sent
            ]
            assert tokenizer.render(short, answer=answer) == expected
    assert '{"line": 3, "text": "é \\"<q>\\"\\n"}' in tokenizer.render(CHATS["calls"])


def test_the_form_of_calls_is_found_where_they_are_shown_with_tools_alone() -> None:
    template = """\
{%- for message in messages %}{{ message.content or '' }}
{%- if tools %}{% for call in message.tool_calls or [] %}
{{- '<call>' + call.function.name + ' ' + call.function.arguments + '</call>' }}
{%- endfor %}{% endif %}{% endfor %}"""
    tokenizer = ChatTokenizer(FILES | {"chat_template.jinja": template.encode()})
    sent = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": None, "tool_calls": [call("edit", line=3)]},
    ]
    assert tokenizer.render(sent, TOOLS) == 'Go on.<call>edit {"line": 3}</call>'


def test_arguments_stay_as_they_were_written() -> None:
    tokenizer = ChatTokenizer(FILES | {"chat_template.jinja": CALLS_AS_TEXT["beside"].encode()})
    sent = [{"role": "assistant", "content": None, "tool_calls": [call("edit")]}]
    sent[0]["tool_calls"][0]["function"]["arguments"] = '{ "line":3.0 }'
    assert '<｜sep｜>{ "line":3.0 }<｜call end｜>' in tokenizer.render(sent)


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    reference = theirs(TEMPLATES["marks"])
    reference.save_pretrained(tmp_path)
    reference, tokenizer = (
        AutoTokenizer.from_pretrained(tmp_path),
        ChatTokenizer(read_model_files(tmp_path)),
    )
    for text in (
        "def area(a):\n\treturn a",
        "<|user|>hi<|end|>",
        "  5 77x",
        "Grüße 日本 🙂",
        "",
        "\x00\r\n",
    ):
        ids = reference(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (reference.eos_token_id, "<|end|>")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("tokenizer.json", b"junk", r"tokenizer.json cannot be read .* download"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer.json cannot be read"),
        ("tokenizer.json", b'{"model": {"type": "Spells"}}', r"tokenizer.json cannot be read"),
        ("tokenizer_config.json", b"{", r"tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", b"{}", r"eos_token '' is not in the vocabulary"),
        (
            "tokenizer_config.json",
            b'{"eos_token": "<|end|>", "tool_syntax": "xml"}',
            r"unknown tool_syntax 'xml'",
        ),
        ("chat_template.jinja", b"{% if %}", r"chat template cannot be parsed"),
    ],
)
def test_junk_is_named(name: str, data: bytes, said: str) -> None:
    with pytest.raises(EtudeError, match=said):
        ChatTokenizer(FILES | {name: data})


def test_a_model_without_a_template_still_reads_text() -> None:
    files = {name: data for name, data in FILES.items() if name != "chat_template.jinja"}
    tokenizer = ChatTokenizer(files)
    assert tokenizer.decode(tokenizer.encode("area")) == "area"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "x"}])


def test_a_template_says_what_it_does_not_take() -> None:
    refusing = ChatTokenizer(
        FILES | {"chat_template.jinja": b"{{ raise_exception('only one user at a time') }}"}
    )
    with pytest.raises(ValueError, match="only one user at a time"):
        refusing.render([])
    escaping = ChatTokenizer(FILES | {"chat_template.jinja": b"{{ messages.__class__.__mro__ }}"})
    with pytest.raises(ValueError, match="unsafe"):
        escaping.render([])


SHORT_IDS = """\
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if message.tool_call_id|length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
[TOOL_RESULTS]{{ message.tool_call_id }}:{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{ raise_exception("ids have nine letters") }}{% endif %}
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments|tojson }}
{%- endfor %}
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}
{%- endfor %}"""


def test_a_template_that_wants_short_ids_gets_them(tmp_path: Path) -> None:
    """A call and its result get the same id, the model's own ids stay unchanged, and the text is
    that of transformers."""
    reference = theirs(SHORT_IDS)
    reference.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(read_model_files(tmp_path))
    assert tokenizer.tool_syntax == "mistral"

    def conversation(ids: list[str]) -> list[dict[str, Any]]:
        function = {"name": "edit", "arguments": {"line": 3}}
        calls = [{"id": id, "type": "function", "function": function} for id in ids]
        results = [{"role": "tool", "tool_call_id": id, "content": "done"} for id in ids]
        asked = {"role": "user", "content": "Go on."}
        return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, *results]

    given = [
        "call_8f0e1d2c3b4a",
        "Xy1234567",
        "call_2",
        "call8f0e1d2c3b4a",
        "call_1234",
        "Ünlaut123",
    ]
    shown = tokenizer.render(conversation(given))
    ids = re.findall(r"CALL_ID\](\w+)\[", shown)
    assert ids == re.findall(r"RESULTS\](\w+):", shown) and len(set(ids)) == len(given)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in ids)
    assert ids[1] == "Xy1234567"
    assert shown == reference.apply_chat_template(conversation(ids), tokenize=False)


@pytest.mark.parametrize(
    "name", ["role", "calls", "calls.x", "none", "none.x", "items", "keys()", "get('role')"]
    + ["__class__", "__class__.mro", "pop", "update({})", "text.upper()", "text.x", "missing.x"],
)  # fmt: skip
def test_the_short_way_to_a_key_says_what_the_sandbox_says(name: str) -> None:
    message = {"role": "user", "calls": {"x": 1}, "none": None, "text": "a", "get": 1, "items": 2}
    text = "{{ m.name }}|{{ m.name is defined }}".replace("name", name)
    theirs = ImmutableSandboxedEnvironment().from_string(text).render

    def shown(render: Callable[..., str]) -> str:
        try:
            return render(m=message)
        except TemplateError as e:
            return f"{type(e).__name__} {e}"

    said = shown(compile_template(text))
    assert re.sub("0x[0-9a-f]+", "", said) == re.sub("0x[0-9a-f]+", "", shown(theirs))
