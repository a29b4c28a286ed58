"""Trainers that run in their own processes and are killed there, on a run that consists of nothing
but its trainer."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

from etude.core.config import RunConfig, parse
from etude.core.errors import EtudeError
from etude.core.events import Event, FitStep, StepDone
from etude.core.sampling import version_spans
from etude.core.types import Batch, Row
from etude.model.files import hf_state_dict, write_directory
from etude.model.transformer import ModelConfig
from etude.store.checkpoints import read
from etude.store.runs import Run
from etude.trainer.prepare import store_files
from etude.weights.manifest import find_newest
from tests.small_model import TEXTS, sharp, small_files

STEPS = 20
COMMON = """
name = "lives"
deterministic = true
engine = {regions = ["here"]}
tasks = {train = 8, heldout = 1, novel = 0}
trainer = {checkpoint_every_s = 0}
"""
STAGES = {
    "midtrain": f"""
[[stage]]
kind = "midtrain"
steps = {STEPS}
batch_tokens = 128
seq_len = 64
[[stage.sources]]
path = "HERE/text.jsonl"
""",
    "sft": f"""
[[stage]]
kind = "sft"
path = "HERE/sessions.jsonl"
max_epochs = {STEPS // 2}
patience = {STEPS}
batch_tokens = 45
""",
    "rl": f"""
[[stage]]
kind = "rl"
steps = {STEPS}
max_lag = 0
""",
    "dpo": f"""
[[stage]]
kind = "dpo"
path = "HERE/pairs.jsonl"
epochs = {STEPS // 2}
batch_pairs = 6
lr = 1e-3
""",
    "distill": f"""
[[stage]]
kind = "distill"
steps = {STEPS}
max_lag = 0
teacher = "HERE/teacher"
""",
}
"""Each stage alone, with this many steps, and its data in HERE."""

# One process loads torch, and trainers are forked from it. A trainer started with `apart` is a new
# process: it shares no random state, set order or memory with the others, so a dependence on one of
# these shows.
_forked, _apart = multiprocessing.get_context("forkserver"), multiprocessing.get_context("spawn")
_forked.set_forkserver_preload(["torch._dynamo", "etude.trainer.trainer", "tests.trainer.lives"])


def prepared(directory: Path, kind: str) -> Run:
    """Prepare a run; runs in neighbouring directories learn from the same files."""
    run, files, data = Run.open(f"file:{directory}"), small_files(), directory.parent / "data"
    data.mkdir(exist_ok=True)
    asks = [{"role": "user", "content": f"edit {number}"} for number in range(12)]
    lines(data / "text.jsonl", [{"text": f"{text} {number}"} for number, text in enumerate(TEXTS)])
    lines(
        data / "sessions.jsonl",
        [{"messages": [ask, {"role": "assistant", "content": "test"}]} for ask in asks],
    )
    lines(
        data / "pairs.jsonl",
        [{"prompt": [ask], "chosen": "submit", "rejected": "test"} for ask in asks],
    )
    if kind == "distill":
        write_directory(
            data / "teacher",
            files,
            hf_state_dict(sharp(ModelConfig.from_json(files["config.json"]), 1, 2.0)),
        )
    run.put_config(parse((COMMON + STAGES[kind]).replace("HERE", str(data))))
    store_files(run, files)
    for step in range(1, STEPS + 1 if kind in ("rl", "distill") else 1):
        run.put_batch(batch(step))
    return run


def lines(path: Path, records: list[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def batch(step: int) -> Batch:
    rng = random.Random(step)

    def row(number: int) -> Row:
        mask = [False] * 4 + [rng.random() < 0.7 for _ in range(rng.randint(4, 20))] + [True]
        return Row(
            sample=f"{step}-{number}",
            tokens=tuple(rng.randrange(300) for _ in mask),
            mask=tuple(mask),
            logprobs=tuple(-5.0 - rng.random() if sampled else 0.0 for sampled in mask),
            advantages=tuple((1.0, -0.5)[number % 2] if sampled else 0.0 for sampled in mask),
            versions=version_spans([step - 1] * sum(mask)),
        )

    return Batch(step=step, rows=tuple(row(number) for number in range(3)), oldest=step - 1)


def live(
    store: str,
    die_at: int | None,
    place: str,
    rank: int = 0,
    ranks: int = 1,
    meeting: Path | None = None,
) -> None:
    """Train until the end, or until killed at a step: in the middle of it (`step`), when it is
    reported (`told`), or just before or after the checkpoint with that number is committed
    (`uncommitted`, `committed`), which happens in the background. Otherwise like
    `etude.trainer.trainer`."""
    import torch

    from etude.train import distributed as ranks_module
    from etude.train.distributed import SINGLE_PROCESS, World
    from etude.trainer.trainer import Trainer

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def emit(event: Event) -> None:
        if not isinstance(event, FitStep | StepDone):
            return
        if place == "told" and event.step == die_at:
            die()

    class Mortal(Run):
        def put_checkpoint(self, name: str, manifest: bytes) -> None:
            now = die_at in map(int, name.split("."))
            if now and place == "uncommitted":
                die()
            super().put_checkpoint(name, manifest)
            if now and place == "committed":
                die()

        def wait_batch(self, step: int) -> tuple[Batch, bytes]:
            if place == "step" and step == die_at:
                made.learner.model.model.layers[1].register_forward_hook(lambda *_: die())
            return super().wait_batch(step)

    torch.set_num_threads(1)
    ranks_module.LIVENESS_S = 2.0
    run = Mortal.open(store, create=False)
    together = World.on_one_machine(rank, ranks, meeting, 30.0) if meeting else SINGLE_PROCESS
    try:
        with together.naming_lost_ranks():
            made = Trainer(run, run.config(), emit, together)
            made.train()
            together.close()
    except EtudeError as e:
        run.objects.put(f"last words/{rank}", str(e).encode())
        os._exit(2)
    if ranks > 1:
        # Everything is saved and published. A gloo thread that frees a tensor during interpreter
        # shutdown aborts the process, which is not what is tested.
        os._exit(0)


class Stopped(Exception):
    pass


def live_briefly(run: Run, config: RunConfig, steps: int, device: str = "cpu") -> None:
    """Train in this process, and stop after this many steps."""
    import torch

    from etude.trainer.trainer import Trainer

    left = steps

    def emit(event: Event) -> None:
        nonlocal left
        left -= isinstance(event, FitStep | StepDone)
        if not left:
            raise Stopped

    trainer = Trainer(run, config, emit, device=torch.device(device))
    try:
        trainer.train()
    except Stopped:
        trainer.saver.wait()  # a process that dies takes its threads along
        trainer.publisher.wait()
    else:
        raise AssertionError(f"it ended before step {steps}")


def spawn(
    run: Run, die_at: int | None = None, place: str = "told", *, apart: bool = False
) -> int | None:
    """Run one trainer process; return its exit code."""
    process = (_apart if apart else _forked).Process(
        target=live, args=(run.objects.url, die_at, place)
    )
    process.start()
    process.join()
    return process.exitcode


def spawn_ranks(
    run: Run, meeting: Path, ranks: int, die_at: int | None = None, *, apart: bool = False
) -> list[int | None]:
    """Run several ranks, the last of which may die in the middle of a step; return their exit
    codes."""
    processes = []
    for rank in range(ranks):
        death = die_at if rank == ranks - 1 else None
        arguments = (run.objects.url, death, "step", rank, ranks, meeting)
        processes.append((_apart if apart else _forked).Process(target=live, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def fingerprint(run: Run) -> str:
    """SHA-256 of the result of a run: weights, optimizer, cursor, lineage and published versions.
    The code's version is left out, since commits may happen during the test."""
    checkpoint, newest = read(run, run.checkpoints()[-1]), find_newest(run.objects)
    assert newest is not None
    lineage = tuple(replace(origin, code="") for origin in checkpoint.lineage)
    told = f"{replace(checkpoint, lineage=lineage)} {newest.version} {newest.root}"
    return hashlib.sha256(told.encode()).hexdigest()


def of_version_1(made: Batch) -> Batch:
    """The batch with tokens of version 1, beginning with it."""
    rows = [replace(row, versions=version_spans([1] * sum(row.mask))) for row in made.rows]
    return replace(made, rows=tuple(rows), oldest=1, base=1)
