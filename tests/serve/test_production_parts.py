"""The configuration file of production mode, its key, and the ways in which a recording ends."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from etude.core.config import parse
from etude.core.consent import pseudonym
from etude.core.errors import EtudeError
from etude.core.feedback import FeedbackEvent
from etude.core.recorded import Redaction
from etude.core.traffic import Arm
from etude.serve.production import routes
from etude.serve.production.config import KEY_BYTES, read_production, read_user_key
from etude.serve.production.place import Place
from etude.serve.production.recording import _spans, _with_parsed_calls, _with_spelled_calls
from etude.serve.production.routes import open_production
from etude.serve.router import Router
from etude.serve.worker_protocol import JoinRequest
from etude.store.objects import Objects
from etude.store.runs import Run
from tests.serve.producing import ALICE, KEY, production
from tests.serve.scripted import TOKENIZER

NOW = 2e9


def test_paths_in_the_file_begin_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "production.toml"
    file.write_text(
        'user_key_file = "keys/user"\nstore = "recorded"\n[consent.users]\n"a@b" = false\n'
    )
    config = read_production(file)
    assert config.user_key_file == str(tmp_path / "keys" / "user")
    assert config.store == str(tmp_path / "recorded")
    assert (config.retention_s, config.horizon_s) == (30 * 86400, 24 * 3600)
    assert (config.sampling_rate, config.session_idle_minutes) == (1.0, 30.0)
    assert config.consent.users == {"a@b": False} and config.feedback_per_minute == 60.0
    file.write_text('user_key_file = "/key"\nstore = "s3://bucket/x"\nretention_days = 2\n')
    config = read_production(file)
    assert (config.user_key_file, config.store) == ("/key", "s3://bucket/x")
    assert config.retention_s == 2 * 86400
    file.write_text('user_key_file = "k"')
    assert read_production(file).store is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "user_key_file"),
        ("user_key_file = ", "production.toml: "),
        ("sampling = 1", "sampling"),
        ("sampling_rate = 1.1", "sampling_rate: from 0 to 1"),
        ("sampling_rate = -0.1", "sampling_rate: from 0 to 1"),
        ("retention_days = 0", "retention_days: a number above 0"),
        ("pending_hours = 0", "pending_hours: a number above 0"),
        ("session_idle_minutes = 1e6", "session_idle_minutes: a number above 0"),
        ("feedback_per_minute = 0", "feedback_per_minute: a number above 0"),
        ("redaction.patterns.mine = '('", "mine"),
    ],
)
def test_what_the_file_may_not_say(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "production.toml"
    file.write_text(f'user_key_file = "k"\n{text}' if "user_key" not in why and text else text)
    with pytest.raises(EtudeError, match=why):
        read_production(file)
    for allowed in ("sampling_rate = 0", "sampling_rate = 1", "feedback_per_minute = 0.5"):
        file.write_text(f'user_key_file = "k"\n{allowed}')
        read_production(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EtudeError, match="cannot read .*production.toml: No such file"):
        read_production(tmp_path / "production.toml")


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(EtudeError, match="holds no key"):
        read_user_key(path, create=False)
    key = read_user_key(path, create=True)
    assert len(key) == KEY_BYTES and path.stat().st_mode & 0o777 == 0o600
    assert read_user_key(path, create=True) == read_user_key(path, create=False) == key
    assert os.listdir(tmp_path) == ["key"], "nothing is left beside it"
    other = tmp_path / "other"
    assert read_user_key(other, create=True) != key


def test_of_two_who_make_a_key_both_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "key", os.link

    def first(part: Path, whole: Path) -> None:
        path.write_text("ab" * KEY_BYTES)
        link(part, whole)

    monkeypatch.setattr(os, "link", first)
    assert read_user_key(path, create=True) == b"\xab" * KEY_BYTES
    assert os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize(("text", "why"), [("ab" * (KEY_BYTES - 1), "must have"), ("oh", "no key")])
def test_what_is_no_key(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(EtudeError, match=why):
        read_user_key(tmp_path / "key", create=True)


def test_a_place_is_the_store_that_the_file_names(tmp_path: Path) -> None:
    file = tmp_path / "production.toml"
    file.write_text('user_key_file = "k"\n[consent.users]\na = false\nb = true\n'
                    "[consent.organisations]\nc = false\n")  # fmt: skip
    (tmp_path / "k").write_text(KEY.hex())
    with pytest.raises(EtudeError, match="names no store"):
        Place(file, None)
    Objects.open(f"file:{tmp_path}/run").put("x", b"")
    place = Place(file, f"file:{tmp_path}/run")
    assert place.refused == {pseudonym(name, KEY) for name in ("a", "c")}
    assert place.key == KEY


async def test_a_word_that_comes_while_the_model_answers_counts(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Turns that were recorded before stay until they are deleted."""
    async with production(http, f"file:{tmp_path}", ["one", "two", "three"]) as made:
        await made.say("hello")
        (open_,) = made.mode.recording.sessions.values()
        made.mode.recording._permitted = lambda session: False
        await made.say("again")
        assert open_.dropped == "consent_withdrawn"
        assert made.mode.recording.counts["dropped_consent_withdrawn"] == 1
        assert made.mode.recording.counts["turns"] == 1
        made.mode.recording._permitted = lambda session: True
        await made.say("once more")
        assert made.mode.recording.counts["turns"] == 1, "it is over"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RecursionError(), "unredactable"),
        (OverflowError(), "unredactable"),
        (UnicodeEncodeError("utf-8", "x", 0, 1, ""), "unredactable"),
        (EtudeError("the disk is full"), "store_failed"),
    ],
)
async def test_what_cannot_be_written_ends_the_recording_and_not_the_answer(
    http: aiohttp.ClientSession, tmp_path: Path, error: Exception, reason: str
) -> None:
    async with production(http, f"file:{tmp_path}", ["one", "two"]) as made:
        await made.say("hello")
        deleted: list[tuple[str, str]] = []
        dropped: list[dict[str, int]] = []
        store = made.mode.recording._store

        def fails(*_: Any) -> None:
            raise error

        made.mode.recording._store = SimpleNamespace(  # type: ignore[assignment]
            now=store.now, drop_sessions_with=fails, put_turn=fails,
            delete_session=lambda user, name: deleted.append((user, name)), drop=dropped.append,
        )  # fmt: skip
        answer = await made.say("again")
        assert answer["choices"][0]["message"]["content"] == "two"
        (open_,) = made.mode.recording.sessions.values()
        assert (open_.dropped, open_.known) == (reason, set())
        assert made.mode.recording.counts[f"dropped_{reason}"] == 1
        if reason == "unredactable":
            assert deleted == [(open_.identity.user, open_.name)]
            assert dropped == [{"sessions unredactable": 1}]
        else:
            assert not deleted and not dropped


