"""Sessions and preference pairs as tokens: the tokens that the loss counts, under any chat
template, and the inputs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.core.config import parse
from etude.core.errors import EtudeError
from etude.model.tokenizer import ChatTokenizer
from etude.trainer import data
from etude.trainer.data import (
    built_in_sessions,
    read_preferences,
    read_sessions,
    tokenize,
    vocabulary_texts,
)
from etude.trainer.prepare import scratch_files
from tests.small_model import small_files

FILES = small_files()
TOKENIZER = ChatTokenizer(FILES)
SESSION: list[dict[str, Any]] = [
    {"role": "user", "content": "call a tool"},
    {"role": "assistant", "content": "read"},
    {"role": "user", "content": "test"},
    {"role": "assistant", "content": "submit"},
]

# A line break after the end of a turn, which the model does not generate. (SmolLM2, Qwen)
BREAKS = """\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token + '\\n' }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
# Shows the assistant's reasoning only in its last turn. (Qwen3)
FORGETS = """\
{% for m in messages %}{% set c = m.content %}
{%- if m.role == 'assistant' and not loop.last %}{% set c = c.split('/')[-1] %}{% endif %}
{{- '<|' + m.role + '|>' + c + eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# Opens the answer with words that the whole conversation does not contain.
OPENS = """\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>think{% endif %}"""
ENDLESS = """\
{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def with_template(template: str) -> ChatTokenizer:
    return ChatTokenizer(FILES | {"chat_template.jinja": template.encode()})


def counted(row: tuple[list[int], list[bool]]) -> str:
    return TOKENIZER.decode([token for token, counts in zip(*row, strict=True) if counts])


def test_only_what_the_assistant_says_counts() -> None:
    (row,) = tokenize(SESSION, TOKENIZER, [])
    assert TOKENIZER.decode(row[0]) == TOKENIZER.render(SESSION)
    assert counted(row) == "read<|end|>submit<|end|>"


def test_marks_within_what_is_said_are_text() -> None:
    session = [
        {"role": "user", "content": "x<|end|>"},
        {"role": "assistant", "content": "y<|end|><|user|>z"},
    ]
    (row,) = tokenize(session, TOKENIZER, [])
    assert TOKENIZER.decode(
        row[0]
    ) == "<|user|>x<|end|><|assistant|>y<|end|><|user|>z<|end|>".replace("x", "x<|end|>")
    assert counted(row) == "y<|end|><|user|>z<|end|>"
    assert row[0].count(TOKENIZER.eos_token_id) == 2


def test_what_follows_the_end_of_a_turn_does_not_count() -> None:
    tokenizer = with_template(BREAKS)
    (row,) = tokenize(SESSION, tokenizer, [])
    assert counted(row) == "read<|end|>submit<|end|>"
    assert TOKENIZER.decode(row[0]) == tokenizer.render(SESSION).removesuffix("\n")


def test_a_template_that_forgets_makes_a_row_for_each_turn() -> None:
    """Each turn is learnt after the text that the engine will show the model before it."""
    thinking = [
        m | {"content": f"hm/{m['content']}"} if m["role"] == "assistant" else m for m in SESSION
    ]
    tokenizer = with_template(FORGETS)
    rows = tokenize(thinking, tokenizer, [])
    assert [counted(row) for row in rows] == ["hm/read<|end|>", "hm/submit<|end|>"]
    for row, end in zip(rows, (2, 4), strict=True):
        prompt = TOKENIZER.decode([token for token, counts in zip(*row, strict=True) if not counts])
        assert prompt == tokenizer.render(thinking[: end - 1], answer=True)


@pytest.mark.parametrize("template", [OPENS, ENDLESS])
def test_a_template_whose_answers_cannot_be_told_is_refused(template: str) -> None:
    with pytest.raises(
        ValueError, match=r"message 2: the chat template does not render it as an answer"
    ):
        tokenize(SESSION, with_template(template), [])


def test_messages_of_weight_0_are_read_and_not_imitated() -> None:
    (row,) = tokenize([SESSION[0], SESSION[1] | {"weight": 0}, *SESSION[2:]], TOKENIZER, [])
    assert counted(row) == "submit<|end|>"


def write(path: Path, *records: object) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def session(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"edit {number}"}, SESSION[1]]} | more


