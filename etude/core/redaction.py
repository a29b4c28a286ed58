"""Redaction of secrets that must never be written: keys, tokens, passwords and other private data
in a text.

A *kind* is a pattern and, for some kinds, a check of its matches. Texts hide their content: in
JSON, in URLs, in base64, in hexadecimal, or behind invisible characters. So a text is searched in
several *views*, each the text as a decoder reads it, and in views of views; a match in any of them
is a span of the text itself. A value that was called a password once is searched for by itself from
then on (`known`), in the same views.

Only secrets with a recognisable form are found. A password that nothing labels as one is a word
like any other, and a key with separated letters is not found: docs/production.md describes what
redaction can and cannot do.
"""

from __future__ import annotations

import base64
import math
import re
import string
import urllib.parse
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 3
"""Nesting of views, such as base64 of JSON of base64."""
MIN_KNOWN = 6
"""Characters of a value that is searched for on its own; a shorter one is a common word."""
MARK = "[redacted:"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A span of a text that must not be written."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of secret. The pattern's group `s` is the secret, if it is not the whole match."""

    pattern: re.Pattern[str]
    words: tuple[str, ...] = ()
    """Every match begins with one of these words, in lower case: searching only there is faster."""
    check: Callable[[re.Match[str]], bool] = lambda found: True
    remembered: bool = False
    """True if only the context of a value reveals it: from then on the value is searched for on its
    own."""

    def matches(self, text: str, lower: str) -> Iterator[re.Match[str]]:
        if not self.words:
            yield from self.pattern.finditer(text)
        for word in self.words:
            at = lower.find(word)
            while at >= 0:
                found = self.pattern.match(text, at)
                if found is not None:
                    yield found
                at = lower.find(word, at + 1 if found is None else max(found.end(), at + 1))


class Redactor:
    """Finds secrets in texts and replaces them with marks. Pure."""

    def __init__(self, kinds: Collection[str], patterns: Mapping[str, str] | None = None) -> None:
        """`kinds`: names in `KINDS`. `patterns`: further kinds, by their own names. Raises
        ValueError for an unknown name or an invalid pattern."""
        if unknown := sorted(set(kinds) - KINDS.keys()):
            raise ValueError(f"{', '.join(unknown)}: no such kind; choose from {', '.join(KINDS)}")
        self._kinds = {name: KINDS[name] for name in KINDS if name in kinds}
        for name, pattern in (patterns or {}).items():
            try:
                self._kinds[name] = Kind(re.compile(pattern))
            except re.error as e:
                raise ValueError(f"pattern {name!r}: {e}") from e

        self._remembered = {name: k for name, k in self._kinds.items() if k.remembered}

    def find(self, text: str, known: Collection[str] = ()) -> list[Finding]:
        """The findings in order; no two of them touch."""
        found: list[Finding] = []
        for view in _views(text):
            for start, end, kind, _ in _look(self._kinds, view.text, known):
                found.append(Finding(*view.origin(start, end), kind))
        return _merged(found)

    def remember(self, text: str) -> set[str]:
        """The values that only their context reveals."""
        return {
            value
            for view in _views(text)
            for *_, value in _look(self._remembered, view.text, ())
            if len(value) >= MIN_KNOWN
        }

    def redact(self, text: str, known: Collection[str] = ()) -> str:
        """Replace every finding with a mark such as `[redacted:email]`."""
        pieces, end = [], 0
        for finding in self.find(text, known):
            pieces += [text[end : finding.start], f"{MARK}{finding.kind}]"]
            end = finding.end
        return "".join((*pieces, text[end:]))

    def redact_json(self, value: Any, known: Collection[str] = ()) -> Any:
        """Redact all texts of a JSON value, names of fields included. A field whose name labels it
        as a secret is one, whatever its value is."""
        if isinstance(value, str):
            return self.redact(value, known)
        if isinstance(value, list | tuple):
            return [self.redact_json(item, known) for item in value]
        if isinstance(value, dict):
            return {
                self.redact(key, known): self._field(key, item, known)
                for key, item in value.items()
            }
        return value

    def _field(self, name: str, value: Any, known: Collection[str]) -> Any:
        if _is_scalar(value) and "password" in self._kinds and MARK not in str(value):
            quoted = f'{name}: "{value}"'
            if any(self._kinds["password"].check(m) for m in _PASSWORD.finditer(quoted)):
                return f"{MARK}password]"
        return self.redact_json(value, known)

    def values(self, value: Any) -> set[str]:
        """The values to remember (see `remember`) in all texts of a JSON value."""
        if isinstance(value, str):
            return self.remember(value)
        if isinstance(value, list | tuple):
            return {found for item in value for found in self.values(item)}
        if isinstance(value, dict):
            named = {
                found
                for key, item in value.items()
                if _is_scalar(item)
                for found in self.remember(f'{key}: "{item}"')
            }
            return named | {found for item in value.values() for found in self.values(item)}
        return set()


