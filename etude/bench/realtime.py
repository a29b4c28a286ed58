"""Real-time RL against real processes: simulated users teach a model, with saboteurs and without.

`etude realtime` runs as it would for a product: gateway, workers in pools, trainer, loop. 10,000
simulated users request songs over HTTP and send feedback. They like vowels, and each has a taste
for length and for letters; tastes drift, users differ in patience, some feedback is noise, and 5 %
are saboteurs, who report the opposite of their opinion three times. A fifth of the users is held
out and stays with the first version, a model that has learnt to sing songs of all kinds (sft). When
enough updates are live, the loop is stopped as an operator would, and the feedback of the users of
the newest version is compared with that of the held-out users. Then that version is rolled back.

The whole benchmark runs twice: with saboteurs, then without. The first model, the users and the
held-out users are the same; in the second run (`clean.X`) the saboteurs are honest.

    updates           versions that went live
    refused           versions that the gate or the users stopped
    sessions, users   recorded sessions and users
    trained           sessions in the batches of the live versions
    kept, kept_heldout                  share of answers that were kept, as the product sees it
    dissatisfied, dissatisfied_heldout  share of answers with a complaint, likewise
    kept_p, dissatisfied_p              one-sided p-values of the differences, user by user
    gain, gain_error  difference of the mean appeal (0 to 1) of the answers to honest users,
                      between the taught and the held-out ones, and its standard error
    rollback_s        from the rollback command to the last session that began with the version
    minutes           duration
    shrinks           loss of gain to saboteurs, as a share of clean.gain
    shrinks_error     its standard error from the choice of users, not from training

With `--simulate` there are no processes, and several seeds are trained, starting at `--seed`
(`bench._realtime_alone`).
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean, variance
from typing import Any

import aiohttp
from rich.console import Console

from etude.bench._realtime_setup import SABOTEURS, honest_ids, users_of, write_run
from etude.bench._realtime_tasks import LONGEST, request, style, vowel_quality
from etude.commands.realtime import rollback, stop
from etude.core.consent import pseudonym
from etude.core.errors import EtudeError
from etude.core.traffic import Change, Traffic
from etude.core.updates import SessionFigures
from etude.launch.launcher import free_ports
from etude.realtime.population import Answer, Population, SimulatedUser
from etude.run.realtime_process import open_loop
from etude.serve.production.config import read_user_key
from etude.serve.tokens import SECRET_VARIABLE, Scope, TokenAuthority
from etude.store.realtime import TrafficLog, UpdateLog
from etude.store.runs import Run

ASKING = 8
"""Concurrent users."""
PAUSE_S = 0.2
"""Pause between two users, so that the population does not take all processors."""
DAY_SESSIONS = 4000
"""Sessions of all users in a day: tastes drift by the day."""
MEASURED = 5000
"""Sessions that are compared, after the last update."""
MOST_S = 7200.0
"""The longest wait for updates on a busy machine; then the benchmark goes on without them."""
ROLL_BACK_S = 5.0


def run(steps: int = 5, seed: int = 0, simulate: bool = False) -> dict[str, float]:
    """Run the benchmark until `steps` updates are live."""
    if simulate:
        from etude.bench import _realtime_alone

        return _realtime_alone.run(steps, first=seed)
    found = {}
    for name, saboteurs in (("saboteurs", SABOTEURS), ("clean", 0.0)):
        with tempfile.TemporaryDirectory(prefix="etude-realtime-") as folder:
            found[name] = asyncio.run(_run(Path(folder), saboteurs, updates=steps, seed=seed))
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    ours, clean = found["saboteurs"], found["clean"]
    return {
        **ours,
        **{f"clean.{figure}": value for figure, value in clean.items()},
        **shrinkage(ours, clean),
    }


def shrinkage(ours: Mapping[str, float], clean: Mapping[str, float]) -> dict[str, float]:
    """The loss of gain to saboteurs, as a share of the gain without them, with its standard
    error."""
    ratio = ours["gain"] / clean["gain"]
    error = math.hypot(
        ours["gain_error"] / clean["gain"], ratio * clean["gain_error"] / clean["gain"]
    )
    return {"shrinks": 1 - ratio, "shrinks_error": error}


@dataclass(frozen=True, slots=True)
class Liked:
    """A user's true opinion of an answer, independent of their feedback."""

    user: SimulatedUser
    time: float
    appeal: float