def test_sessions_from_files_and_those_held_back(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": '{"line": 2}'}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {}}}]
    tooled = {"messages": [SESSION[0], {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    path = write(
        tmp_path / "a.jsonl",
        *[session(n) for n in range(60)],
        *[session(n) for n in range(60)],
        tooled,
    )
    found = read_sessions(path, TOKENIZER, 256, "error")
    assert len(found.train) + len(found.heldout) == 121 and not found.skipped
    assert 2 <= len(found.heldout) <= 30
    assert {tuple(row[0]) for row in found.heldout}.isdisjoint(tuple(row[0]) for row in found.train)
    said = [counted(row) for row in found.train + found.heldout]
    assert "<tool_call>edit 2</tool_call><|end|>" in said
    two = read_sessions(
        write(tmp_path / "b.jsonl", session(1), session(2)), TOKENIZER, 256, "error"
    )
    assert len(two.train) == len(two.heldout) == 1


def test_some_sessions_are_shown_whatever_their_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "HELDOUT_ONE_IN", 1)  # every digest is a held-out one
    path = write(tmp_path / "a.jsonl", session(1), session(2), session(3))
    found = read_sessions(path, TOKENIZER, 256, "error")
    assert (len(found.train), len(found.heldout)) == (1, 2)


def test_what_is_too_long_is_named_and_dropped_or_an_error(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "edit " * 99}, SESSION[1]]}
    path = write(tmp_path / "a.jsonl", session(1), session(2), long)
    found = read_sessions(path, TOKENIZER, 64, "drop")
    assert found.skipped == [f"{path}:3"] and len(found.train) + len(found.heldout) == 2
    with pytest.raises(
        EtudeError, match=r"a\.jsonl:3 has \d+ tokens, but the model's context is 64"
    ):
        read_sessions(path, TOKENIZER, 64, "error")
    with pytest.raises(EtudeError, match="sft needs at least two different sessions that fit"):
        read_sessions(
            write(tmp_path / "b.jsonl", session(1), session(1), long), TOKENIZER, 64, "drop"
        )


ASSISTANT = SESSION[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "'messages' is not a list of messages"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": ["hi"]}, "messages 1: it is not an object with a role"),
        (
            {"messages": [SESSION[0], {"role": "assistant"}]},
            "messages 2: its content is not a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages 1: its content is not a string",
        ),
        ({"messages": [SESSION[0]]}, "the assistant says nothing"),
        (
            {"messages": [ASSISTANT | {"tool_calls": [{}]}]},
            "a tool call has no function name",
        ),
        (
            {
                "messages": [
                    ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "the arguments of f are not valid JSON",
        ),
        (
            {
                "messages": [
                    ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}
                ]
            },
            "the arguments of f are not an object",
        ),
        (
            {"messages": SESSION, "tools": [{"type": "function"}]},
            "tools is not a list of functions",
        ),
        ("{", "the line is not valid JSON"),
    ],
)
def test_a_malformed_session_is_named(tmp_path: Path, record: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", session(1), session(2), record)
    with pytest.raises(EtudeError, match=rf"a\.jsonl:3: .*{message}"):
        read_sessions(path, TOKENIZER, 256, "error")


def test_a_session_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", session(1), session(2))
    refusing = with_template("{{ raise_exception('not today') }}")
    with pytest.raises(EtudeError, match=r"a\.jsonl:1: .*not today; fix or remove the line"):
        read_sessions(path, refusing, 256, "error")


def test_a_session_may_begin_with_the_assistant(tmp_path: Path) -> None:
    begun = {"messages": [{"role": "assistant", "content": "submit"}, *SESSION]}
    found = read_sessions(write(tmp_path / "a.jsonl", begun, session(1)), TOKENIZER, 256, "error")
    said = [counted(row) for row in found.train + found.heldout]
    assert "submit<|end|>read<|end|>submit<|end|>" in said


def pair(chosen: object, rejected: object) -> dict[str, object]:
    return {"prompt": SESSION[:3], "chosen": chosen, "rejected": rejected}


def test_pairs_share_their_prompt_and_count_their_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        pair("submit", "test"),
        pair(SESSION[3], [{"role": "assistant", "content": "test"}]),
        pair([SESSION[3], SESSION[0], SESSION[1]], "read"),
        pair("submit " * 99, "read"),
    )
    pairs, skipped = read_preferences(path, TOKENIZER, 64, "drop")
    assert skipped == [f"{path}:4"]
    assert pairs[0] == pairs[1]
    assert [counted(row) for row in pairs[0]] == ["submit<|end|>", "test<|end|>"]
    assert counted(pairs[2][0]) == "submit<|end|>read<|end|>"
    prompt = TOKENIZER.render(SESSION[:3], answer=True)
    assert all(TOKENIZER.decode(row[0]).startswith(prompt) for pair in pairs for row in pair)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "'prompt' is not a list of messages"),
        (pair("submit", None), "'rejected' is not a list of messages"),
        (pair("submit", "submit"), "chosen and rejected are the same"),
        (pair("submit", [SESSION[0]]), "rejected makes 0 token sequences instead of one"),
    ],
)
def test_a_malformed_pair_is_named(tmp_path: Path, record: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", pair("submit", "test"), record)
    with pytest.raises(EtudeError, match=rf"a\.jsonl:2: {message}"):
        read_preferences(path, TOKENIZER, 256, "error")


def test_an_answer_of_several_turns_needs_a_template_that_does_not_forget(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        pair([{"role": "assistant", "content": "a/b"}, SESSION[0], SESSION[1]], "read"),
    )
    with pytest.raises(EtudeError, match="chosen makes 2 token sequences"):
        read_preferences(path, with_template(FORGETS), 256, "error")
    with pytest.raises(EtudeError, match="no pair fits into the model's context of 4 tokens"):
        read_preferences(write(tmp_path / "b.jsonl", pair("submit", "test")), TOKENIZER, 4, "drop")


RUN = 'name = "a"\n[tasks]\ntrain = 30\n[[stage]]\nkind = "midtrain"\nsteps = 1\n'


def test_built_in_sessions_are_held_back_by_task() -> None:
    config = parse(RUN)
    found = built_in_sessions(config, 25, TOKENIZER, 4096)
    assert (len(found.train), len(found.heldout), found.skipped) == (25, 2, [])
    train, heldout = ({tuple(row[0]) for row in rows} for rows in (found.train, found.heldout))
    assert train.isdisjoint(heldout)
    assert built_in_sessions(config, 25, TOKENIZER, 4096) == found
    few = built_in_sessions(parse(RUN, ["tasks.train=1"]), 1, TOKENIZER, 4096)
    assert len(few.train) == len(few.heldout) == 1
    with pytest.raises(EtudeError, match="a demonstration has"):
        built_in_sessions(config, 25, TOKENIZER, 16)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(data, "NUM_SAMPLES", 8)
    return 8


def test_a_vocabulary_is_learnt_from_all_that_the_run_will_read(
    tmp_path: Path, few_samples: int
) -> None:
    own = tmp_path / "own.jsonl"
    write(own, *({"body": f"word{n}"} for n in range(few_samples + 1)))
    source = f'[[stage.sources]]\npath = "{own}"\nfield = "body"\n'
    plain = vocabulary_texts(parse(RUN))
    texts = vocabulary_texts(parse(RUN + source))
    assert texts == plain + [f"word{n}" for n in range(few_samples)]
    assert any(text.startswith("edit ") for text in plain), "calls, with their arguments"
    assert all(plain) and "None" not in plain


def test_a_new_model_has_the_shape_that_the_run_asks_for(few_samples: int) -> None:
    shape = {
        "hidden_size": 48,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "intermediate_size": 80,
        "max_context": 96,
        "vocab_size": 320,
    }
    files = scratch_files(parse(RUN, [f"model.{name}={value}" for name, value in shape.items()]))
    made = json.loads(files["config.json"])
    assert made["vocab_size"] == ChatTokenizer(files).vocab_size <= 320
    assert [
        made[name]
        for name in (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "max_position_embeddings",
        )
    ] == [48, 3, 6, 2, 80, 96]
