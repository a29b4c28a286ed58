"""Real-time RL against real processes: simulated users teach a model that knows nothing.

`etude realtime` runs as it would for a product: gateway, workers in pools, trainer, loop. Users of
a simulated population ask for songs by HTTP and say what they think of them; they like vowels. Some
of them are held out: they stay with the first version, and all others are compared with them.

    updates           versions that went live
    refused           versions that the gate or the users stopped
    sessions          that were recorded
    kept, kept_heldout                  share of answers that were kept, in the last third
    dissatisfied, dissatisfied_heldout  share that users complained about, likewise
    kept_p, dissatisfied_p              one-sided p-values of the differences, user by user
    minutes           it took
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, variance
from typing import Any

import aiohttp

from etude.bench._realtime_tasks import vowel_quality
from etude.core.errors import EtudeError
from etude.core.traffic import Traffic
from etude.launch.launcher import free_ports
from etude.realtime.cycle import product_metrics
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.realtime.signals import SessionOutcome
from etude.run.realtime_process import open_loop
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority
from etude.store.realtime import TrafficLog
from etude.store.runs import Run

RUN = """
name = "songs"
[model]
hidden_size = 64
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 128
max_context = 128
[tasks]
environment = "etude.bench._realtime_tasks:Songs"
heldout = 40
novel = 0
[harness]
agent = "etude.bench._realtime_tasks:Singer"
max_tokens = 16
concurrency = 4
[engine]
regions = ["here"]
port = PORT
[sandbox]
isolation = "process"
[realtime]
production = "production.toml"
every_minutes = 0.0
min_sessions = 150
horizon_minutes = 0.1
horizon_minutes_per_turn = 0.0
heldout_share = 0.2
look_s = 0.5
[realtime.gate]
margin = 0.2
[realtime.canary]
ramp = [0.3, 1.0]
kept_margin = 0.2
dissatisfied_margin = 0.2
judged_margin = 0.2
delay_minutes = 0.05
control_share = 0.3
[[stage]]
kind = "rl"
steps = 40
lr = 5e-3
warmup_steps = 0
"""
PRODUCTION = 'user_key_file = "user.key"\nfeedback_per_minute = 6000.0\n'
ASKING = 8
"""Users at once."""
MOST_S = 1800.0


def run(steps: int = 5) -> dict[str, float]:
    """Until so many updates are live."""
    with tempfile.TemporaryDirectory(prefix="etude-realtime-") as folder:
        return asyncio.run(_run(Path(folder), updates=steps, saboteurs=0.05))


@dataclass
class Product:
    """The backend of a product with simulated users."""

    url: str
    token: str
    population: Population
    draw: Random = field(default_factory=lambda: Random(1))
    asked: int = 0

    async def use(self, http: aiohttp.ClientSession) -> None:
        """One user asks once, and says what they think of it."""
        user = self.draw.choice(self.population.users)
        body = {
            "messages": [{"role": "user", "content": f"sing {self.draw.randrange(1000)}"}],
            "max_tokens": 16,
        }
        answer = await self._post(http, user, "/v1/chat/completions", body)
        if answer is None:
            return
        self.asked += 1
        song = str(answer["choices"][0]["message"]["content"] or "")
        seen = Answer(completion=answer["id"], quality=vowel_quality(song))
        for number, reaction in enumerate(self.population.react(user, seen)):
            for copy in range(reaction.copies):
                event = {
                    "event": f"{answer['id']}/{number}/{copy}",
                    "completion": answer["id"],
                    "kind": reaction.kind,
                    "text": reaction.text,
                }
                await self._post(http, user, "/v1/feedback", event)

    async def _post(
        self, http: aiohttp.ClientSession, user: SimulatedUser, path: str, body: object
    ) -> Any:
        headers = {
            "Authorization": f"Bearer {self.token}",
            "X-Etude-User": user.id,
            "X-Etude-Organisation": user.organisation,
            "X-Etude-Consent": "granted",
        }
        try:
            async with http.post(self.url + path, json=body, headers=headers) as response:
                return await response.json() if response.status == 200 else None
        except aiohttp.ClientError:  # it starts, or starts again
            await asyncio.sleep(0.5)
            return None


async def _run(folder: Path, *, updates: int, saboteurs: float) -> dict[str, float]:
    (port,) = free_ports(1)
    (folder / "run.toml").write_text(RUN.replace("PORT", str(port)))
    (folder / "production.toml").write_text(PRODUCTION)
    secret, began = secrets.token_hex(32), time.monotonic()
    token = TokenAuthority(secret).mint(Scope.ADMIN, "product", 86_400.0)
    population = Population.of(10_000, seed=1, saboteurs=saboteurs, flood=3)
    product = Product(f"http://127.0.0.1:{port}", token, population)
    argv = [sys.executable, "-P", "-m", "etude", "realtime", "run.toml", "--dir", "songs"]
    loop = subprocess.Popen(argv, cwd=folder, env=os.environ | {SECRET_VARIABLE: secret})
    try:
        await _until(product, folder / "songs", updates, loop)
    finally:
        loop.terminate()
        loop.wait()
    found = _figures(folder / "songs")
    return found | {"minutes": (time.monotonic() - began) / 60}


async def _until(
    product: Product, store: Path, updates: int, loop: subprocess.Popen[bytes]
) -> None:
    """Users come and go until so many updates have settled."""
    began, timeout = time.monotonic(), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:

        async def keep_asking() -> None:
            while True:
                await product.use(http)

        asking = [group.create_task(keep_asking()) for _ in range(ASKING)]
        while _settled(store) < updates:
            if loop.poll() is not None:
                raise EtudeError(f"etude realtime ended with code {loop.returncode}")
            if time.monotonic() - began > MOST_S:
                print(f"only {_settled(store)} updates in {MOST_S:.0f} s", file=sys.stderr)
                break
            await asyncio.sleep(1.0)
        for task in asking:
            task.cancel()


def _settled(store: Path) -> int:
    if not (store / "config.json").exists():
        return 0
    changes = TrafficLog(Run.open(str(store)).objects).changes()
    return sum(change.action == "settle" for change in changes)


def _figures(store: Path) -> dict[str, float]:
    run = Run.open(str(store))
    changes = TrafficLog(run.objects).changes()
    outcomes = sorted(open_loop(run, run.config()).outcomes(), key=lambda o: o.session.started)
    last = outcomes[2 * len(outcomes) // 3 :]
    taught, heldout = _by_user(last, changes[-1].traffic)
    figures: dict[str, float] = {
        "updates": sum(change.action == "settle" for change in changes),
        "refused": sum(change.action in ("refuse", "roll_back") for change in changes),
        "sessions": len(outcomes),
    }
    for name, sign in (("kept", 1.0), ("dissatisfied", -1.0)):
        ours, theirs = ([user[name] for user in arm] for arm in (taught, heldout))
        figures |= {name: fmean(ours), f"{name}_heldout": fmean(theirs)}
        figures[f"{name}_p"] = p_value(ours, theirs, sign)
    return figures


def _by_user(
    outcomes: list[SessionOutcome], traffic: Traffic
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The mean of each metric for each user: those who are taught, and those held out."""
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for outcome in outcomes:
        found[outcome.user].append(product_metrics(outcome))
    arms: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for user, sessions in found.items():
        means = {name: fmean(one[name] for one in sessions) for name in sessions[0]}
        arms[traffic.is_heldout(user)].append(means)
    return arms


def p_value(ours: list[float], theirs: list[float], sign: float) -> float:
    """That the difference is not in the wanted direction (Welch, many users)."""
    spread = variance(ours) / len(ours) + variance(theirs) / len(theirs)
    with contextlib.suppress(ZeroDivisionError):
        z = sign * (fmean(ours) - fmean(theirs)) / spread**0.5
        return 0.5 * math.erfc(z / math.sqrt(2))  # one less the other would be 0 from 1e-16 on
    return 0.5


if __name__ == "__main__":
    print(json.dumps(run()))
