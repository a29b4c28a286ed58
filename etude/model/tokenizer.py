"""Conversion between text, chat messages and token ids, from the files of a Hugging Face directory.
No torch: the gateway uses it.

`tokenizers` reads `tokenizer.json`. `tokenizer_config.json` names the special tokens (`eos_token`
ends a turn; `generation_config.json`, if present, names others that may end it) and, if the chat
template does not show it, the syntax of tool calls (`tool_syntax`, a key of our own). The chat
template is in `chat_template.jinja`, or in `tokenizer_config.json` in older directories.

The author of a message must not be able to end it, or to begin one in another's name: the text of a
control token within a message or a tool is text. `render` replaces it by a stand-in, so that
anything that then looks like a control token was written by the template, and `encode` produces the
tokens of the text behind the stand-in. In an assistant's messages only special tokens are replaced,
because templates search these messages for the marks of reasoning.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from etude.core.errors import EtudeError
from etude.model.detokenizer import PieceStream
from etude.model.output_parser import (
    FORMATS,
    AnswerParser,
    MarkScanner,
    detect_format,
    message_of,
    schemas_of,
    with_ids,
    with_think_marks_of,
)
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
"""Special tokens that a template may use, by these names."""

REASONING_KEYS = {"reasoning_content": "reasoning_content", "message.thinking": "thinking"}
"""Words of a template, and the key where it then looks for the reasoning of a message. A template
without these words finds it within the content, between marks."""
_MARK = re.compile(r"[<\[]\S+[>\]]")
"""Added tokens that mean something other than their letters; the other added tokens are words or
runs of spaces."""
_TAIL = 8
"""Tokens at the end of a prompt that may contain the mark that begins the reasoning."""
_REMEMBERED = 1 << 16
"""Single tokens and pairs whose text is cached."""
_NONCE = f"{secrets.randbelow(10**10):010d}"
"""Unguessable part of a stand-in. Digits only, because templates may trim, escape or change the
case of text."""
_STAND_IN = re.compile(rf"~{_NONCE}:(\d+)~")


class ChatTokenizer:
    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._json = files["tokenizer.json"]
        self._tokenizer = _read_tokenizer(self._json)
        added = self._tokenizer.get_added_tokens_decoder()
        self._controls = {
            id: token.content
            for id, token in added.items()
            if token.special or _MARK.fullmatch(token.content)
        }
        self._control_ids = {_in_json(text): id for id, text in self._controls.items()}
        self._control_texts = _any_of(self._control_ids)
        self._are_spelt_alike = self._control_ids.keys() == set(self._controls.values())
        """True if control tokens have the same spelling in JSON."""
        self._special_ids = {id for id, token in added.items() if token.special}
        special = [added[id].content for id in sorted(self._special_ids)]
        self._special_texts = _any_of(map(_in_json, special))
        self.longest = 2 * max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        """Upper bound of the characters of one token. The vocabulary's spelling of a token has at
        least one character for each of them; doubled because a normaliser may have joined some."""
        config = read_config(files, "tokenizer_config.json")
        self._special = {key: _text(config[key]) for key in SPECIAL if config.get(key)}
        self.eos_token = self._special.get("eos_token", "")
        eos_id = self._tokenizer.token_to_id(self.eos_token)
        if eos_id is None:
            raise EtudeError(
                f"tokenizer_config.json: eos_token {self.eos_token!r} is not in the vocabulary "
                f"of tokenizer.json; set it to the token that ends a turn"
            )
        self.eos_token_id: int = eos_id
        template = (
            files["chat_template.jinja"].decode()
            if "chat_template.jinja" in files
            else chat_template(config)
        ) or ""
        self._read_format(config, template)
        self.supports_tools = "tools" in template
        """False: the template cannot show tools."""
        try:
            self._render = compile_template(template) if template else None
        except TemplateError as e:
            raise EtudeError(
                f"the chat template cannot be parsed ({e}): download the model again, or repair "
                f"the template"
            ) from e
        end_ids = _end_ids(read_config(files, "generation_config.json"))
        self.stop_token_ids = tuple(dict.fromkeys((eos_id, *end_ids, *self._ends_of_turn())))
        """All tokens that end an answer, `eos_token_id` first."""

    def _read_format(self, config: Mapping[str, Any], template: str) -> None:
        """Detect the model's syntax of reasoning and tool calls."""
        self.tool_syntax = config.get("tool_syntax") or detect_format(template)
        if self.tool_syntax not in FORMATS:
            raise EtudeError(
                f"tokenizer_config.json: unknown tool_syntax {self.tool_syntax!r}; use one of "
                f"{', '.join(FORMATS)}"
            )
        self._format = with_think_marks_of(template, FORMATS[self.tool_syntax])
        tokens = set(self._controls.values())
        self._spelled_marks = [mark for mark in self._format.marks if mark not in tokens]
        self._knows_developer = "developer" in template
        self._reasons = any(mark in template for mark in self._format.think)
        keys = (key for word, key in REASONING_KEYS.items() if word in template)
        self._reasoning_key = next(keys, None)

    def _ends_of_turn(self) -> list[int]:
        """The special token that the template writes after an answer, if it writes one."""
        asked = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}]
        try:
            shown = self.render(asked)
        except ValueError:
            return []
        behind = self.encode(shown.rpartition("Answer")[2].lstrip())
        return [id for id in behind[:1] if id in self._special_ids]

    @cached_property
    def vocabulary(self) -> str:
        """A digest of tokenizer.json: if it is equal, ids mean the same."""
        return hashlib.blake2b(self._json, digest_size=16).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, long: bool = False) -> list[int]:
        """Token ids of a text, which may come from `render`. If it is `long`, the other threads of
        the process keep running."""
        encoding = _encoded(self._tokenizer, text, long)
        ids: list[int] = encoding.ids
        if _NONCE not in text:
            return ids
        borders = [(n, *encoding.offsets[n]) for n, id in enumerate(ids) if id in self._controls]
        found = []
        first = 0
        start = 0
        for last, stop, behind in (*borders, (len(ids), len(text), len(text))):
            said = text[start:stop]
            found += self._as_plain(said, long) if _NONCE in said else ids[first:last]
            found += ids[last : last + 1]
            first, start = last + 1, behind
        return found

    def encode_plain(self, text: str, *, long: bool = False) -> list[int]:
        """Token ids of an untrusted text: nothing in it is a control token."""
        ids: list[int] = _encoded(self._plain, text, long).ids
        return ids

    def _as_plain(self, text: str, long: bool) -> list[int]:
        return self.encode_plain(self._as_said(text), long=long)

    @cached_property
    def _plain(self) -> Tokenizer:
        """A tokenizer without control tokens. Created on first use, since few need it."""
        spelled = json.loads(self._json)
        for token in spelled.get("added_tokens") or ():
            token["special"] = token["id"] in self._controls
        tokenizer = _read_tokenizer(json.dumps(spelled).encode())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _as_said(self, text: str) -> str:
        return (
            _STAND_IN.sub(lambda found: self._controls[int(found[1])], text)
            if _NONCE in text
            else text
        )

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """True if the text certainly has more tokens. Encoding may take seconds; this does not."""
        if text.count(_NONCE) > num_tokens:  # each stands for several tokens
            return True
        return len(self._as_said(text)) > num_tokens * self.longest

    def is_plain(self, text: str) -> bool:
        """True if output of `render` spells no control token."""
        return _NONCE not in text and self._control_texts.search(text) is None

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) <= 2:
            return self._decode_few(tuple(ids))
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def _decode_few(self) -> Callable[[tuple[int, ...]], str]:
        """A cache, since every token of an answer is decoded alone, and with the one before it."""
        return lru_cache(_REMEMBERED)(
            lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=False)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        answer: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model reads, for `encode`. With `answer` it ends where the model should
        continue. `options`: further variables of the template. Raises ValueError for messages that
        the template cannot show."""
        if self._render is None:
            raise ValueError(
                "this model has no chat template: it can complete text, but not answer chat "
                "messages"
            )
        form = self._call_form
        shaped = [form.shape(self._as_template_has_it(message)) for message in messages]
        shown, rest = self._with_stand_ins(shaped, {**(options or {}), "tools": list(tools)})
        known = {"messages": shown, "tools": rest["tools"] or None, "add_generation_prompt": answer}
        try:
            return self._render(**{"documents": None, **rest, **self._special, **known})
        # TypeError: the template concatenates a text and something else
        except (TemplateError, TypeError) as e:
            raise ValueError(f"chat template: {self._as_said(str(e))}") from e

    @cached_property
    def _call_form(self) -> CallForm:
        assert self._render is not None
        return call_form(self._render, **self._special)

    def _as_template_has_it(self, message: Message) -> Message:
        """The message with a role that the template knows, and the reasoning under the key that it
        reads."""
        if message.get("role") == "developer" and not self._knows_developer:
            return message | {"role": "system"}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if message.get("role") != "assistant" or not isinstance(reasoning, str):
            return message
        said = message.get("content") or ""
        if self._reasoning_key == "thinking" and said and message.get("tool_calls"):
            # gpt-oss shows one text next to a call
            return message | {"thinking": f"{reasoning}\n\n{said}", "content": ""}
        if self._reasoning_key is not None:
            return message | {self._reasoning_key: reasoning}
        begin, end = self._format.think
        if not self._reasons or end in said:
            return message
        return message | {"content": f"{begin}\n{reasoning}\n{end}\n\n{said}"}

    def _with_stand_ins(
        self, messages: list[Message], rest: dict[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Replace control tokens by stand-ins in messages and options, at any depth."""
        if not self._are_plain(messages):
            messages = [
                self._guarded(message, assistant=message.get("role") == "assistant")
                for message in messages
            ]
        return messages, self._guarded(rest) if any(rest.values()) else rest

    def _are_plain(self, messages: list[Message]) -> bool:
        """True if certainly no message spells a control token; one search covers all of them."""
        if not self._are_spelt_alike:
            return False
        values = [value for message in messages for value in message.values()]
        said = [value for value in values if isinstance(value, str)]
        if len(said) < len(values):  # calls, and any other values of a client
            others = [value for value in values if not isinstance(value, str)]
            said.append(json.dumps(others, ensure_ascii=False))
        return self._control_texts.search("\n".join(said)) is None

    def _guarded(self, said: dict[str, Any], *, assistant: bool = False) -> dict[str, Any]:
        texts = self._special_texts if assistant else self._control_texts
        if self._are_spelt_alike and all(
            isinstance(value, str) and texts.search(value) is None for value in said.values()
        ):
            return said
        text = json.dumps(said, ensure_ascii=False)
        if texts.search(text) is None:
            return said
        guarded: dict[str, Any] = json.loads(
            texts.sub(lambda found: f"~{_NONCE}:{self._control_ids[found[0]]}~", text)
        )
        return guarded

    def begins_reasoning(self, prompt: Sequence[int]) -> bool:
        """True if the prompt ends with the mark that begins the reasoning."""
        end = self.decode(prompt[-_TAIL:]).rstrip()
        return self._reasons and end.endswith(self._format.think[0])

    def answer_parser(
        self,
        prompt: Sequence[int] = (),
        tools: Sequence[Tool] | None = None,
        *,
        stop_token_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
    ) -> AnswerParser:
        """Parser of the answer to a prompt, token by token. `tools`: None if text that looks like a
        call is text."""
        parser = self._format.parser(
            None if tools is None else schemas_of(tools),
            reasons=self._reasons,
            reasoning=self.begins_reasoning(prompt),
        )
        return AnswerParser(
            PieceStream(self.decode, self._controls, stop),
            MarkScanner(self._spelled_marks),
            parser,
            self.stop_token_ids if stop_token_ids is None else stop_token_ids,
        )

    def parse(
        self,
        tokens: Sequence[int],
        tools: Sequence[Tool] | None,
        call_id: Callable[[int], str],
        prompt: Sequence[int] = (),
    ) -> Message:
        """The assistant message that sampled tokens make."""
        parser = self.answer_parser(prompt, tools)
        events = parser.extend(tokens)
        finished = bool(tokens) and tokens[-1] in self.stop_token_ids
        events += parser.end(finished=finished)
        return message_of(with_ids(events, call_id))