async def test_sessions_that_are_over_are_forgotten(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["a", "b"], session_idle_minutes=2) as made:
        await made.say("hello", "old")
        await made.say("hello", "new")
        old, new = made.mode.recording.sessions.values()
        now = made.store.now()
        old.used, new.used = now - 121, now - 100
        made.mode.forget_idle()
        assert list(made.mode.recording.sessions) == [new.key]
        assert made.mode._gauges()["production_sessions"] == 1.0


@pytest.mark.parametrize(
    ("headers", "body", "why"),
    [
        ({"X-Etude-Consent": "maybe"}, {}, "granted, or refused"),
        ({"X-Etude-User": ""}, {}, "say whose feedback it is"),
        ({"X-Etude-User": "x" * 5000}, {}, "at most"),
        ({}, {"time": 0}, "time: seconds since 1970"),
        ({}, {"time": 1e12}, "time: seconds since 1970"),
        ({}, {"kind": "custom:own"}, "strength: say how much"),
    ],
)
async def test_feedback_that_is_refused(
    http: aiohttp.ClientSession, tmp_path: Path, headers: dict[str, str], body: Any, why: str
) -> None:
    async with production(http, f"file:{tmp_path}", []) as made:
        event = {"event": "e", "completion": f"chatcmpl-{'0' * 24}", "kind": "accepted"} | body
        status, told = await made.feedback(ALICE | headers, **event)
        assert status == 400 and why in told["error"]["message"]


