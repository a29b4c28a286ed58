"""Training through collectives in a group of one rank, against training without a group: FSDP2, the
exchange of tokens between the ranks that share experts, and on a CUDA device NCCL. NCCL refuses two
ranks on one GPU, so a machine with a single GPU runs these paths in no other way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from etude.model.transformer import Transformer, init_from_scratch
from etude.train.distributed import World, shard_module
from etude.train.expert_parallel import distribute_experts
from etude.train.learner import Learner
from tests.train.distributed_work import batch
from tests.train.sparse_work import SPARSE

ON = [
    pytest.param("cpu", torch.float32, id="gloo"),
    *(
        pytest.param(
            "cuda",
            dtype,
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


class GroupOfOne(World):
    """One rank that shards and exchanges as ranks of a larger group do."""

    def shard(self, model: Transformer) -> None:
        distribute_experts(model, self, 1)
        mesh = init_device_mesh(next(model.parameters()).device.type, (1,))
        for block in model.model.layers:
            shard_module(block, mesh)
        shard_module(model, mesh, reshard_after_forward=False)

    def reshard(self, model: Transformer) -> None:
        model.reshard()  # type: ignore[operator]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield GroupOfOne()
    dist.destroy_process_group()


@pytest.mark.parametrize(("device", "dtype"), ON)
def test_a_sparse_model_trains_in_a_group_of_one_as_in_none(
    group: World, device: str, dtype: torch.dtype
) -> None:
    curves = []
    for world in (World(), group):
        model = init_from_scratch(SPARSE["qwen3_moe"], 0).to(device)
        learner = Learner(model, world, compute_dtype=dtype)
        steps = [learner.rl_step(batch(step), lr=1e-3) for step in range(1, 4)]
        curves.append([(step.loss, step.grad_norm) for step in steps])
    for alone, grouped in zip(*curves, strict=True):
        assert grouped == pytest.approx(alone, rel=1e-6)