def _look(
    kinds: Mapping[str, Kind], text: str, known: Collection[str]
) -> Iterator[tuple[int, int, str, str]]:
    """(start, end, kind, value) of each match in a text, without decoding."""
    lower = text.translate(_LOWER)
    for name, kind in kinds.items():
        for found in kind.matches(text, lower):
            start, end = _secret_span(found)
            value = text[start:end]
            if start < end and not value.startswith(MARK) and kind.check(found):
                yield start, end, name, value
    for value in known:
        for found in re.finditer(_alone(value), text):
            yield found.start(), found.end(), "known", value


def is_distinctive(value: str) -> bool:
    """True if a value is too specific to be a word that occurs in many texts."""
    mixed = any(map(str.isdigit, value)) and any(map(str.isalpha, value))
    return len(value) >= 12 or (len(value) >= 8 and mixed)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _secret_span(found: re.Match[str]) -> tuple[int, int]:
    names = [name for name in ("s", "u", "w") if found.re.groupindex.get(name)]
    spans = [found.span(name) for name in names if found.span(name) != (-1, -1)]
    return spans[0] if spans else found.span()


def _alone(value: str) -> str:
    """A pattern for the value where it is not a part of a longer word."""
    before = r"(?<![A-Za-z0-9])" if value[0].isalnum() else ""
    behind = r"(?![A-Za-z0-9])" if value[-1].isalnum() else ""
    return before + re.escape(value) + behind


def _merged(found: Iterable[Finding]) -> list[Finding]:
    merged: list[Finding] = []
    for finding in sorted(found):
        if merged and finding.start <= merged[-1].end:
            last = merged.pop()
            finding = Finding(last.start, max(last.end, finding.end), last.kind)
        merged.append(finding)
    return merged


_LOWER = str.maketrans({letter: letter.lower() for letter in string.ascii_uppercase})
"""ASCII only: elsewhere one letter may become two, which would move positions."""

# Views


class _View:
    """A text as a decoder reads another one, with the origin of each of its characters."""

    def __init__(self, pieces: Iterable[tuple[str, int, int]], outer: _View | None = None) -> None:
        """`pieces`: (text, start and end of the span that it was decoded from). A piece as long as
        its span is a copy of it. `outer`: the view that was decoded; None if it was the text
        itself."""
        self._outer = outer
        self._starts: list[int] = []
        self._from: list[tuple[int, int, bool]] = []
        texts, length = [], 0
        for text, begin, end in pieces:
            if text:
                self._starts.append(length)
                self._from.append((begin, end, len(text) == end - begin))
                texts.append(text)
                length += len(text)
        self.text = "".join(texts)

    def origin(self, start: int, end: int) -> tuple[int, int]:
        """The span of the original text that a part of the view comes from."""
        first, last = (bisect_right(self._starts, at) - 1 for at in (start, end - 1))
        begin, _, copied = self._from[first]
        lowest = begin + start - self._starts[first] if copied else begin
        begin, highest, copied = self._from[last]
        if copied:
            highest = begin + end - self._starts[last]
        return (lowest, highest) if self._outer is None else self._outer.origin(lowest, highest)


Pieces = list[tuple[str, int, int]]


def _views(text: str) -> Iterator[_View]:
    """The text itself, its decoded forms, and theirs."""
    views = [_View([(text, 0, len(text))])] if text else []
    for _ in range(MAX_DEPTH + 1):
        yield from views
        views = [
            _View(pieces, view)
            for view in views
            for read in _DECODERS
            for pieces in read(view.text)
        ]


def _replaced(
    text: str, pattern: re.Pattern[str], decode: Callable[[str], str]
) -> Iterator[Pieces]:
    """The text with all matches of the pattern decoded, if there are any."""
    pieces: Pieces = []
    end = 0
    for found in pattern.finditer(text):
        pieces.append((text[end : found.start()], end, found.start()))
        pieces.append((decode(found[0]), *found.span()))
        end = found.end()
    if pieces:
        yield [*pieces, (text[end:], end, len(text))]


_JSON_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_JSON = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[\"\\/bfnrt])")
_PERCENT = re.compile(r"(?:%[0-9a-fA-F]{2})+")
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]+")
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-fA-F]{2}){12,}(?![0-9A-Za-z])")
_BASE64 = re.compile(
    r"[A-Za-z0-9+/_-]{16,}(?:(?:[\r\n]{1,2}[ \t]{0,16})[A-Za-z0-9+/_-]{4,})*={0,2}"
)


