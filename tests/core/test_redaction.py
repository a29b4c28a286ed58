"""Secrets in texts: those with a form are found in every spelling, and code is left alone."""

from __future__ import annotations

import base64
import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.redaction import KINDS, Redactor, is_distinctive

REDACTOR = Redactor(KINDS)
PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAtYm\nZq8Rk2Lw==\n"
    "-----END RSA PRIVATE KEY-----"
)
SECRETS = {
    "sk-ant-api03-Zq8Rk2Lw9Xc4Vb7Nm1Qs": "api_key",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a": "api_key",
    "AKIAIOSFODNN7EXAMPLE": "api_key",
    "xoxb-123456789012-abcdefghij": "api_key",
    "hooks.slack.com/services/T0123ABCD/B0123ABCD/abcdefghijklmnop": "api_key",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "jwt",
    "bob.smith+x@mail.example.com": "email",
    "4111 1111 1111 1111": "card",
    PEM: "private_key",
}
SPELLINGS: dict[str, Any] = {
    "plain": lambda text: text,
    "json": lambda text: json.dumps(json.dumps({"a": text})),
    "escaped": lambda text: "".join(f"\\u{ord(c):04x}" for c in text),
    "url": lambda text: quote(text, safe=""),
    "base64": lambda text: base64.b64encode(f'{{"key": "{text}"}}'.encode()).decode(),
    "base64 in base64": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
    "wrapped base64": lambda text: base64.encodebytes(f"the key: {text} ".encode() * 4).decode(),
    "hex": lambda text: text.encode().hex(),
    "unseen": lambda text: "\u200b".join(text),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("secret", SECRETS, ids=[*SECRETS.values()][:-1] + ["private_key"])
def test_secrets_are_found_in_every_spelling(secret: str, spelling: str) -> None:
    spelled = SPELLINGS[spelling](secret)
    left = REDACTOR.redact(f"Here: {spelled} and so on")
    assert left.startswith("Here: ") and left.endswith(" and so on")
    assert spelled not in left and secret not in left
    assert "[redacted:" in left


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("my password is hunter2!x", "hunter2!x"),
        ("DB_PASSWORD=correcthorse", "correcthorse"),
        ('{"password": "swordfish"}', "swordfish"),
        ('{\\"password\\": \\"swordfish\\"}', "swordfish"),
        ("password: 12345678", "12345678"),
        ("postgres://bob:pa55word@db/x", "pa55word"),
        ("Authorization: Bearer abcdef123456789", "abcdef123456789"),
        ("login --password hunter2x --user bob", "hunter2x"),
        ("<password>hunter2</password>", "hunter2"),
        ("pay with passcode: 4711x8 please", "4711x8"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
        ("SMTP_PASS=correcthorse", "correcthorse"),
        ("https://x.example/y?access_token=abcd1234efgh", "abcd1234efgh"),
        ("//registry.example/:_authToken=abcd1234-ef56", "abcd1234-ef56"),
        ("ENCRYPTION_KEY=correcthorse", "correcthorse"),
        ("AccountName=x;AccountKey=Zm9vYmFyYmF6+/8=;Suffix=y", "Zm9vYmFyYmF6+/8="),
        ("Authorization: Token 9944b09199c62bcf9418", "9944b09199c62bcf9418"),
        ("curl -s -u admin:hunter2x https://x.example", "hunter2x"),
    ],
)
def test_what_is_called_a_secret_is_one_from_then_on(text: str, value: str) -> None:
    assert value not in REDACTOR.redact(text)
    assert REDACTOR.remember(text) == {value}
    spelled = base64.b64encode(f"it is {value} still".encode()).decode()
    assert (
        REDACTOR.redact(f"a {value}. {spelled}", {value}) == "a [redacted:known]. [redacted:known]"
    )
    assert REDACTOR.redact(f"a{value}b", {value}) == f"a{value}b"


