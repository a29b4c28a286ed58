"""Sessions that other parties claim, and results that they send: the desk of the gateway, and the
environment behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from etude.core.errors import EtudeError
from etude.core.remote import (
    RemoteTask,
    RolloutRequest,
    RolloutResult,
    SessionOffer,
    SessionOutcome,
)
from etude.core.types import Score, Trajectory
from etude.run import service as service_module
from etude.run.gateway_client import GatewayClient
from etude.run.pull import PullEnvironment
from etude.run.rollout import RolloutRunner
from etude.serve import process
from etude.serve.access import SignedTokens
from etude.serve.conversations import ConversationStore
from etude.serve.http import create_app
from etude.serve.session_desk import SessionDesk, SessionRoutes
from etude.serve.session_journal import SessionJournal
from etude.serve.session_records import SessionRecords
from etude.serve.token_routes import TokenRoutes
from etude.serve.tokens import Scope, TokenAuthority
from etude.store.objects import Objects
from tests.run.test_service import TASK, Service, Sessions
from tests.serve.test_recorder import TOKENIZER

RESULT = {"status": "done", "score": {"reward": 0.75}}


TOKENS = TokenAuthority()


@contextlib.asynccontextmanager
async def gateway(desk: SessionRoutes | None = None) -> AsyncIterator[GatewayClient]:
    """A gateway with its desk and a token issuer; the client is an admin's."""
    listener = process.bind("127.0.0.1", 0, None)
    tokens = TokenRoutes(TOKENS, Objects.open("memory:"))
    routes = [*(desk or SessionRoutes()).routes(), *tokens.routes()]
    app = create_app(routes, SignedTokens(TOKENS))
    async with process.serving(app, listener), GatewayClient(process.url_of(listener)) as client:
        client.headers = process.authorization(TOKENS.mint(Scope.ADMIN, "", 3600.0))
        yield client


