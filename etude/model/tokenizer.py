"""Text, chat messages and token ids, from the files of a Hugging Face directory. No torch in here:
the gateway uses it.

`tokenizer.json` is read by `tokenizers`. `tokenizer_config.json` says which tokens are special
(`eos_token` ends a turn; others that may end it too are in `generation_config.json`, if there is
one) and how the model writes tool calls (`tool_syntax`, a key of our own). The chat template stands
in `chat_template.jinja`, or in `tokenizer_config.json` as in older directories.

Who writes a message must not be able to end it, or to begin one in another's name: the text of a
special token within a message or a tool is text. `render` puts a stand-in in its place, so that
what then looks like a special token was written by the template, and `encode` gives the tokens of
the text that the stand-in is for.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from etude.core.errors import EtudeError
from etude.model.template import CallForm, call_form, compile_template

Message = dict[str, Any]
Tool = dict[str, Any]

SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""What a template may know of, by these names."""

TOOL_CALL_START, TOOL_CALL_END = "<tool_call>", "</tool_call>"
CALL = re.compile(f"{TOOL_CALL_START}(.*?){TOOL_CALL_END}", re.DOTALL)

_SPARE = 100
"""Levels of nesting that a call leaves unused, since it is read again with more of the stack in use
than here."""


_NONCE = f"{secrets.randbelow(10**10):010d}"
"""Nobody else writes it. Digits, because templates may trim, escape or change the case of what they
show."""
_STAND_IN = re.compile(rf"~{_NONCE}:(\d+)~")


class InvalidToolCall(ValueError):
    """The text between the tool-call marks cannot be read."""


Calls = list[tuple[str, dict[str, Any]]]


def parse_compact(body: str, tools: Mapping[str, Mapping[str, Any]]) -> Calls:
    """`edit 3 return a + b`: the tool's name, then its arguments in the order of its schema; the
    last one takes the rest of the line. It costs a small model a fifth of the tokens that JSON
    would."""
    name, _, rest = body.strip().partition(" ")
    parameters = list(tools.get(name, {}).items())
    values = rest.split(" ", len(parameters) - 1) if parameters and rest else []
    if len(values) != len(parameters):
        raise InvalidToolCall(f"{name} takes {len(parameters)} arguments")
    return [
        (
            name,
            {
                key: _typed(value, schema)
                for (key, schema), value in zip(parameters, values, strict=True)
            },
        )
    ]


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    return int(value) if schema.get("type") == "integer" and value.isdecimal() else value


def parse_hermes(body: str, tools: Mapping[str, Mapping[str, Any]]) -> Calls:
    """`{"name": "edit", "arguments": {"line": 3, "text": "return a + b"}}` as Qwen writes it, or a
    list of such objects as SmolLM2 does."""
    try:
        said = json.loads(body)
        calls = [
            (call["name"], call.get("arguments", {}))
            for call in (said if isinstance(said, list) else [said])
        ]
    except (ValueError, KeyError, TypeError) as e:
        raise InvalidToolCall(f"not a JSON tool call: {e}") from e
    if not calls or not all(
        isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls
    ):
        raise InvalidToolCall("a tool call needs a name and an object of arguments")
    return calls


SYNTAX: dict[str, Callable[[str, Mapping[str, Mapping[str, Any]]], Calls]] = {
    "compact": parse_compact,
    "hermes": parse_hermes,
}


