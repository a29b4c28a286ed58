"""Production mode: what is recorded of users, what is not, and their feedback."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from etude.core.consent import Consent, pseudonym
from etude.core.errors import EtudeError
from etude.core.recorded import RecordedSession, RecordedTurn
from etude.serve.access import SignedTokens
from etude.serve.production.routes import CLOCK_SKEW_S
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.production import ProductionStore
from tests.serve.producing import ALICE, KEY, Produced, production
from tests.serve.scripted import TOKENIZER, answers, call

SECRET = "sk-ant-api03-Zq8Rk2Lw9Xc4Vb7Nm1Qs"
PASSWORD = "Tr0ub4dor&3-horse"
TOOLS: Any = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}]


def bytes_of(directory: Path) -> bytes:
    """Everything on the disk, file names included."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return b"\n".join(str(path).encode() + b"\n" + path.read_bytes() for path in files)


def scan(directory: Path, *secrets: str) -> None:
    """Assert that no secret is on the disk, in any spelling, nor in the text of stored tokens."""
    data = bytes_of(directory)
    for secret in secrets:
        spelled = [secret, secret[4:], json.dumps(secret)[1:-1], secret.encode().hex()]
        spelled += [base64.b64encode(bytes(n) + secret.encode()).decode()[4:-4] for n in range(3)]
        assert [text for text in spelled if text.encode() in data] == []


def texts(sessions: Sequence[RecordedSession]) -> str:
    return "\n".join(
        TOKENIZER.decode((*turn.read, *turn.sampled)) + json.dumps([*turn.messages, *turn.tools])
        for session in sessions
        for turn in session.turns
    )


