"""Worker pools, and the choice of the pool that answers a user.

The gateway follows the run's store (`core.traffic`): it has each pool load its version, and sends
each user to the pool of their arm. A session stays with the pool that it began with for as long as
that pool serves; then it moves to the live one. A user whose pool is not up, or not yet at its
version, is also sent to the live pool: an update must never cost an answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from etude.core.errors import EtudeError
from etude.core.traffic import Arm, Change
from etude.serve.http import ApiError
from etude.serve.process import log_to_stderr
from etude.serve.router import Router
from etude.store.realtime import TrafficLog

FOLLOW_S = 1.0
"""Time until a change is noticed, at most; as long as the heartbeat interval of a worker."""
MAX_SESSIONS = 100_000


class Pools:
    """The worker pools of a gateway, each with a router, and the choice of one for a user by the
    newest change in the store. Before the first change there are no pools."""

    def __init__(self, make_router: Callable[[], Router], log: TrafficLog) -> None:
        self._make_router = make_router
        self._log = log
        self._routers: dict[str, Router] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._pinned: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self.change: Change | None = None

    def router(self, pool: str) -> Router:
        if pool not in self._routers:
            self._routers[pool] = self._make_router()
        return self._routers[pool]

    def home(self, user: str, session: str) -> tuple[Router, Arm] | None:
        """The router and the arm for a session of a user; None if there are no pools."""
        if self.change is None:
            return None
        traffic = self.change.traffic
        arm, pinned = traffic.arm(user), self._pinned.get((user, session))
        if pinned is not None:
            pool, version = pinned
            # pools are reused: with another version this is not what the session began with
            if pool in traffic.serving and traffic.pools[pool] == version:
                arm = Arm(pool=pool, version=version, propensity=arm.propensity)
        if not self._is_up(arm):
            arm = Arm(pool=traffic.live, version=traffic.version, propensity=arm.propensity)
        if session:
            self._pin(user, session, arm)
        return self.router(arm.pool), arm

    def _pin(self, user: str, session: str, arm: Arm) -> None:
        self._pinned[user, session] = arm.pool, arm.version
        self._pinned.move_to_end((user, session))
        if len(self._pinned) > MAX_SESSIONS:
            self._pinned.popitem(last=False)

    def _is_up(self, arm: Arm) -> bool:
        fleet = self.router(arm.pool).fleet
        return fleet.floor >= arm.version and bool(fleet.up)

    def status(self) -> dict[str, dict[str, int]]:
        """For each pool, the version that new requests get and the number of workers that are
        up."""
        return {
            pool: {"version": router.fleet.floor, "up": len(router.fleet.up)}
            for pool, router in self._routers.items()
        }

    async def watch(self) -> None:
        """Follow the store until cancelled."""
        while True:
            try:
                await self.refresh()
            except EtudeError as e:
                log_to_stderr(
                    f"the versions that users get cannot be refreshed, and stay as they are: {e}"
                )
            for router in self._routers.values():
                router.expire_silent()
            await asyncio.sleep(FOLLOW_S)

    async def refresh(self) -> None:
        """Read the newest change, and have pools load the versions that they lack."""
        self.change = await asyncio.to_thread(self._log.newest)
        if self.change is None:
            return
        for pool, version in self.change.traffic.pools.items():
            running = self._loading.get(pool)
            if self.router(pool).fleet.floor < version and (running is None or running.done()):
                self._loading[pool] = asyncio.create_task(self._load(pool, version))

    async def _load(self, pool: str, version: int) -> None:
        """Load a version into a pool. If that fails, the next refresh tries again; meanwhile other
        pools answer."""
        try:
            await self.router(pool).load(version)
        except ApiError as e:
            log_to_stderr(f"pool {pool}: {e}")
