"""`etude mismatch MODEL|RUN`: how far the engine's log-probs are from the trainer's, and what brings the difference in.

Of a run it first says how far the newest batch, as it was recorded, is from the weights that trained on it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from etude.core.errors import EtudeError
from etude.core.events import Gap, Metered
from etude.core.types import Json, Recomputed, Row
from etude.model.files import build
from etude.model.numerics import INVARIANT
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import Transformer
from etude.run.diagnose import Diagnosis, Prompt, diagnose, find_cut
from etude.run.serve import load
from etude.serve.wire import read_model_files
from etude.store.runs import Run
from etude.train.loss import predicted
from etude.train.meter import meter
from etude.train.rows import Text, pack
from etude.weights.follow import fetch
from etude.weights.manifest import find_newest

TEXTS = (
    "def area(width, height):\n    return width",
    "Write a function that reverses a linked list, then explain in one sentence why it is linear in time.",
    "The test fails with `IndexError: list index out of range` in line 42 of parser.py. The loop there reads\n"
    "    for i in range(len(tokens) + 1):\n        if tokens[i].kind == 'name':\n            names.append(tokens[i])\n",
    "import json\n\n\ndef load(path):\n    with open(path) as f:\n        return json.load(f)\n\n\ndef save(path):\n",
)
NUM_PROMPTS = 8
LEGEND = (
    "k1: mean of the engine's log-prob minus the trainer's; k3: the same without sign, 0 if all are equal; ratio: the "
    "trainer's probability over the engine's, p99: at 99 of 100 tokens it is lower"
)


@dataclass(frozen=True, slots=True)
class Sides:
    """The same weights, as each side computes with them."""

    engine: Transformer
    trainer: Transformer
    prompts: Sequence[Prompt]


def mismatch(target: Path, console: Console, *, tokens: int, temperature: float, invariant: bool) -> dict[str, Json]:
    said: dict[str, Json] = {}
    progress("the weights are read")
    if (target / "config.json").is_file() and (target / "tokenizer.json").is_file():
        sides = of_model(target)
    else:
        run = Run.open(f"file:{target.absolute()}", create=False)
        sides, recorded = of_run(run, console)
        said["recorded"] = asdict(recorded) if recorded else None
    if invariant:
        sides.engine.compute_with(INVARIANT)
        sides.trainer.compute_with(INVARIANT)
    found = diagnose(
        sides.engine, sides.trainer, sides.prompts, max_tokens=tokens, temperature=temperature, progress=progress
    )
    show(found, console)
    return said | asdict(found) | {"causes": found.causes}


def of_model(directory: Path) -> Sides:
    files, engine = load(directory, None, torch.device("cpu"))
    tokenizer = ChatTokenizer(files)
    prompts = [tuple(tokenizer.encode(text)) for text in TEXTS]
    return Sides(engine, as_trained(engine), prompts)


def of_run(run: Run, console: Console) -> tuple[Sides, Metered | None]:
    """The newest weights; and if there are batches, the gap of the last one."""
    files, newest = read_model_files(run.objects), find_newest(run.objects)
    if newest is None:
        raise EtudeError(f"{run.objects.url} has no published weights yet: run its first stage to the end first")
    tokenizer, steps = ChatTokenizer(files), run.batches()
    if not steps:
        engine = build(files, fetch(run.objects, newest.version)).requires_grad_(False)
        return Sides(engine, as_trained(engine), [tuple(tokenizer.encode(text)) for text in TEXTS]), None
    batch = run.batch(steps[-1])
    engine = build(files, fetch(run.objects, batch.step - 1)).requires_grad_(False)
    trainer = as_trained(engine)
    stage = next(stage for stage in run.config().stage if stage.kind == "rl")
    recorded = of_batch(trainer, batch.rows, batch.step - 1, stage.temperature, tokenizer, console)
    prompts = [tuple(token for token, _ in takewhile(lambda each: not each[1], zip(row.tokens, row.mask, strict=True)))
               for row in batch.rows]  # fmt: skip
    return Sides(engine, trainer, sorted(set(prompts), key=len)[:NUM_PROMPTS]), recorded


def as_trained(engine: Transformer) -> Transformer:
    """In fp32, on the values that are published: rounded to bf16."""
    trainer = Transformer(engine.config).requires_grad_(False)
    trainer.load_state_dict(engine.state_dict())
    for side in (engine, trainer):
        for parameter in side.parameters():
            parameter.copy_(parameter.bfloat16())
    return trainer


def of_batch(
    trainer: Transformer, rows: Sequence[Row], version: int, temperature: float, tokenizer: ChatTokenizer,
    console: Console,
) -> Metered:  # fmt: skip
    found, old, new = [], [], []
    distributions: list[Tensor] = []
    for row in rows:
        with torch.no_grad():
            states = predicted(trainer, pack([Text(row.tokens, row.mask)]))
            logp_N, logp_NV = trainer.logprobs(*states, temperature)
        found.append(Recomputed(logprobs=tuple(logp_N.tolist()), likeliest=tuple(logp_NV.argmax(-1).tolist())))
        old.append(torch.tensor(row.logprobs)[torch.tensor(row.mask)])
        new.append(logp_N)
        distributions.append(logp_NV)
    measured = meter(rows, found, step=version + 1, decode=tokenizer.decode)
    console.print(f"the batch of step {version + 1}, as it was recorded, against version {version}:", highlight=False)
    tell({f"lag {lag}": gap for lag, gap in measured.by_lag.items()} | measured.by_region, console)
    for worst in measured.worst:
        console.print(f"  {worst.old:8.4f} -> {worst.new:8.4f}  {worst.text[-40:]!r}", highlight=False, markup=False)
    if cut := find_cut(torch.cat(old), torch.cat(new), torch.cat(distributions)):
        console.print(f"it was drawn with top-p {cut.top_p:.2f}, which the trainer does not know", style="bold")
    return measured


def progress(text: str) -> None:
    print(f".. {text}", file=sys.stderr, flush=True)


def show(found: Diagnosis, console: Console) -> None:
    for cause in found.causes:
        console.print(f"cause: {cause}", style="bold", highlight=False, markup=False)
    if not found.causes:
        console.print("nothing stands out: what there is, is rounding", style="bold", highlight=False)
    tell(found.gaps, console)
    console.print(LEGEND, style="dim", highlight=False, soft_wrap=True)
    console.print(f"the likeliest token is another one at {found.flips:.2%} of the places", highlight=False)
    if not found.operators:
        console.print("every operator computes the same for the same input", highlight=False)
        return
    console.print("operators that differ most, for the same input, relative to the trainer's:", highlight=False)
    for operator in found.operators[:8]:
        console.print(f"  {operator.difference:9.2e}  {operator.name}  {operator.note}", highlight=False, markup=False)


def tell(gaps: dict[str, Gap], console: Console) -> None:
    line = "{:10} {:>6}  {:>9} {:>9} {:>9}  {:>9} {:>9}  {}".format

    def say(*columns: object) -> None:
        console.print(line(*columns).rstrip(), highlight=False, markup=False, soft_wrap=True)

    say("", "tokens", "k1", "k3", "k3 p99", "ratio p99", "ratio max", "routed otherwise")
    for name, gap in gaps.items():
        otherwise = "" if gap.routed_otherwise is None else f"{gap.routed_otherwise:.2%}"
        figures = (f"{value:.2e}" for value in (gap.k1, gap.k3, gap.k3_p99))
        say(name, gap.num_tokens, *figures, f"{gap.ratio_p99:.5f}", f"{gap.ratio_max:.5f}", otherwise)
