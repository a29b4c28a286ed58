"""The official client of OpenAI against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from etude.model.tokenizer import ChatTokenizer
from tests.serve.serving import FILES, serving, write_model

TOKENIZER = ChatTokenizer(FILES)
MODEL = "tiny"
READ: list[Any] = [{"role": "user", "content": "read area.py"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "integer"}, "new": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "test"}},
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "why": {"enum": ["typo", "sign"]},
    },
    "required": ["line", "why"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = write_model(tmp_path_factory.mktemp("serve") / MODEL)
    with (
        serving(model, token="secret") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client,
    ):
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **({"model": MODEL, "messages": READ, "seed": 1, "max_tokens": 24} | options)
    )


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(ask(client, stream=True, **options))


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    one, again, other = ask(client), ask(client), ask(client, seed=2)
    assert (
        one.choices[0].message.content
        == again.choices[0].message.content
        != other.choices[0].message.content
    )
    assert one.object == "chat.completion" and one.model == MODEL and one.id != again.id
    assert one.usage.prompt_tokens == len(TOKENIZER.encode(TOKENIZER.render(READ, answer=True)))
    assert one.usage.total_tokens == one.usage.prompt_tokens + one.usage.completion_tokens
    assert ask(
        client, seed=-5, user="me", metadata={"a": "b"}, store=False, service_tier="auto"
    ).choices


def test_n_answers_differ_and_the_first_is_the_one_alone(client: openai.OpenAI) -> None:
    alone, several = ask(client), ask(client, n=4)
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert texts[0] == alone.choices[0].message.content and len(set(texts)) == 4
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens


def test_greedy_and_narrow_sampling_agree(client: openai.OpenAI) -> None:
    greedy = ask(client, temperature=0).choices[0].message.content
    assert greedy == ask(client, temperature=0, seed=9).choices[0].message.content
    assert greedy == ask(client, extra_body={"top_k": 1}).choices[0].message.content
    assert greedy == ask(client, top_p=1e-9).choices[0].message.content


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    for options in ({}, {"stop": ["a", "tool"]}, {"n": 3}, {"max_tokens": 1}):
        whole = ask(client, **options)
        chunks = streamed(client, **options)
        assert len({chunk.id for chunk in chunks}) == 1
        for choice in whole.choices:
            pieces = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
            assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [
                choice.finish_reason
            ]
            assert pieces[0].delta.role == "assistant"
            assert pieces[-1].weight_version == choice.weight_version


def test_usage_in_a_stream_comes_last_and_only_if_wanted(client: openai.OpenAI) -> None:
    assert not any("usage" in chunk.model_fields_set for chunk in streamed(client))
    chunks = streamed(client, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage == ask(client).usage


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(
        client, logprobs=True, top_logprobs=3, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    content = choice.logprobs.content
    assert len(content) == len(choice.token_ids) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        # the likeliest token was taken
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert (
            bytes(entry.bytes).decode() == entry.token if entry.bytes else "\ufffd" in entry.token
        )
    pieces = streamed(client, logprobs=True, top_logprobs=3, temperature=0)
    told = [
        entry
        for chunk in pieces
        for c in chunk.choices
        if c.logprobs
        for entry in c.logprobs.content
    ]
    assert [entry.token for entry in told] == [entry.token for entry in content]
    assert all(
        entry.top_logprobs == [] for entry in ask(client, logprobs=True).choices[0].logprobs.content
    )


def test_stop_texts_may_cross_tokens(client: openai.OpenAI) -> None:
    # The answer is fixed, and ASCII: whatever tokens are drawn, every boundary between them is also
    # one between characters.
    said = {
        "type": "json_schema",
        "json_schema": {"name": "said", "schema": {"const": "submit a test of area.py"}},
    }
    options: dict[str, Any] = {
        "max_tokens": 60,
        "response_format": said,
        "extra_body": {"return_token_ids": True},
    }
    answer = ask(client, **options)
    text, ids = answer.choices[0].message.content, answer.choices[0].token_ids
    boundary = len(TOKENIZER.decode(ids[: len(ids) // 2]))
    stop = text[boundary - 2 : boundary + 2]
    stopped = ask(client, stop=[stop, "never said"], **options)
    choice = stopped.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]
    shortest = next(n for n in range(len(ids)) if stop in TOKENIZER.decode(ids[:n]))
    assert choice.token_ids == ids[:shortest]  # no token was sampled after the stop text
    assert stopped.usage.completion_tokens == shortest


def test_a_prediction(client: openai.OpenAI) -> None:
    plain = ask(client, max_tokens=8, temperature=0)
    assert plain.usage.completion_tokens_details is None
    prediction: Any = {"type": "content", "content": plain.choices[0].message.content}
    answer = ask(client, max_tokens=8, temperature=0, prediction=prediction)
    assert answer.choices[0].message == plain.choices[0].message
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_tools_are_called_as_told(client: openai.OpenAI) -> None:
    for seed in range(4):
        required = ask(
            client, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=200
        ).choices[0]
        assert required.finish_reason == "tool_calls" and required.message.tool_calls
        named = {"type": "function", "function": {"name": "edit"}}
        (call,) = (
            ask(client, tools=TOOLS, tool_choice=named, seed=seed, max_tokens=200)
            .choices[0]
            .message.tool_calls
        )
        assert call.type == "function" and call.function.name == "edit"
        assert all(isinstance(value, int) for value in json.loads(call.function.arguments).values())
        single = ask(
            client,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=200,
        )
        assert len(single.choices[0].message.tool_calls) == 1
        none = ask(client, tools=TOOLS, tool_choice="none", seed=seed).choices[0]
        assert none.message.tool_calls is None and none.message.content is not None


def test_parallel_calls_and_their_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    counts = []
    for seed in range(6):
        whole = ask(client, seed=seed, **options).choices[0]
        calls = whole.message.tool_calls
        chunks = streamed(client, seed=seed, **options)
        told = [
            call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or ()
        ]
        assert [call.index for call in told] == list(range(len(calls)))
        assert [(c.id, c.function.name, c.function.arguments) for c in told] == [
            (c.id, c.function.name, c.function.arguments) for c in calls
        ]
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason
        assert len({call.id for call in calls}) == len(calls)
        counts.append(len(calls))
    assert max(counts) > 1


def test_a_conversation_with_results_of_tools(client: openai.OpenAI) -> None:
    called = ask(client, tools=TOOLS, tool_choice="required", max_tokens=60).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "done"} for call in called.tool_calls
    ]
    turn = called.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    assert ask(client, messages=[*READ, turn, *results], tools=TOOLS).choices


def test_json_fits_its_schema(client: openai.OpenAI) -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    form = {"type": "json_schema", "json_schema": {"name": "fix", "schema": SCHEMA, "strict": True}}
    answers = ask(client, response_format=form, n=8, temperature=1.5, max_tokens=200)
    for choice in answers.choices:
        assert choice.finish_reason == "stop"
        validator.validate(json.loads(choice.message.content))
    pieces = streamed(client, response_format=form, temperature=1.5, max_tokens=200)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == answers.choices[0].message.content
    objects = ask(client, response_format={"type": "json_object"}, n=8, max_tokens=200).choices
    ended = [
        json.loads(choice.message.content) for choice in objects if choice.finish_reason == "stop"
    ]
    assert ended and all(isinstance(value, dict) for value in ended)
    assert ask(client, response_format={"type": "text"}).choices[0] == ask(client).choices[0]


def test_completions(client: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("def area(a")
    options: dict[str, Any] = {
        "model": MODEL,
        "seed": 3,
        "max_tokens": 12,
        "extra_body": {"return_token_ids": True},
    }
    text = client.completions.create(prompt="def area(a", **options)
    tokens = client.completions.create(prompt=ids, logprobs=2, **options)
    both = client.completions.create(prompt=[ids, TOKENIZER.encode("test")], n=2, **options)
    choice: Any = tokens.choices[0]
    assert text.choices[0].text == choice.text and choice.prompt_token_ids == ids
    assert text.object == "text_completion" and len(choice.token_ids) == 12
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == 12
    assert choice.logprobs.text_offset[0] == 0 and choice.logprobs.text_offset[1] == len(
        choice.logprobs.tokens[0]
    )
    assert [c.index for c in both.choices] == [0, 1, 2, 3] and both.choices[0].text == choice.text
    assert both.usage and both.usage.prompt_tokens == len(ids) + len(TOKENIZER.encode("test"))
    chunks = list(client.completions.create(prompt=ids, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    for others in (0, 2):  # besides the token that was drawn
        asked = {"prompt": ids, "logprobs": others, **options}
        (told,) = (each.logprobs for each in client.completions.create(**asked).choices)
        chunks = list(client.completions.create(stream=True, **asked))
        parts = [part for chunk in chunks if (part := chunk.choices[0].logprobs)]
        assert [p for part in parts for p in part.token_logprobs] == told.token_logprobs
        if others:
            assert [top for part in parts for top in part.top_logprobs] == told.top_logprobs
        else:
            assert all(part.top_logprobs is None for part in (*parts, told))
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(prompt="a", model=MODEL, echo=True)


def test_exact_tokens_and_versions(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert answer.prompt_token_ids == TOKENIZER.encode(TOKENIZER.render(READ, answer=True))
    assert TOKENIZER.decode(choice.token_ids).removesuffix("<|end|>") == choice.message.content
    assert choice.weight_version == [{"version": 0, "count": len(choice.token_ids)}]
    chunks = streamed(client, extra_body={"return_token_ids": True})
    assert [id for chunk in chunks for c in chunk.choices for id in c.token_ids] == choice.token_ids
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert not any("prompt_token_ids" in (chunk.model_extra or {}) for chunk in chunks[1:])


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="available: 'tiny'"):
        client.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError, match="available: 'tiny'"):
        ask(client, model="gpt-5")


def test_mistakes_are_told_as_openai_does(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        ask(client, extra_body={"frobnicate": 1})
    assert (told.value.param, told.value.code, told.value.type) == (
        "frobnicate",
        "invalid_request",
        "invalid_request_error",
    )
    with pytest.raises(openai.BadRequestError) as told:
        ask(client, messages=[{"role": "user", "content": "return " * 400}])
    assert told.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="JSON schema"):
        ask(
            client,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wat"}},
            },
        )
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))


def test_request_ids(client: openai.OpenAI) -> None:
    raw = client.models.with_raw_response
    assert raw.list(extra_headers={"x-request-id": "mine-7"}).headers["x-request-id"] == "mine-7"
    made = raw.list(extra_headers={"x-request-id": "with space"}).headers["x-request-id"]
    assert made != "with space" and made != raw.list().headers["x-request-id"]
    with pytest.raises(openai.AuthenticationError) as told:
        client.with_options(api_key="wrong").models.list(extra_headers={"x-request-id": "mine-8"})
    assert told.value.request_id == "mine-8"
