import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from etude.core.advantage import AdvantageEstimator
from etude.core.sampling import VersionSpan
from etude.core.types import Credit, Group, Score, Segment, Task, Trajectory
from etude.rewards.failed_calls import failed_calls
from etude.rewards.review import Review

Message = dict[str, Any]
TASK = Task(id="t", prompt="mend it")
ASKED: Message = {"role": "user", "content": "mend it"}
WORDS: Message = {"role": "assistant", "content": "done"}


def call(*answers: object) -> list[Message]:
    """A turn that calls tools, and their answers."""
    calls = [{"id": str(number), "function": {"name": "edit"}} for number in range(len(answers))]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    return [said, *({"role": "tool", "content": answer} for answer in answers)]


def segment(num_turns: int) -> Segment:
    mask = (True, True, False) * num_turns
    return Segment(
        prompt=(1,), tokens=(2,) * len(mask), mask=mask, logprobs=(0.0,) * len(mask),
        versions=(VersionSpan(0, sum(mask)),),
    )  # fmt: skip


def credit(
    messages: Sequence[Message], *segments: Segment, task: Task = TASK
) -> tuple[Credit, ...]:
    return failed_calls(task, messages, segments, 0.5)


def test_a_turn_of_which_a_call_failed_is_credited_less() -> None:
    messages = [ASKED, *call("ok"), *call("ok", "error: no such file"), *call("an error: not ours")]
    assert credit(messages, segment(3)) == (
        Credit(0.0, segment=0, turn=0),
        Credit(-0.5, segment=0, turn=1),
        Credit(0.0, segment=0, turn=2),
    )


def test_turns_go_on_in_the_next_segment_and_words_have_no_credit() -> None:
    messages = [ASKED, *call("ok"), WORDS, ASKED, *call([{"text": "error: that again"}]), WORDS]
    assert credit(messages, segment(2), segment(2)) == (
        Credit(0.0, segment=0, turn=0),
        Credit(-0.5, segment=1, turn=0),
    )


def test_the_last_call_may_have_no_answer() -> None:
    assert credit([ASKED, *call()], segment(1)) == ()
    unanswered: Message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert credit([ASKED, unanswered], segment(1)) == (Credit(0.0, segment=0, turn=0),)


def test_what_the_task_begins_with_is_not_the_policys() -> None:
    opening = (ASKED, *call("error: an example"), ASKED)
    task = Task(id="t", messages=opening)
    messages = [*opening, *call("ok")]
    assert credit(messages, segment(1), task=task) == (Credit(0.0, segment=0, turn=0),)


@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_turns_that_match_no_messages_have_none(num_turns: int) -> None:
    messages = [ASKED, *call("error: one"), *call("error: two")]
    assert credit(messages, segment(num_turns)) == ()


def test_a_group_of_equal_rewards_teaches_which_calls_fail() -> None:
    """The reward is the environment's, and its own credit stays."""
    own = Credit(1.0, segment=0)

    def attempt(number: int, answer: str, score: Score) -> Trajectory:
        messages = [ASKED, *call(answer)]
        review = Review(failed_call=0.5)
        done = asyncio.run(review.complete(TASK, messages, [segment(1)], "", score))
        assert (done.reward, done.parts, done.flags) == (1.0, (), ())
        return Trajectory(
            id=f"g.{number}", task="t", group="g", segments=(segment(1),), score=done,
            status="done", messages=messages,
        )  # fmt: skip

    assert attempt(0, "error: x", Score(1.0, credit=(own,))).score == Score(
        1.0, credit=(own, Credit(-0.5, segment=0, turn=0))
    )
    attempts = (attempt(0, "error: x", Score(1.0)), attempt(1, "ok", Score(1.0)))
    outcome = AdvantageEstimator().estimate(
        Group(id="g", task="t", trajectories=attempts, slot=0, admitted=0)
    )
    assert outcome.credit == {
        "g.0": (Credit(-0.25, segment=0, turn=0),),
        "g.1": (Credit(0.25, segment=0, turn=0),),
    }