@pytest.mark.parametrize(
    "text",
    [
        "password: string",
        "self.token = token",
        "def check(password: str, token: str = None) -> bool:",
        "password = getpass.getpass()",
        "secret_key = os.environ['SECRET']",
        "tokens = tokenizer.encode(text)",
        "token_count = 12345678",
        "a password is required",
        "the secret is that nobody knows",
        "basic understanding of bearer plants",
        "git@github.com:team/project.git",
        "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
        "from etude.serve.production.recording import RecordingAnswerer",
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 and 1794824191640 and 0.1234567890123456",
        "@app.route('/v1/users') 10.0.0.1:8100 2026-11-16T10:00:00Z",
        "password = '<your password>'  # or ${PASSWORD}",
        "FIRST_PASS = first_pass(tokens)",
        "self.access_token = response.access_token",
        "account_key = accounts[0].key; session_token: str",
        "docker run --user 1000:1000 image && curl -fsSL https://x.example/a:b",
        "the authorization token is refused",
        'curl -u "$USER:$TOKEN" https://x.example',
    ],
)
def test_code_is_left_alone(text: str) -> None:
    assert REDACTOR.redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "4111 1111 1111 1111.",
        "7 4111-1111-1111-1111 0 12",
        "x4111111111111111",
        "(4111 1111 1111 1111 0",
    ],
)
def test_a_card_is_found_among_other_numbers(text: str) -> None:
    assert "1111" not in REDACTOR.redact(text)


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=40), st.sampled_from(sorted(SECRETS)), st.text(max_size=40),
    st.sampled_from(sorted(SPELLINGS)),
)  # fmt: skip
def test_redacted_texts_hold_nothing_more(
    before: str, secret: str, behind: str, spelling: str
) -> None:
    text = f"{before} {SPELLINGS[spelling](secret)} {behind}"
    left = REDACTOR.redact(text)
    assert secret not in left
    while (again := REDACTOR.redact(left)) != left:  # a mark may replace digits
        assert len(again) != len(left)
        left = again
    found = REDACTOR.find(text)
    assert all(one.end < other.start for one, other in zip(found, found[1:], strict=False))
    assert all(0 <= one.start < one.end <= len(text) for one in found)


def test_values_in_json_keep_their_form() -> None:
    said = {
        "password": "abcd",
        "pin": {"passcode": 123456},
        "max_tokens": 12,
        "ok": True,
        "list": ["x", None, "bob@example.com"],
    }
    assert REDACTOR.redact_json(said) == {
        "password": "[redacted:password]",
        "pin": {"passcode": "[redacted:password]"},
        "max_tokens": 12,
        "ok": True,
        "list": ["x", None, "[redacted:email]"],
    }


def test_kinds_are_chosen_and_added() -> None:
    only = Redactor(["api_key"], {"ticket": r"TCK-\d{6}"})
    text = "TCK-123456 of bob@example.com"
    assert only.redact(text) == "[redacted:ticket] of bob@example.com"
    with pytest.raises(ValueError, match="no such kind"):
        Redactor(["api_keys"])
    with pytest.raises(ValueError, match="ticket"):
        Redactor((), {"ticket": "("})


def test_values_are_remembered_from_all_of_a_document() -> None:
    """This includes values that only their field reveals."""
    secret, other, third = "kx7Qv2mP9w", "hunter2-blue-42", "zz81-Lq0-ppW"
    document = {
        "login": [{"password": secret}, f"password: {other}"],
        "inner": {"deep": ({"note": f'password = "{third}"'},)},
        "count": 3,
        "flag": True,
        "nothing": None,
    }
    assert REDACTOR.values(document) == {secret, other, third}
    assert REDACTOR.values(["nothing", 3, None]) == set()


@pytest.mark.parametrize(
    ("value", "is_one"),
    [("password", False), ("12345678", False), ("summer", False), ("summer1", False),
     ("summer12", True), ("correcthorse", True), ("correcthors", False), ("", False)],
)  # fmt: skip
def test_a_word_of_many_texts_is_not_distinctive(value: str, is_one: bool) -> None:
    assert is_distinctive(value) is is_one
