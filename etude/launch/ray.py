"""The Ray launcher: the programs of a run as actors of a cluster, in placement groups.

It does the same as the local launcher, wherever there is room. A program that dies is restarted, up
to its limit; one whose node is lost is restarted without a limit, on another node or when one is
available again. All state is in the store, so none has to move. Programs that know the address of a
program that moved are restarted with the new one. Actors end with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.clock import AwakeClock, SystemClock
from etude.core.errors import EtudeError
from etude.core.events import Event, ProcessDied, ProcessHeard, ProcessRestarted
from etude.core.liveness import Liveness
from etude.launch.endings import advice_for, exit_message, how_ended, stop_message
from etude.launch.launcher import (
    CREDENTIALS,
    LOOK_EVERY_S,
    START_S,
    STOP_S,
    Credentials,
    Program,
    Restarts,
    common_environment,
)
from etude.launch.ray_host import ProgramHost
from etude.launch.ray_plan import (
    REGION_LABEL,
    Node,
    PlacementGroup,
    awaited,
    check_room,
    filled,
    placement_groups,
    rank_environment,
)

try:
    import ray
    from ray.exceptions import RayActorError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as e:
    raise EtudeError("a Ray cluster needs Ray: run `pip install 'etude[ray]'`") from e

CARRIED = ("AWS_", "GOOGLE_", "AZURE_", "ETUDE_")
"""Prefixes of the variables that programs inherit from here: the credentials of stores, and
ours."""
CONNECT_S = 10.0
HEAR_EVERY_S = 2.0
END_S = 2 * STOP_S
"""Time for an actor to stop its program."""
LOSS_S = 60.0
"""Time within which Ray detects that a node is lost."""
THREADS = 4
"""Threads of an actor: its program, its heartbeats, its end, and a spare one."""


def connect(address: str) -> None:
    """Join the cluster at an address in Ray's notation: `auto`, HOST:PORT, `ray://..`, or `local`
    for one that is created on this machine and ends with this process."""
    try:
        if re.fullmatch(r"[^/]+:\d+", address):  # Ray would silently retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, namespace="etude", log_to_driver=False, logging_level="error")
    except (OSError, RuntimeError, ValueError) as e:
        raise EtudeError(
            f"no answer from a Ray cluster at {address} ({str(e).splitlines()[0]}): start one "
            "with `ray start --head`, or start one here with --ray local"
        ) from e


@dataclass(frozen=True, slots=True)
class _Ended:
    """The failure of a program."""

    program: Program
    code: int | None
    """The exit code; None if its node is lost."""
    lines: list[str]


@dataclass(frozen=True, slots=True)
class _Bundle:
    """The place of a program in its placement group."""

    program: Program
    group: Any
    index: int

    def actor(self) -> Any:
        place = PlacementGroupSchedulingStrategy(self.group, self.index)
        needs = self.program.needs
        options = {"num_cpus": needs.cpus, "num_gpus": needs.gpus, "scheduling_strategy": place}
        return ray.remote(ProgramHost).options(max_concurrency=THREADS, **options).remote()


class RayLauncher:
    """Runs programs as actors of the cluster that this process has joined. Their output is in Ray's
    logs."""

    def __init__(
        self,
        *,
        threads: int,
        resume: str,
        heartbeat_timeout_s: float = math.inf,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`say`: reports to the person who stops the run what the stop is waiting for."""
        self.resume = resume
        self._say = say
        self._clock = AwakeClock(SystemClock())
        self._liveness = Liveness(heartbeat_timeout_s)
        self._credentials = Credentials()
        self._environment = common_environment(threads) | {
            name: value
            for name, value in os.environ.items()
            if name.startswith(CARRIED) and name not in CREDENTIALS
        }
        self._urls: dict[str, str] = {}
        self._moved = asyncio.Condition()
        self._names: set[str] = set()
        self._acting_now: dict[str, None] = {}  # in the order of their start
        # restarted programs -> time of death, until they are heard again
        self._died: dict[str, float] = {}
        self._untold: list[Event] = []

    async def run_to_end(self, program: Program) -> None:
        await self.run_all([program], until=program.name)

    async def run_all(self, programs: Sequence[Program], *, until: str) -> None:
        running = asyncio.create_task(self._run_all(programs, until))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            # now, not when the programs have ended
            if self._acting_now:
                self._say(stop_message([*self._acting_now], END_S))
            raise
        finally:
            await _cancelled(running)

    async def _run_all(self, programs: Sequence[Program], until: str) -> None:
        nodes = _nodes()
        groups = placement_groups(programs, nodes)
        check_room(groups, nodes)
        self._names = {program.name for program in programs}
        with contextlib.ExitStack() as stack:
            reserved = [stack.enter_context(_reserved(group)) for group in groups]
            async with asyncio.TaskGroup() as tasks:
                kept = {
                    together[0].program.name: tasks.create_task(self._keep(together))
                    for bundles in reserved
                    for together in _lives(bundles)
                }
                await kept[until]
                for task in kept.values():
                    task.cancel()

    async def watch(self, tell: Callable[[Event], None]) -> None:
        try:
            while True:
                self._untold += self._liveness.look(self._clock.now())
                while self._untold:
                    tell(self._untold.pop(0))
                await asyncio.sleep(LOOK_EVERY_S)
        finally:  # the cause of the run's end
            for event in self._untold:
                tell(event)

    async def _keep(self, together: Sequence[_Bundle]) -> None:
        """Keep programs alive that live and die together: one, or all ranks of a group."""
        first = together[0].program
        restarts = Restarts(first.restarts, SystemClock())
        while (ended := await self._once(together)) is not None:
            if ended.code is not None and not restarts.allow():
                how, advice = how_ended(ended.code), advice_for(ended.program.name, ended.code)
                self._untold.append(ProcessDied(process=ended.program.name, how=how, advice=advice))
                raise EtudeError(
                    exit_message(
                        ended.program.name,
                        ended.code,
                        ended.lines,
                        "its log",
                        self.resume,
                        how=how,
                        restarts=ended.program.restarts,
                    )
                )
            self._died[ended.program.name] = self._clock.now()
            self._untold.append(
                ProcessRestarted(
                    process=ended.program.name,
                    how="was lost with its node" if ended.code is None else how_ended(ended.code),
                    limit=None if ended.code is None else first.restarts,
                )
            )

    async def _once(self, together: Sequence[_Bundle]) -> _Ended | None:
        """Run them once. None if they have ended successfully."""
        needed = set().union(*(awaited(each.program, self._names) for each in together))
        while True:
            async with self._moved:
                await self._moved.wait_for(lambda: needed <= self._urls.keys())
            told = {name: self._urls[name] for name in needed}
            living = asyncio.create_task(self._live(together, told))
            moving = asyncio.create_task(self._until_moved(told))
            try:
                await asyncio.wait({living, moving}, return_when=asyncio.FIRST_COMPLETED)
                if living.done():
                    return living.result()
            finally:
                await _cancelled(living, moving)

    async def _until_moved(self, told: dict[str, str]) -> None:
        async with self._moved:
            await self._moved.wait_for(
                lambda: any(self._urls.get(name) != url for name, url in told.items())
            )

    async def _live(self, together: Sequence[_Bundle], urls: dict[str, str]) -> _Ended | None:
        async with contextlib.AsyncExitStack() as stack:
            actors = [await stack.enter_async_context(self._acting(bundle)) for bundle in together]
            try:
                places = [await actor.address.remote() for actor in actors]
            except RayActorError:
                return _Ended(together[0].program, None, [])
            await self._announce(together[0].program, places[0])
            running = [
                asyncio.create_task(
                    _run(
                        actor,
                        bundle.program,
                        filled(bundle.program, place, urls),
                        self._environment
                        | self._credentials.of(bundle.program)
                        | rank_environment(bundle.program, len(together), places[0]),
                    )
                )
                for actor, bundle, place in zip(actors, together, places, strict=True)
            ]
            try:
                for each in asyncio.as_completed(running):
                    ended = await each
                    if ended.code != 0 or ended.program.serves:
                        return await _cause(ended, running)
                return None
            finally:
                await _cancelled(*running)

    async def _announce(self, program: Program, address: tuple[str, int]) -> None:
        async with self._moved:
            self._urls[program.name] = "http://{}:{}".format(*address)
            self._moved.notify_all()

    @contextlib.asynccontextmanager
    async def _acting(self, bundle: _Bundle) -> AsyncIterator[Any]:
        """An actor in its place; when the block ends, its program is gone."""
        name = bundle.program.name
        self._acting_now[name] = None
        self._liveness.heard(name, self._clock.now() + START_S)
        actor = bundle.actor()
        hearing = asyncio.create_task(self._hear(name, actor))
        try:
            yield actor
        finally:
            await _cancelled(hearing)
            self._liveness.forget(name)
            await asyncio.shield(_end(actor))
            self._acting_now.pop(name, None)

    async def _hear(self, name: str, actor: Any) -> None:
        """Poll an actor for the heartbeats of its program, which it receives by pipe."""
        known = 0
        with contextlib.suppress(RayActorError):
            while True:
                count = await actor.heartbeats.remote()
                if count > known:
                    known = count
                    now = self._clock.now()
                    self._liveness.heard(name, now)
                    if (died := self._died.pop(name, None)) is not None:
                        self._untold.append(ProcessHeard(process=name, seconds=now - died))
                await asyncio.sleep(HEAR_EVERY_S)