def _read_json(text: str) -> Iterator[Pieces]:
    def decode(said: str) -> str:
        if said[1] == "u":
            return chr(int(said[2:], 16))
        return _JSON_ESCAPES.get(said[1], said[1])

    return _replaced(text, _JSON, decode)


def _read_percent(text: str) -> Iterator[Pieces]:
    if "%" not in text:
        return iter(())
    return _replaced(text, _PERCENT, lambda said: urllib.parse.unquote(said, errors="replace"))


def _read_unseen(text: str) -> Iterator[Pieces]:
    if text.isascii():
        return iter(())
    return _replaced(text, _UNSEEN, lambda said: "")


def _read_hex(text: str) -> Iterator[Pieces]:
    for found in _HEX.finditer(text):
        yield from _decoded(bytes.fromhex(found[0]), *found.span())


def _read_base64(text: str) -> Iterator[Pieces]:
    """Letters may directly precede the base64 text, so decoding is tried from each of its first
    four characters."""
    for found in _BASE64.finditer(text):
        letters = re.sub(r"[\s=]", "", found[0]).translate(_URL_SAFE)
        for skip in range(4):
            rest = letters[skip:]
            rest = rest[: len(rest) - (len(rest) % 4 == 1)]
            data = base64.b64decode(rest + "=" * (-len(rest) % 4))
            yield from _decoded(data, *found.span())


_URL_SAFE = str.maketrans("-_", "+/")
_MOSTLY = 0.9


def _decoded(data: bytes, start: int, end: int) -> Iterator[Pieces]:
    """The decoded data, if it is text. All of it is attributed to the whole span; it is shorter
    than the span, and so is not taken for a copy."""
    readable = sum(32 <= byte < 127 or byte in b"\n\r\t" for byte in data)
    if data and readable >= _MOSTLY * len(data):
        yield [(data.decode("latin-1"), start, end)]


_DECODERS = (_read_json, _read_percent, _read_unseen, _read_hex, _read_base64)


# Kinds


def _entropy(text: str) -> float:
    """Bits per character."""
    counts = Counter(text).values()
    return -sum(count / len(text) * math.log2(count / len(text)) for count in counts)


def _is_random(found: re.Match[str]) -> bool:
    text = found[0]
    classes = (str.isupper, str.islower, str.isdigit)
    mixed = all(any(map(is_one, text)) for is_one in classes)
    return mixed and text.count("/") < 4 and _entropy(text) >= 4.2


def _is_card(found: re.Match[str]) -> bool:
    """True if neighbouring groups of digits form a card number. Other numbers may be next to it."""
    groups = re.split("[ -]", found[0])
    for first in range(len(groups)):
        digits = ""
        for group in groups[first : first + 5]:
            digits += group
            if len(group) < 3:
                break
            if 13 <= len(digits) <= 19 and digits[0] in "3456" and _adds_up(digits):
                return True
    return False


def _adds_up(digits: str) -> bool:
    """Check the Luhn sum."""
    numbers = [int(digit) for digit in digits]
    doubled = [2 * number - 9 * (number > 4) for number in numbers[-2::-2]]
    return (sum(numbers[-1::-2]) + sum(doubled)) % 10 == 0


_STAND_INS = re.compile(
    r"(?i)[<$%{*]|x{4}|your|example|changeme|redacted|placeholder|"
    r"(?:none|null|nil|true|false|undefined|string|str|int|bool|optional)\b"
)
_CODE = re.compile(r"[A-Za-z_]\w*(?:(?:\.|->|::)\w+)+|[A-Za-z_]*")
"""A value that names something: `self.password`, `string`."""


def _is_password(found: re.Match[str]) -> bool:
    """True if the text after `password =` is a value, not a name or a placeholder for one."""
    name = found["name"]
    weak = name.lower() == "token"
    if found["u"] is None:
        value = found["s"] or found["w"]
        if _STAND_INS.match(value):
            return False
        return any(map(str.isdigit, value)) or not (" " in value or (weak and len(value) < 16))
    value = found["u"]
    if _STAND_INS.match(value):
        return False
    if name.isupper() and found["sep"].strip() == "=":  # a line of an .env file
        return True
    return not _CODE.fullmatch(value) and any(map(str.isalnum, value)) and not weak


