"""Benchmark of trained summaries: sessions that do not fit one window, with four ways to continue.

One model learns from demonstrated sessions to read, to answer, and to summarize as for a general
prompt (`_summary_tasks`, `summary.toml`). Four variants start from its weights and try the same
held-out tasks:

    none        no summaries: the next window begins with the task alone
    untrained   its own summaries
    excluded    after rl that trains everything except the summaries
    trained     after rl that trains summaries too, with the reward of their session

For each:

    failures    share of the tasks that are not solved, with a 95 % interval (low, high)
    tokens      tokens per summary
    summaries   summaries per session
    session     tokens of all windows of a session
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean

from etude.bench._summary_tasks import prepare
from etude.bench.loop import execute, export
from etude.core.statistics import wilson
from etude.store.rollouts import RolloutLog, RolloutRow
from etude.store.runs import Run

Pick = Callable[[Iterable[int]], int]
"""Chooses one of the versions that were evaluated."""
RL = '[[stage]]\nkind = "rl"\n'
UNCHANGED = """
[[stage]]
kind = "sft"
path = "two.jsonl"
max_epochs = 1
lr = 1e-12
"""
"""A stage that changes nothing, for the evaluation after it."""


def run(seed: int = 0, steps: int = 60) -> dict[str, float]:
    """Run the benchmark with `steps` steps of rl."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as scratch:
        folder = Path(scratch)
        prepare(folder, seed)
        configs = Configs.read(seed, steps)
        base = execute(folder / "untrained", configs.base)
        print(f"{_minutes(began):5.1f} min  imitated", flush=True)
        measured: dict[str, float] = {}
        export(base, folder / "model")
        shown = (folder / "sessions.jsonl").read_text().splitlines()[:2]
        (folder / "two.jsonl").write_text("\n".join(shown))
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as side_by_side:
            places = [folder / name for name in configs.arms]
            done = side_by_side.map(execute, places, configs.arms.values())
            for name, arm in zip(configs.arms, done, strict=True):
                measured |= _told(name, arm, began)
                if name == "trained":
                    measured |= _told("untrained", arm, began, pick=min)
    before, after = measured["untrained.failures"], measured["trained.failures"]
    measured["failures_ratio"] = after / before if before else 1.0
    measured["tokens_ratio"] = measured["trained.tokens"] / measured["untrained.tokens"]
    return measured | {"minutes": _minutes(began)}


def _minutes(began: float) -> float:
    return (time.monotonic() - began) / 60


@dataclass(frozen=True, slots=True)
class Configs:
    base: str
    """Imitation alone, without an evaluation: the arms begin with one."""
    arms: dict[str, str]
    """Variants that start from the weights of `base`."""

    @classmethod
    def read(cls, seed: int, steps: int) -> Configs:
        text = resources.files("etude.bench").joinpath("summary.toml").read_text()
        text = text.replace('name = "summary"\n', f'name = "summary"\nseed = {seed}\n')
        base, _, rl = text.partition(RL)
        common = base.partition("[[stage]]")[0].replace('"fresh"', '"model"')
        rl = RL + rl.replace("steps = 60", f"steps = {steps}")
        return cls(
            base.replace("heldout = 400", "heldout = 0"),
            {
                "none": common.replace("InventoryAgent", "ForgetfulAgent") + UNCHANGED,
                "trained": common + rl,
                "excluded": common + rl + "train_summaries = false\n",
            },
        )


def _told(name: str, run: Run, began: float, pick: Pick = max) -> dict[str, float]:
    found = metrics(RolloutLog(run.objects).rows(), pick)
    figures = {figure: round(value, 4) for figure, value in found.items()}
    print(f"{_minutes(began):5.1f} min  {name:10} {figures}", flush=True)
    return {f"{name}.{figure}": value for figure, value in found.items()}


def metrics(rows: list[RolloutRow], pick: Pick = max) -> dict[str, float]:
    """The figures of one evaluation; `pick` chooses the last or the first."""
    held_out = [row for row in rows if row.kind == "heldout" and row.reward is not None]
    version = pick(row.versions[-1] for row in held_out)
    attempts = [row for row in held_out if row.versions[-1] == version]
    failures = sum(row.reward != 1.0 for row in attempts)
    low, high = wilson(failures, len(attempts))
    summaries = sum(row.parts["summaries"] for row in attempts)
    return {
        "failures": failures / len(attempts),
        "low": low,
        "high": high,
        "tokens": sum(row.parts["summary_tokens"] for row in attempts) / max(1.0, summaries),
        "summaries": summaries / len(attempts),
        "session": fmean(row.length for row in attempts),
    }
