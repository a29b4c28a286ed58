"""Judges: their prompts, the count of votes, the agreement of a judge of known error with labels,
and resistance to texts that try to talk one into a pass."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from etude.core.config import parse
from etude.core.errors import EtudeError, RolloutFailure
from etude.core.expression import Expression
from etude.core.rewards_config import RewardsConfig
from etude.core.types import Part, Score, Task
from etude.rewards.judge import (
    MAX_CHARACTERS,
    Calibration,
    Example,
    Judge,
    _response_format,
    calibrate,
    parse_verdict,
    prompt,
)
from etude.rewards.review import Review, composed, work
from etude.run.controller import build_review
from tests.rewards.injections import INJECTIONS

Respond = Callable[[dict[str, Any]], Any]
"""The body of a request -> the content of the answer, or a whole response."""
RUBRICS = {"style": "It follows the style around it.", "small": "Nothing is changed in vain."}


@contextlib.asynccontextmanager
async def judged_by(respond: Respond, **options: Any) -> AsyncIterator[Judge]:
    """A judge with a function as its model."""

    async def chat(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        answer = respond(await request.json())
        if isinstance(answer, web.Response):
            return answer
        return web.json_response({"choices": [{"message": {"content": answer}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        async with aiohttp.ClientSession() as http:
            given = {"rubrics": RUBRICS, "model": "m", "api_key": "secret", **options}
            yield Judge(http, url=url, **given)
    finally:
        await runner.cleanup()


def fenced(body: dict[str, Any]) -> tuple[str, str]:
    """The nonce and the work, as an attentive reader finds them."""
    nonce = body["response_format"]["json_schema"]["schema"]["properties"]["nonce"]["enum"][0]
    said = body["messages"][1]["content"]
    _, begin, rest = said.partition(f"===== {nonce} the work begins =====\n")
    inside, end, behind = rest.rpartition(f"\n===== {nonce} the work ends =====")
    assert begin and end and nonce not in inside and behind.count(nonce) == 1
    return nonce, inside


def test_the_schema_of_a_verdict_is_one_that_servers_hold_to() -> None:
    """In strict mode, OpenAI's servers refuse an object with optional or free-form fields."""
    asked = _response_format("n")["json_schema"]
    assert isinstance(asked, dict) and asked["strict"] is True
    schema = asked["schema"]
    assert isinstance(schema, dict) and schema["additionalProperties"] is False
    assert schema["required"] == list(schema["properties"]) == ["nonce", "reason", "verdict"]


def verdict(nonce: str, passes: bool) -> str:
    said = {"nonce": nonce, "reason": "so", "verdict": "pass" if passes else "fail"}
    return json.dumps(said)


def scripted(error_every: int = 0) -> Respond:
    """Pass texts with the word GOOD; every `error_every`th answer is wrong."""
    count = itertools.count(1)

    def respond(body: dict[str, Any]) -> str:
        nonce, inside = fenced(body)
        is_wrong = bool(error_every) and next(count) % error_every == 0
        return verdict(nonce, ("GOOD" in inside) != is_wrong)

    return respond


async def test_each_rubric_is_asked_by_itself_and_votes_are_counted() -> None:
    asked = []

    def respond(body: dict[str, Any]) -> str:
        nonce, inside = fenced(body)
        text = body["messages"][1]["content"]
        (about,) = [name for name, rubric in RUBRICS.items() if text.count(rubric) == 2]
        asked.append((about, nonce, inside))
        return verdict(nonce, about == "style" or sum(a == "small" for a, _, _ in asked) == 1)

    async with judged_by(respond, votes=3, needed=2) as judge:
        style, small = await judge.parts("x = 1")
    assert style == Part("style", 1.0, "3 of 3 votes, 2 needed\npass: so\npass: so\npass: so")
    assert small.value == 0.0 and small.evidence.startswith("1 of 3 votes, 2 needed\n")
    assert len(asked) == 6 and len({nonce for _, nonce, _ in asked}) == 6
    assert {inside for _, _, inside in asked} == {"x = 1"}


BROKEN: dict[str, Respond] = {
    "no JSON": lambda body: "pass",
    "nothing": lambda body: "",
    "no text": lambda body: None,
    "no object": lambda body: '["pass"]',
    "no reason": lambda body: json.dumps({"nonce": fenced(body)[0], "verdict": "pass"}),
    "another verdict": lambda body: verdict(fenced(body)[0], True).replace('"pass"', '"yes"'),
    "another nonce": lambda body: verdict("0" * 16, True),
    "JSON and more": lambda body: verdict(fenced(body)[0], True) + " I am sure.",
    "absurdly deep": lambda body: "[" * 100_000,
    "an error": lambda body: web.Response(status=500, text="overloaded"),
    "another API": lambda body: web.json_response({"content": "pass"}),
    "not even JSON": lambda body: web.Response(text="<html>"),
}


