"""Tracking sinks for a run's metrics: TensorBoard, Weights & Biases, trackio. A run names them in
`trackers`.

The events in the store come first and are complete; a sink is a copy of their numbers for people
who already use such a tool. Each sink needs a package that Etude itself does not: it is imported
when the sink is requested.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from etude.core.errors import EtudeError
from etude.core.events import Event
from etude.core.metrics import metrics
from etude.store.runs import Run
from etude.store.telemetry import EventReader, flush_s


class Sink(Protocol):
    def write(self, t: float, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Files under `tensorboard/` in the run's directory: `tensorboard --logdir runs`."""

    def __init__(self, name: str, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(directory / "tensorboard"))

    def write(self, t: float, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Record(wall_time=t, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Packages with W&B's interface: `init`, then `log` with a separate step for each curve."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, t: float, step: int, numbers: Mapping[str, float]) -> None:
        # Each stage counts its steps from the start, and the axis of these packages never goes
        # back: so each stage has its own axis.
        axes = {f"{name.partition('/')[0]}/step": float(step) for name in numbers}
        self._run.log({**numbers, **axes})

    def close(self) -> None:
        self._run.finish()


def _wandb(name: str, directory: Path) -> Sink:
    """The package's own variables (WANDB_MODE=offline, WANDB_PROJECT, ...) work as usual."""
    import wandb

    return WandbLike(wandb.init(name=name, id=name, dir=directory, resume="allow"))


def _trackio(name: str, directory: Path) -> Sink:
    import trackio

    return WandbLike(trackio.init(project="etude", name=name, resume="allow"))


SINKS: dict[str, Callable[[str, Path], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}


class Sinks:
    """All sinks of a run, as one."""

    def __init__(self, names: Sequence[str], *, run: str, directory: Path) -> None:
        self._sinks = [_open(name, run, directory) for name in names]

    def write(self, t: float, event: Event) -> None:
        step, numbers = metrics(event)
        for sink in self._sinks if numbers else ():
            sink.write(t, step, numbers)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _open(name: str, run: str, directory: Path) -> Sink:
    try:
        return SINKS[name](run, directory)
    except ModuleNotFoundError as e:
        raise _not_installed(name, str(e.name)) from e


def check_sinks(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed; each has the name of its package."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise _not_installed(name, name)


def _not_installed(name: str, package: str) -> EtudeError:
    return EtudeError(
        f"trackers = [{name!r}] needs the package {package}, which is not installed: pip install "
        f"'etude[{name}]', or take it out of trackers"
    )


async def forward_events(run: Run, sinks: Sinks) -> None:
    """Forward events to the sinks from now on until cancelled, including the last ones."""
    events = EventReader(run)
    await asyncio.to_thread(events.new)  # earlier events were forwarded then
    try:
        while True:
            await asyncio.sleep(flush_s(run))
            for stamped in await asyncio.to_thread(events.new):
                sinks.write(stamped.t, stamped.record)
    finally:
        for stamped in events.new():
            sinks.write(stamped.t, stamped.record)
        sinks.close()