async def test_a_user_who_consents_is_recorded_token_for_token(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    said = ["I edit. " + call("edit", line=3), "Done."]
    async with production(http, f"file:{tmp_path}", said) as made:
        first = await made.say("read", tools=TOOLS)
        history = [
            {"role": "user", "content": "read"},
            first["choices"][0]["message"],
            {"role": "tool", "tool_call_id": "x", "content": "ok"},
        ]
        streamed = await made.ask(history, tools=TOOLS, stream=True)
        second = next(events(streamed))
        (session,) = made.store.sessions().sessions
        assert not made.mode.recording._writing  # stored data is not kept in memory
    (segment,) = session.segments
    assert [turn.sampled for turn in segment.turns] == [tuple(one) for one in answers(said)]
    assert [turn.completion for turn in segment.turns] == [
        answer["id"].removeprefix("chatcmpl-") for answer in (first, second)
    ]
    assert [message["role"] for message in segment.messages] == [
        *("user", "assistant", "tool", "assistant")
    ]
    exact = segment.exact()
    assert exact is not None and sum(exact.mask) == sum(map(len, answers(said)))
    assert session.user == pseudonym("alice@example.com", KEY) and session.policy == "mine"
    assert b"alice" not in bytes_of(tmp_path)


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Etude-User": "alice@example.com"},
        {"X-Etude-Consent": "granted"},
        {"X-Etude-User": "alice@example.com", "X-Etude-Consent": "refused"},
        ALICE | {"X-Etude-Organisation": "no-such"},
    ],
    ids=["no word", "nobody", "refused", "the organisation refuses"],
)
async def test_without_consent_users_are_served_and_not_recorded(
    headers: dict[str, str], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    consent: Any = {"organisations": {"no-such": False}}
    async with production(http, f"file:{tmp_path}", ["Done."], consent=_consent(consent)) as made:
        body = {"messages": [{"role": "user", "content": "read"}]}
        status, answer = await made.call("POST", "/v1/chat/completions", body, headers)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "Done."
        event = {"event": "1", "completion": answer["id"], "kind": "tip", "text": "private"}
        status, told = await made.feedback(headers, **event)
        refused = (400, None) if "X-Etude-User" not in headers else (200, "not_recorded")
        assert (status, told.get("status")) == refused
    assert not list(tmp_path.rglob("users/*"))


def _consent(table: dict[str, Any]) -> Any:
    from etude.serve.production.config import ConsentConfig

    return ConsentConfig(**table)


async def test_consent_can_be_withdrawn_in_mid_session(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    user = {"X-Etude-User": "alice@example.com"}
    async with production(http, f"file:{tmp_path}", ["One.", "Two.", "Three."]) as made:
        assert await made.call("POST", "/v1/consent", {"granted": True}, user) == (
            200,
            {"granted": True},
        )
        body = {"messages": [{"role": "user", "content": "read"}]}
        await made.call("POST", "/v1/chat/completions", body, user)
        assert len(made.store.sessions().sessions) == 1
        assert await made.call("POST", "/v1/consent", {"granted": False}, user) == (
            200,
            {"granted": False},
        )
        # an older consent that arrives late changes nothing, nor does a header
        late = {"granted": True, "time": 1e9}
        assert await made.call("POST", "/v1/consent", late, user) == (200, {"granted": False})
        await made.call("POST", "/v1/chat/completions", body, ALICE)
        found = made.store.sessions()
        assert not found.sessions and found.dropped == {"consent_withdrawn": 1}
        assert bytes_of(tmp_path).count(b"/turns/") == 1
    async with production(http, f"file:{tmp_path}", ["Four."]) as again:
        await again.say("read")
        assert bytes_of(tmp_path).count(b"/turns/") == 1


async def test_a_word_to_another_gateway_is_heard_although_its_clock_is_behind(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    user = {"X-Etude-User": "alice@example.com"}
    body = {"messages": [{"role": "user", "content": "read"}]}
    async with production(http, f"file:{tmp_path}", ["One.", "Two."]) as made:
        await made.call("POST", "/v1/chat/completions", body, user)
        behind = ProductionStore(made.store.objects, lambda: time.time() - CLOCK_SKEW_S / 2)
        subject = pseudonym("alice@example.com", KEY)
        behind.put_consent(Consent(subject=subject, granted=True, time=behind.now()))
        await made.mode.refresh()
        await made.call("POST", "/v1/chat/completions", body, user)
        (session,) = made.store.sessions().sessions
    assert [turn.sampled for turn in session.turns] == [tuple(one) for one in answers(["Two."])]


async def test_a_refusal_is_heard_although_the_store_could_not_be_read_for_long(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(since: float) -> Any:
        raise EtudeError("unreachable")

    async with production(http, f"file:{tmp_path}", ["One."]) as made:
        begun, other = time.time(), ProductionStore(made.store.objects)
        subject = pseudonym("alice@example.com", KEY)
        other.put_consent(Consent(subject=subject, granted=False, time=begun))
        made.store.now = lambda: begun + 2 * CLOCK_SKEW_S
        with monkeypatch.context() as m, pytest.raises(EtudeError):
            m.setattr(made.store, "consents", unreachable)
            await made.mode.refresh()
        await made.mode.refresh()
        await made.say("read")
        assert b"/turns/" not in bytes_of(tmp_path)


def events(stream: str) -> Iterator[Any]:
    """The events of a streamed chat."""
    return (json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {"))


def told(stream: str) -> str:
    """The content of a streamed chat."""
    choices = [event["choices"][0] for event in events(stream)]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_secrets_never_reach_the_disk(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Secrets in prompts, answers, calls, results, tool schemas and feedback; in base64 and in
    JSON; streamed, and recognised as a password only once."""
    blob = base64.b64encode(f'{{"user": "bob", "key": "{SECRET}"}}'.encode()).decode()
    said = [
        f"The key is {SECRET}. " + call("edit", password=PASSWORD),
        f"I put {PASSWORD} into the file, and {blob}",
        "Done.",
    ]
    tools = json.loads(json.dumps(TOOLS))
    tools[0]["function"]["description"] = f"use api_key={SECRET}"
    async with production(http, f"file:{tmp_path}", said) as made:
        history: list[Any] = [{"role": "user", "content": f"my mail is bob@example.com {blob}"}]
        first = await made.ask(history, tools=tools)
        history += [first["choices"][0]["message"], {"role": "tool", "content": f"ok {SECRET}"}]
        streamed = await made.ask(history, tools=tools, stream=True)
        assert told(streamed) == said[1]  # the user gets the whole answer
        event = {"event": f"e {SECRET}", "completion": first["id"], "kind": "follow_up"}
        assert (await made.feedback(**event, text=f"why {SECRET}?"))[0] == 200
        found = made.store.sessions()
        (session,) = found.sessions
        kept = texts([session])
        ((word,),) = made.store.joined(found, horizon_s=60).by_answer.values()
    assert word.text.startswith("why ") and word.text.endswith("?") and SECRET not in word.text
    scan(tmp_path, SECRET, PASSWORD, "bob@example.com")
    assert SECRET not in kept and PASSWORD not in kept and "bob@" not in kept and blob not in kept
    # everything that is not a secret is unchanged and in its place
    for turn, whole in zip(session.turns, answers(said), strict=False):
        hidden = {at for span in turn.redacted for at in range(span.start, span.end)}
        assert turn.answer_redacted and len(turn.sampled) == len(whole)
        assert all(
            one == other
            for at, (one, other) in enumerate(zip(turn.sampled, whole, strict=True))
            if at + len(turn.read) not in hidden
        )
        # there are no log-probs after a secret
        assert len(turn.logprobs) <= min(hidden) or not turn.logprobs


async def test_a_secret_that_is_recognised_late_takes_its_sessions_along(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """This includes turns of another session, or of an earlier gateway process."""
    async with production(http, f"file:{tmp_path}", ["Yes?"]) as made:
        await made.say("try correcthorsebattery", "zero")
    async with production(http, f"file:{tmp_path}", ["Yes?", "Done.", "Done."]) as made:
        first = await made.say("try correcthorsebattery")
        await made.say("read", "two")
        assert b"correcthorse" in bytes_of(tmp_path)
        history = [
            {"role": "user", "content": "try correcthorsebattery"},
            first["choices"][0]["message"],
            {"role": "user", "content": 'it is my "password": "correcthorsebattery"'},
        ]
        await made.ask(history)
        scan(tmp_path, "correcthorsebattery")
        found = made.store.sessions()
        assert [len(session.turns) for session in found.sessions] == [1]
        assert found.dropped == {"hole": 1}
        assert made.store.dropped() == {"sessions late_secret": 2}


async def test_the_id_of_every_dialect_finds_its_tokens(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["One.", "Two.", "Three."]) as made:
        ids = []
        async with openai.AsyncOpenAI(
            base_url=f"{made.url}/v1", api_key="x", default_headers=ALICE
        ) as client:
            chat = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "read"}]
            )
            ids += [chat.id, (await client.responses.create(model="m", input="read")).id]
        async with anthropic.AsyncAnthropic(
            base_url=made.url, api_key="x", default_headers=ALICE
        ) as client:
            told = await client.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "read"}]
            )
            ids.append(told.id)
        for number, id in enumerate(ids):
            event = {"event": str(number), "completion": id, "kind": "thumbs_up"}
            assert await made.feedback(**event) == (200, {"status": "stored"})
        sessions = made.store.sessions()
        joined = made.store.joined(sessions, horizon_s=60)
    found = {
        turn.sampled: joined.by_answer[turn.answer]
        for session in sessions.sessions
        for turn in session.turns
    }
    assert {tokens: len(events) for tokens, events in found.items()} == {
        tuple(one): 1 for one in answers(["One.", "Two.", "Three."])
    }


async def feedback_of(made: Produced, **event: Any) -> tuple[int, str]:
    status, told = await made.feedback(**event)
    return status, told.get("status") or told["error"]["code"]


async def test_feedback_is_checked_limited_and_counted_once(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["Done."], feedback_per_minute=1) as made:
        id = (await made.say("read"))["id"]
        event = {"event": "1", "completion": id, "kind": "accepted"}
        assert await feedback_of(made, **event) == (200, "stored")
        assert await feedback_of(made, **event) == (200, "duplicate")
        assert await feedback_of(made, **event | {"kind": "rejected"}) == (409, "conflict")
        for wrong in (
            {"kind": "nice"},
            {"kind": "custom:mine"},
            {"strength": 1.5},
            {"completion": "chatcmpl-../../etc"},
            {"time": 1e12},
            {"text": "x" * 4001},
            {"more": 1},
        ):
            assert await feedback_of(made, **event | wrong) == (400, "invalid_request")
        assert await feedback_of(made, **event) == (429, "too_many_requests")
        # another user has a limit of their own, and none of the answers
        bob = ALICE | {"X-Etude-User": "bob"}
        assert (await made.feedback(bob, **event | {"kind": "thumbs_down"}))[0] == 200
        joined = made.store.joined(made.store.sessions(), horizon_s=60)
    ((answer, events),) = joined.by_answer.items()
    assert answer == (id.removeprefix("chatcmpl-"), 0)
    assert [e.kind for e in events] == ["accepted"]
    assert [e.kind for e in joined.dropped["other_user"]] == ["thumbs_down"]


async def test_a_kind_that_is_not_known_is_named(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["Done."]) as made:
        id = (await made.say("read"))["id"]
        for kind, said in (
            ("thumbsup", "kind 'thumbsup': write one of thumbs_up, "),
            ("custom:mine", "strength is required"),
        ):
            _, told = await made.feedback(event="1", completion=id, kind=kind)
            assert told["error"]["message"].startswith(said)


async def test_feedback_belongs_to_one_of_several_answers(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["Done.", "Not yet."]) as made:
        id = (await made.say("read", n=2))["id"]
        for event, choice, kind in (("1", 1, "accepted"), ("2", 0, "rejected")):
            told = {"event": event, "completion": id, "choice": choice, "kind": kind}
            assert await feedback_of(made, **told) == (200, "stored")
        joined = made.store.joined(made.store.sessions(), horizon_s=60)
    kinds = {choice: [e.kind for e in events] for (_, choice), events in joined.by_answer.items()}
    assert kinds == {0: ["rejected"], 1: ["accepted"]}


async def test_a_session_of_another_user_cannot_be_gone_on_with(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["One.", "Two."]) as made:
        async with openai.AsyncOpenAI(base_url=f"{made.url}/s/one/v1", api_key="x") as client:
            mine = await client.responses.create(model="m", input="read", extra_headers=ALICE)
            bob = ALICE | {"X-Etude-User": "bob"}
            with pytest.raises(openai.BadRequestError, match="not stored here"):
                await client.responses.create(
                    model="m", input="go on", previous_response_id=mine.id, extra_headers=bob
                )
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(mine.id, extra_headers=bob)
            await client.responses.create(model="m", input="read", extra_headers=bob)
        async with http.get(f"{made.url}/s/one/segments") as response:
            assert response.status == 404
        assert [len(s.turns) for s in made.store.sessions().sessions] == [1, 1]


async def test_a_deleted_user_is_gone(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with production(http, f"file:{tmp_path}", ["One.", "Two.", "Three."]) as made:
        id = (await made.say("my cat is called Mnemosyne"))["id"]
        await made.feedback(event="1", completion=id, kind="tip", text="Mnemosyne")
        await made.say("read", headers={"X-Etude-User": "bob"})
        status, told = await made.call("DELETE", "/v1/users")
        assert (status, told) == (200, {"objects": 2})
        user = pseudonym("alice@example.com", KEY)
        count, found = made.store.scan([b"Mnemosyne", user.encode()])
        assert count and not found
        assert b"Mnemosyne" not in bytes_of(tmp_path)
        assert [s.user for s in made.store.sessions().sessions] == [pseudonym("bob", KEY)]
        # a deleted user who returns is a new user
        await made.say("read")
        assert len(made.store.sessions().sessions) == 2


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_what_a_deleted_user_had_consented_to_holds_no_longer(
    http: aiohttp.ClientSession, tmp_path: Path, elsewhere: bool
) -> None:
    user = {"X-Etude-User": "alice@example.com"}
    body = {"messages": [{"role": "user", "content": "read"}]}
    async with production(http, f"file:{tmp_path}", ["One.", "Two."]) as made:
        await made.call("POST", "/v1/consent", {"granted": True}, user)
        if elsewhere:
            ProductionStore(made.store.objects).delete_user(pseudonym("alice@example.com", KEY))
            await made.mode.refresh()
        else:
            await made.call("DELETE", "/v1/users", headers=user)
        await made.call("POST", "/v1/chat/completions", body, user)
        assert not made.store.users()
        await made.call("POST", "/v1/consent", {"granted": True}, user)
        await made.mode.refresh()
        await made.call("POST", "/v1/chat/completions", body, user)
        assert len(made.store.users()) == 1


async def test_an_answer_that_comes_after_its_user_was_deleted_is_in_no_memory(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["One.", "Two."]) as made:
        recording, keep = made.mode.recording, made.mode.recording.keep

        async def late(*answer: Any) -> None:
            assert (await made.call("DELETE", "/v1/users"))[0] == 200
            await keep(*answer)

        recording.keep = late  # type: ignore[method-assign]
        await made.say("my cat is called Mnemosyne")
        assert recording.recorder.sessions == []
        recording.keep = keep  # type: ignore[method-assign]
        await made.say("read")
        (session,) = made.store.sessions().sessions
        assert "Mnemosyne" not in texts([session])


async def test_a_share_of_the_sessions_is_recorded(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with production(http, f"file:{tmp_path}", ["Done."] * 24, sampling_rate=0.5) as made:
        for number in range(12):
            await made.say("read", f"s{number}")
            await made.say("read", f"s{number}")
        sessions = made.store.sessions().sessions
    assert 0 < len(sessions) < 12
    assert {len(session.turns) for session in sessions} == {2}
    assert {session.propensity for session in sessions} == {0.5}


async def test_odd_requests_are_served_and_recorded_or_dropped(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    huge = {"name": "edit", "parameters": {"type": "object", "x": 10**30}}
    surrogate = 'password = "\\ud800abcdefgh1"'
    async with production(http, f"file:{tmp_path}", ["Done."] * 20) as made:
        await made.say("three", "n", n=3)
        await made.say(surrogate, "surrogate")
        await made.say("huge", "huge", tools=[{"type": "function", "function": huge}])
        await asyncio.gather(*(made.say(f"p{n % 3}", "parallel") for n in range(9)))
        found = made.store.sessions()
        assert sorted((len(s.turns), len(s.segments)) for s in found.sessions) == [
            *((1, 1), (3, 3), (9, 9))
        ]
        assert sorted(t.choice for s in found.sessions for t in s.turns)[-3:] == [0, 1, 2]
        assert made.store.dropped() == {"sessions unredactable": 1}
        for wrong in ({"X-Etude-User": "x" * 300}, {"X-Etude-Consent": "maybe"}):
            status, told = await made.call("POST", "/v1/chat/completions", {}, ALICE | wrong)
            assert status == 400 and told["error"]["param"] == next(iter(wrong))


async def test_a_token_speaks_for_its_subject_alone(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority = TokenAuthority(32 * "s")

    def headers(scope: Scope, subject: str, named: str) -> dict[str, str]:
        token = authority.mint(scope, subject, 600)
        told = {"X-Etude-User": named} if named else {}
        return {"Authorization": f"Bearer {token}", "X-Etude-Consent": "granted", **told}

    access = SignedTokens(authority)
    async with production(http, f"file:{tmp_path}", ["hi"] * 9, access=access) as produced:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
        word = {"event": "1", "completion": "chatcmpl-" + 24 * "a", "kind": "thumbs_up"}

        async def ask(path: str, asked: dict[str, Any], *who: Any) -> int:
            return (await produced.call("POST", path, asked, headers(*who)))[0]

        assert await ask("/v1/chat/completions", body, Scope.USER, "alice", "bob") == 403
        assert await ask("/v1/consent", {"granted": True}, Scope.USER, "alice", "bob") == 403
        assert await ask("/v1/feedback", word, Scope.FEEDBACK, "alice", "bob") == 403
        assert await ask("/v1/feedback", word, Scope.SESSION, "s", "alice") == 403
        assert await ask("/v1/chat/completions", body, Scope.FEEDBACK, "", "alice") == 403
        assert await ask("/s/s/v1/chat/completions", body, Scope.SESSION, "s", "alice") == 200
        assert produced.mode.recording.sessions == {}, "whose session that is nobody said"
        for session, found in (("s", 200), ("t", 404)):
            token = headers(Scope.SESSION, session, "")
            path, asked = f"/s/{session}/v1/responses", {"input": "hello", "max_output_tokens": 9}
            if session == "s":
                _, made = await produced.call("POST", path, asked, token)
            assert (await produced.call("GET", f"{path}/{made['id']}", None, token))[0] == found

        assert await ask("/v1/chat/completions", body, Scope.USER, "alice", "") == 200
        assert await ask("/v1/chat/completions", body, Scope.ADMIN, "", "alice") == 200
        users = {each.identity.user for each in produced.mode.recording.sessions.values()}
        assert len(users) == 1, "the same user by both ways"
        assert await ask("/v1/feedback", word, Scope.USER, "alice", "alice") == 200
        assert await ask("/v1/feedback", word | {"event": "2"}, Scope.FEEDBACK, "", "bob") == 200


async def test_the_organisation_of_a_token_is_that_of_its_user(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority = TokenAuthority(32 * "s")

    def headers(scope: Scope, organisation: str, **told: str) -> dict[str, str]:
        token = authority.mint(scope, "alice", 600, organisation)
        return {"Authorization": f"Bearer {token}", "X-Etude-Session": "one", **told}

    def stored(produced: Produced) -> list[RecordedTurn]:
        return [turn for each in produced.store.sessions().sessions for turn in each.turns]

    admin = {"Authorization": f"Bearer {authority.mint(Scope.ADMIN, '', 600)}"}
    access = SignedTokens(authority)
    async with production(http, f"file:{tmp_path}", ["hi"] * 9, access=access) as produced:

        async def ask(path: str, body: dict[str, Any], said: dict[str, str]) -> Any:
            status, answer = await produced.call("POST", path, body, said)
            assert status == 200, answer
            return answer

        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
        of_acme = headers(Scope.USER, "acme", **{"X-Etude-Organisation": "other"})
        acme = pseudonym("acme", KEY)
        await ask("/v1/chat/completions", body, of_acme)
        assert not stored(produced), "nobody said yes"
        await ask("/v1/consent", {"granted": True}, admin | {"X-Etude-Organisation": "acme"})
        answer = await ask("/v1/chat/completions", body, of_acme)
        assert [turn.organisation for turn in stored(produced)] == [acme]

        word = {"event": "1", "completion": answer["id"], "kind": "thumbs_up"}
        await ask("/v1/feedback", word, headers(Scope.FEEDBACK, "acme"))
        assert [event.organisation for event in produced.store.feedback()] == [acme]

        await ask("/v1/consent", {"granted": False}, of_acme)
        other = headers(Scope.USER, "acme") | {"X-Etude-Session": "two"}
        await ask("/v1/chat/completions", body, other)
        assert not stored(produced), "a user's no is the user's"
        bob = admin | {"X-Etude-User": "bob", "X-Etude-Organisation": "acme"}
        await ask("/v1/chat/completions", body, bob)
        assert len(stored(produced)) == 1, "and not the organisation's"


def test_only_users_have_an_organisation() -> None:
    with pytest.raises(ValueError, match="cannot belong to an organisation"):
        TokenAuthority().mint(Scope.WORKER, "", 600, "acme")
