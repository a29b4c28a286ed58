"""kill -9 during answers and feedback: everything that was acknowledged is stored, and no secret
is."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp

from etude.store.objects import Objects
from etude.store.production import ProductionStore
from tests.serve.producing import ALICE
from tests.serve.scripted import FILES, TOKENIZER
from tests.serve.test_production import PASSWORD, SECRET, scan

ANSWERS = [f"use {SECRET} then", f'password = "{PASSWORD}"', "Done."]


async def test_a_killed_gateway_loses_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    model, store = tmp_path / "model", tmp_path / "store"
    model.mkdir()
    for name, data in FILES.items():
        (model / name).write_bytes(data)
    argv = [sys.executable, "-m", "tests.serve.production_process", str(model), f"file:{store}"]
    child = subprocess.Popen([*argv, *ANSWERS], stdout=subprocess.PIPE, text=True)
    acknowledged: list[str] = []
    answered: list[str] = []
    enough = asyncio.Event()
    limit = random.Random().randint(20, 60)

    async def user(number: int, http: aiohttp.ClientSession, url: str) -> None:
        """Asks, and sends feedback, until the gateway is gone."""
        headers = ALICE | {"X-Etude-User": f"user {number}", "X-Etude-Session": "s"}
        body = {"messages": [{"role": "user", "content": f"my key is {SECRET}"}]}
        while True:
            async with http.post(
                f"{url}/v1/chat/completions", json=body, headers=headers
            ) as response:
                id = (await response.json())["id"]
            answered.append(id.removeprefix("chatcmpl-"))
            event = {"event": id, "completion": id, "kind": "tip", "text": f"no {SECRET}!"}
            async with http.post(f"{url}/v1/feedback", json=event, headers=headers) as response:
                assert response.status == 200
            acknowledged.append(id.removeprefix("chatcmpl-"))
            if len(acknowledged) >= limit:
                enough.set()

    try:
        assert child.stdout is not None
        url = (await asyncio.to_thread(child.stdout.readline)).strip()
        async with aiohttp.ClientSession() as http:
            users = [asyncio.create_task(user(number, http, url)) for number in range(4)]
            await enough.wait()
            child.send_signal(signal.SIGKILL)
            ended = await asyncio.gather(*users, return_exceptions=True)
        assert all(isinstance(one, aiohttp.ClientError) for one in ended), ended
    finally:
        child.kill()
        child.wait()
    scan(store, SECRET, PASSWORD)
    kept = ProductionStore(Objects.open(f"file:{store}"))
    turns = [turn for session in kept.sessions().sessions for turn in session.turns]
    assert set(answered) <= {turn.completion for turn in turns}
    assert SECRET not in "".join(TOKENIZER.decode((*t.read, *t.sampled)) for t in turns)
    events = kept.feedback()
    assert set(acknowledged) <= {event.completion for event in events}
    assert len(events) == len({event.completion for event in events})
