"""The check before a start: it reports everything that the processes of a run would refuse, before
any of them runs. The part that loads a model or the user's own code is a separate process.

    python -m etude.launch.check [--resumed] [--look] [--store URL]  < the config, as JSON

With `--store` it also asks the environment for its tasks, and compares them with those that the run
there began with. With `--look` it always asks for them, and estimates the resources that the run
needs; the last line of its output is then a `Findings`, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.launch.launcher import check_port, locked, python
from etude.launch.place import RunPlace
from etude.run.audit import is_finished
from etude.run.controller import (
    build_agent,
    check_task,
    open_environment,
    read_tasks,
    wanted_splits,
)
from etude.run.gateway_client import GatewayClient
from etude.run.process import error_message
from etude.run.sinks import check_sinks
from etude.run.task_record import check_record
from etude.store.runs import Run
from etude.trainer.prepare import check_stage_files, check_training, model_directory

VLLM_S = 5.0
"""Time for a vLLM server to report that it is healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The tasks that a run has, and the resources that it needs."""

    tasks: dict[str, int]
    """Split -> the number of tasks that the environment has."""
    parameters: int
    model_context: int
    seconds: dict[str, float]
    disk_bytes: int
    memory_bytes: int
    activation_bytes: int
    memory_free: int


def check_start(
    config: RunConfig, place: RunPlace, *, fresh: bool = False, look: bool = False
) -> Findings | None:
    """Raise EtudeError for every reason to refuse a start in this place; change nothing. `fresh`:
    the run that is stored there will be removed. With `look`, return the findings."""
    _check_directory(place.directory)
    resumed, store = False, None
    if fresh:
        place.check_removable()
    elif (run := place.find()) is not None:
        run.check_config(config)
        # a run that has nothing left to do no longer needs its tasks
        store = None if is_finished(run, config) else place.store
        resumed = bool(run.checkpoints())
    if config.model.path is not None and not resumed:
        model_directory(config.model.path)
    check_stage_files(config)
    check_sinks(config.trackers)
    if config.engine.port:
        check_port(config.engine.port)
    _check_vllm(config.engine.vllm_urls)
    return _ask(config, resumed=resumed, look=look, store=store)


def _check_directory(directory: Path) -> None:
    if (directory / "lock").is_file():
        with locked(directory):
            return
    place = directory
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "is not writable" if place.is_dir() else "is not a directory"
        raise EtudeError(
            f"cannot create a run in {directory} ({place} {why}): choose another place with --dir"
        )


def _check_vllm(servers: dict[str, str]) -> None:
    for region, url in servers.items():
        try:
            with urlopen(f"{url}/health", timeout=VLLM_S):
                pass
        except (URLError, OSError, ValueError) as e:
            raise EtudeError(
                f"engine.vllm_urls: no answer from the vLLM server for the region {region} at "
                f"{url} ({e}): start it as described in docs/serve.md"
            ) from e


def _ask(
    config: RunConfig, *, resumed: bool, look: bool, store: str | None = None
) -> Findings | None:
    """Run the rest of the check in a process of its own."""
    flags = (["--resumed"] if resumed else []) + (["--look"] if look else [])
    flags += ["--store", store] if store else []
    done = subprocess.run(
        python("etude.launch.check", *flags),
        input=config.model_dump_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise EtudeError(done.stderr.rpartition("error: ")[2].strip())
    if done.returncode:
        raise EtudeError(
            f"the check of the run ended with exit code {done.returncode}:\n{done.stderr}"
        )
    return Findings(**json.loads(done.stdout.splitlines()[-1])) if look else None


async def examine(
    config: RunConfig, *, resumed: bool, look: bool, store: str | None = None
) -> Findings | None:
    """The check of `_ask`, within this process."""
    run = Run.open(store, create=False) if store else None
    check_training(config, resumed=resumed)
    tasks = {}
    async with open_environment(config) as (environment, pool):
        async with GatewayClient("http://127.0.0.1") as gateway:
            build_agent(config.harness, environment, gateway.http, desk=gateway, temperature=1.0)
        for split in wanted_splits(config) if look or run is not None else ():
            found = await read_tasks(environment, config.tasks, split)
            for task in found:
                check_task(task, split, pool.check)
            if run is not None:
                check_record(run, split, found)
            tasks[split] = len(found)
    if not look:
        return None
    from etude.trainer.estimate import estimate  # imports torch

    return Findings(tasks=tasks, **asdict(estimate(config, tasks)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="etude.launch.check", description="Check a config, read from standard input."
    )
    parser.add_argument("--resumed", action="store_true", help="the run has a checkpoint")
    parser.add_argument(
        "--look", action="store_true", help="report what was found and what the run needs"
    )
    parser.add_argument("--store", help="store of an existing run that resumes")
    args = parser.parse_args()
    config = RunConfig.model_validate_json(sys.stdin.read())
    try:
        findings = asyncio.run(examine(config, **vars(args)))
    except (EtudeError, ExceptionGroup) as e:
        if (told := error_message(e)) is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return 2
    except OSError as e:
        print(
            f"error: this machine refused something that the run needs ({e}): look for a full "
            "disk or missing permissions",
            file=sys.stderr,
        )
        return 2
    if findings is not None:
        print(json.dumps(asdict(findings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