async def post(
    client: GatewayClient, path: str, body: Any, token: str | None = None
) -> tuple[int, Any]:
    headers = process.authorization(token) if token else client.headers
    async with client.http.post(client.url + path, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, json.loads(text) if text else None


async def send(client: GatewayClient, asked: dict[str, Any]) -> int:
    """Send the result of a rollout, as a service does that does not wait for a request."""
    headers = process.authorization(asked["callback_token"])
    url = asked["callback_url"]
    async with client.http.post(url, json=RESULT, headers=headers) as response:
        return response.status


def rollouts(
    client: GatewayClient, path: Path, *, claim_s: float = 60.0, timeout_s: float = 60.0
) -> tuple[RolloutRunner, Sessions]:
    environment = PullEnvironment(str(path), counts={"train": 3}, claim_s=claim_s)
    agent = environment.own_agent(client, max_tokens=9, timeout_s=timeout_s, temperature=0.5)
    sessions = Sessions()
    return RolloutRunner(environment, agent, sessions, concurrency=16), sessions


async def test_a_scheduler_asks_for_sessions_and_sends_their_scores(tmp_path: Path) -> None:
    async with gateway() as client:
        runner, _ = rollouts(client, tmp_path)
        attempts = [asyncio.create_task(runner.attempt(TASK, f"g.{n}", seed=n)) for n in range(3)]
        seen = set()
        for _ in attempts:
            scheduler = TOKENS.mint(Scope.SCHEDULER, "", 60.0)
            status, asked = await post(client, "/v1/sessions", {"wait_s": 30}, scheduler)
            assert status == 200 and asked["task"]["prompt"] == "sing"
            assert asked["base_url"] == f"http://gateway/s/{asked['id']}/v1"
            assert (asked["token"], asked["max_tokens"]) == ("key", 9)
            assert asked["deadline"] > 1e9
            seen.add(asked["id"])
            score = f"/v1/sessions/{asked['id']}/score"
            assert asked["callback_url"] == client.url + score
            assert (await post(client, score, RESULT, asked["callback_token"]))[0] == 204
        done: list[Trajectory] = await asyncio.gather(*attempts)
    assert seen == {"g.0", "g.1", "g.2"}
    assert [(each.status, each.reward) for each in done] == [("done", 0.75)] * 3


async def test_an_agent_cannot_score_itself(tmp_path: Path) -> None:
    """The agent's key cannot set a score, and the key for scores cannot reach the model."""
    async with gateway() as client:
        runner, _ = rollouts(client, tmp_path)
        attempt = asyncio.create_task(runner.attempt(TASK, "g.0", seed=0))
        _, asked = await post(client, "/v1/sessions", {"wait_s": 30})
        agents = TOKENS.mint(Scope.SESSION, asked["id"], 60.0)
        others = TOKENS.mint(Scope.SCORE, "g.1", 60.0)
        generous = {"status": "done", "score": {"reward": 1.0}}
        for token, code in ((agents, "wrong_scope"), (others, "wrong_session")):
            status, said = await post(client, "/v1/sessions/g.0/score", generous, token)
            assert (status, said["error"]["code"]) == (403, code)
        assert asked["callback_token"] != asked["token"]
        assert (await post(client, "/v1/sessions", {}, asked["callback_token"]))[0] == 403
        await post(client, "/v1/sessions/g.0/score", RESULT, asked["callback_token"])
        assert (await attempt).reward == 0.75


async def test_without_one_to_run_there_is_nothing_to_say(tmp_path: Path) -> None:
    async with gateway() as client:
        assert await post(client, "/v1/sessions", {}) == (204, None)
        assert await post(client, "/v1/sessions", {"wait_s": 0.01}) == (204, None)
        status, said = await post(client, "/v1/sessions/g.0/score", RESULT)
        assert (status, said["error"]["code"]) == (404, "unknown_session")


async def test_a_claimed_session_without_a_result_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.run.pull.GRACE_S", 0.0)
    async with gateway() as client:
        # time enough for the second one to be settled
        runner, sessions = rollouts(client, tmp_path, timeout_s=2.0)
        attempt = asyncio.create_task(runner.attempt(TASK, "g.0", seed=0))
        _, lost = await post(client, "/v1/sessions", {"wait_s": 30})
        _, again = await post(client, "/v1/sessions", {"wait_s": 30})
        assert (lost["id"], again["id"]) == ("g.0", "g.0~1")
        await post(client, "/v1/sessions/g.0~1/score", RESULT)
        assert (await attempt).reward == 0.75
        assert sessions.forgotten == ["g.0", "g.0~1"]


async def test_what_nobody_asks_for_fails_and_says_so(tmp_path: Path) -> None:
    async with gateway() as client:
        runner, _ = rollouts(client, tmp_path, claim_s=0.05)
        done = await runner.attempt(TASK, "g.0", seed=0)
    assert done.score is None and done.error is not None
    assert "no scheduler took the session within 0.05 s (tasks.timeout_s)" in done.error


async def test_a_session_that_failed_has_no_reward(tmp_path: Path) -> None:
    async with gateway() as client:
        runner, _ = rollouts(client, tmp_path)
        attempt = asyncio.create_task(runner.attempt(TASK, "g.0", seed=0))
        await post(client, "/v1/sessions", {"wait_s": 30})
        failed = {"status": "failed", "error": "no browser"}
        assert (await post(client, "/v1/sessions/g.0/score", failed))[0] == 204
        done = await attempt
    assert done.score is None and done.error is not None and "no browser" in done.error


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "running"},
        {"status": "done"},
        {"status": "failed", "score": {"reward": 0.0}},
        {"status": "done", "score": {"reward": "much"}},
        {"score": {"reward": 1.0}},
    ],
)
async def test_what_is_no_result_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    async with gateway() as client:
        await client.offer("g.0", offer("g.0"))
        assert (await post(client, "/v1/sessions/g.0/score", wrong))[0] == 400


