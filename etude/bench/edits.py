"""Benchmark of speculative edits: forward passes over real edits, and time.

*Passes.* Edits are taken from a git history (`--repo DIR`, by default the current directory): a
file before and after a commit, 40 to 600 lines, at least half of them kept. The old file is prompt
and prediction. Engine, scheduler and drafts are real, but nothing is computed: the sampled tokens
are those of the new file.

    edits.count               edits, the newest first
    edits.tokens_per_pass     tokens of all answers, over the passes that sampled them
    edits.median, .decile     the same per edit: the median, and the value that nine in ten reach
    edits.accepted_share      share of the drafted tokens that were accepted
    all.count, all.tokens_per_pass    including edits that kept less than half, so rewritten files

*Time.* One line of a file of 200 lines is changed. Every pass is computed in full by a real model,
but the sampled tokens are scripted, since no small model would write the file by itself. `plain` is
the same without a prediction; on a CPU its time is extrapolated from the rate of its first tokens,
which favours it a little, as later tokens see a longer context. Both include the time to read the
prompt.

    smollm2.seconds, .plain_seconds, .speedup, .tokens_per_pass   SmolLM2-135M (`--model DIR`), or
                                                                  its shape, in bf16
    qwen3-0.6b.bN.*                                           the same with N requests at once, on a
                                                              CUDA device

*The answer.* On a CUDA device: the model's own answers, with and without a prediction, at
temperature 0.

    qwen3-0.6b.same_tokens              length of the common prefix, out of 256 tokens
    qwen3-0.6b.logprob_difference       the largest difference of log-probs in it

On a bare CUDA image, without the passes: python -m etude.bench.edits --json
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etude.bench.engine import model_directory
from etude.core.errors import EtudeError
from etude.core.sampling import Request, Sample, SamplingParams
from etude.engine.batch import ForwardBatch, Ints, ModelRunner, SamplerOutput
from etude.engine.engine import Engine, FinishedRequest
from etude.engine.select import select_runner
from etude.model.config import ModelConfig
from etude.model.files import build_model, read_directory
from etude.model.lora import Adapter
from etude.model.transformer import Transformer

MOST = 100
"""Most edits that are taken."""
SUFFIXES = (".py", ".ts", ".tsx", ".js", ".go", ".rs", ".c", ".h", ".java")
PLAIN_TOKENS = 64
CHECKED = 256
GREEDY = SamplingParams(temperature=0.0)

Tokens = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Edit:
    before: str
    after: str

    @property
    def kept(self) -> float:
        """Share of the lines of the new file that the old one contains."""
        lines = self.after.splitlines()
        return sum((Counter(lines) & Counter(self.before.splitlines())).values()) / len(lines)


def run(model: str | None = None, repo: str = ".") -> dict[str, float]:
    if torch.cuda.is_available():
        return counted(history(Path(repo)), words()) | on_cuda()
    with model_directory(model) as directory:
        files, tensors = read_directory(directory)
        small = build_model(files, tensors).to(torch.bfloat16).requires_grad_(False)
        encode = words() if files["tokenizer.json"] == b"{}" else tokenizer(files)
        return counted(history(Path(repo)), encode) | {
            f"smollm2.{k}": v for k, v in on_cpu(small, encode).items()
        }


def tokenizer(files: Mapping[str, bytes]) -> Encode:
    from etude.model.tokenizer import ChatTokenizer

    return ChatTokenizer(files).encode


def words() -> Encode:
    """A stand-in for a missing tokenizer: one token for every word, whitespace and sign."""
    known: dict[str, int] = {}
    return lambda text: [
        known.setdefault(word, len(known)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)
    ]


def history(repo: Path) -> list[Edit]:
    log = (
        "log",
        "--no-merges",
        "--diff-filter=M",
        "--raw",
        "--no-abbrev",
        "--format=",
        "-n",
        "2000",
    )
    edits = []
    for line in _git(repo, *log).decode().splitlines():
        head, _, path = line.partition("\t")
        if path.endswith(SUFFIXES):
            before, after = (
                _git(repo, "cat-file", "blob", blob).decode(errors="replace")
                for blob in head.split()[2:4]
            )
            if 40 <= len(after.splitlines()) <= 600:
                edits.append(Edit(before, after))
        if len(edits) == MOST:
            break
    if not edits:
        raise EtudeError(
            f"{repo}: no change in its git history touches a file of 40 to 600 lines; choose "
            "another repository with --repo"
        )
    return edits


def _git(repo: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(repo), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise EtudeError(
            f"{repo}: {done.stderr.decode().strip()}; pass a git repository with --repo"
        )
    return done.stdout


class ScriptedRunner:
    """A runner that samples scripted answers, by number of arrival. It computes each pass by the
    runner that it wraps, or not at all without one."""

    def __init__(
        self, runner: ModelRunner | None, answers: Sequence[tuple[Tokens, Tokens]]
    ) -> None:
        """`answers`: pairs of prompt and answer."""
        self._runner = runner
        self._texts = [np.array(prompt + answer) for prompt, answer in answers]
        self.num_blocks, self.block_size = (
            (runner.num_blocks, runner.block_size) if runner else (1 << 16, 16)
        )
        self.num_windowed_blocks = runner.num_windowed_blocks if runner else 0
        self.overlaps = runner is not None and runner.overlaps
        self.num_passes = 0
        """Number of passes that sampled tokens."""

    def launch(self, batch: ForwardBatch) -> Callable[[], SamplerOutput]:
        read = (
            self._runner.launch(batch)
            if self._runner
            else lambda: SamplerOutput(tokens=[], logprobs=[0.0] * len(batch.logits_indices_R))
        )
        self.num_passes += bool(len(batch.logits_indices_R))
        ids_R = batch.seq_ids_B[
            np.searchsorted(batch.query_starts_B, batch.logits_indices_R, side="right") - 1
        ]
        places_R = batch.positions_N[batch.logits_indices_R] + 1
        tokens = [int(self._texts[id][place]) for id, place in zip(ids_R, places_R, strict=True)]
        return lambda: replace(read(), tokens=tokens)

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return self._runner.routed_experts(blocks, length) if self._runner else None

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        raise NotImplementedError("the answers are known")

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        raise NotImplementedError("the answers are known")

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError("the answers are known")


@dataclass(frozen=True, slots=True)
class Written:
    """The cost of writing some answers."""

    seconds: float
    passes: int
    tokens: int
    accepted_share: float


def write(
    model: Transformer,
    runner: ModelRunner | None,
    answers: Sequence[tuple[Tokens, Tokens]],
    predictions: Sequence[Tokens],
) -> Written:
    """Measure the writing of all answers at once. Without predictions nothing is drafted."""
    knowing = ScriptedRunner(runner, answers)
    engine = Engine(
        model, max_num_seqs=max(2, len(answers)), max_batched_tokens=1024, runner=knowing
    )
    for number, (prompt, answer) in enumerate(answers):
        asked = Request(
            prompt=prompt,
            max_tokens=len(answer),
            seed=0,
            params=GREEDY,
            prediction=predictions[number] if predictions else None,
        )
        engine.add(asked, str(number))
    began = time.perf_counter()
    said = {event.id: event.sample for event in _events(engine)}
    seconds = time.perf_counter() - began
    assert [said[str(n)].tokens for n in range(len(answers))] == [answer for _, answer in answers]
    stats = engine.stats()
    share = stats.accepted_tokens / max(1, stats.draft_tokens)
    return Written(seconds, knowing.num_passes, sum(len(answer) for _, answer in answers), share)


def _events(engine: Engine) -> Iterator[FinishedRequest]:
    while not engine.idle:
        yield from (event for event in engine.step() if isinstance(event, FinishedRequest))


def counted(edits: Sequence[Edit], encode: Encode) -> dict[str, float]:
    known = [(edit.kept, tuple(encode(edit.before)), tuple(encode(edit.after))) for edit in edits]
    most = max(max(*before, *after) for _, before, after in known)
    shape = ModelConfig(
        vocab_size=most + 1, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, intermediate_size=8, max_position_embeddings=1 << 18,
    )  # fmt: skip
    with torch.device("meta"):
        idle = Transformer(shape)
    written = [
        (kept, write(idle, None, [(before, after)], [before])) for kept, before, after in known
    ]
    close = [each for kept, each in written if kept >= 0.5]
    rates = sorted(each.tokens / each.passes for each in close)
    return {
        "edits.count": len(close),
        "edits.tokens_per_pass": _rate(close),
        "edits.median": statistics.median(rates),
        "edits.decile": rates[len(rates) // 10],
        "edits.accepted_share": statistics.mean(each.accepted_share for each in close),
        "all.count": len(written),
        "all.tokens_per_pass": _rate([each for _, each in written]),
    }


def _rate(written: Sequence[Written]) -> float:
    return sum(each.tokens for each in written) / sum(each.passes for each in written)


def one_line_change() -> Edit:
    """A change of one line in a real file of 200 lines."""
    lines = (
        (Path(__file__).parent.parent / "engine/scheduler.py")
        .read_text()
        .splitlines(keepends=True)[:200]
    )
    changed = [*lines[:120], lines[120].rstrip() + "  # looked at again\n", *lines[121:]]
    return Edit("".join(lines), "".join(changed))


def on_cpu(model: Transformer, encode: Encode) -> dict[str, float]:
    edit = one_line_change()
    before, after = tuple(encode(edit.before)), tuple(encode(edit.after))

    def written(count: int, predictions: Sequence[Tokens]) -> Written:
        return write(
            model, select_runner(model, 2, 1 << 30), [(before, after[:count])], predictions
        )

    written(1, [])  # warms up
    first, some = written(1, []).seconds, written(PLAIN_TOKENS, []).seconds
    plain_seconds = first + (some - first) / (PLAIN_TOKENS - 1) * (len(after) - 1)
    return _compared(written(len(after), [before]), plain_seconds)


def _compared(drafted: Written, plain_seconds: float) -> dict[str, float]:
    return {
        "seconds": drafted.seconds,
        "plain_seconds": plain_seconds,
        "speedup": plain_seconds / drafted.seconds,
        "tokens_per_pass": drafted.tokens / drafted.passes,
    }


def on_cuda(name: str = "qwen3-0.6b") -> dict[str, float]:
    from etude.bench import engine_cuda
    from etude.engine.cuda import CudaRunner

    model = engine_cuda.random_model(engine_cuda.SHAPES[name])
    edit = one_line_change()
    encode = words()
    before, after = tuple(encode(edit.before)), tuple(encode(edit.after))
    found: dict[str, float] = {}
    for batch in (1, 8):
        # A different first token each, so that they share no prefix.
        answers = [((number, *before), after) for number in range(batch)]
        runner = CudaRunner(model, 1024, max(2, batch))
        write(model, runner, answers, [before] * batch)  # warms up
        plain = write(model, runner, answers, [])
        compared = _compared(write(model, runner, answers, [before] * batch), plain.seconds)
        found |= {f"{name}.b{batch}.{what}": value for what, value in compared.items()}
    return found | {
        f"{name}.{what}": value for what, value in really_said(model, runner, before).items()
    }


def really_said(model: Transformer, runner: ModelRunner, prompt: Tokens) -> dict[str, float]:
    asked = Request(prompt=prompt, max_tokens=CHECKED, seed=0, params=GREEDY)
    plain = _said(model, runner, asked)
    guess = (*plain.tokens[: CHECKED // 2], 0, *plain.tokens[CHECKED // 2 + 1 :])
    drafted = _said(model, runner, replace(asked, prediction=guess))
    same = next((n for n in range(CHECKED) if plain.tokens[n] != drafted.tokens[n]), CHECKED)
    differences = np.abs(np.array(plain.logprobs[:same]) - np.array(drafted.logprobs[:same]))
    return {"same_tokens": same, "logprob_difference": float(differences.max(initial=0.0))}


def _said(model: Transformer, runner: ModelRunner, asked: Request) -> Sample:
    engine = Engine(
        model, max_num_seqs=2, max_batched_tokens=1024, prefix_cache=False, runner=runner
    )
    engine.add(asked, "0")
    (done,) = _events(engine)
    return done.sample


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what prediction saves on a CUDA device.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    figures = on_cuda()
    print(
        json.dumps(figures, indent=2)
        if options.json
        else "\n".join(f"{k:40} {v:.5g}" for k, v in figures.items())
    )


if __name__ == "__main__":
    main()
