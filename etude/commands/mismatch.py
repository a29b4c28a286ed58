"""`etude mismatch MODEL|RUN`: the difference between the engine's log-probs and the trainer's, and
its causes.

For a run, first judge the newest batch as it was recorded, against the weights that trained on it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch
from rich.console import Console

from etude.commands.serve import load
from etude.core.config import RunConfig
from etude.core.errors import EtudeError
from etude.core.events import MismatchMeasured, MismatchStats
from etude.core.lineage import stage_spans
from etude.core.sampling import expand_spans
from etude.core.stages import RolloutStageConfig
from etude.core.types import Json, RecomputedRow, Row
from etude.launch.place import RunPlace
from etude.model.experts import read_ids
from etude.model.files import build_model
from etude.model.lora import whole_model
from etude.model.numerics import Arithmetic
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import Transformer
from etude.run.diagnose import Diagnosis
from etude.run.trials import Prompt, RecordedAnswer, diagnose, diagnose_recorded, recompute
from etude.serve.worker_protocol import read_model_files
from etude.store.experts import get_experts
from etude.store.runs import Run
from etude.train.mismatch import measure_mismatch
from etude.weights.follow import fetch
from etude.weights.manifest import find_newest

TEXTS = (
    "def area(width, height):\n    return width",
    "Write a function that reverses a linked list, then explain in one sentence why it is linear "
    "in time.",
    "The test fails with `IndexError: list index out of range` in line 42 of parser.py. The loop "
    "there reads\n"
    "    for i in range(len(tokens) + 1):\n        if tokens[i].kind == 'name':\n            "
    "names.append(tokens[i])\n",
    "import json\n\n\ndef load(path):\n    with open(path) as f:\n        return "
    "json.load(f)\n\n\ndef save(path):\n",
)
NUM_PROMPTS = 8
JUDGED_TOKENS = 4096
JUDGED_LOGITS = 2**26
"""Limits on the tokens and logits of a batch that are also recomputed with random rounding, keeping
their distributions."""
LEGEND = (
    "k1: mean of the engine's log-prob minus the trainer's; k3: the same, but never negative, "
    "and 0 if all are equal; rounding: the largest k3 that rounding alone causes on these "
    "tokens; ratio: the trainer's probability over the engine's; p99: 99 of 100 tokens are below"
)


@dataclass(frozen=True, slots=True)
class Sides:
    """The same weights as both sides compute with them."""

    engine: Transformer
    trainer: Transformer
    prompts: Sequence[Prompt]
    temperature: float = 1.0

    def compute_with(self, arithmetic: Arithmetic) -> None:
        self.engine.compute_with(arithmetic)
        self.trainer.compute_with(arithmetic)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The mismatch of a step's batch as it was recorded."""

    measured: MismatchMeasured
    diagnosis: Diagnosis | None
    """None if the trainer's weights sampled no row completely."""

    def to_json(self) -> Json:
        return _as_json(asdict(self.measured)) | (to_json(self.diagnosis) if self.diagnosis else {})


def mismatch(
    target: str, console: Console, *, tokens: int, temperature: float | None, invariant: bool
) -> dict[str, Json]:
    """Show the mismatch, and return the data for `--json`. `temperature`: None uses that of the
    run's stage, or 1."""
    said: dict[str, Json] = {}
    if all((Path(target) / name).is_file() for name in ("config.json", "tokenizer.json")):
        progress("reading the weights")
        sides = from_model(Path(target))
    else:
        run = RunPlace.of(target).open()
        progress("reading the weights")
        sides, recorded = from_run(run, console)
        said["recorded"] = recorded.to_json() if recorded else None
    if invariant:
        sides.compute_with(sides.engine.arithmetic.but(invariant=True))
    asked = sides.temperature if temperature is None else temperature
    found = diagnose(
        sides.engine,
        sides.trainer,
        sides.prompts,
        max_tokens=tokens,
        temperature=asked,
        progress=progress,
    )
    show(found, console)
    return said | to_json(found)


def to_json(found: Diagnosis) -> dict[str, Json]:
    told: dict[str, Json] = _as_json(asdict(found))
    return told | {"causes": found.causes, "unexplained": found.unexplained}


