"""`etude mismatch` finds a planted fault and names it, and finds nothing if there is none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.cli import main
from etude.commands.mismatch import to_judge, trainer_copy
from etude.core.config import parse
from etude.core.sampling import (
    Request,
    Sample,
    SamplingParams,
    SamplingSpan,
    VersionSpan,
    version_spans,
)
from etude.core.types import Batch, Row
from etude.engine.engine import Engine
from etude.model.config import ModelConfig
from etude.model.experts import read_ids
from etude.model.files import hf_state_dict, write_directory
from etude.model.numerics import INVARIANT, Arithmetic
from etude.model.transformer import Transformer, init_from_scratch
from etude.run.diagnose import Diagnosis
from etude.run.trials import RecordedAnswer, diagnose, diagnose_recorded, row_of
from etude.store.experts import put_experts
from etude.store.runs import Run
from etude.trainer.prepare import store_files
from etude.weights.publish import publish
from tests.engine.reference import FAMILIES
from tests.slow import slow, slow_but
from tests.small_model import add, config, drain, request, sharp, small_files

PROMPTS = [tuple(1 + (i * n) % 59 for i in range(1, 20 + 9 * n)) for n in range(1, 5)]


def model(name: str = "llama") -> Transformer:
    return sharp(FAMILIES[name], seed=0, factor=3.0)


def look(
    engine: Transformer,
    trainer: Transformer,
    make_engine: Callable[..., Engine] = Engine,
    prompts: int = 4,
) -> Diagnosis:
    return diagnose(engine, trainer, PROMPTS[:prompts], max_tokens=8, make_engine=make_engine)


@pytest.mark.parametrize("name", slow_but({"llama"}, FAMILIES))
def test_nothing_is_found_where_there_is_nothing(name: str) -> None:
    found = look(model(name), model(name))
    assert found.causes == [] and found.operators == () and found.argmax_flip_frac == 0
    assert all(gap.k3 < 1e-9 for gap in found.gaps.values())
    assert (found.gaps["batch"].router_mismatch_frac == 0) == (name != "llama")


def test_in_invariant_mode_nothing_at_all_differs() -> None:
    found = look(
        model("qwen3_moe").compute_with(INVARIANT), model("qwen3_moe").compute_with(INVARIANT)
    )
    assert {gap.k3_max for gap in found.gaps.values()} == {0.0}


def test_another_epsilon_in_one_layer() -> None:
    engine = model()
    engine.get_submodule("model.layers.1.input_layernorm").eps = 0.02  # type: ignore[assignment]
    found = look(engine, model())
    assert [operator.name for operator in found.operators] == ["model.layers.1.input_layernorm"]
    assert any(
        "layers.1.input_layernorm" in cause and "epsilon is 0.02" in cause for cause in found.causes
    )


def test_another_weight_in_one_matrix() -> None:
    engine = model("qwen3_moe")
    engine.get_parameter("model.layers.2.mlp.gate.weight").mul_(1.1)
    (cause,) = [cause for cause in look(engine, model("qwen3_moe")).causes if "operator" in cause]
    assert "model.layers.2.mlp.gate (other weights: weight)" in cause


@pytest.mark.parametrize("top_p", [slow(0.8), 0.93])
def test_top_p_on_one_side_only(top_p: float) -> None:
    class Cutting(Engine):
        def add(self, request: Request, id: str, **told: Any) -> None:
            params = replace(request.params, top_p=top_p)
            super().add(replace(request, params=params), id, **told)

    found = look(model(), model(), Cutting)
    assert found.cut is not None and found.cut.top_p == pytest.approx(top_p, abs=0.02)
    (cause,) = found.causes
    assert cause.startswith("top-p")


def test_stale_keys_and_values_after_a_swap() -> None:
    class Forgetful(Engine):
        def swap_weights(self, version: int, put_in_place: Callable[[], None]) -> None:
            put_in_place()

    (cause,) = look(model(), model(), Forgetful).causes
    assert cause.startswith("stale KV")


def test_another_precision() -> None:
    trainer = model()
    for parameter in trainer.parameters():
        parameter.copy_(parameter.bfloat16())
    engine = copy.deepcopy(trainer).to(torch.bfloat16)
    found = look(engine, trainer, prompts=1)
    assert found.gaps["precision"].k3 < 1e-9 < found.gaps["alone"].k3
    assert any(cause.startswith("precision") for cause in found.causes)


def test_the_command_on_a_model_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = config(vocab_size=300, context=256)
    write_directory(
        tmp_path / "tiny", small_files(), hf_state_dict(init_from_scratch(shape, seed=0))
    )
    assert main(["mismatch", str(tmp_path / "tiny"), "--tokens", "4", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["gaps"].keys() >= {"alone", "batch", "chunking", "cache", "swap"}
    lines = said.err.splitlines()
    tried = [line for line in lines if line.startswith(".. ")]
    assert [
        line for line in tried if line.endswith(("alone", "swap", "recomputing with the trainer"))
    ] and lines[0] in tried
    cause, *table = (line for line in lines if line not in tried)  # a cause may take two lines
    assert cause.startswith(("no mismatch beyond rounding", "cause: "))
    assert any("ratio p99" in line for line in table[:2])
    assert "k1: mean of the engine" in said.err
    assert main(["mismatch", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


RL = """
name = "a"
[[stage]]
kind = "rl"
name = "warm"
steps = 1
temperature = 1.0
[[stage]]
kind = "rl"
name = "cool"
steps = 1
temperature = 0.5
"""
DISTILL = """
name = "a"
[[stage]]
kind = "distill"
teacher = "some/where"
steps = 2
temperature = 0.5
"""


def record(
    path: Path,
    text: str,
    *,
    step: int = 2,
    shape: ModelConfig | None = None,
    change: Callable[[Sample], Sample] = lambda sample: sample,
    sampling: tuple[SamplingSpan, ...] = (),
    fp8: bool = False,
    fp8_kv: bool = False,
    **asked: Any,
) -> None:
    """A run whose last batch was sampled at temperature 0.5 by the weights that trained on it.
    `sampling`: the sampling spans of its rows."""
    run, small = Run.open(f"file:{path}"), small_files()
    run.put_config(parse(text))
    shape = replace(shape or config(), vocab_size=300, max_position_embeddings=256)
    store_files(run, small | {"config.json": shape.to_json().encode()})
    policy = trainer_copy(sharp(shape, seed=0, factor=2.0))
    policy.compute_with(Arithmetic.of(invariant=False, fp8=fp8, fp8_kv=fp8_kv))
    for version in range(step):
        publish(run.objects, version, hf_state_dict(policy), stage="rl", step=version)
    engine, rows = Engine(policy, max_num_seqs=1), []
    for number, prompt in enumerate(PROMPTS):
        add(
            engine,
            request(str(number), list(prompt), stop_token_ids=(), **({"temperature": 0.5} | asked)),
        )
        sample = change(replace(drain(engine)[str(number)], versions=(VersionSpan(step - 1, 20),)))
        experts = None if sample.experts is None else put_experts(run.objects, sample.experts)
        row = row_of(str(number), prompt, sample)
        rows.append(replace(row, experts=experts, sampling=sampling))
    run.put_batch(Batch(step=step, rows=tuple(rows), oldest=step - 1))


def judged(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["mismatch", str(path), "--tokens", "2", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("text", [RL, DISTILL], ids=["rl", "distill"])
def test_each_stage_has_its_own_temperature(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, text)
    found = judged(tmp_path, capsys)
    recorded = found["recorded"]
    assert recorded["all"]["k3"] <= recorded["rounding"]["recorded"]["k3"] < 1e-9
    assert recorded["causes"] == recorded["unexplained"] == found["causes"] == []
    assert found["fits"]["alone"]["asked"] == 0.5


def test_a_run_in_fp8_is_judged_in_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "said", 'quantization = "fp8"\n' + RL, fp8=True)
    found = judged(tmp_path / "said", capsys)
    recorded = found["recorded"]
    assert recorded["all"]["k3"] < 1e-4 and recorded["causes"] == found["causes"] == []
    record(tmp_path / "unsaid", RL, fp8=True)
    assert judged(tmp_path / "unsaid", capsys)["recorded"]["all"]["k3"] > 1e-4


def test_a_run_with_its_kv_cache_in_fp8_is_judged_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "said", 'kv_cache_dtype = "fp8"\n' + RL, fp8_kv=True)
    found = judged(tmp_path / "said", capsys)
    recorded = found["recorded"]
    assert recorded["all"]["k3"] < 1e-4 and recorded["causes"] == found["causes"] == []
    record(tmp_path / "unsaid", RL, fp8_kv=True)
    assert judged(tmp_path / "unsaid", capsys)["recorded"]["all"]["k3"] > 1e-4


def test_a_batch_that_no_stage_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, RL, step=4)
    assert main(["mismatch", str(tmp_path)]) == 2
    assert "no rl or distill stage with that step" in capsys.readouterr().err


def test_a_batch_that_was_sampled_at_another_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, RL, temperature=0.8)
    recorded = judged(tmp_path, capsys)["recorded"]
    (cause,) = recorded["causes"]
    assert (
        "are those of temperature 0.800, but the trainer computes at 0.5" in cause
        and recorded["unexplained"] == []
    )


def test_a_batch_whose_rows_say_how_they_were_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage's temperature differs, which explains nothing."""
    spans = (SamplingSpan(SamplingParams(temperature=0.8), 20),)
    record(tmp_path, RL, temperature=0.8, sampling=spans)
    recorded = judged(tmp_path, capsys)["recorded"]
    assert recorded["all"]["k3"] <= recorded["rounding"]["recorded"]["k3"] < 1e-9
    assert recorded["causes"] == recorded["unexplained"] == []
    assert recorded["fits"]["recorded"]["asked"] == 0.8