def chat_template(config: Mapping[str, Any]) -> str | None:
    """The template within tokenizer_config.json, which has one text, or several with names."""
    said = config.get("chat_template")
    if isinstance(said, list):
        said = {entry["name"]: entry["template"] for entry in said}.get("default")
    return said


def same_vocabulary(one: bytes, other: bytes) -> bool:
    """True if two tokenizer.json files give every token the same id."""
    first, second = (
        _read_tokenizer(data).get_vocab(with_added_tokens=True) for data in (one, other)
    )
    return first == second


def _read_tokenizer(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except ValueError as e:
        raise EtudeError(f"tokenizer.json cannot be read ({e}): download the model again") from e


def read_config(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Parse a JSON file; {} if it is missing."""
    try:
        config = json.loads(files.get(name, b"{}"))
    except ValueError as e:
        raise EtudeError(f"{name} is not valid JSON ({e}): download the model again") from e
    if not isinstance(config, dict):
        raise EtudeError(f"{name} is not a JSON object: download the model again")
    return config


def _end_ids(generation: Mapping[str, Any]) -> list[int]:
    said = generation.get("eos_token_id")
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(id, int) for id in ids):
        raise EtudeError(
            f"generation_config.json: eos_token_id is {said!r}; set it to a token id, or a list "
            f"of token ids"
        )
    return ids


def _encoded(tokenizer: Tokenizer, text: str, long: bool) -> Encoding:
    """Encode a text; only a batch is encoded without the interpreter's lock, which for a short text
    costs more than it saves."""
    if long:
        return tokenizer.encode_batch([text], add_special_tokens=False)[0]
    return tokenizer.encode(text, add_special_tokens=False)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _text(token: Any) -> str:
    """Text of a special token, which is a string or an object with more fields."""
    return token if isinstance(token, str) else str(token["content"])
