"""Benchmark of asynchrony: the same tasks, weights and number of trained groups, with `max_lag` 0
and 2.

Both runs start from the weights of one short imitation stage on the few tasks that are then trained
on, so that most groups contain both successes and failures: the benchmark measures the loop, not
the luck of a model that solves nothing. Tool calls are delayed by `TOOL_DELAY_S`, as if they ran
compilers and test suites. For each lag:

    seconds        from the first admission to the last step
    trainer_busy   share of that time in which the trainer computed
    engine_busy    share of that time in which the workers computed, mean over regions
    rollouts_per_s finished sessions, including those that taught nothing
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from etude.core.errors import EtudeError
from etude.core.events import EVENTS, Event, FleetStatus, GroupDone, StepDone
from etude.model.files import write_directory
from etude.store.codec import Stamped
from etude.store.runs import Run
from etude.weights.follow import fetch
from etude.weights.manifest import find_newest

LAGS = (0, 2)
TOOL_DELAY_S = 0.2

COMMON = """
name = "{name}"
[tasks]
train = 12
heldout = 1
novel = 0
"""

TEACH = (
    COMMON
    + """
[model]
hidden_size = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
intermediate_size = 192
max_context = 768

[[stage]]
kind = "sft"
demonstrations = 400
max_epochs = 8
patience = 8
batch_tokens = 1024
lr = 3e-3
"""
)

LOOP = (
    COMMON
    + """
[model]
path = "{path}"
max_context = 768

[harness]
tool_delay_s = {delay}

[[stage]]
kind = "rl"
steps = 8
groups_per_step = 4
group_size = 8
max_lag = {lag}
"""
)


def run() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        work = Path(scratch)
        export(execute(work / "taught", TEACH.format(name="taught")), work / "model")
        measured: dict[str, float] = {}
        for lag in LAGS:
            name = f"lag{lag}"
            loop = execute(
                work / name,
                LOOP.format(name=name, path=work / "model", delay=TOOL_DELAY_S, lag=lag),
            )
            measured |= {
                f"{name}.{figure}": value for figure, value in metrics(events(loop)).items()
            }
    return measured


def execute(folder: Path, config: str) -> Run:
    """Execute a whole run by `etude run`. Return the finished run."""
    file = folder.with_suffix(".toml")
    file.write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "etude", "run", str(file), "--dir", str(folder)],
        # shows progress on a terminal
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EtudeError(
            f"the run {folder.name} of the benchmark ended with code {done.returncode}: "
            f"{done.stderr}"
        )
    return Run.open(str(folder), create=False)


def export(run: Run, directory: Path) -> None:
    """Write the newest weights of a run to a directory, for other runs to start from."""
    newest = find_newest(run.objects)
    assert newest is not None
    write_directory(
        directory,
        run.model_files(),
        fetch(run.objects, newest.version),
    )


def events(run: Run) -> list[Stamped[Event]]:
    return [
        stamped for process in run.processes() for stamped in run.events(process, EVENTS).read()[0]
    ]


def metrics(events: Sequence[Stamped[Event]]) -> dict[str, float]:
    """The figures of one run from its events. The measured time excludes startup and
    evaluations."""
    start = min(e.t - e.record.seconds for e in events if isinstance(e.record, GroupDone))
    end = max(e.t for e in events if isinstance(e.record, StepDone))
    during = [e.record for e in events if start <= e.t <= end]
    busy = [
        region.busy
        for fleet in during
        if isinstance(fleet, FleetStatus)
        for region in fleet.regions.values()
    ]
    rollouts = sum(
        len(group.rewards) + group.failed + len(group.quarantined)
        for group in during
        if isinstance(group, GroupDone)
    )
    return {
        "seconds": end - start,
        "trainer_busy": sum(step.seconds for step in during if isinstance(step, StepDone))
        / (end - start),
        "engine_busy": sum(busy) / max(1, len(busy)),
        "rollouts_per_s": rollouts / (end - start),
    }
