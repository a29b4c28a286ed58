"""Masters in two halves: exact to the bit, and the same steps as with whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import etude.train.optimizer as optimizers
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import init_from_scratch
from etude.train.learner import Learner
from etude.train.masters import SplitMaster, join, round_into, split
from etude.train.objective import RlObjective
from tests.train.test_learner import CONFIG, batch, equal, texts, through_bytes

LARGEST = 0x7F7FFFFF


def floats(*bits: int) -> Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def bits_of(tensor: Tensor) -> list[int]:
    found: list[int] = tensor.view(torch.int32).tolist()
    return found


def split_learner(seed: int = 0, optimizer: str = "adamw") -> Learner:
    model = init_from_scratch(CONFIG, seed)
    return Learner(model, optimizer=optimizer, compute_dtype=torch.bfloat16)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
@example([0, 1 << 31, 1, 0x7FFF, 0x8000, 0x8001, 0x80008000])  # zeros, subnormals, ties
@example([0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0xBF808000, 0x3FFF8000])
@example([LARGEST, 0x7F7F7FFF, 0x7F7F8000, 0xFF7FFFFF, 0x7F800000])  # rounded up: infinite
@example([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])  # not a number
def test_halves_give_back_every_bit_pattern(patterns: list[int]) -> None:
    masters = floats(*patterns)
    assert bits_of(join(*split(masters))) == bits_of(masters)


@given(st.lists(st.integers(-LARGEST, LARGEST), min_size=1))
def test_a_master_is_rounded_to_the_nearest_and_ties_away_from_zero(signed: list[int]) -> None:
    masters = floats(*(abs(n) | (n < 0) << 31 for n in signed))
    rounded, remainder = split(masters)
    to_even = masters.to(torch.bfloat16)
    ties = remainder == -0x8000
    assert torch.equal(rounded[~ties], to_even[~ties])
    assert all(rounded[ties].abs() >= to_even[ties].abs())
    assert torch.equal(rounded.signbit(), masters.signbit())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_a_parameter_is_rounded_in_the_same_way_in_either_dtype(patterns: list[int]) -> None:
    masters = floats(*patterns)
    wide, narrow = (torch.empty_like(masters, dtype=d) for d in (torch.float32, torch.bfloat16))
    for parameter in (wide, narrow):
        round_into(parameter, masters)
    rounded, _ = split(masters)
    assert torch.equal(narrow.view(torch.int16), rounded.view(torch.int16))
    assert bits_of(wide) == [n << 16 for n in rounded.view(torch.int16).tolist()]


def test_a_learner_in_bf16_stores_half_of_each_master() -> None:
    one = split_learner()
    assert all(isinstance(master, SplitMaster) for master in one._masters.values())
    for name, p in one.model.named_parameters():
        master = one._masters[name]
        assert isinstance(master, SplitMaster)
        assert master.parameter is p and master.remainder.dtype == torch.int16
        assert torch.equal(
            one.state()[f"master.{name}"], init_from_scratch(CONFIG, 0).state_dict()[name]
        )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("microbatch_tokens", [None, 0])
def test_steps_with_halves_are_those_with_whole_masters(
    optimizer: str, microbatch_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "PIECE", 256)  # several for most tensors
    halves = split_learner(optimizer=optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(SplitMaster, "of", lambda master, parameter: master)
        whole = split_learner(optimizer=optimizer)
    assert all(isinstance(master, Tensor) for master in whole._masters.values())
    for one in (halves, whole):
        one.snapshot()
    for step in (1, 2, 3):
        found = [
            one.rl_step(
                batch(step),
                lr=1e-2,
                weight_decay=0.1,
                microbatch_tokens=microbatch_tokens,
                objective=RlObjective(kl_coef=0.1),
            )
            for one in (halves, whole)
        ]
        assert found[0] == found[1]
    assert equal(halves.state(), whole.state())
    assert equal(halves.weights(), whole.weights())
    for one in (halves, whole):
        one.restore_snapshot()
    assert equal(halves.state(), whole.state())
    assert equal(halves.weights(), whole.weights())


@pytest.mark.parametrize("resumed_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_either_kind_is_read_by_both(
    trained_in: torch.dtype, resumed_in: torch.dtype
) -> None:
    first, second = (
        Learner(init_from_scratch(CONFIG, seed), compute_dtype=dtype)
        for seed, dtype in enumerate((trained_in, resumed_in))
    )
    first.supervised_step(texts(0), lr=1e-2)
    first.snapshot()
    first.supervised_step(texts(1), lr=1e-2)
    state = through_bytes(first.state())
    assert all(t.dtype == torch.float32 for name, t in state.items() if name.startswith("master."))
    second.load_state(state)
    assert equal(second.state(), state)
    assert equal(second.weights(), first.weights())
    for one in (first, second):
        one.restore_snapshot()
    assert equal(second.weights(), first.weights())


def test_the_snapshot_computes_and_leaves_the_weights_as_they_were() -> None:
    one = split_learner()
    before = one.weights()
    one.snapshot()
    one.supervised_step(texts(0), lr=1e-2)
    state, weights = through_bytes(one.state()), one.weights()
    with one.using_snapshot():
        assert equal(one.weights(), before)
    assert equal(one.state(), state) and equal(one.weights(), weights)
    assert not equal(weights, before)


def test_the_gradient_of_one_microbatch_stays_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    one = split_learner()
    seen: list[dict[str, Tensor]] = []
    step = one._optimizer.step

    def recorded(gradients: dict[str, Tensor], **how: Any) -> None:
        seen.append({name: gradient.clone() for name, gradient in gradients.items()})
        step(gradients, **how)

    monkeypatch.setattr(one._optimizer, "step", recorded)
    one.rl_step(batch(1), lr=0.0)
    one.rl_step(batch(1), lr=0.0, microbatch_tokens=0)
    assert {g.dtype for g in seen[0].values()} == {torch.bfloat16}
    assert {g.dtype for g in seen[1].values()} == {torch.float32}
    assert not one._gradients
    single, summed = (torch.cat([g.float().flatten() for g in some.values()]) for some in seen)
    assert (single - summed).norm() < 0.02 * summed.norm()


def test_an_adapter_in_bf16_is_split_too() -> None:
    lora = LoraConfig(rank=4, alpha=8.0, targets=("q_proj",))
    one = Learner(add_adapter(init_from_scratch(CONFIG, 0), lora, 1), compute_dtype=torch.bfloat16)
    base = {n: p.clone() for n, p in one.model.named_parameters() if not p.requires_grad}
    one.rl_step(batch(1), lr=1e-2)
    assert all(isinstance(master, SplitMaster) for master in one._masters.values())
    assert all(torch.equal(dict(one.model.named_parameters())[n], p) for n, p in base.items())