def test_neighbouring_places_of_one_kind_are_one() -> None:
    places = {5: "b", 3: "a", 4: "a", 7: "a", 6: "b"}
    assert _spans(places) == [Redaction(3, 5, "a"), Redaction(5, 7, "b"), Redaction(7, 8, "a")]
    assert _spans({}) == []


def test_arguments_are_read_to_be_looked_through_and_written_again() -> None:
    def calling(*arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": each}} for each in arguments
        ]}  # fmt: skip

    said = calling('{"a": "\\u00e9"}', "{oh", None, "[1]")
    parsed = _with_parsed_calls(said)
    found = [call["function"]["arguments"] for call in parsed["tool_calls"]]
    assert found == [[{"a": "é"}], "{oh", None, [[1]]]
    again = _with_spelled_calls(parsed)
    assert [call["function"]["arguments"] for call in again["tool_calls"]] == [
        '{"a": "é"}', "{oh", None, "[1]"
    ]  # fmt: skip
    plain = {"role": "user", "content": "x"}
    assert _with_parsed_calls(plain) is plain and _with_spelled_calls(plain) is plain


@pytest.mark.parametrize(
    ("headers", "body", "why"),
    [
        ({}, {}, "say whose word it is, by X-Etude-User or by X-Etude-Organisation"),
        ({"X-Etude-User": "a", "X-Etude-Organisation": "b"}, {}, "say whose word it is"),
        ({"X-Etude-User": "a"}, {"time": -1}, "time: seconds since 1970, and not in the future"),
        ({"X-Etude-User": "a"}, {"time": NOW + 300}, "not in the future"),
        ({"X-Etude-User": "a"}, {"time": NOW + 299}, None),
        ({"X-Etude-Organisation": "b"}, {"time": 0}, None),
    ],
)
async def test_a_word_is_of_one_subject_and_of_the_past(
    http: aiohttp.ClientSession, tmp_path: Path, headers: dict[str, str], body: Any, why: str | None
) -> None:
    async with production(http, f"file:{tmp_path}", []) as made:
        made.store.now = lambda: NOW
        status, told = await made.call("POST", "/v1/consent", {"granted": True} | body, headers)
        assert status == (400 if why else 200)
        assert why in told["error"]["message"] if why else told == {"granted": True}
        subjects = {pseudonym(name, KEY) for name in headers.values()}
        assert set(made.store.consents()) == (set() if why else subjects)


async def test_what_names_nobody_deletes_nobody(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["one"]) as made:
        await made.say("hello")
        status, told = await made.call("DELETE", "/v1/users", headers={"X-Etude-Session": "one"})
        assert (status, told["error"]["message"]) == (400, "say whom to delete: X-Etude-User")
        assert len(made.store.users()) == 1


