"""The estimated cost of a run, against the counts of its trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.core.config import RunConfig, parse
from etude.core.types import Row
from etude.model.parts import ExpertsConfig
from etude.model.transformer import init_from_scratch
from etude.train.flops import step_flops
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from etude.trainer import estimate as estimating
from etude.trainer.estimate import (
    LOGITS_BYTES,
    PROCESS_BYTES,
    TRAINING,
    activation_bytes,
    estimate,
)
from etude.trainer.prepare import model_shape

RATE = 1e9
ROW = Row(
    sample="s",
    tokens=(1,) * 65,
    mask=(False,) + (True,) * 64,
    logprobs=(0.0,) * 65,
    advantages=(0.0,) * 65,
    versions=(),
)
"""Row of 64 tokens that are learnt."""


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "_rate", lambda config: RATE)


def run(*overrides: str) -> RunConfig:
    stages = '[[stage]]\nkind = "midtrain"\nsteps = 6\n[[stage]]\nkind = "rl"\nsteps = 2\n'
    return parse(f'name = "a"\n{stages}', overrides)


def test_a_step_takes_what_its_arithmetic_takes() -> None:
    config = run("stage.midtrain.seq_len=64", "stage.midtrain.batch_tokens=640")
    counted = 6 * 10 * step_flops(model_shape(config), [ROW])
    assert estimate(config, {}).seconds["midtrain"] == pytest.approx(counted / (RATE * TRAINING))


def test_pairs_are_read_once_more_by_the_weights_they_are_compared_with(tmp_path: Path) -> None:
    """Files have 4 characters per token; a backward pass costs two forward ones, and the reference
    has none."""
    (tmp_path / "a.jsonl").write_bytes(b"x" * 4 * 64 * 7)
    (tmp_path / "b.jsonl").write_bytes(b"x" * 4 * 64 * 3)
    text = f'name = "a"\n[[stage]]\nkind = "dpo"\nepochs = 2\npath = "{tmp_path}/*.jsonl"\n'
    config = parse(text, ["model.max_context=128"])
    counted = 2 * (7 + 3) * step_flops(model_shape(config), [ROW])
    found = estimate(config, {}).seconds
    assert found["dpo"] == pytest.approx(counted / (RATE * TRAINING) * 4 / 3)


def test_a_token_meets_the_experts_that_are_chosen_and_those_that_are_shared() -> None:
    config = run("model.max_context=256")
    plain = model_shape(config)
    met = ExpertsConfig(
        num_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=24,
        shared_expert_intermediate_size=16, layers=(0,),
    )  # fmt: skip
    cpu = torch.device("cpu")
    dense = replace(plain, intermediate_size=3 * 24 + 16)
    sparse = replace(plain, experts=met)
    assert activation_bytes(config, sparse, cpu) == activation_bytes(config, dense, cpu)


def test_more_work_takes_longer_and_what_is_not_evaluated_takes_none() -> None:
    one, two = (estimate(run(f"stage.rl.steps={n}"), {}).seconds for n in (1, 2))
    assert two["rl"] == pytest.approx(2 * one["rl"]) and two["midtrain"] == one["midtrain"]
    assert one["evaluations"] == 0.0
    assert estimate(run(), {"heldout": 10}).seconds["evaluations"] > 0.0


def test_every_rank_takes_its_memory() -> None:
    one, two = (estimate(run(f"trainer.ranks={n}"), {}) for n in (1, 2))
    assert two.activation_bytes == 2 * one.activation_bytes
    beside = two.activation_bytes - one.activation_bytes
    assert two.memory_bytes - one.memory_bytes == beside + PROCESS_BYTES


def test_memory_is_that_of_the_tensors_which_a_pass_keeps() -> None:
    config = run("model.hidden_size=128", "model.num_layers=6", "model.max_context=256")
    shape = model_shape(config)
    model = init_from_scratch(shape, 0)
    length, rows = 256, 1024 // 256
    row = TokenSequence((1,) * (length + 1), (False,) * length + (True,))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, or its address would be reused
        return tensor

    def foreseen(*overrides: str) -> int:
        again = config.model_copy(update={"stage": run(*overrides).stage})
        return activation_bytes(again, shape, torch.device("cpu"))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(model, pack_batch([row] * rows))
    counted = sum(storage.nbytes() for storage in kept.values())
    logits = 1024 * shape.vocab_size * LOGITS_BYTES
    assert foreseen() - logits == pytest.approx(counted, rel=0.25)
    # a session is never split
    assert foreseen("stage.rl.microbatch_tokens=1") <= foreseen("stage.rl.microbatch_tokens=256")
    assert foreseen("stage.rl.microbatch_tokens=4096") > 3 * foreseen()


def test_a_trainer_holds_its_state_and_activations() -> None:
    found = estimate(run(), {})
    assert 16 * found.parameters < found.memory_bytes - found.activation_bytes
    again = estimate(run("trainer.gradient_checkpointing=true"), {})
    assert again.activation_bytes < found.activation_bytes / 2
    assert found.memory_free > 0