class Product:
    """The backend of a product with simulated users."""

    def __init__(self, url: str, token: str, population: Population) -> None:
        self.url = url
        self.token = token
        self.population = population
        self.liked: list[Liked] = []
        self._draw = Random(population.seed)
        self._activity = list(accumulate(user.sessions_per_day for user in population.users))

    async def use(self, http: aiohttp.ClientSession) -> None:
        """Let one user ask once and send feedback."""
        (user,) = self._draw.choices(self.population.users, cum_weights=self._activity)
        body = {
            "messages": [{"role": "user", "content": request(self._draw)}],
            "max_tokens": LONGEST,
        }
        asked = time.time()
        day = len(self.liked) / DAY_SESSIONS
        answer = await self._post(http, user, "/v1/chat/completions", body)
        if answer is None:
            return
        song = str(answer["choices"][0]["message"]["content"] or "")
        seen = Answer(completion=answer["id"], quality=vowel_quality(song), aspects=style(song))
        self.liked.append(Liked(user, asked, self.population.appeal(user, seen, day)))
        for number, reaction in enumerate(self.population.react(user, seen, day)):
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
        except aiohttp.ClientError:  # the gateway is starting
            await asyncio.sleep(0.5)
            return None


async def _run(folder: Path, saboteurs: float, *, updates: int, seed: int) -> dict[str, float]:
    (port,) = free_ports(1)
    write_run(folder, seed, port)
    secret, began = secrets.token_hex(32), time.monotonic()
    token = TokenAuthority(secret).mint(Scope.ADMIN, "product", 86_400.0)
    product = Product(f"http://127.0.0.1:{port}", token, users_of(seed, saboteurs))
    argv = [sys.executable, "-P", "-m", "etude", "realtime", "run.toml", "--dir", "songs"]
    environment = os.environ | {SECRET_VARIABLE: secret}
    # stdout is for the figures
    loop = subprocess.Popen(argv, cwd=folder, env=environment, stdout=sys.stderr)
    try:
        measured = await _live(product, folder / "songs", updates, loop)
    finally:
        loop.terminate()
        loop.wait()
    found = _figures(folder, product, *measured)
    return found | {"minutes": (time.monotonic() - began) / 60}


async def _live(
    product: Product, store: Path, updates: int, loop: subprocess.Popen[bytes]
) -> tuple[float, float]:
    """Let users come and go until `updates` updates have settled, then for the measurement with the
    loop stopped, then until the newest version has been rolled back. Return the times at which the
    measurement began and ended."""
    console, timeout = Console(file=sys.stderr), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:

        async def keep_asking() -> None:
            while True:
                with contextlib.suppress(TimeoutError):
                    await product.use(http)
                await asyncio.sleep(PAUSE_S)

        asking = [group.create_task(keep_asking()) for _ in range(ASKING)]
        await _until(lambda: _settled(store) >= updates, loop)
        stop(Run.open(str(store)), console)
        since, before = time.time(), len(product.liked)
        await _until(lambda: len(product.liked) >= before + MEASURED, loop)
        until = time.time()
        with contextlib.suppress(
            EtudeError
        ):  # a canary began before the stop: there is no version to go back to
            rollback(Run.open(str(store)), console)
        await asyncio.sleep(ROLL_BACK_S)
        for task in asking:
            task.cancel()
    return since, until


