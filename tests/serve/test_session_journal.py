"""The journal of sessions: everything that a gateway acknowledged is restored, or its session is
marked as incomplete."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from etude.core.errors import EtudeError
from etude.core.sampling import RegionSpan, Request, Sample, SamplingParams
from etude.model.tokenizer import Message
from etude.serve.answerer import ServedModel
from etude.serve.conversations import ConversationStore, StoredResponse
from etude.serve.fake import Scripted
from etude.serve.gateway import SessionAnswerer
from etude.serve.grammar import GrammarBuilder
from etude.serve.http import ApiError, Unavailable
from etude.serve.session_journal import (
    FOLDER,
    MAX_IDLE_S,
    ForgottenResponse,
    KeptResponse,
    SessionJournal,
    SettledSession,
    WithdrawnSession,
    _AppendedFile,
)
from etude.serve.session_records import SessionRecords
from etude.store.objects import Objects
from tests.serve.test_recorder import FILES, TOKENIZER, TOOLS, prompt_for, sample_of, user

EOS = TOKENIZER.eos_token_id


class Life:
    """One run of a gateway over a store."""

    def __init__(self, objects: Objects, now: float = 0.0, **options: Any) -> None:
        self.conversations = ConversationStore()
        self.records = SessionRecords(TOKENIZER, self.conversations)
        self.journal = SessionJournal(objects, now=lambda: now, **options)
        self.settled: list[SettledSession] = []
        self.known = self.records.restore(self.journal, self.settled.append)

    def end(self) -> None:
        """End it as the kernel does when a process is killed."""
        self.journal.close()

    async def say(
        self, session: str, messages: Sequence[Message], text: str, *, received: bool = True,
        **differs: Any,
    ) -> Message:  # fmt: skip
        recorder = self.records.recorder
        prompt = prompt_for(recorder, session, messages, TOOLS)
        sample = replace(sample_of([*TOKENIZER.encode(text), EOS], len(messages)), **differs)
        message = TOKENIZER.parse(sample.tokens, TOOLS, str)
        params = SamplingParams(temperature=0.5)
        life = self.records.life(session)
        turn = await self.records.record(session, prompt, sample, message, params, "turns", life)
        if received:
            recorder.received(turn)
        return message


@pytest.fixture(params=["directory", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "bucket":
        return Objects(MemoryStore(), "s3://fake")
    return Objects.open(f"file:{tmp_path}/store")


async def test_a_session_goes_on_where_it_was(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(objects)
    history = [user(f"read {TOKENIZER.eos_token} area.py")]
    answer = await life.say("s", history, "call a", experts=b"abc", regions=(RegionSpan("e", 3),))
    history += [answer, user("go on")]
    await life.say("s", history, "tool")
    await life.say("s", [user("sum it up")], "done")
    before = life.records.recorder.segments("s"), life.records.recorder.experts("s")
    life.end()

    # another process: control tokens within messages have other stand-ins
    monkeypatch.setattr("etude.model.tokenizer._NONCE", "9876543210")
    monkeypatch.setattr("etude.model.tokenizer._STAND_IN", re.compile(r"~9876543210:(\d+)~"))
    life = Life(objects)
    recorder = life.records.recorder
    assert life.known == ["s"]
    assert (recorder.segments("s"), recorder.experts("s")) == before
    history += [{"role": "assistant", "content": "tool"}, user("and now")]
    await life.say("s", history, "read", experts=b"d")
    life.end()

    recorder = Life(objects).records.recorder
    assert len(recorder.segments("s")) == 2
    grown = recorder.segments("s")[0]
    assert grown.tokens[: len(before[0][0].tokens)] == before[0][0].tokens
    assert sum(grown.mask) == sum(before[0][0].mask) + len(TOKENIZER.encode("read")) + 1
    assert grown.sampling[0].params.temperature == 0.5 and len(grown.versions) == 3


@pytest.mark.parametrize("seed", range(3))
async def test_any_sessions_in_any_number_of_lives(objects: Objects, seed: int) -> None:
    rng, whole = random.Random(seed), Life(Objects.open("memory:"))
    life = Life(objects, max_file_bytes=2000)
    histories: dict[str, list[Message]] = {}
    for _ in range(40):
        session = rng.choice("abcd")
        history = histories.setdefault(session, [user("read")])
        if rng.random() < 0.1:
            history[:] = [user("a summary")]
        text = rng.choice(["call", "a tool", "read area"])
        received = rng.random() < 0.8
        answers = [
            await each.say(session, history, text, received=received) for each in (life, whole)
        ]
        if received:
            history += [answers[0], user(rng.choice(["go", "call a tool"]))]
        if rng.random() < 0.1:
            await life.records.forget(session)
            await whole.records.forget(session)
            del histories[session]
        if rng.random() < 0.2:
            life.end()
            life = Life(objects, max_file_bytes=2000)
            assert sorted(life.known) == sorted(histories)
    for session in histories:
        recorded = [each.records.recorder.segments(session) for each in (life, whole)]
        assert recorded[0] == recorded[1]


async def test_who_asks_again_is_given_what_was_recorded(objects: Objects) -> None:
    life = Life(objects)
    history = [user("read")]
    await life.say("s", history, "call", received=False)
    life.end()
    life = Life(objects)
    records, recorder = life.records, life.records.recorder
    prompt = prompt_for(recorder, "s", history, TOOLS)
    answer = (*TOKENIZER.encode("call"), EOS)
    asked = Request(
        prompt=prompt.tokens, max_tokens=len(answer), seed=0,
        params=SamplingParams(temperature=0.5), stop_token_ids=(EOS,),
    )  # fmt: skip
    for another in (
        replace(asked, params=SamplingParams()),
        replace(asked, max_tokens=len(answer) - 1),
        replace(asked, top_logprobs=2),
        replace(asked, stop=("x", "al")),  # it would have ended earlier
        replace(asked, stop_token_ids=(EOS + 1,), stop=("x",)),  # it would continue here
    ):
        assert await records.take_unreceived("s", prompt, another) is None
    again = await records.take_unreceived("s", prompt, replace(asked, max_tokens=99, seed=1))
    assert again is not None and again.tokens == answer
    # now it has been received: another answer to the same prompt is another segment
    assert await records.take_unreceived("s", prompt, asked) is None
    await life.say("s", history, "tool")
    assert [segment.prompt for segment in recorder.segments("s")] == [prompt.tokens] * 2


async def test_turns_of_many_sessions_are_stored_together() -> None:
    objects = Objects(MemoryStore(), "s3://fake")
    life = Life(objects)
    await asyncio.gather(*(life.say(f"s{n}", [user("read")], "call") for n in range(50)))
    assert len(objects.list(FOLDER)) <= 4
    assert len(Life(objects).known) == 50


async def test_what_is_over_leaves_nothing(objects: Objects) -> None:
    life = Life(objects, max_file_bytes=1000)
    await life.say("long", [user("read")], "call")
    for n in range(30):
        await life.say(f"s{n}", [user("read")], "call")
        await life.records.forget(f"s{n}")
    assert len(objects.list(FOLDER)) > 1  # the first file is needed
    await life.records.forget("long")
    await life.say("last", [user("read")], "call")
    await life.records.forget("last")
    assert len(objects.list(FOLDER)) <= 2 and objects.size(FOLDER) < 2500
    life.end()
    assert Life(objects).known == []


async def test_a_session_nobody_came_back_to_is_over(objects: Objects) -> None:
    life = Life(objects)
    await life.say("s", [user("read")], "call")
    life.end()
    life = Life(objects, now=MAX_IDLE_S - 1)
    assert life.known == ["s"]
    life.end()
    assert Life(objects, now=MAX_IDLE_S + 1).known == []


@pytest.mark.parametrize("left", [0, 1, 23, 24, 25, -1])
async def test_the_last_entry_may_be_cut_off(tmp_path: Path, left: int) -> None:
    objects = Objects.open(f"file:{tmp_path}/store")
    life = Life(objects)
    await life.say("s", [user("read")], "call")
    path = objects.path(objects.list(FOLDER)[-1])
    assert path is not None
    whole = path.stat().st_size
    await life.say("s", [user("another")], "tool")
    life.end()
    os.truncate(path, whole + left if left >= 0 else path.stat().st_size - 1)
    life = Life(objects)
    life.records.check("s")
    assert len(life.records.recorder.segments("s")) == 1
    await life.say("s", [user("another")], "tool")
    assert len(life.records.recorder.segments("s")) == 2


@pytest.mark.parametrize("place", [0, 5, 10, 30, 200])
async def test_a_session_with_a_hole_is_dropped_by_name(objects: Objects, place: int) -> None:
    life = Life(objects)
    for session in ("s", "t"):
        history = [user("read")]
        history += [await life.say(session, history, "call"), user("go")]
        await life.say(session, history, "tool")
    life.end()
    Life(objects).end()  # all in one file
    (key,) = [key for key in objects.list(FOLDER) if objects.get(key)]
    data = bytearray(objects.get(key))
    data[place] ^= 1
    objects.put(key, bytes(data))
    for _ in range(2):  # it stays broken
        life = Life(objects)
        known = set(life.known)
        assert known <= {"s", "t"}
        for session in known:
            if session not in life.records.recorder.sessions:
                with pytest.raises(
                    ApiError, match="incomplete.*(turns are missing|damaged at byte)"
                ) as told:
                    life.records.check(session)
                assert (told.value.status, told.value.code) == (409, "session_incomplete")
            else:
                assert len(life.records.recorder.segments(session)[0].versions) == 2
        assert "s" not in life.records.recorder.sessions
        life.end()


async def test_damage_in_mid_session_breaks_the_session_and_no_kept_response(
    tmp_path: Path,
) -> None:
    objects = Objects.open(f"file:{tmp_path}/store")
    life = Life(objects)
    kept = StoredResponse(
        response={"id": "one", "output": []}, items=(), messages=(user("a"),), previous=None
    )
    life.conversations.put("", "one", kept)
    await life.journal.commit()
    history = [user("read")]
    history += [await life.say("s", history, "call"), user("go")]
    (key,) = objects.list(FOLDER)
    whole = len(objects.get(key))
    await life.say("s", history, "tool")
    await life.say("t", [user("read")], "call")
    life.end()
    data = bytearray(objects.get(key))
    data[whole + 60] ^= 1  # the second turn of s
    objects.put(key, bytes(data))
    life = Life(objects)
    with pytest.raises(ApiError, match="incomplete.*damaged at byte"):
        life.records.check("s")
    life.records.check("t")
    assert life.records.recorder.sessions == ["t"]
    found = life.conversations.get("", "one")
    assert found is not None and found.messages == (user("a"),)


async def test_stored_responses_are_there_again(objects: Objects) -> None:
    life = Life(objects)

    async def keep(session: str, id: str, messages: list[str], previous: str | None) -> None:
        stored = StoredResponse(
            response={"id": id, "output": [{"id": f"item-{id}"}]},
            items=({"id": "i"},),
            messages=tuple(map(user, messages)),
            previous=previous,
        )
        life.conversations.put(session, id, stored)
        await life.journal.commit()

    for session in ("", "s", "/user/alice"):
        await keep(session, "one", ["a", "b"], None)
        await keep(session, "two", ["a", "b", "c", "d"], "one")
        await keep(session, "gone", ["x"], None)
        life.conversations.delete(session, "gone")
    await keep("t", "three", ["x"], None)
    await life.records.forget("t")
    life.end()
    life = Life(objects)
    for session in ("", "s", "/user/alice"):
        found = life.conversations.get(session, "two")
        assert found is not None and found.messages == tuple(map(user, "abcd"))
        assert life.conversations.item(session, "item-one") == {"id": "item-one"}
        assert life.conversations.get(session, "gone") is None
    assert life.conversations.get("t", "three") is None


async def test_a_result_is_there_until_it_is_withdrawn(objects: Objects) -> None:
    """It may be on another shard than its session, so forgetting one does not forget the other."""
    life = Life(objects)
    settled = [SettledSession(session=session, result=b"{}") for session in ("a", "b")]
    await life.say("b", [user("hi")], "done")
    for each in settled:
        life.journal.append(each)
    life.journal.append(WithdrawnSession(session="b"))
    await life.journal.commit()
    life.end()

    life = Life(objects)
    assert life.settled == settled[:1] and life.known == ["b"]
    await life.records.forget("a")
    life.end()
    life = Life(objects)
    assert life.settled == settled[:1]
    life.end()


async def test_an_answer_that_was_not_stored_is_not_given_either(tmp_path: Path) -> None:
    life = Life(Objects.open(f"file:{tmp_path}/store"))
    await life.say("s", [user("read")], "call")
    prompt = prompt_for(life.records.recorder, "s", [user("go")], TOOLS)
    asked = Request(
        prompt=prompt.tokens, max_tokens=9, seed=0, params=SamplingParams(temperature=0.5),
        stop_token_ids=(EOS,),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: 0)
        with pytest.raises(Unavailable):
            await life.say("s", [user("go")], "tool", received=False)
        with pytest.raises(Unavailable):
            await life.records.take_unreceived("s", prompt, asked)


async def test_an_answer_after_the_end_of_its_session_brings_nothing_back(tmp_path: Path) -> None:
    objects = Objects.open(f"file:{tmp_path}/store")
    life = Life(objects)
    model = ServedModel(tokenizer=TOKENIZER, grammars=GrammarBuilder(FILES), max_context=100)

    class Late(Scripted):
        async def sample(self, request: Request, session: str = "") -> Sample:
            await life.records.forget("s")
            return await super().sample(request)

    policy = Late([[*TOKENIZER.encode("call"), EOS]])
    answerer = SessionAnswerer(model, policy, life.records, "s", "turns")  # type: ignore[arg-type]
    asked = Request(prompt=await answerer.prompt([user("read")], (), {}), max_tokens=9, seed=0)
    with pytest.raises(ApiError, match="has ended"):
        await answerer.sample([asked], lambda request, sample: user("said"), "id")
    assert life.records.recorder.sessions == []
    await life.say("s", [user("read")], "call")  # a new session with the same name starts afresh
    life.end()
    assert Life(objects).known == ["s"]


async def test_two_gateways_do_not_share_a_journal(tmp_path: Path) -> None:
    objects = Objects.open(f"file:{tmp_path}/store")
    life = Life(objects)
    await life.say("s", [user("read")], "call")
    with pytest.raises(EtudeError, match="another gateway is writing to"):
        Life(objects)
    life.end()
    with pytest.raises(
        EtudeError,
        match="sessions/0-of-1 has sessions of a gateway with a different number of shards",
    ):
        Life(objects, shard="1-of-2")


async def test_a_second_gateway_at_a_bucket_is_noticed_by_the_first() -> None:
    """A bucket cannot be locked, but the data of the other gateway is not mistaken for one's
    own."""
    objects = Objects(MemoryStore(), "s3://fake")
    first = Life(objects)
    await first.say("s", [user("read")], "call")
    Life(objects)
    with pytest.raises(Unavailable, match="another gateway has written"):
        await first.say("s", [user("another")], "tool")


async def test_a_turn_that_cannot_be_stored_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry is lost: it is stored with the next one."""
    objects = Objects.open(f"file:{tmp_path}/store")
    life = Life(objects)
    await life.say("s", [user("read")], "call")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        with pytest.raises(Unavailable, match="could not be stored in .*only .* bytes"):
            await life.say("s", [user("another")], "tool")
    await life.say("s", [user("third")], "tool")
    life.end()
    assert len(Life(objects).records.recorder.segments("s")) == 3