def _lives(bundles: Sequence[_Bundle]) -> list[Sequence[_Bundle]]:
    """Groups of programs that live and die together: the ranks of a group form one."""
    ranks = [each for each in bundles if each.program.needs.rank is not None]
    alone = [[each] for each in bundles if each.program.needs.rank is None]
    return [*alone, ranks] if ranks else [*alone]


async def _run(
    actor: Any, program: Program, argv: tuple[str, ...], environment: dict[str, str]
) -> _Ended:
    try:
        code, lines = await actor.run.remote(argv, environment)
    except RayActorError:
        return _Ended(program, None, [])
    return _Ended(program, code, lines)


async def _cause(first: _Ended, ranks: Sequence[asyncio.Task[_Ended]]) -> _Ended:
    """The actual cause when ranks end. They end as soon as one of them is gone, and Ray takes
    longer to report that its node was lost."""
    if len(ranks) == 1:
        return first
    done, _ = await asyncio.wait(ranks, timeout=LOSS_S)
    return next((each.result() for each in done if each.result().code is None), first)


async def _end(actor: Any) -> None:
    """Stop its program in the regular way, if the actor still answers."""
    with contextlib.suppress(RayActorError, TimeoutError):
        async with asyncio.timeout(END_S):
            await actor.stop.remote()
    ray.kill(actor)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def _reserved(group: PlacementGroup) -> Iterator[list[_Bundle]]:
    """Reserve the places of a group. Actors wait for their place by themselves."""
    made = placement_group(
        group.bundles,
        strategy="SPREAD" if group.spread else "PACK",
        bundle_label_selector=[dict(group.labels)] * len(group.bundles) if group.labels else None,
    )
    try:
        yield [_Bundle(program, made, index) for index, program in enumerate(group.programs)]
    finally:
        remove_placement_group(made)


def _nodes() -> list[Node]:
    return [
        Node(
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            region=node["Labels"].get(REGION_LABEL, ""),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
