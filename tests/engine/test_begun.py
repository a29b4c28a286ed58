"""An answer that another engine has begun ends as that engine would have ended it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from etude.core.sampling import Sample, Token, expand_spans
from etude.engine.engine import Engine
from etude.model.numerics import INVARIANT
from tests.small_model import Asked, add, config, drain, request, sharp

NUM_TOKENS = 12


def stop_after(count: int) -> Callable[[int], bool]:
    seen: list[int] = []

    def check(token: int) -> bool:
        seen.append(token)
        return len(seen) == count

    return check


def engine() -> Engine:
    """An engine with batch-invariant arithmetic."""
    model = sharp(config(), seed=0)
    model.compute_with(INVARIANT)
    return Engine(model, max_num_seqs=4, version=7)


def ended(asked: Asked) -> Sample:
    made = engine()
    add(made, asked)
    return drain(made)["1"]


def tokens_of(sample: Sample, count: int) -> tuple[Token, ...]:
    versions, tops = list(expand_spans(sample.versions)), sample.top_logprobs
    return tuple(
        Token(sample.tokens[n], sample.logprobs[n], versions[n], tops[n] if tops else ())
        for n in range(count)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5},
        {"temperature": 1.5, "top_logprobs": 2, "repetition_penalty": 1.4},
        {"temperature": 1.5, "max_tokens": 30},
        {"temperature": 1.5, "prediction": (3, 4, 5)},
    ],
    ids=["plain", "penalty", "stop text", "prediction"],
)
def test_the_rest_is_the_same(options: dict[str, Any]) -> None:
    options = {"max_tokens": NUM_TOKENS, "stop_token_ids": (), "experts_from": None} | options
    stops = options["max_tokens"] > NUM_TOKENS

    def asked(**more: Any) -> Asked:
        check = stop_after(NUM_TOKENS) if stops else None
        return request("1", [5, 6, 7], **options, stop_check=check, **more)

    whole = ended(asked())
    assert len(whole.tokens) == NUM_TOKENS
    assert whole.finish_reason == ("stop" if stops else "length")
    for count in range(NUM_TOKENS + 1):
        rest = ended(asked(begun=tokens_of(whole, count)))
        # guesses made before are not counted
        assert replace(rest, accepted_draft_tokens=0, rejected_draft_tokens=0) == replace(
            whole, accepted_draft_tokens=0, rejected_draft_tokens=0
        )


def test_only_new_tokens_are_streamed() -> None:
    asked = request("1", [5, 6, 7], max_tokens=4, stop_token_ids=())
    begun = tokens_of(ended(asked), 3)
    made = engine()
    add(made, replace(asked, begun=begun, stream=True))
    events = [event for _ in range(3) for event in made.step()]
    assert len(events) == 2  # the last token, and the sample


def test_more_than_was_wanted_is_refused() -> None:
    asked = request("1", [5, 6, 7], max_tokens=4, stop_token_ids=())
    whole = ended(asked)
    with pytest.raises(ValueError, match="exceed max_tokens = 3 "):
        engine().check(replace(asked, max_tokens=3, begun=tokens_of(whole, 4)))
