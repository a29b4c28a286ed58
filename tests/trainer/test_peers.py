"""Ranks in separate processes publish together, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from etude.store.objects import Objects
from etude.weights.follow import Follower
from etude.weights.manifest import Chain
from etude.weights.tensors import root_of

WORLD = 3

RANK = """
import sys, torch, torch.distributed as dist
from etude.trainer.peers import TorchPeer
from etude.store.objects import Objects
from etude.weights import codec, delta_format
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.snapshot import Part
delta_format.CHUNK = 64
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(folder + ".meeting", world), rank=rank, world_size=world)
peers = TorchPeer(timeout_s=30)
others = range(world)
assert peers.all_to_all([b"%d to %d" % (rank, to) for to in others]) == [b"%d to %d" % (r, rank) for r in others]
assert peers.all_to_all([b"x" * (to * rank) for to in others]) == [b"x" * (r * rank) for r in others]
publisher = Publisher(Chain(Objects.open(folder)), peers=peers)
for version in (1, 2):
    whole = torch.arange(700).view(100, 7).bfloat16() + version
    rows = range(rank * 34, min(100, rank * 34 + 34))
    publisher.publish(version, {"w": Part(whole[rows.start : rows.stop], rows.start, 100)}, stage="rl", step=version)
    print(publisher.wait().root)
publisher.close()
dist.destroy_process_group()
"""  # noqa: E501


def test_processes_publish_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(WORLD), str(tmp_path / "run")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * WORLD, outputs
    monkeypatch.setattr("etude.weights.delta_format.CHUNK", 64)
    chain = Chain(Objects.open(str(tmp_path / "run")))
    wanted = [torch.arange(700).view(100, 7).bfloat16() + version for version in (1, 2)]
    assert {told for told, _ in outputs} == {"".join(f"{root_of({'w': w})}\n" for w in wanted)}
    follower = Follower(chain)
    for version, whole in enumerate(wanted, 1):
        assert torch.equal(follower.fetch(version)["w"], whole)
    assert len(chain.find(2)[1].route.shards) == WORLD
