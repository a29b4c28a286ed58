"""Redaction by token: every token that holds a part of a secret is removed, however the secret was
split into tokens, and no other token moves or changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.redaction import KINDS, Finding, Redactor
from etude.serve.production.recording import Recording, TokenRedactor, Unredactable
from tests.core.test_recorded_sessions import turn
from tests.core.test_redaction import SECRETS, SPELLINGS
from tests.serve.scripted import TOKENIZER

REDACTOR = TokenRedactor(TOKENIZER, Redactor(KINDS))
around = st.text(alphabet="ab \n€é漢🎉👩'\"{}<>|\\%=:;\u0301", max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    around, st.sampled_from(sorted(SECRETS)), st.sampled_from(sorted(SPELLINGS)), around,
    st.floats(0, 1), st.booleans(),
)  # fmt: skip
def test_only_the_tokens_of_a_secret_are_replaced(
    before: str, secret: str, spelling: str, behind: str, cut: float, exact_before: bool
) -> None:
    spelled = SPELLINGS[spelling](secret)
    tokens = tuple(TOKENIZER.encode(f"{before} {spelled} {behind}"))
    border = round(cut * len(tokens))
    whole = turn(
        0, 0, read=tokens[:border], sampled=tokens[border:],
        logprobs=(-0.5,) * (len(tokens) - border),
    )  # fmt: skip
    clean = REDACTOR.strip(whole, set(), exact_before=exact_before)
    left = (*clean.read, *clean.sampled)
    hidden = {at for span in clean.redacted for at in range(span.start, span.end)}
    text = TOKENIZER.decode(left)
    assert spelled not in text and secret not in text and secret[4:14] not in text
    assert len(left) == len(tokens) and hidden
    assert all(left[at] == tokens[at] for at in range(len(tokens)) if at not in hidden)
    exact = min(hidden) - border if exact_before else 0
    assert len(clean.logprobs) == max(0, exact)


def test_a_turn_without_secrets_is_as_it_was() -> None:
    tokens = tuple(TOKENIZER.encode("def area(a, b):\n    return a * b  # 漢🎉"))
    whole = turn(0, 0, read=tokens, sampled=tokens, logprobs=(-0.5,) * len(tokens))
    assert REDACTOR.strip(whole, {"hunter2"}, exact_before=True) == whole


@pytest.mark.parametrize(("rounds", "settles"), [(0, True), (3, True), (4, False)])
def test_what_does_not_settle_is_not_kept(rounds: int, settles: bool) -> None:
    """Each round finds one more secret, the given number of times."""
    tokens = tuple(TOKENIZER.encode("a b c d e f g h"))
    whole = turn(0, 0, read=tokens, sampled=(), logprobs=())
    looks = 0

    def find(text: str, known: object) -> list[Finding]:
        nonlocal looks
        looks += 1
        start = text.index("abcdefgh"[looks]) if looks <= rounds else 0
        return [Finding(start, start + 1, "own")] if looks <= rounds else []

    def redact(value: int, known: object) -> int:
        return min(value + 1, rounds)

    redactor: Any = SimpleNamespace(find=find, redact_json=redact)
    recording: Any = SimpleNamespace(_redactor=redactor)
    strip = TokenRedactor(TOKENIZER, redactor).strip
    if not settles:
        with pytest.raises(Unredactable):
            strip(whole, (), exact_before=True)
        with pytest.raises(Unredactable):
            Recording._settled(recording, 0, ())
        return
    clean = strip(whole, (), exact_before=True)
    assert TOKENIZER.decode(clean.read).count("*") == rounds
    assert Recording._settled(recording, 0, ()) == rounds
