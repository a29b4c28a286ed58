"""A session as text for people: speakers, and the parts that are left out."""

from __future__ import annotations

from typing import Any

import pytest

from etude.core.sampling import VersionSpan
from etude.core.types import Credit, Part, Score, Segment, Trajectory
from etude.dash.detail import tokens
from etude.dash.session import (
    LONG,
    LONG_LINE,
    read_arguments,
    read_call,
    read_session,
    said,
    score_text,
    shorten,
)

SEGMENT = Segment(
    prompt=(1, 2), tokens=(3,), mask=(True,), logprobs=(-1.0,), versions=(), regions=()
)


def session(status: str, **more: Any) -> Trajectory:
    given: dict[str, Any] = {"segments": (), "score": Score(0.5), "messages": [{"role": "user"}]}
    return Trajectory(id="g.0", task="t", group="g", status=status, **given | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "blocks"),
    [
        ("done", []),
        ("truncated", [("truncated", "out of turns or context; graded on what was done by then")]),
        ("timeout", [("timed out", "out of time; graded on what was done by then")]),
    ],
)
def test_one_that_was_cut_short_says_why(status: str, blocks: list[tuple[str, str]]) -> None:
    found = [(block.who, block.text) for block in read_session(session(status), None)]
    assert found == [("user", "(says nothing)"), *blocks, ("score", "reward 0.5")]


def test_one_that_failed_says_where() -> None:
    failed = session("failed", score=None, error="sandbox: gone", traceback="File x")
    assert [(b.who, b.text) for b in read_session(failed, None)][1:] == [
        ("error", "sandbox: gone\nFile x")
    ]


def test_tokens_are_read_where_there_are_no_messages() -> None:
    def decode(tokens: Any) -> str:
        return " ".join(map(str, tokens))

    def told(segments: int, **more: Any) -> list[tuple[str, str]]:
        whole = session("done", segments=(SEGMENT,) * segments, **more)
        return [(block.who, block.text) for block in read_session(whole, decode)][:-1]

    assert told(1, messages=[]) == [("raw", "1 2 3")]
    assert told(2, messages=[]) == [("raw 0", "1 2 3"), ("raw 1", "1 2 3")]
    assert told(1) == [("user", "(says nothing)")]
    assert read_session(session("done", segments=(SEGMENT,), messages=[]), None)[0].who == "score"


def test_what_the_model_says_and_calls() -> None:
    call = {"function": {"name": "edit", "arguments": '{"line": 3, "text": "x = 1"}'}}
    broken = {"function": {"name": "edit", "arguments": '{"line": '}}
    message = {"role": "assistant", "content": "I edit.", "tool_calls": [call, broken, "what?"]}
    assert [(block.who, block.text) for block in said([message])] == [
        ("model", "I edit."),
        ("call", "edit(line=3, text='x = 1')"),
        ("call", 'edit({"line": )'),
        ("call", "?()"),
    ]
    assert [block.who for block in said([message | {"content": ""}])] == ["call"] * 3


def test_a_text_in_a_call_is_read_line_by_line() -> None:
    call = {"function": {"name": "write", "arguments": {"path": "a", "text": "one\ntwo"}}}
    (block,) = said([{"role": "assistant", "tool_calls": [call]}])
    assert block.text == "write(\n  path = a\n  text = one\ntwo\n)"
    for size, lines in ((100, 1), (101, 3)):
        name = "n" * (size - len("path=''"))
        call = {"function": {"name": "write", "arguments": {"path": name}}}
        (block,) = said([{"role": "assistant", "tool_calls": [call]}])
        assert len(block.text.splitlines()) == lines


def test_calls_of_others_are_read_as_far_as_they_go() -> None:
    assert read_call({"id": "c1", "function": {"name": "f", "arguments": "{}"}}) == (
        "c1",
        "f",
        "{}",
    )
    for strange in (None, "x", {"function": 3}, {"id": None}):
        assert read_call(strange) == ("", "?", "")
    assert read_arguments('{"a": 1}') == {"a": 1} == read_arguments({"a": 1})
    for strange in ("[1]", "{", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, 3):
        assert read_arguments(strange) is None


def test_long_texts_keep_their_beginning_and_their_end() -> None:
    lines = [str(number) for number in range(LONG + 5)]
    assert shorten("\n".join(lines[:LONG])) == "\n".join(lines[:LONG])
    short = shorten("\n".join(lines)).split("\n")
    half = LONG // 2
    assert short == [*lines[:half], "... (5 lines left out) ...", *lines[-half:]]
    assert shorten("x" * LONG_LINE + "\n\n") == "x" * LONG_LINE
    assert shorten("x" * (LONG_LINE + 1)) == f"{'x' * LONG_LINE} ... ({LONG_LINE + 1} characters)"


def test_a_score_says_what_it_is_made_of() -> None:
    score = Score(
        0.25,
        parts=(Part("tests", 1.0, "all\npassed"), Part("style", 0.5, "")),
        flags=("cheat:hang",),
        credit=(Credit(0.5, 1), Credit(-1.0, 0, 2)),
    )
    assert score_text(score).split("\n") == [
        "reward 0.25",
        "tests 1: all",
        "    passed",
        "style 0.5",
        "flag: cheat:hang",
        "credit 0.5 for segment 1",
        "credit -1 for segment 0, turn 2",
    ]


def test_some_tokens_of_a_segment_are_told_with_their_place() -> None:
    segment = Segment(
        prompt=(1, 2, 1), tokens=(5, 6, 5), mask=(True, False, True), logprobs=(-1.0, 0.0, -2.0),
        versions=(VersionSpan(3, 1), VersionSpan(4, 1)),
    )  # fmt: skip
    whole = tokens(segment, str, [-1.5, -2.5], offset=0, limit=99)
    assert (whole["offset"], whole["total"]) == (0, 6)
    assert whole["pieces"] == ["1", "2", "5", "6"] and whole["tokens"] == [0, 1, 0, 2, 3, 2]
    assert whole["mask"] == [[0, 3], [1, 1], [0, 1], [1, 1]]
    assert (whole["logprobs"], whole["trainer"]) == ([-1.0, -2.0], [-1.5, -2.5])
    assert whole["versions"] == [[3, 1], [4, 1]]
    part = tokens(segment, str, [-1.5, -2.5], offset=4, limit=2)
    assert (part["offset"], part["total"], part["pieces"]) == (4, 6, ["6", "5"])
    assert (part["mask"], part["logprobs"], part["trainer"]) == ([[0, 1], [1, 1]], [-2.0], [-2.5])
    assert part["versions"] == [[4, 1]]
    assert tokens(segment, str, None, offset=0, limit=1)["trainer"] is None