class ChatTokenizer:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._json = files["tokenizer.json"]
        self._tokenizer = _read_tokenizer(self._json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = {id: token.content for id, token in added.items() if token.special}
        self._control_ids = {_in_json(text): id for id, text in self._controls.items()}
        self._control_texts = re.compile("|".join(map(re.escape, self._control_ids)) or r"(?!)")
        self.longest = 2 * max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        """No token stands for more characters. A vocabulary spells a token with at least one for
        each of them; twice, because a normaliser may have put some together."""
        config = read_config(files, "tokenizer_config.json")
        self._special = {key: _text(config[key]) for key in SPECIAL if config.get(key)}
        self.eos_token = self._special.get("eos_token", "")
        eos_id = self._tokenizer.token_to_id(self.eos_token)
        if eos_id is None:
            raise EtudeError(
                f"tokenizer_config.json: eos_token {self.eos_token!r} is not in the vocabulary of "
                f"tokenizer.json; name "
                f"the token that ends a turn"
            )
        self.eos_token_id: int = eos_id
        self._end_ids = _end_ids(read_config(files, "generation_config.json"))
        syntax = config.get("tool_syntax", "hermes")
        if syntax not in SYNTAX:
            raise EtudeError(
                f"tokenizer_config.json: tool_syntax is {syntax!r}; write one of "
                f"{', '.join(SYNTAX)}"
            )
        self._parse = SYNTAX[syntax]
        template = (
            files["chat_template.jinja"].decode()
            if "chat_template.jinja" in files
            else chat_template(config)
        )
        self.supports_tools = "tools" in (template or "")
        """Otherwise the model is not told of them."""
        try:
            self._render = compile_template(template) if template else None
        except TemplateError as e:
            raise EtudeError(
                f"the chat template cannot be read ({e}): fetch the model again, or repair it"
            ) from e

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer, `eos_token_id` first."""
        return tuple(dict.fromkeys((self.eos_token_id, *self._end_ids, *self._ends_of_turn())))

    def _ends_of_turn(self) -> list[int]:
        """The special token that the template writes behind an answer, if it is one."""
        asked = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}]
        try:
            shown = self.render(asked)
        except ValueError:
            return []
        behind = self.encode(shown.rpartition("Answer")[2].lstrip())
        return [id for id in behind[:1] if id in self._controls]

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, long: bool = False) -> list[int]:
        """`text` may come from `render`. If it is `long`, the other threads of the process go on
        meanwhile."""
        encoding = _encoded(self._tokenizer, text, long)
        ids: list[int] = encoding.ids
        if _NONCE not in text:
            return ids
        borders = [(n, *encoding.offsets[n]) for n, id in enumerate(ids) if id in self._controls]
        found, first, start = [], 0, 0
        for last, stop, behind in (*borders, (len(ids), len(text), len(text))):
            said = text[start:stop]
            found += self._as_plain(said, long) if _NONCE in said else ids[first:last]
            found += ids[last : last + 1]
            first, start = last + 1, behind
        return found

    def _as_plain(self, text: str, long: bool) -> list[int]:
        ids: list[int] = _encoded(self._plain, self._as_said(text), long).ids
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        """To which no text is a special token. Few need it, so it is made for the first who
        does."""
        tokenizer = _read_tokenizer(self._json)
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _as_said(self, text: str) -> str:
        return (
            _STAND_IN.sub(lambda found: self._controls[int(found[1])], text)
            if _NONCE in text
            else text
        )

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """Whether it is certain that the text has more tokens. To encode it may take seconds; this
        does not."""
        if text.count(_NONCE) > num_tokens:  # what they stand for is several tokens each
            return True
        return len(self._as_said(text)) > num_tokens * self.longest

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, answer: bool = False
    ) -> str:
        """The text that the model reads, for `encode`. With `answer` it ends where the model is to
        go on. Raises ValueError for messages that the template cannot show."""
        if self._render is None:
            raise ValueError(
                "this model has no chat template: it continues text, and cannot be talked to in "
                "messages"
            )
        form = self._call_form
        shown, offered = self._with_stand_ins(
            [form.shape(message) for message in messages], list(tools)
        )
        try:
            return self._render(
                messages=shown,
                tools=offered or None,
                documents=None,
                add_generation_prompt=answer,
                **self._special,
            )
        # TypeError: a template that adds a text to what is none
        except (TemplateError, TypeError) as e:
            raise ValueError(f"chat template: {self._as_said(str(e))}") from e

    @cached_property
    def _call_form(self) -> CallForm:
        assert self._render is not None
        return call_form(self._render, **self._special)

    def _with_stand_ins(
        self, messages: list[Message], tools: list[Tool]
    ) -> tuple[list[Message], list[Tool]]:
        # all that they say, at whatever depth
        text = json.dumps([messages, tools], ensure_ascii=False)
        if self._control_texts.search(text) is None:
            return messages, tools
        guarded = self._control_texts.sub(
            lambda found: f"~{_NONCE}:{self._control_ids[found[0]]}~", text
        )
        messages, tools = json.loads(guarded)
        return messages, tools

    def shows(self, shown: str, answer: Sequence[int], message: Message) -> bool:
        """Whether `shown`, a part of what `render` gave, says all that was sampled as `answer` and
        handed over as `message`. Calls may be spelt otherwise, and there may be other space around;
        no word may be missing."""
        shown = self._as_said(shown)
        said = self.decode(answer[:-1] if answer[-1] in self.stop_token_ids else answer)
        if not (calls := message.get("tool_calls")):
            return shown.strip() == said.strip()
        return CALL.sub("", said).strip() in shown and all(
            call["function"]["name"] in shown for call in calls
        )

    def parse(self, text: str, tools: Sequence[Tool], call_id: Callable[[int], str]) -> Message:
        """The assistant message that a sampled text says. A call that cannot be read is still a
        call, named `invalid`: the harness answers it with an error, so that the model pays for it
        and can learn."""
        text = text.removesuffix(self.eos_token)
        schemas = {
            t["function"]["name"]: t["function"].get("parameters", {}).get("properties", {})
            for t in tools
        }
        functions = []
        for match in CALL.finditer(text):
            try:
                functions += [
                    _on_the_wire(name, arguments)
                    for name, arguments in self._parse(match[1], schemas)
                ]
            except (ValueError, RecursionError) as e:
                functions.append(_on_the_wire("invalid", {"error": str(e)}))
        calls = [
            {"id": call_id(n), "type": "function", "function": f} for n, f in enumerate(functions)
        ]
        content = CALL.sub("", text)
        message: Message = {
            "role": "assistant",
            "content": content if content or not calls else None,
        }
        return message | ({"tool_calls": calls} if calls else {})


def chat_template(config: Mapping[str, Any]) -> str | None:
    """The template within tokenizer_config.json: a text, or several with names."""
    said = config.get("chat_template")
    if isinstance(said, list):
        said = {entry["name"]: entry["template"] for entry in said}.get("default")
    return said


def same_vocabulary(one: bytes, other: bytes) -> bool:
    """Whether two tokenizer.json give every token the same id."""
    first, second = (
        _read_tokenizer(data).get_vocab(with_added_tokens=True) for data in (one, other)
    )
    return first == second


def _read_tokenizer(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as e:
        raise EtudeError(f"tokenizer.json cannot be read ({e}): fetch the model again") from e


def read_config(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Empty if the file is not there."""
    try:
        config = json.loads(files.get(name, b"{}"))
    except ValueError as e:
        raise EtudeError(f"{name} is no JSON ({e}): fetch the model again") from e
    if not isinstance(config, dict):
        raise EtudeError(f"{name} is no JSON object: fetch the model again")
    return config


def _end_ids(generation: Mapping[str, Any]) -> list[int]:
    said = generation.get("eos_token_id")
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(id, int) for id in ids):
        raise EtudeError(
            f"generation_config.json: eos_token_id is {said!r}; write a token id, or a list of them"
        )
    return ids


def _encoded(tokenizer: Tokenizer, text: str, long: bool) -> Encoding:
    """Only a batch is encoded without the interpreter's lock; for a short text that costs more than
    it saves."""
    if long:
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]
    return tokenizer.encode(text, add_special_tokens=False)


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _text(token: Any) -> str:
    """A special token is a text, or an object that says more about it."""
    return token if isinstance(token, str) else str(token["content"])


def _on_the_wire(name: str, arguments: dict[str, Any]) -> dict[str, str]:
    """A call as OpenAI's wire format has it. Raises for what could not be sent or read again:
    numbers of thousands of digits, halves of surrogate pairs, and objects that are nested deeper
    than the stack."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    json.dumps(function, ensure_ascii=False).encode()
    json.loads("[" * _SPARE + function["arguments"] + "]" * _SPARE)
    return function
