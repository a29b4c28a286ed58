"""Communication of ranks and division of rows among them, without processes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from etude.core.errors import EtudeError
from etude.model.config import ExpertsConfig
from etude.model.files import hf_state_dict
from etude.model.lora import LoraConfig, add_adapter
from etude.model.transformer import init_from_scratch
from etude.train.context_parallel import ContextSharding
from etude.train.distributed import SINGLE_PROCESS, World, shard_rows
from etude.train.learner import Learner
from etude.train.packing import TokenSequence
from tests.small_model import config

TEXTS = [TokenSequence(list(range(3, 3 + size)), [True] * size) for size in (12, 9)]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> World:
    """Rank 1 of three; `told` sets the values of the others."""

    def all_gather(rows: list[Tensor], own: Tensor) -> None:
        for rank, row in enumerate(rows):
            assert row.shape == own.shape and row.dtype == own.dtype
            row.copy_(own if rank == 1 else others.pop(0).to(own))

    others: list[Tensor] = []
    monkeypatch.setattr(dist, "all_gather", all_gather)
    world = World(rank=1, world_size=3)
    world.others = others  # type: ignore[attr-defined]
    return world


def told(world: World, *others: list[float] | list[int]) -> None:
    world.others.extend(torch.tensor(each, dtype=torch.float64) for each in others)  # type: ignore[attr-defined]


def test_sums_over_ranks_are_exact(three: World) -> None:
    told(three, [2.0**40, 1.0], [-(2.0**40), 1e-9])
    assert three.all_reduce_sum(2.0**-10, 1.0) == [2.0**-10, math.fsum([1.0, 1.0, 1e-9])]
    told(three, [0.0], [0.0])
    three.barrier()
    assert not three.others, "all have met"  # type: ignore[attr-defined]


def test_the_norm_of_all_gradients(three: World) -> None:
    told(three, [4.0], [144.0])
    found = three.global_norm(torch.tensor(3.0))
    assert found.dtype == torch.float32 and float(found) == pytest.approx(math.sqrt(9 + 4 + 144))


def test_tensors_of_different_lengths_come_one_after_the_other(three: World) -> None:
    told(three, [1], [3], [5.0, 0.0, 0.0], [7.0, 8.0, 9.0])
    found = three.all_gather(torch.tensor([1.0, 2.0]))
    assert found.tolist() == [5.0, 1.0, 2.0, 7.0, 8.0, 9.0]


def test_all_agree_or_one_does_not(three: World) -> None:
    for others, agrees in (([b"ab", b"ab"], True), ([b"ab", b"aa"], False), ([b"xb"] * 2, False)):
        told(three, *(list(each) for each in others))
        assert three.agrees(b"ab") is agrees


def test_one_process_exchanges_nothing() -> None:
    own = torch.tensor([3.0])
    assert SINGLE_PROCESS.all_reduce_sum(1.5, 2.0) == [1.5, 2.0]
    assert SINGLE_PROCESS.all_gather(own) is own and SINGLE_PROCESS.global_norm(own) is own
    assert SINGLE_PROCESS.agrees(b"x")
    SINGLE_PROCESS.barrier()
    SINGLE_PROCESS.close()


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ("1", None):
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        else:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        world = World.from_torchrun(1.0)
        assert (world.rank, world.world_size) == (0, 1)


def test_an_error_that_is_nobodys_loss_stays_what_it_is(tmp_path: Path) -> None:
    world = World(rank=0, world_size=2)
    with pytest.raises(RuntimeError, match="wrong shape"), world.naming_lost_ranks():
        raise RuntimeError("wrong shape")
    for missing in ([], [1]):
        world._liveness = SimpleNamespace(  # type: ignore[assignment]
            missing_ranks=lambda missing=missing: missing, message=lambda lost: f"lost {lost}"
        )
        kind, words = (EtudeError, r"lost \[1\]") if missing else (RuntimeError, "reset")
        with pytest.raises(kind, match=words), world.naming_lost_ranks():
            raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_row_is_held_by_one_rank(count: int, size: int) -> None:
    """Rows are divided as torch divides a tensor."""
    rows = list(range(count))
    held = [rows[shard_rows(count, rank, size)] for rank in range(size)]
    assert [row for part in held for row in part] == rows
    chunks = [part.tolist() for part in torch.tensor(rows).chunk(size)] if count else []
    assert [part for part in held if part] == [part for part in chunks if part]
    assert all(World(rank, size).local_rows(count) == shard_rows(count, rank, size)
               for rank in range(size))  # fmt: skip


def shard(state: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """The rows of one of several ranks."""
    return {
        name: t if name.startswith("fixed.") or not t.ndim else t[shard_rows(len(t), rank, size)]
        for name, t in state.items()
    }


SIGMOID = replace(
    config(),
    model_type="deepseek_v3",
    experts=ExpertsConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1,), sigmoid=True
    ),
)


def trained() -> Learner:
    learner = Learner(init_from_scratch(SIGMOID, 0))
    learner.snapshot()
    learner.supervised_step(TEXTS, lr=1e-2, router_balance=True)
    return learner


def test_states_of_many_ranks_become_those_of_others() -> None:
    """For any two numbers of ranks; `fixed` tensors, which every rank has, are taken once."""
    learner = trained()
    whole = {name: tensor.clone() for name, tensor in learner.state().items()}
    assert {name.partition(".")[0] for name in whole} == {
        "fixed", "master", "snapshot", "step", "exp_avg", "exp_avg_sq"
    }  # fmt: skip
    for old, new in ((1, 3), (2, 3), (5, 2), (3, 1), (4, 8)):
        parts = [shard(whole, rank, old) for rank in range(old)]
        for rank in range(new):
            learner.world = World(rank, new)
            expected = shard(whole, rank, new)
            for name, tensor in expected.items():
                pieces = [learner._mine(name, parts[r][name], r, old) for r in range(old)]
                found = torch.cat(pieces) if tensor.ndim else pieces[0]
                assert torch.equal(found, tensor), (name, old, new, rank)


def test_shards_are_read_only_as_far_as_they_are_needed() -> None:
    learner, other = trained(), Learner(init_from_scratch(SIGMOID, 1))
    whole = {name: tensor.clone() for name, tensor in learner.state().items()}
    for size in (1, 3):
        read = []

        def read_shard(rank: int, size: int = size, read: list[int] = read) -> dict[str, Tensor]:
            read.append(rank)
            return shard(whole, rank, size)

        other.load_shards(size, read_shard)
        assert read == list(range(size))
        found = other.state()
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        other.supervised_step(TEXTS, lr=1e-2)


def test_what_lies_under_an_adapter_is_the_model_as_it_was() -> None:
    model = init_from_scratch(SIGMOID, 0)
    expected = hf_state_dict(model, torch.bfloat16)
    learner = Learner(add_adapter(model, LoraConfig(rank=2, alpha=4.0, targets=("q_proj",)), 0))
    learner.supervised_step(TEXTS, lr=1e-2)
    rows = learner.base_rows()
    assert rows.keys() == expected.keys()
    for name, (data, first, *_) in rows.items():
        assert first == 0 and torch.equal(data, expected[name]), name
    assert all("lora" in name for name in learner.hf_rows())


@pytest.mark.parametrize("lengths", [(8, 8), (5, 3), (7, 2), (1,)])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_of_a_group_are_in_equal_parts(lengths: tuple[int, ...], size: int) -> None:
    sharding = ContextSharding.of(lengths, size)
    assert sharding.lengths[: len(lengths)] == lengths and all(sharding.lengths)
    assert sharding.num_tokens % (2 * size) == 0
    assert sharding.num_tokens - sum(lengths) < 2 * size
    places = [sharding.places_of(rank) for rank in range(size)]
    assert sorted(place for each in places for place in each) == list(range(sharding.num_tokens))
    assert {len(each) for each in places} == {sharding.num_tokens // size}