async def test_feedback_that_cannot_be_stored_is_to_be_sent_again(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(event: object) -> bool:
        raise EtudeError("the disk is full")

    async with production(http, f"file:{tmp_path}", []) as made:
        monkeypatch.setattr(made.store, "put_feedback", fails)
        event = {"event": "e", "completion": f"chatcmpl-{'0' * 24}", "kind": "accepted"}
        status, told = await made.feedback(**event)
        assert status == 503
        assert "the feedback cannot be stored now: the disk is full" in told["error"]["message"]
        assert made.mode.recording.counts["feedback"] == 0


async def test_a_gateway_looks_every_5_s_and_sweeps_every_hour(
    http: aiohttp.ClientSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, seen, sweeps = 50.0, list[float](), list[tuple[float, dict[str, float]]]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        if now > 50 + 2 * 3600:
            raise asyncio.CancelledError

    async def refresh() -> None:
        seen.append(now)
        if len(seen) == 2:
            raise EtudeError("it is away")

    async with production(http, f"file:{tmp_path}", [], retention_days=2, pending_hours=3) as made:
        mode = made.mode
        forgotten: list[None] = []
        monkeypatch.setattr(mode, "refresh", refresh)
        monkeypatch.setattr(mode, "forget_idle", lambda: forgotten.append(None))
        monkeypatch.setattr(made.store, "sweep", lambda **how: sweeps.append((now, how)))
        with monkeypatch.context() as patch:
            calls = SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
            patch.setattr(routes, "asyncio", calls)
            patch.setattr(routes, "time", SimpleNamespace(monotonic=lambda: now))
            with pytest.raises(asyncio.CancelledError):
                await mode.watch()
    assert seen == [50.0 + 5 * number for number in range(2 * 720 + 1)]
    assert len(forgotten) == len(seen)
    kept = {"retention_s": 2 * 86400, "horizon_s": 3 * 3600}
    assert sweeps == [(50.0 + 3600 * hour, kept) for hour in range(3)]
    assert capsys.readouterr().err == "the store of production mode: it is away\n"


async def test_a_session_that_changes_its_pool_is_forgotten_by_the_one_before(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with production(http, f"file:{tmp_path}", ["a", "b", "c", "d"]) as made:
        blue, green = made.mode._router, Router(http)
        (worker,) = blue.fleet.workers
        await green.join(JoinRequest(url=worker.url, region="east", version=0))
        forgotten: list[tuple[str, str]] = []
        for name, router in (("blue", blue), ("green", green)):
            monkeypatch.setattr(router, "forget", lambda key, n=name: forgotten.append((n, key)))
        asked: list[tuple[str, str]] = []
        homes = [(blue, 0), (blue, 0), (green, 1), (green, 1)]

        def home(user: str, session: str) -> tuple[Router, Arm]:
            router, version = homes[len(asked)]
            asked.append((user, session))
            return router, Arm(pool="x", version=version, propensity=0.5)

        monkeypatch.setattr(made.mode, "_pools", SimpleNamespace(home=home))
        for _ in range(4):
            await made.say("hello")
        (open_,) = made.mode.recording.sessions.values()
        assert forgotten == [("blue", open_.key)]
        assert open_.router is green and open_.arm is not None and open_.arm.version == 1
        assert set(asked) == {(open_.identity.user, "one")}


@pytest.mark.parametrize("is_elsewhere", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_a_run_is_served_as_its_file_says(tmp_path: Path, is_elsewhere: bool, learns: bool) -> None:
    file = tmp_path / "production.toml"
    store = f'store = "{tmp_path}/other"\n' if is_elsewhere else ""
    file.write_text(f'{store}user_key_file = "{tmp_path}/key"\n')
    run = Run.open(str(tmp_path / "run"))
    realtime = '[realtime]\nproduction = "production.toml"\n' if learns else ""
    run.put_config(parse(f'name = "r"\n[[stage]]\nkind = "rl"\nsteps = 1\n{realtime}'))
    model: Any = SimpleNamespace(tokenizer=TOKENIZER, gauges=[])
    router: Any = object()
    mode = open_production(file, model, router, run)
    mode._store.put_feedback(
        FeedbackEvent(
            event="e" * 32, user="u" * 32, completion="0" * 24, kind="accepted", strength=0.5,
            time=1.0, received=1.0,
        )
    )  # fmt: skip
    where = Objects.open(str(tmp_path / ("other" if is_elsewhere else "run")))
    assert len(where.list("production/users")) == 1
    assert bool(where.list("production/news")) == learns
    assert bytes.fromhex((tmp_path / "key").read_text()) == mode._key
    assert mode._router is router