async def test_what_cannot_be_written_down_is_refused(objects: Objects) -> None:
    life = Life(objects)
    with pytest.raises(ValueError, match="too large to record"):
        await life.say("s", [{"role": "user", "content": "read", "number": 2**70}], "call")
    assert life.records.recorder.sessions == []


def test_a_write_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    path.touch()
    file = _AppendedFile(str(path))
    file.append(b"one", "the key")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
        with pytest.raises(Unavailable, match="stored in the key: only 2 of 5 bytes"):
            file.append(b"three", "the key")
    assert (path.read_bytes(), file.size) == (b"one", 3)
    file.append(b"four", "the key")
    file.close()
    assert (path.read_bytes(), file.size) == (b"onefour", 7)


def test_a_response_that_goes_on_from_nothing_is_not_there() -> None:
    kept = {
        id: KeptResponse(
            session="s", id=id, previous=previous, response={"id": id}, items=(),
            messages=({"role": "user", "content": id},),
        )
        for id, previous in (("a", None), ("b", "a"), ("d", "c"))
    }  # fmt: skip
    store = ConversationStore()
    for entry in kept.values():
        store.restore(entry)
    first, second = (store.get("s", id) for id in ("a", "b"))
    assert first is not None and second is not None and store.get("s", "d") is None
    assert second.messages == (*first.messages, *kept["b"].messages)
    assert (second.previous, second.response) == ("a", {"id": "b"})
    store.restore(ForgottenResponse(session="s", id="a"))
    assert store.get("s", "a") is None and store.get("s", "b") == second
