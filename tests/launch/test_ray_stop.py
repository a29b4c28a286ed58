"""Messages and actions of the Ray launcher at the end of a run, over a stand-in for Ray: one node,
whose actors live in this process. For the real one: `make test-ray`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.core.events import Event, ProcessDied
from etude.launch.launcher import Program


class Actor:
    """A program that runs until it is stopped, and stops when it is allowed to."""

    ends: dict[str, int] = {}
    """Exit codes of programs that end by themselves."""
    may_stop: asyncio.Event

    def __init__(self) -> None:
        self._stopped = asyncio.Event()
        self._stopping = False

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any) -> asyncio.Future[Any]:
                return asyncio.ensure_future(getattr(self, f"_{method}")(*args))

        return Method

    async def _address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def _heartbeats(self) -> int:
        return 0

    async def _run(self, argv: tuple[str, ...], env: object) -> tuple[int, list[str]]:
        if argv[0] in self.ends:
            return self.ends[argv[0]], ["it broke"]
        await self._stopped.wait()
        return -15, []

    async def _stop(self) -> None:
        await self.may_stop.wait()
        self._stopped.set()


def fake(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    return module


class Remote:
    def __init__(self, kind: type) -> None: ...

    def options(self, **options: Any) -> Remote:
        return self

    def remote(self) -> Actor:
        return Actor()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    node = {"Resources": {"CPU": 8.0}, "Labels": {}, "Alive": True}
    modules = {
        "ray": fake("ray", remote=Remote, nodes=lambda: [node], kill=lambda actor: None),
        "ray.exceptions": fake("ray.exceptions", RayActorError=type("Lost", (Exception,), {})),
        "ray.util": fake("ray.util"),
        "ray.util.placement_group": fake(
            "ray.util.placement_group",
            placement_group=lambda *args, **kwargs: object(),
            remove_placement_group=lambda group: None,
        ),
        "ray.util.scheduling_strategies": fake(
            "ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=lambda *args: None
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "etude.launch.ray", raising=False)
    from etude.launch.ray import RayLauncher

    yield RayLauncher
    sys.modules.pop("etude.launch.ray", None)


PROGRAMS = [Program("gateway", ("gateway",), serves=True), Program("controller", ("controller",))]


async def test_who_stops_a_run_is_told_what_it_waits_for(launched: Callable[..., Any]) -> None:
    """Before any program has ended: these programs end only after the message."""
    Actor.ends, Actor.may_stop, said = {}, asyncio.Event(), []
    launcher = launched(threads=1, resume="etude", say=said.append)
    running = asyncio.create_task(launcher.run_all(PROGRAMS, until="controller"))
    while len(launcher._acting_now) < 2:
        await asyncio.sleep(0)
    running.cancel()
    while not said and not running.done():
        await asyncio.sleep(0)
    assert said == ["stopping: waiting for gateway, controller (at most 10 s each)"]
    Actor.may_stop.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not launcher._acting_now


@pytest.mark.parametrize("code", [0, 2])
async def test_an_end_of_its_own_needs_no_such_line(
    launched: Callable[..., Any], code: int
) -> None:
    Actor.ends, Actor.may_stop, said = {"controller": code}, asyncio.Event(), []
    Actor.may_stop.set()
    launcher = launched(threads=1, resume="etude", say=said.append)
    try:
        await launcher.run_all(PROGRAMS, until="controller")
    except ExceptionGroup as e:
        assert code and e.split(EtudeError)[1] is None
    assert not said and not launcher._acting_now


async def test_what_ended_a_run_is_told(launched: Callable[..., Any]) -> None:
    """As on one machine, so that the dashboard knows it too."""
    Actor.ends, Actor.may_stop = {"controller": 2}, asyncio.Event()
    Actor.may_stop.set()
    launcher, told = launched(threads=1, resume="etude"), list[Event]()
    watching = asyncio.create_task(launcher.watch(told.append))
    with pytest.raises(ExceptionGroup):
        await launcher.run_all(PROGRAMS, until="controller")
    watching.cancel()
    await asyncio.wait([watching])
    assert told == [ProcessDied(process="controller", how="ended with exit code 2", advice="")]