def test_a_batch_with_experts_that_were_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(sample: Sample) -> Sample:
        return replace(
            sample, experts=bytes([3, 1, 2, 0, 4, 5][expert] for expert in sample.experts or b"")
        )

    record(tmp_path, RL, shape=FAMILIES["qwen3_moe"], change=change)
    recorded = judged(tmp_path, capsys)["recorded"]
    (cause,) = recorded["causes"]
    assert cause.startswith("recorded experts") and "experts 0 and 3 are swapped" in cause


def test_only_rows_of_one_version_are_judged_and_not_too_many() -> None:
    def row(*versions: int, prompt: int = 5) -> Row:
        count = len(versions)
        return Row(
            sample="", tokens=(0,) * (prompt + count), mask=(False,) * prompt + (True,) * count,
            logprobs=(0.0,) * (prompt + count), advantages=(), versions=version_spans(versions),
        )  # fmt: skip

    rows = [row(2, 3), row(3, 3), row(2), row(3), row(3, prompt=4090)]
    assert to_judge(rows, 3, vocab_size=10) == [rows[1], rows[3]]
    assert to_judge(rows, 3, vocab_size=2**25) == [rows[1]]
    assert (
        to_judge(rows[-1:], 3, vocab_size=2**27) == rows[-1:]
        and to_judge(rows, 4, vocab_size=10) == []
    )


