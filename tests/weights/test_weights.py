from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from etude.core.errors import EtudeError
from etude.core.seams import WeightStore
from etude.store.objects import Missing, Objects
from etude.weights.digest import digest
from etude.weights.follow import CorruptWeights, fetch
from etude.weights.manifest import Versions
from etude.weights.publish import publish

FILE = "weights/000001/model.safetensors"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(2, 4, generator=generator).to(torch.bfloat16).T.contiguous(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "odd": torch.tensor([float("nan"), -0.0, 0.0, float("inf")], dtype=torch.bfloat16),
    }


def bits(weights: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Equality that tells -0.0 from 0.0 and holds for NaN."""
    return {name: (t.dtype, t.shape, bytes(t.reshape(-1).view(torch.uint8).tolist())) for name, t in weights.items()}


@pytest.fixture
def objects() -> Objects:
    return Objects.open("memory:")


def put(objects: Objects, version: int, seed: int) -> None:
    publish(objects, version, tensors(seed), stage="rl", step=version)


def test_a_b_a_gives_back_a_bit_for_bit(objects: Objects) -> None:
    for version, seed in enumerate((7, 8, 7), 1):
        put(objects, version, seed)
    assert bits(fetch(objects, 1)) == bits(tensors(7)) == bits(fetch(objects, 3))
    assert bits(fetch(objects, 2)) == bits(tensors(8)) != bits(tensors(7))


def test_a_digest_sees_dtype_shape_and_every_bit() -> None:
    zeros = torch.zeros(2, 3)
    others = [zeros.reshape(3, 2), zeros.to(torch.int32), torch.zeros(6), -zeros, torch.zeros(2, 3, 1)]
    assert len({digest(t) for t in [zeros, *others]}) == 6
    assert digest(torch.arange(6.0).reshape(2, 3).T) == digest(torch.arange(6.0).reshape(2, 3).T.contiguous())


def test_publishing_again(objects: Objects) -> None:
    first = publish(objects, 1, tensors(7), stage="rl", step=1)
    assert publish(objects, 1, tensors(7), stage="rl", step=1) == first
    with pytest.raises(EtudeError, match="weight version 1 is published already, with other weights"):
        put(objects, 1, 8)
    assert bits(fetch(objects, 1)) == bits(tensors(7))


def test_a_publisher_that_died_before_the_manifest_can_publish_other_weights(objects: Objects) -> None:
    objects.put(FILE, b"half of a ")
    with pytest.raises(Missing, match="weight version 1 is not published"):
        fetch(objects, 1)
    put(objects, 1, 8)
    assert bits(fetch(objects, 1)) == bits(tensors(8))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def without_w(data: bytes) -> bytes:
    return safetensors.torch.save({n: t for n, t in safetensors.torch.load(data).items() if n != "w"})


def with_more(data: bytes) -> bytes:
    return safetensors.torch.save(safetensors.torch.load(data) | {"more": torch.zeros(1)})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flipped, "has another digest"),
        (without_w, "tensor w is missing"),
        (with_more, "tensor more is not in the manifest"),
        (lambda data: data[: len(data) // 2], FILE),
        (lambda data: b"", FILE),
        (None, FILE),
    ],
)
def test_damage_is_refused(objects: Objects, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    put(objects, 1, 7)
    if damage is None:
        objects.delete(FILE)
    else:
        objects.put(FILE, damage(objects.get(FILE)))
    with pytest.raises(CorruptWeights, match=message):
        fetch(objects, 1)


async def test_newest_wait_get(objects: Objects) -> None:
    versions: WeightStore = Versions(objects)
    assert await versions.newest() is None
    waiting = asyncio.create_task(versions.wait(after=0))
    put(objects, 0, 1)
    put(objects, 2, 3)
    assert (await waiting).version == 2
    assert (await versions.wait(after=-1)).version == 2
    objects.put("weights/000003/model.safetensors", b"a manifest will follow")
    newest = await versions.newest()
    assert newest is not None and newest.version == 2 and newest.stage == "rl"
    assert (await Versions(objects).get(0)).version == 0
    with pytest.raises(Missing, match="weight version 3 is not published"):
        await Versions(objects).get(3)


def test_manifests_are_read_without_torch() -> None:
    code = "import sys, etude.weights.manifest, etude.store.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PUBLISHER = """
import sys, torch
from etude.store.objects import Objects
from etude.weights.publish import publish
objects = Objects.open(sys.argv[1])
for version in range(int(sys.argv[2]), 10**6):
    publish(objects, version, {"w": torch.full((2000, 500), version, dtype=torch.bfloat16)}, stage="rl", step=version)
    print(version, flush=True)
"""


async def test_a_killed_publisher_leaves_only_whole_versions(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    first = 1
    for _ in range(2):
        command = [sys.executable, "-c", PUBLISHER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdout is not None
            confirmed = int([publisher.stdout.readline() for _ in range(3)][-1])
            publisher.kill()
        newest = await Versions(objects).newest()
        assert newest is not None and newest.version >= confirmed
        for version in range(1, newest.version + 1):
            assert torch.equal(fetch(objects, version)["w"][0, :1].float(), torch.tensor([float(version)]))
        first = newest.version + 1