JSON_NAMES = {
    "argmax_flip_frac": "flips",
    "ess": "effective",
    "router_mismatch_frac": "routed_otherwise",
    "position": "place",
    "mismatch_frac": "otherwise",
}
"""Names that differ in `--json`: its format stays stable for programs that read it."""


def _as_json(value: Json) -> Json:
    if isinstance(value, dict):
        return {JSON_NAMES.get(key, key): _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value


def from_model(directory: Path) -> Sides:
    loaded = load(str(directory), None, torch.device("cpu"))
    tokenizer = ChatTokenizer(loaded.files)
    prompts = [tuple(tokenizer.encode(text)) for text in TEXTS]
    return Sides(loaded.model, trainer_copy(loaded.model), prompts)


def from_run(run: Run, console: Console) -> tuple[Sides, Recorded | None]:
    """The newest weights; and if there are batches, the mismatch of the last one."""
    files, newest = read_model_files(run), find_newest(run.objects)
    if newest is None:
        raise EtudeError(
            f"{run.objects.url} has no published weights yet: finish its first stage first"
        )
    tokenizer = ChatTokenizer(files)
    steps = run.batches()
    config = run.config()
    version = steps[-1] - 1 if steps else newest.version
    engine = build_model(
        files, whole_model(files, fetch(run.objects, version)), engine_dtype(config)
    ).requires_grad_(False)
    trainer = trainer_copy(engine)
    sides = Sides(engine, trainer, [tuple(tokenizer.encode(text)) for text in TEXTS])
    sides.compute_with(
        Arithmetic.of(
            invariant=config.batch_invariant,
            fp8=config.quantization == "fp8",
            fp8_kv=config.kv_cache_dtype == "fp8",
        )
    )
    if not steps:
        return sides, None
    rows = run.batch(steps[-1]).rows
    temperature = temperature_of(config, steps[-1])
    recorded = recorded_mismatch(
        run, trainer, rows, version, temperature, tokenizer, engine_dtype(config), console
    )
    prompts = [
        tuple(
            token
            for token, _ in takewhile(
                lambda each: not each[1], zip(row.tokens, row.mask, strict=True)
            )
        )
        for row in rows
    ]
    few = sorted(set(prompts), key=len)[:NUM_PROMPTS]
    return replace(sides, prompts=few, temperature=temperature), recorded


def temperature_of(config: RunConfig, step: int) -> float:
    """The temperature of the stage that a step belongs to; each rl or distill stage has its own."""
    for span in stage_spans(config.stage):
        if span.start < step <= span.end and isinstance(span.stage, RolloutStageConfig):
            return span.stage.temperature
    raise EtudeError(
        f"the run has a batch of step {step}, but its config has no rl or distill stage with "
        "that step: restore config.json from a backup"
    )


def engine_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which the run's workers compute."""
    engine = config.engine
    on_cuda = engine.device == "cuda" or (engine.device == "auto" and torch.cuda.is_available())
    if engine.dtype == "auto":
        return torch.bfloat16 if on_cuda else torch.float32
    kind: torch.dtype = getattr(torch, engine.dtype)
    return kind


def trainer_copy(engine: Transformer) -> Transformer:
    """A copy in fp32. Both models get the published values, which are rounded to bf16."""
    trainer = Transformer(engine.config).requires_grad_(False)
    trainer.load_state_dict(engine.state_dict())
    for side in (engine, trainer):
        for parameter in side.parameters():
            parameter.copy_(parameter.bfloat16())
    return trainer


def recorded_mismatch(
    run: Run, trainer: Transformer, rows: Sequence[Row], version: int, temperature: float,
    tokenizer: ChatTokenizer, kind: torch.dtype, console: Console,
) -> Recorded:  # fmt: skip
    found = []
    for row in rows:
        with torch.no_grad():
            again = recompute(trainer, RecordedAnswer(row), temperature)
        likeliest = tuple(again.logp_NV.argmax(-1).tolist())
        found.append(RecomputedRow(logprobs=tuple(again.logp_N.tolist()), argmax=likeliest))
    measured = measure_mismatch(rows, found, step=version + 1, decode=tokenizer.decode)
    console.print(
        f"the recorded batch of step {version + 1}, against version {version}:",
        highlight=False,
    )
    print_stats(
        {f"lag {lag}": gap for lag, gap in measured.by_lag.items()} | measured.by_region, console
    )
    for worst in measured.worst:
        console.print(
            f"  {worst.old:8.4f} -> {worst.new:8.4f}  {worst.text[-40:]!r}",
            highlight=False,
            markup=False,
        )
    judged = to_judge(rows, version, trainer.config.vocab_size)
    if not judged:
        console.print(
            "no row was sampled by these weights alone: every row also differs by what was "
            "learnt in between",
            highlight=False,
        )
        return Recorded(measured, None)
    progress("recomputing the batch with random rounding")
    answers = [RecordedAnswer(row, recorded_experts(run, row, trainer)) for row in judged]
    diagnosis = diagnose_recorded(trainer, answers, temperature, kind)
    conclude(diagnosis, console)
    return Recorded(measured, diagnosis)


def to_judge(rows: Sequence[Row], version: int, vocab_size: int) -> list[Row]:
    """The first rows that one version sampled completely, as many as time and memory allow. Tokens
    that other weights sampled, or left in the cache, also differ by what was learnt in between."""
    found: list[Row] = []
    num_tokens = num_logits = 0
    for row in rows:
        if set(expand_spans(row.versions)) != {version}:
            continue
        num_tokens += len(row.tokens)
        num_logits += sum(row.mask) * vocab_size
        if found and (num_tokens > JUDGED_TOKENS or num_logits > JUDGED_LOGITS):
            break
        found.append(row)
    return found


def recorded_experts(run: Run, row: Row, trainer: Transformer) -> torch.Tensor | None:
    if row.experts is None or trainer.config.experts is None:
        return None
    return read_ids(get_experts(run.objects, row.experts), trainer.config.experts).long()


def progress(text: str) -> None:
    print(f".. {text}", file=sys.stderr, flush=True)


def show(found: Diagnosis, console: Console) -> None:
    conclude(found, console)
    print_stats(found.gaps, console, {name: bound.k3 for name, bound in found.rounding.items()})
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    console.print(
        f"the most likely token differs at {found.argmax_flip_frac:.2%} of the positions",
        highlight=False,
    )
    if not found.operators:
        console.print(
            "every operator computes the same result for the same input, except for rounding",
            highlight=False,
        )
        return
    console.print(
        "operators that differ most for the same input, relative to the trainer's result:",
        highlight=False,
    )
    for each in found.operators[:8]:
        line = f"  {each.difference:9.2e}  rounding {each.bound:9.2e}  {each.name}  {each.note}"
        console.print(line, highlight=False, markup=False)


def conclude(found: Diagnosis, console: Console) -> None:
    gap, bound = found.gaps[found.simplest], found.rounding[found.simplest]
    for cause in found.causes:
        console.print(f"cause: {cause}", style="bold", highlight=False, markup=False)
    for unexplained in found.unexplained:
        console.print(f"unexplained: {unexplained}", style="bold", highlight=False, markup=False)
    if not found.causes and not found.unexplained:
        rounding = f"no mismatch beyond rounding (k3 {gap.k3:.1e} of at most {bound.k3:.1e})"
        console.print(rounding, style="bold", highlight=False)


def print_stats(
    gaps: dict[str, MismatchStats], console: Console, rounding: Mapping[str, float] | None = None
) -> None:
    line = "{:12} {:>6}  {:>9} {:>9} {:>9} {:>9}  {:>9} {:>9}  {}".format

    def say(*columns: object) -> None:
        console.print(line(*columns).rstrip(), highlight=False, markup=False, soft_wrap=True)

    say("", "tokens", "k1", "k3", "rounding", "k3 p99", "ratio p99", "ratio max", "other route")
    for name, gap in gaps.items():
        otherwise = "" if gap.router_mismatch_frac is None else f"{gap.router_mismatch_frac:.2%}"
        bound = f"{rounding[name]:.2e}" if rounding else ""
        figures = (f"{gap.k1:.2e}", f"{gap.k3:.2e}", bound, f"{gap.k3_p99:.2e}")
        say(
            name,
            gap.num_tokens,
            *figures,
            f"{gap.ratio_p99:.5f}",
            f"{gap.ratio_max:.5f}",
            otherwise,
        )
