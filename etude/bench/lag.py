"""Benchmark of staleness: the demo's rl with a lag of 0, 2 and 8, and at 8 with every correction.

All runs start from the same weights, after the demo's mid-training and imitation, and train for the
same number of steps on the same tasks. The number of concurrent sessions fills the lag, so that it
is really reached. For each run:

    solved   share of 1,200 held-out tasks; its standard error is 0.014
    lag      mean over the sampled tokens, after the first steps
    k3       mean over the steps
    capped   share of the tokens whose importance weight was truncated or masked

Takes about 45 minutes on two cores. With more cores, one run per two cores goes in parallel.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean

from etude.bench.loop import events, execute, export
from etude.core.events import EvalDone, Event, StepDone
from etude.store.codec import Stamped

RUNS = {
    "lag0": (0, "truncated"),
    "lag2": (2, "truncated"),
    "lag8": (8, "truncated"),
    "lag8.none": (8, "none"),
    "lag8.masked": (8, "masked"),
    "lag8.sequence_truncated": (8, "sequence_truncated"),
    "lag8.sequence_masked": (8, "sequence_masked"),
}
STEPS, GROUPS, GROUP_SIZE = 60, 8, 8
UNDER_WAY = 10  # steps

LOOP = f"""
name = "lag"
[model]
path = "PATH"

[tasks]
train = 2048
heldout = 1200
novel = 0

[harness]
max_turns = 5
max_tokens = 40
concurrency = SESSIONS

[eval]
temperature = 1.0

[engine]
max_num_seqs = SESSIONS

[[stage]]
kind = "rl"
steps = {STEPS}
groups_per_step = {GROUPS}
group_size = {GROUP_SIZE}
max_lag = LAG
correction = "CORRECTION"
lr = 4e-4
warmup_steps = 5
lr_schedule = "linear"
advantage = "self_imitation"
"""


def run() -> dict[str, float]:
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        model = Path(scratch) / "model"
        export(execute(Path(scratch) / "demo", before_rl()), model)
        folders = {name: Path(scratch) / name.replace(".", "-") for name in RUNS}
        cores = sorted(os.sched_getaffinity(0))
        pairs: SimpleQueue[list[int]] = SimpleQueue()
        for first in range(0, max(1, len(cores) - 1), 2):
            pairs.put(cores[first : first + 2])
        with ThreadPoolExecutor(pairs.qsize(), initializer=_take_cores, initargs=(pairs,)) as (
            side_by_side
        ):
            loops = [loop(model, lag, correction) for lag, correction in RUNS.values()]
            done = side_by_side.map(execute, folders.values(), loops)
            for name, found in zip(RUNS, map(metrics, map(events, done)), strict=True):
                print(
                    name, {figure: round(value, 4) for figure, value in found.items()}, flush=True
                )
                measured |= {f"{name}.{figure}": value for figure, value in found.items()}
    return measured


def _take_cores(pairs: SimpleQueue[list[int]]) -> None:
    """Pin this thread, and all processes that it starts, to two cores: a run that saw all cores
    would start as many threads in each process."""
    os.sched_setaffinity(0, pairs.get())


def loop(model: Path, lag: int, correction: str) -> str:
    config = (
        LOOP.replace("PATH", str(model)).replace("CORRECTION", correction).replace("LAG", str(lag))
    )
    return config.replace("SESSIONS", str((lag + 1) * GROUPS * GROUP_SIZE))


def before_rl() -> str:
    """The demo without its last stage."""
    demo = resources.files("etude.commands").joinpath("demo.toml").read_text()
    return demo[: demo.index('[[stage]]\nkind = "rl"')]


def metrics(stamped: Sequence[Stamped[Event]]) -> dict[str, float]:
    records = [each.record for each in stamped]
    *_, done = (e for e in records if isinstance(e, EvalDone) and e.split == "heldout")
    steps = [e for e in records if isinstance(e, StepDone)]
    late = [step.lags for step in steps if step.step > UNDER_WAY]
    return {
        "solved": done.solved / done.total,
        "lag": fmean(
            sum(lag * count for lag, count in enumerate(lags)) / sum(lags) for lags in late
        ),
        "k3": fmean(step.k3_mean for step in steps),
        "capped": fmean(step.corrected_frac for step in steps),
    }