async def test_a_field_that_is_unknown_is_refused() -> None:
    """Misspelt, it would be a wait of zero seconds."""
    async with gateway() as client:
        await client.offer("g.0", offer("g.0"))
        status, said = await post(client, "/v1/sessions", {"wait": 30})
        assert (status, said["error"]["param"]) == (400, "wait")
        assert "unknown field `wait`; known fields: wait_s" in said["error"]["message"]
        outcome = await client.outcome("g.0", 0.0)
        assert outcome is not None and not outcome.claimed, "it is still free"


@pytest.mark.parametrize(
    ("wrong", "field", "why"),
    [
        ({"artefacts": []}, "artefacts", "`artefacts`; known fields: id, status, score, error, "),
        ({"score": {"reward": 1, "credits": []}}, "credits", "`credits` - at `$.score`; known"),
        (
            {"score": {"reward": 1, "parts": [{"name": "a", "value": 1, "proof": ""}]}},
            "proof",
            "`proof` - at `$.score.parts[0]`; known fields: name, value, evidence",
        ),
        ({"artifacts": [{"name": "film", "link": ""}]}, "link", "`link` - at `$.artifacts[0]`"),
    ],
)
async def test_a_field_that_no_result_has_is_refused(
    wrong: dict[str, Any], field: str, why: str
) -> None:
    """Misspelt, it would be missing from the training data. Nothing is settled."""
    async with gateway() as client:
        await client.offer("g.0", offer("g.0"))
        status, said = await post(client, "/v1/sessions/g.0/score", {**RESULT, **wrong})
        assert (status, said["error"]["param"]) == (400, field)
        assert f"unknown field {why}" in said["error"]["message"]
        free = {**RESULT, "messages": [{"role": "user", "content": None, "by": {"whom": ["x"]}}]}
        assert (await post(client, "/v1/sessions/g.0/score", free))[0] == 204


async def test_a_score_needs_an_answer_of_the_model() -> None:
    """Without one the score is refused, and nothing is settled; a failure needs no answer."""
    answered: set[str] = set()
    async with gateway(SessionRoutes(answered.__contains__)) as client:
        for session in ("g.0", "g.1"):
            await client.offer(session, offer(session))
            status, said = await post(client, f"/v1/sessions/{session}/score", RESULT)
            assert (status, said["error"]["code"]) == (400, "no_answer")
            assert "no recorded answer of the model" in said["error"]["message"]
        answered.add("g.0")
        assert (await post(client, "/v1/sessions/g.0/score", RESULT))[0] == 204
        failed = {"status": "failed", "error": "no browser"}
        assert (await post(client, "/v1/sessions/g.1/score", failed))[0] == 204
        status, said = await post(client, "/v1/sessions/g.2/score", RESULT)
        assert (status, said["error"]["code"]) == (404, "unknown_session")


