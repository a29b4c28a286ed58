"""The small files of a model with fresh weights: a vocabulary learnt from text, and a chat
template. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from etude.model.output_parser import TOOL_CALL_END, TOOL_CALL_START

END_OF_TURN = "<|end|>"
SPECIAL = (
    END_OF_TURN, "<|tools|>", "<|user|>", "<|assistant|>", "<|tool|>", TOOL_CALL_START,
    TOOL_CALL_END,
)  # fmt: skip

# One token for each word, digit, operator or run of spaces: a bug is one token, and so is its fix.
PRE_TOKENS = r" ?[A-Za-z_]+| ?\d| ?[+\-*<>=!]=?|\n|  +|\"{3}| ?[^\sA-Za-z_\d]| "

_TEMPLATE = """\
{%- if tools %}<|tools|>{{ tools | map(attribute="function.name") | join(" ") }}{{ eos_token }}{% endif %}
{%- for message in messages %}
{%- if message.role == "assistant" %}<|assistant|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}TOOL_CALL_START{{ call.function.name }}
{%- for value in call.function.arguments.values() %}{{ " " ~ value }}{% endfor %}TOOL_CALL_END{% endfor %}{{ eos_token }}
{%- else %}<|{{ "tool" if message.role == "tool" else "user" }}|>{{ message.content }}{{ eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""  # noqa: E501
TEMPLATE = _TEMPLATE.replace("TOOL_CALL_START", TOOL_CALL_START).replace(
    "TOOL_CALL_END", TOOL_CALL_END
)


def tokenizer_files(texts: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; the same texts give the same
    bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {
        "eos_token": END_OF_TURN,
        "tool_syntax": "compact",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