_PASSWORD = re.compile(
    r"(?P<name>(?i:password|passwd|passphrase|passcode|pwd|secret(?:[_-]?access)?(?:[_-]?key)?"
    r"|(?:api|access|private|auth|account|encryption|signing|master)[_-]?key|credentials?"
    r"|(?:(?:access|auth|refresh|session)[_-]?)?token)|_PASS(?==))_?\d{0,3}"
    r"(?:(?:\\?[\"'`])?\s{0,3}(?P<sep>=>|:=|={1,2}|:|>|\b(?:is|was|to)\b)\s{0,3}"
    r"|(?P<gap>[ =]))"
    r"(?:(?P<q>\\?[\"'`])(?P<s>(?:(?!(?P=q))[^\r\n]){4,200})(?P=q)"
    r"|(?<!d )(?P<u>[^\s\"'`,;<>(){}\[\]\\]{4,200}+)(?![(\[])"
    r"|(?<=d )(?P<w>(?=\S{0,40}\d)[^\s\"'`,;<>(){}\[\]\\]{6,200}))"
)

_PASSWORD_WORDS = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "secret", "credential", "token"),
    "_pass=",
    *(
        f"{first}{between}{last}"
        for last, firsts in {
            "key": "api access private auth account encryption signing master",
            "token": "access auth refresh session",
        }.items()
        for first in firsts.split()
        for between in ("_", "-", "")
    ),
)
_KEY_BEGINNINGS = (
    *("sk-", "sk_", "rk_", "pk_", "whsec_", "akia", "asia", "ghp_", "gho_", "ghu_", "ghs_"),
    *("ghr_", "github_pat_", "glpat-", "xox", "xapp-", "aiza", "ya29.", "gocspx-", "hf_", "npm_"),
    *("pypi-", "dop_v1_", "sg.", "gsk", "fw", "r8", "fo1", "nvapi", "lin_api", "shpat", "shpss"),
    *("tskey", "dckr_pat", "pat_", "pat-", "dapi", "age-secret-key-1", "hooks.slack.com"),
    *("discord.com", "discordapp.com"),
)

KINDS: dict[str, Kind] = {
    "private_key": Kind(
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?:(?!-----)[\s\S]){0,16384}-----END [A-Z0-9 ]{0,40}-----"
            r"|(?:(?:\s|\\[rn]){0,8}[A-Za-z0-9+/=]{16,})*(?:(?:\s|\\[rn]){1,8}[A-Za-z0-9+/=]{1,15})?)"
        ),
        ("-----begin",),
    ),
    "api_key": Kind(
        re.compile(
            r"(?<![A-Za-z0-9])(?:"
            r"sk-[A-Za-z0-9_-]{16,}|(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{10,}"
            r"|whsec_[A-Za-z0-9+/=]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
            r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{22,}|glpat-[A-Za-z0-9_-]{16,}"
            r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}"
            r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{16,}"
            r"|hf_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{40,}"
            r"|dop_v1_[a-f0-9]{40,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"
            r"|(?:gsk|fw|r8|fo1|nvapi|lin_api|shpat|shpss|tskey|dckr_pat|pat)[_-]"
            r"[A-Za-z0-9_-]{20,}|dapi[a-f0-9]{32}|AGE-SECRET-KEY-1[A-Z0-9]{50,}"
            r"|hooks\.slack\.com/[a-z]{1,20}/[A-Za-z0-9/]{20,}"
            r"|discord(?:app)?\.com/api/webhooks/\d{10,}/[A-Za-z0-9_-]{20,})"
        ),
        _KEY_BEGINNINGS,
    ),
    "jwt": Kind(
        re.compile(
            r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"
        ),
        ("eyj",),
    ),
    "authorization": Kind(
        re.compile(
            r"(?i:\b(?:bearer|basic|authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?token))"
            r"\s{1,3}(?P<s>(?=[A-Za-z._~+/=-]{0,200}\d)"
            r"[A-Za-z0-9._~+/=-]{12,})"
        ),
        ("bearer", "basic", "authorization"),
        remembered=True,
    ),
    "url_password": Kind(
        re.compile(
            r"://[^\s/@:]{0,256}:(?P<s>[^\s/@]{1,256})@"
            r"|(?i:curl)\b[^\r\n|;]{0,500}?\s(?:-u|--user)[ =]{0,2}[\"']?[^\s:\"']{1,256}:"
            r"(?P<u>(?![$<{%])[^\s\"']{1,256})"
        ),
        ("://", "curl"),
        remembered=True,
    ),
    "password": Kind(_PASSWORD, _PASSWORD_WORDS, _is_password, remembered=True),
    "card": Kind(re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ -]?\d){12,}(?!\.?\d)"), check=_is_card),
    "email": Kind(
        re.compile(
            r"(?<![A-Za-z0-9._%+-])(?!git@)[A-Za-z0-9._%+-]{1,64}@"
            r"(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
        )
    ),
    "random": Kind(re.compile(r"[A-Za-z0-9+/_=-]{32,}"), check=_is_random),
}
"""All kinds by name; `random` is anything that looks like a key of no known kind."""