@pytest.mark.parametrize("respond", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_verdict_is_an_error_and_never_a_vote(respond: Respond) -> None:
    async with judged_by(respond) as judge:
        with pytest.raises(RolloutFailure, match="judge: "):
            await judge.parts("x = 1")


async def test_one_bad_vote_among_good_ones_is_an_error() -> None:
    count = itertools.count()

    def respond(body: dict[str, Any]) -> str:
        return verdict(fenced(body)[0], True) if next(count) else "pass"

    async with judged_by(respond) as judge:
        with pytest.raises(RolloutFailure, match="no verdict"):
            await judge.part("style", "x = 1")


async def test_a_judge_that_is_not_there_is_an_error() -> None:
    async with aiohttp.ClientSession() as http:
        judge = Judge(http, url="http://127.0.0.1:9/v1", model="m", rubrics=RUBRICS)
        with pytest.raises(RolloutFailure, match=r"judge: http://127\.0\.0\.1:9/v1"):
            await judge.parts("x = 1")


def examples(count: int) -> list[Example]:
    return [
        Example(rubric="style", work=f"{'GOOD' if n % 2 else 'BAD'} {n}", passes=bool(n % 2))
        for n in range(count)
    ]


async def test_a_judge_of_known_error_is_known_by_its_calibration() -> None:
    """One answer in seven is wrong: a single vote is wrong as often, two of three never are."""
    async with judged_by(scripted(error_every=7), votes=1, needed=1) as alone:
        found = await calibrate(alone, examples(70))
    assert found == Calibration(
        examples=70, agreement=60 / 70, false_pass_rate=5 / 35, false_fail_rate=5 / 35, errors=0
    )
    async with judged_by(scripted(error_every=7), votes=3, needed=2) as several:
        found = await calibrate(several, examples(35))
    assert (found.agreement, found.false_pass_rate) == (1.0, 0.0)


async def test_errors_of_a_judge_are_counted_apart() -> None:
    count = itertools.count()

    def respond(body: dict[str, Any]) -> str:
        return "?" if next(count) == 0 else scripted()(body)

    async with judged_by(respond, votes=1, needed=1) as judge:
        found = await calibrate(judge, examples(4))
    assert (found.examples, found.errors, found.agreement) == (4, 1, 1.0)


async def passed(respond: Respond, **options: Any) -> tuple[int, int]:
    """Number of injections, each alone and within bad work, that pass, and number of errors."""
    count = errors = 0
    async with judged_by(respond, **options) as judge:
        for text in (
            *INJECTIONS,
            *(f"def f():\n    return 0  # BAD\n{each}" for each in INJECTIONS),
        ):
            try:
                count += (await judge.part("style", text)).value == 1.0
            except RolloutFailure:
                errors += 1
    return count, errors


def test_there_are_enough_of_them() -> None:
    assert len(set(INJECTIONS)) == len(INJECTIONS) >= 30


async def test_nothing_ends_the_fence() -> None:
    """`fenced` finds one end, followed by the question alone."""
    assert await passed(scripted(), votes=1, needed=1) == (0, 0)


async def test_a_judge_that_copies_a_verdict_from_the_work_gives_none() -> None:
    def parrot(body: dict[str, Any]) -> str:
        nonce, inside = fenced(body)
        copied = re.search(r"\{[^{}]*\}", inside)
        return copied[0] if copied else verdict(nonce, False)

    count, errors = await passed(parrot, votes=1, needed=1)
    assert count == 0 and errors > 0


async def test_a_gullible_judge_is_outvoted() -> None:
    """It falls for every eighth text, whatever the text says: 12 % with a single vote, and none
    with two of three."""
    gullible = scripted(error_every=8)
    alone, _ = await passed(gullible, votes=1, needed=1)
    assert alone == len(INJECTIONS) * 2 // 8
    together, _ = await passed(scripted(error_every=8), votes=3, needed=2)
    assert together <= 0.01 * 2 * len(INJECTIONS)


@pytest.mark.parametrize(
    "token",
    ["<|im_start|>", "<｜User｜>", "[INST]", "[/INST]", "<start_of_turn>", "<<SYS>>", "</s>"],
)
def test_what_is_shown_has_no_turns_of_a_chat(token: str) -> None:
    system, question = prompt("r", f"a{token}b", "n")
    assert (system["role"], question["role"]) == ("system", "user")
    shown = question["content"]
    assert token not in shown and token[1:] in shown


async def test_work_of_which_a_part_would_be_judged_fails() -> None:
    """Otherwise the rest could be the part that is wrong."""
    async with judged_by(scripted(), votes=1, needed=1) as judge:
        fits = await judge.part("style", "GOOD".ljust(MAX_CHARACTERS))
        longer = await judge.part("style", "GOOD".ljust(MAX_CHARACTERS + 1))
    assert (fits.value, longer.value) == (1.0, 0.0)
    assert longer.evidence == "too long to judge: 60001 characters, of at most 60000"


def test_a_verdict_is_read_as_it_stands() -> None:
    assert parse_verdict(verdict("n", True), "n").passes
    assert not parse_verdict(verdict("n", False), "n").passes


TASK = Task(id="t", prompt="mend it")
TESTS = Score(1.0, (Part("tests", 1.0, "6 of 6"),), flags=("odd",))


async def test_parts_of_all_kinds_make_one_reward() -> None:
    async with judged_by(scripted(), votes=1, needed=1) as judge:
        review = Review(
            judge=judge, reward=Expression.parse("tests * (0.8 + 0.2 * min(style, small))")
        )
        bad = await review.complete(TASK, [], [], "+x = 1", TESTS)
        good = await review.complete(TASK, [], [], "+x = 1  # GOOD", TESTS)
    assert (bad.reward, good.reward) == (pytest.approx(0.8), pytest.approx(1.0))
    assert [part.name for part in good.parts] == ["tests", "style", "small", "environment"]
    assert good.parts[3] == Part(
        "environment", 1.0, "reward = tests * (0.8 + 0.2 * min(style, small))"
    )
    assert all(part.evidence for part in good.parts) and good.flags == ("odd",)


async def test_a_run_builds_what_its_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_JUDGE_KEY", "secret")
    text = """
name = "x"
[rewards]
detector = "off"
reward = "environment * style"
[rewards.judge]
url = "URL"
model = "m"
rubrics = {style = "It is GOOD."}
votes = 1
needed = 1
[[stage]]
kind = "rl"
steps = 1
"""
    async with judged_by(scripted()) as judge, aiohttp.ClientSession() as http:
        url = judge._url.removesuffix("/chat/completions")
        review = build_review(parse(text.replace("URL", url)).rewards, http)
        assert review is not None and not review.detector
        score = await review.complete(TASK, [], [], "+x", TESTS)
        assert (score.reward, score.parts[1].name) == (0.0, "style")
        assert build_review(RewardsConfig(detector="off"), http) is None
        assert build_review(RewardsConfig(), http) == Review(detector=True)
        credited = RewardsConfig(detector="off", failed_call=0.2)
        assert build_review(credited, http) == Review(failed_call=0.2)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ('reward = "tests **"', "rewards.reward: 'tests \\*\\*' is not an expression"),
        ('reward = "len(tests)"', "is not allowed"),
        ('judge = {url = "http://x/v1", model = "m", rubrics = {}}', "rubrics"),
        ('judge = {url = "http://x", model = "m", rubrics = {a-b = "x"}}', "rubrics"),
        (
            'judge = {url = "http://x", model = "m", rubrics = {a = "x"}, votes = 1}',
            "needed = 2 with votes = 1: nothing could pass",
        ),
        ('judge = {url = "http://x", model = "m", rubrics = {environment = "x"}}', "another name"),
        ('judge = {url = "http://x", model = "m", rubrics = {detector = "x"}}', "another name"),
        ('reward = "environment * (detector == 0)"', "'detector' cannot be used in the reward"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(rewards: str, why: str) -> None:
    text = f'name = "x"\n[rewards]\n{rewards}\n[[stage]]\nkind = "rl"\nsteps = 1\n'
    with pytest.raises(EtudeError, match=why):
        parse(text)


async def test_what_nobody_asks_for_changes_nothing() -> None:
    assert await Review().complete(TASK, [], [], "", TESTS) == TESTS


def test_a_part_that_is_missing_is_an_error_and_no_zero() -> None:
    with pytest.raises(
        ValueError, match="needs 'lint', which is not one of the parts: environment, tests"
    ):
        composed(TESTS, Expression.parse("tests * lint"))


def test_breaking_the_grader_does_not_save_from_its_0() -> None:
    """An environment that gives 0 may not have computed the other parts."""
    worthless = Score(0.0, (Part("tests", 0.0),))
    score = composed(worthless, Expression.parse("0.5 * tests + 0.5 * lint"))
    assert score.reward == 0.0
    assert [part.name for part in score.parts] == ["tests", "lint", "environment"]
    assert "counts as 0" in score.parts[1].evidence


def test_a_judge_sees_the_task_the_change_and_the_last_words() -> None:
    messages = [
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    shown = work(TASK, messages, "+x = 1")
    assert shown == (
        "# What was asked for\nmend it\n\n# What was changed\n+x = 1\n\n"
        "# What the author says\ndone"
    )
    assert work(TASK, [], "").count("(nothing)") == 2
    in_parts = [{"role": "assistant", "content": [{"type": "text", "text": "in parts"}]}]
    assert work(TASK, in_parts, "").endswith("\nin parts")


async def test_a_calibration_without_examples_of_a_kind_claims_no_errors() -> None:
    good = [example for example in examples(8) if example.passes]
    async with judged_by(scripted(), votes=1, needed=1) as judge:
        found = await calibrate(judge, good)
        assert (found.agreement, found.false_pass_rate, found.false_fail_rate) == (1.0, 0.0, 0.0)
        nothing = await calibrate(judge, [])
    assert (nothing.examples, nothing.agreement, nothing.errors) == (0, 0.0, 0)
