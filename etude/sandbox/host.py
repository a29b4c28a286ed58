"""A sandbox host: sandboxes of this machine for processes on others, each held by a lease.

The owner of a sandbox renews its lease. If the owner is killed or cut off, the lease ends and the
sandbox is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.errors import EtudeError, RolloutFailure
from etude.core.sandbox import Sandbox, SandboxPool, SandboxSpec
from etude.sandbox.served import ServedSandbox

LEASE_S = 90.0
"""Default length of a lease. A sandbox is gone within two minutes of its owner's death."""
MAX_LEASE_S = 86400.0
_LOOK_S = 1.0


class Full(Exception):
    """This host has as many open sandboxes as it may hold; a later attempt may succeed."""


class Leases:
    """The time at which the lease of each sandbox ends."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def renew(self, name: str, seconds: float, now: float) -> None:
        self._ends[name] = now + min(seconds, MAX_LEASE_S)

    def end(self, name: str) -> None:
        self._ends.pop(name, None)

    def left_s(self, name: str, now: float) -> float:
        return self._ends[name] - now

    def over(self, now: float) -> list[str]:
        return [name for name, ends in self._ends.items() if ends <= now]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """An open sandbox with a lease."""

    name: str
    isolation: str
    metadata: Mapping[str, str]
    served: ServedSandbox
    started: float
    """Start time, in seconds since 1970."""
    close: Callable[[], Any]


class SandboxHost:
    """The sandboxes that this machine has open for others."""

    def __init__(
        self,
        pools: Mapping[str, SandboxPool],
        *,
        max_sandboxes: int,
        places: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pools`: by isolation; the first one is the default. `places`: paths at which sandboxes
        show directories of this machine."""
        self.pools = pools
        self.places = places
        self._max_sandboxes = max_sandboxes
        self._clock = clock
        self._leases = Leases()
        self._opening = 0
        self._hosted: dict[str, Hosted] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._hosted)

    def pool(self, isolation: str) -> SandboxPool:
        if isolation not in self.pools:
            offered = ", ".join(self.pools)
            raise EtudeError(
                f"this host has no sandboxes of isolation {isolation}; available: {offered}"
            )
        return self.pools[isolation]

    async def open(
        self,
        isolation: str,
        spec: SandboxSpec,
        lease_s: float = LEASE_S,
        metadata: Mapping[str, str] | None = None,
    ) -> Hosted:
        pool = self.pool(isolation)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._place())
            sandbox = await stack.enter_async_context(pool.open(spec))
            close = stack.pop_all().aclose
        return await self._host(isolation, sandbox, close, lease_s, metadata or {})

    async def fork(self, name: str, lease_s: float = LEASE_S) -> Hosted:
        origin = self.find(name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._place())
            sandbox = await origin.served.sandbox.fork()
            place = stack.pop_all()

        async def close() -> None:
            place.close()
            await sandbox.close()

        return await self._host(origin.isolation, sandbox, close, lease_s, origin.metadata)

    @contextlib.contextmanager
    def _place(self) -> Any:
        """Take one of the places for a sandbox while the block runs."""
        if self._opening >= self._max_sandboxes:
            raise Full(
                f"this host has no room: {self._max_sandboxes} sandboxes are open, which is "
                f"its limit"
            )
        self._opening += 1
        try:
            yield
        finally:
            self._opening -= 1

    async def _host(
        self,
        isolation: str,
        sandbox: Sandbox,
        close: Callable[[], Any],
        lease_s: float,
        metadata: Mapping[str, str],
    ) -> Hosted:
        if self._closed:
            await close()
            raise RolloutFailure("sandbox: this host is closed")
        hosted = Hosted(
            name=secrets.token_hex(10),
            isolation=isolation,
            metadata=metadata,
            served=ServedSandbox(sandbox),
            started=time.time(),
            close=close,
        )
        self._hosted[hosted.name] = hosted
        self._leases.renew(hosted.name, lease_s, self._clock())
        return hosted

    def find(self, name: str) -> Hosted:
        """Raises KeyError for a sandbox that does not exist (any more)."""
        return self._hosted[name]

    def all(self) -> list[Hosted]:
        return list(self._hosted.values())

    def left_s(self, name: str) -> float:
        return self._leases.left_s(name, self._clock())

    def renew(self, names: Collection[str], lease_s: float) -> list[str]:
        """Renew these leases. Return the names of sandboxes that do not exist any more."""
        for name in names:
            if name in self._hosted:
                self._leases.renew(name, lease_s, self._clock())
        return [name for name in names if name not in self._hosted]

    async def kill(self, name: str) -> bool:
        """Close a sandbox; False if there is none."""
        self._leases.end(name)
        if (hosted := self._hosted.pop(name, None)) is None:
            return False
        with contextlib.suppress(RolloutFailure):  # a broken one is gone as well
            await hosted.close()
        return True

    async def watch(self) -> None:
        """Close sandboxes whose lease is over, for as long as this runs. One that hangs or fails
        does not delay the others."""
        closing: set[asyncio.Task[None]] = set()
        while True:
            task = asyncio.create_task(self.close_abandoned())
            closing.add(task)
            task.add_done_callback(closing.discard)
            await asyncio.sleep(_LOOK_S)

    async def close_abandoned(self) -> None:
        await asyncio.gather(*(self.kill(name) for name in self._leases.over(self._clock())))

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(self.kill(name) for name in list(self._hosted)))
        for pool in self.pools.values():
            await pool.close()
