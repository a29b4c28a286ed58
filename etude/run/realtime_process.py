"""The process of the loop of real-time RL: python -m etude.run.realtime_process --store RUN."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.lineage import stage_spans
from etude.core.realtime_config import RealtimeConfig
from etude.core.types import EVAL_SPLITS
from etude.run.process import run_process
from etude.run.realtime import RealtimeLoop, Stage
from etude.run.realtime_probes import probe_splits
from etude.run.realtime_sessions import UserSessions, signal_table
from etude.run.realtime_simulated import simulate
from etude.serve.production.place import Place
from etude.store.runs import Run
from etude.store.telemetry import event_writer
from etude.weights.manifest import find_newest


def realtime_settings(config: RunConfig) -> RealtimeConfig:
    if config.realtime is None:
        raise EtudeError(f"run {config.name} has no table [realtime]: add one (docs/realtime.md)")
    return config.realtime


def open_loop(run: Run, config: RunConfig) -> RealtimeLoop:
    """The loop of a run that was prepared."""
    realtime = realtime_settings(config)
    span = stage_spans(config.stage)[-1]

    def published() -> int:
        newest = find_newest(run.objects)
        return -1 if newest is None else newest.version

    async def evaluate(version: int, split: str, samples: int) -> None:
        # import the engine, and torch with it, only when there is something to evaluate
        from etude.run.evaluator import evaluating

        async with (
            event_writer(run, "evaluator") as emit,
            evaluating(run, config, emit) as evaluate,
        ):
            await evaluate(version, split, samples)

    place = Place(Path(realtime.production), run.objects.url)
    users = UserSessions(
        place.store,
        run.objects,
        policy=config.name,
        table=signal_table(realtime),
        refused=place.refused,
    )
    return RealtimeLoop(
        run,
        users,
        realtime,
        Stage(
            first=span.start,
            last=span.end,
            max_tokens=config.model.max_context,
            splits=(
                *(split for split in EVAL_SPLITS if getattr(config.tasks, split)),
                *probe_splits(realtime.gate, config.seed),
            ),
        ),
        published=published,
        evaluate=evaluate,
        simulate=partial(simulate, run, config),
        tell=lambda text: print(text, flush=True),
    )


async def run_loop(store: str, *, once: bool) -> None:
    run = await asyncio.to_thread(lambda: Run.open(store, create=False))
    await open_loop(run, run.config()).follow(once=once)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.run.realtime_process", description="Learn from users."
    )
    parser.add_argument("--store", required=True, help="the run's store")
    parser.add_argument("--once", action="store_true", help="exit after one update")
    args = parser.parse_args()
    return run_process(lambda: run_loop(args.store, once=args.once))


if __name__ == "__main__":
    sys.exit(main())