async def _until(reached: Callable[[], bool], loop: subprocess.Popen[bytes]) -> None:
    began = time.monotonic()
    while not reached():
        if loop.poll() is not None:
            raise EtudeError(f"etude realtime ended with code {loop.returncode}")
        if time.monotonic() - began > MOST_S:
            print(f"not reached within {MOST_S:.0f} s; continuing without it", file=sys.stderr)
            break
        await asyncio.sleep(1.0)


def _settled(store: Path) -> int:
    if not (store / "config.json").exists():
        return 0
    changes = TrafficLog(Run.open(str(store)).objects).changes()
    return sum(change.action == "settle" for change in changes)


def _figures(folder: Path, product: Product, since: float, until: float) -> dict[str, float]:
    run = Run.open(str(folder / "songs"))
    changes = TrafficLog(run.objects).changes()
    traffic = changes[-1].traffic
    key = read_user_key(folder / "user.key", create=False)
    users = open_loop(run, run.config()).users
    users.look()
    sessions = users.figures()
    measured = [one for one in sessions if since <= one.started < until]
    taught, heldout = _by_user(measured, traffic)
    settled = {change.version for change in changes if change.action == "settle"}
    records = UpdateLog(run).records()
    figures: dict[str, float] = {
        "updates": len(settled),
        "refused": sum(c.action in ("refuse", "roll_back") and not c.held for c in changes),
        "sessions": len(sessions),
        "users": len({one.user for one in sessions}),
        "trained": sum(len(records[version].answers) for version in settled),
    }
    for name, sign in (("kept", 1.0), ("dissatisfied", -1.0)):
        ours, theirs = ([user[name] for user in arm] for arm in (taught, heldout))
        figures |= {name: fmean(ours), f"{name}_heldout": fmean(theirs)}
        figures[f"{name}_p"] = p_value(ours, theirs, sign)
    honest = honest_ids(product.population.seed)
    liked = [one for one in product.liked if since <= one.time < until and one.user.id in honest]
    gain, error = gain_of(liked, traffic, key)
    figures |= {"gain": gain, "gain_error": error}
    if (back := changes[-1]).action == "roll_back" and back.time >= until:
        figures["rollback_s"] = _last_begun(sessions, back) - back.time
    return figures


def gain_of(liked: list[Liked], traffic: Traffic, key: bytes) -> tuple[float, float]:
    """The difference of mean appeal between the honest users who are taught and those held out,
    with its standard error."""
    appeals: defaultdict[str, list[float]] = defaultdict(list)
    for one in liked:
        if not one.user.is_saboteur:
            appeals[one.user.id].append(one.appeal)
    arms: tuple[list[float], list[float]] = ([], [])
    for user, found in appeals.items():
        arms[traffic.is_heldout(pseudonym(user, key))].append(fmean(found))
    ours, theirs = arms
    spread = variance(ours) / len(ours) + variance(theirs) / len(theirs)
    return fmean(ours) - fmean(theirs), spread**0.5


def _last_begun(sessions: list[SessionFigures], change: Change) -> float:
    """The start of the last session with the version that a change rolled back."""
    return max(one.started for one in sessions if change.version in one.versions)


def _by_user(
    sessions: list[SessionFigures], traffic: Traffic
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The mean of each metric for each user, in two lists: taught users, and held-out users."""
    found: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    for one in sessions:
        found[one.user].append(one.metrics)
    arms: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for user, each in found.items():
        means = {name: fmean(one[name] for one in each) for name in each[0]}
        arms[traffic.is_heldout(user)].append(means)
    return arms


def p_value(ours: list[float], theirs: list[float], sign: float) -> float:
    """One-sided p-value of a difference in the direction of `sign` (Welch, many users)."""
    spread = variance(ours) / len(ours) + variance(theirs) / len(theirs)
    with contextlib.suppress(ZeroDivisionError):
        z = sign * (fmean(ours) - fmean(theirs)) / spread**0.5
        return 0.5 * math.erfc(z / math.sqrt(2))  # 1 - cdf would be 0 below 1e-16
    return 0.5


if __name__ == "__main__":
    print(json.dumps(run()))