async def test_a_desk_that_forgot_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, after a restart of the gateway, when the session is claimed already."""
    desk = SessionRoutes()
    async with gateway(desk) as client:
        runner, _ = rollouts(client, tmp_path)
        is_known = asyncio.Event()
        ask = client.outcome

        async def outcome(
            session: str, wait_s: float, *, claimed: bool = False
        ) -> SessionOutcome | None:
            if claimed:
                is_known.set()
            return await ask(session, wait_s, claimed=claimed)

        monkeypatch.setattr(client, "outcome", outcome)
        attempt = asyncio.create_task(runner.attempt(TASK, "g.0", seed=0))
        await post(client, "/v1/sessions", {"wait_s": 30})
        await is_known.wait()
        await desk.forget("g.0")
        while await client.outcome("g.0", 0.0) is None:
            await asyncio.sleep(0.01)
        assert await post(client, "/v1/sessions", {}) == (204, None), "it is not free again"
        await post(client, "/v1/sessions/g.0/score", RESULT)
        assert (await attempt).reward == 0.75


async def test_a_score_outlives_the_gateway(tmp_path: Path) -> None:
    """A score that was acknowledged before the controller read it; the controller then starts its
    wait again."""
    store = Objects.open(f"file:{tmp_path}/store")

    def begin_life() -> tuple[SessionRoutes, SessionJournal]:
        desk, journal = SessionRoutes(), SessionJournal(store)
        records = SessionRecords(TOKENIZER, ConversationStore())
        records.restore(journal, desk.restore)
        desk.journal = journal
        return desk, journal

    desk, journal = begin_life()
    huge = RESULT | {"messages": [{"role": "user", "content": "x", "n": 1 << 200}]}
    async with gateway(desk) as client:
        await client.offer("g.0", offer("g.0"))
        assert (await post(client, "/v1/sessions", {}))[0] == 200
        assert (await post(client, "/v1/sessions/g.0/score", huge))[0] == 204
    journal.close()

    desk, journal = begin_life()
    async with gateway(desk) as client:
        assert (await post(client, "/v1/sessions/g.0/score", huge))[0] == 204, "sent again"
        assert (await post(client, "/v1/sessions/g.0/score", RESULT))[0] == 409
        runner, _ = rollouts(client, tmp_path)
        done = await runner.attempt(TASK, "g.0", seed=0)
        assert done.reward == 0.75 and done.messages[0]["n"] == 1 << 200
        headers = client.headers
        async with client.http.delete(f"{client.url}/v1/sessions/g.0", headers=headers) as gone:
            assert gone.status == 204
    journal.close()

    desk, journal = begin_life()
    async with gateway(desk) as client:
        assert await client.outcome("g.0", 0.0) is None
    journal.close()


def test_nothing_to_try_without_a_run(tmp_path: Path) -> None:
    environment = PullEnvironment(str(tmp_path), counts={}, claim_s=1.0)
    with pytest.raises(EtudeError, match="start it with etude run"):
        environment.own_agent(None)


async def test_a_service_may_send_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of waiting for a request: this service never reports that a rollout has ended."""
    monkeypatch.setattr(service_module, "RETRY_S", 0.01)
    async with gateway() as client:
        service = Service((202, {"status": "running"}))

        async def look(http: web.Request) -> web.Response:
            assert await send(client, service.asked[-1]) == 204
            await asyncio.sleep(600)
            raise AssertionError

        service.looked = look
        async with service.runner(desk=client) as runner:
            done = await runner.attempt(TASK, "g.0", seed=0)
    assert (done.status, done.reward) == ("done", 0.75)


async def test_a_result_that_was_sent_before_the_service_was_lost_counts() -> None:
    async with gateway() as client:
        service = Service((202, {"status": "running"}))

        async def look(http: web.Request) -> web.Response:
            await send(client, service.asked[-1])
            return web.Response(status=404)

        service.looked = look
        async with service.runner(desk=client) as runner:
            done = await runner.attempt(TASK, "g.0", seed=0)
    assert done.reward == 0.75 and len(service.asked) == 1


def offer(session: str) -> SessionOffer:
    request = RolloutRequest(
        id=session,
        task=RemoteTask(id="t", prompt="x"),
        base_url="",
        token="",
        seed=0,
        deadline=0.0,
    )
    return SessionOffer(request=request, timeout_s=5.0)


def test_the_desk_alone() -> None:
    desk = SessionDesk()
    for session in ("a", "b"):
        desk.offer(session, offer(session))
    first = desk.claim(now=100.0)
    assert first is not None and (first.id, first.deadline) == ("a", 105.0)
    desk.offer("a", offer("a"))
    second = desk.claim(now=100.0)
    assert second is not None and second.id == "b", "told again, it stays claimed"
    assert desk.claim(now=100.0) is None
    result = RolloutResult(status="done", score=Score(1.0))
    with pytest.raises(ValueError, match="belongs to rollout 'a', not 'b'"):
        desk.settle("a", replace(result, id="b"))
    assert desk.outcome("a").result is None
    desk.settle("b", replace(result, id="b"))
    desk.settle("a", result)
    desk.settle("a", result)
    with pytest.raises(ValueError, match="already has another result"):
        desk.settle("a", RolloutResult(status="done", score=Score(0.0)))
    assert desk.outcome("a").result == result
    desk.forget("a")
    for lost in (lambda: desk.outcome("a"), lambda: desk.settle("a", result)):
        with pytest.raises(KeyError):
            lost()