def test_what_stands_behind_the_last_sampled_token_changes_nothing() -> None:
    """A session may end with the answer of a tool."""
    one, tail = model("qwen3_moe"), (7, 8, 9)
    engine = Engine(one, max_num_seqs=1)
    add(engine, request("0", list(PROMPTS[0]), max_tokens=8))
    sample = drain(engine)["0"]
    assert sample.experts is not None and one.config.experts is not None
    row, experts = (
        row_of("a", PROMPTS[0], sample),
        read_ids(sample.experts, one.config.experts).long(),
    )
    longer = replace(
        row, tokens=row.tokens + tail, mask=row.mask + (False,) * 3,
        logprobs=row.logprobs + (0.0,) * 3, advantages=row.advantages + (0.0,) * 3,
    )  # fmt: skip
    others = torch.cat((experts, experts[:3]))
    short, long = (
        diagnose_recorded(one, [RecordedAnswer(*told)] * 2, 1.0, torch.float32)
        for told in ((row, experts), (longer, others))
    )
    assert long == short and short.experts is not None


def test_a_batch_that_cannot_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(sample: Sample) -> Sample:
        return replace(
            sample, logprobs=tuple(p - place % 2 for place, p in enumerate(sample.logprobs))
        )

    record(tmp_path, RL, change=change)
    assert main(["mismatch", str(tmp_path), "--tokens", "2"]) == 0
    said = capsys.readouterr()
    assert "unexplained: recorded: k3 " in said.out + said.err


def test_the_command_on_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its last batch was recorded with top-p, which the config does not mention."""
    run, small = Run.open(f"file:{tmp_path}"), small_files()
    run.put_config(parse('name = "a"\n[[stage]]\nkind = "rl"\nsteps = 1\n'))
    store_files(run, small)
    policy = trainer_copy(sharp(config(vocab_size=300, context=256), seed=0, factor=4.0))
    publish(run.objects, 0, hf_state_dict(policy), stage="rl", step=0)
    engine, rows = Engine(policy, max_num_seqs=4), []
    for number, prompt in enumerate(PROMPTS):
        add(engine, request(str(number), list(prompt), top_p=0.7, stop_token_ids=()))
        rows.append(row_of(str(number), prompt, drain(engine)[str(number)]))
    run.put_batch(Batch(step=1, rows=tuple(rows), oldest=0))
    assert main(["mismatch", str(tmp_path), "--tokens", "2", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "sampled with top-p 0.7" in said.err and found["causes"] == []
    assert [cause.partition(":")[0] for cause in found["recorded"]["causes"]] == ["top-p"]
    assert found["recorded"]["by_lag"]["0"]["k3"] > 1e-3 > 1e-9 > found["gaps"]["alone"]["k3"]
