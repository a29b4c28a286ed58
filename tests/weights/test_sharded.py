"""Many ranks publish together; readers take parts. The bits never depend on the division among
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.core.errors import EtudeError
from etude.core.types import Manifest, VersionRef
from etude.store.objects import Objects
from etude.weights import codec
from etude.weights.follow import Follower, fetch
from etude.weights.layout import Extent, build_layout
from etude.weights.manifest import Chain
from etude.weights.peers import InProcessPeer
from etude.weights.publish import Publisher, SnapshotPolicy
from etude.weights.snapshot import Part, Snapshots, bits, changed
from etude.weights.tensors import TensorEntry, root_of
from tests.weights.test_weights import Tensors, moved, wrong_tensors
from tests.weights.test_weights import bits as all_bits

SHAPES = {"a": (37, 5), "b": (64,), "c": (3, 4, 7), "empty": (0, 3), "scalar": (), "wide": (2, 300)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.weights.delta_format.CHUNK", 64)


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()
    }


def split(given: Tensors, cuts: Sequence[float]) -> list[dict[str, torch.Tensor | Part]]:
    """Rows by rank, as in sharded training; tensors without rows are on all ranks."""
    bounds = [0.0, *sorted(cuts), 1.0]
    parts: list[dict[str, torch.Tensor | Part]] = [{} for _ in bounds[1:]]
    for name, tensor in given.items():
        for rank, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if tensor.ndim == 0 or not len(tensor):
                parts[rank][name] = tensor
                continue
            rows = range(round(low * len(tensor)), round(high * len(tensor)))
            if rows:
                parts[rank][name] = Part(tensor[rows.start : rows.stop], rows.start, len(tensor))
    return parts


class Crew:
    """Publishers of all ranks, each on a thread."""

    def __init__(self, objects: Objects, world: int, policy: SnapshotPolicy | None = None) -> None:
        self.ranks = [
            Publisher(Chain(objects, sleep=lambda s: None), peers=peers, policy=policy)
            for peers in InProcessPeer.group(world, timeout_s=20.0)
        ]

    def publish(
        self, version: int, parts: Sequence[dict[str, torch.Tensor | Part]]
    ) -> list[Manifest]:
        def one(publisher: Publisher, mine: dict[str, torch.Tensor | Part]) -> Manifest:
            publisher.publish(version, mine, stage="rl", step=version)
            manifest = publisher.wait()
            assert manifest is not None
            return manifest

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            started = [pool.submit(one, *each) for each in zip(self.ranks, parts, strict=True)]
            errors = [future.exception() for future in started]
            if any(errors):
                raise ExceptionGroup("ranks", [e for e in errors if isinstance(e, Exception)])
            return [future.result() for future in started]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(0, 1000))
def test_any_split_gives_the_same_version(cuts: list[float], seed: int) -> None:
    objects, now = Objects.open("memory:"), tensors(seed)
    crew = Crew(objects, len(cuts) + 1, SnapshotPolicy(max_chain=2))
    for version in range(1, 5):
        manifests = crew.publish(version, split(now, cuts))
        assert len(set(map(repr, manifests))) == 1 and manifests[0].root == root_of(now)
        assert all_bits(fetch(objects, version)) == all_bits(now)
        now = moved(now, version, share=0.1)
    assert all_bits(Follower(Chain(objects)).fetch(4)) == all_bits(fetch(objects, 4))
    (whole,) = Chain(objects).extra_routes(Chain(objects).find(3)[0])
    assert whole.base is None and sum(s.bytes for s in whole.shards) > manifests[0].bytes


def test_a_run_goes_on_with_another_number_of_ranks() -> None:
    objects, now = Objects.open("memory:"), tensors(1)
    before = now
    for version, cuts in enumerate(([], [0.3], [0.2, 0.4, 0.9], [0.5]), 1):
        crew = Crew(objects, len(cuts) + 1)
        if version > 2:
            # like a trainer that was killed after the commit
            crew.publish(version - 1, split(before, cuts))
        assert crew.publish(version, split(now, cuts))[0].root == root_of(now)
        assert all_bits(fetch(objects, version)) == all_bits(now)
        before, now = now, moved(now, version)
    assert all(Chain(objects).find(version)[1].route.base for version in (2, 3, 4))


def test_if_one_rank_fails_all_do_and_nothing_is_committed() -> None:
    objects, now = Objects.open("memory:"), tensors(2)
    crew = Crew(objects, 3)
    crew.publish(1, split(now, [0.3, 0.6]))

    def full(epoch: int, version: int, data: bytes) -> str:
        raise EtudeError("the disk is full")

    crew.ranks[1].chain.put_shard = full  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as failed:
        crew.publish(2, split(moved(now, 2, share=0.5), [0.3, 0.6]))
    told = sorted(str(e) for e in failed.value.exceptions)
    assert told == ["rank 1 could not publish: the disk is full"] * 2 + ["the disk is full"]
    assert list(Chain(objects).lineage()) == [1]


def test_parts_that_do_not_make_a_whole_are_refused() -> None:
    entry = TensorEntry("w", "bfloat16", (100, 2))
    with pytest.raises(EtudeError, match="no rank has byte 200 of w"):
        build_layout([[Extent(entry, 0, 200)], [Extent(entry, 204, 400)]])
    with pytest.raises(EtudeError, match="ranks disagree on w"):
        build_layout(
            [[Extent(entry, 0, 200)], [Extent(TensorEntry("w", "float32", (100, 2)), 200, 400)]]
        )


def test_only_ragged_ends_travel() -> None:
    entry = TensorEntry("w", "bfloat16", (256, 2))  # eight chunks of 128 bytes
    layout = build_layout(
        [[Extent(entry, 0, 384)], [Extent(entry, 384, 700)], [Extent(entry, 700, 1024)]]
    )
    assert layout.owners == {"w": ((0, range(0, 3)), (1, range(3, 6)), (2, range(6, 8)))}
    assert [(p.start, p.stop, p.source, p.owner) for p in layout.transfers] == [(700, 768, 2, 1)]
    assert build_layout([[Extent(entry, 0, 1024)], [Extent(entry, 0, 1024)]]).owners == {
        "w": ((0, range(8)),)
    }


def test_a_reader_of_some_rows_decodes_only_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, now = (
        Objects.open("memory:"),
        {"w": torch.randn(256, 4).bfloat16(), "z": torch.randn(50).bfloat16()},
    )
    chain = Chain(objects)
    publisher = Publisher(chain)

    def rows(entry: TensorEntry) -> range | None:
        return entry.holding(100, 150) if entry.name == "w" else None

    part, decoded = Follower(chain, only=rows), list[None]()
    real = codec.apply
    monkeypatch.setattr(codec, "apply", lambda *args: decoded.append(real(*args)))
    for version in range(1, 5):
        publisher.publish(version, now, stage="rl", step=version)
        publisher.wait()
        decoded.clear()
        image = part.image(version)
        assert image.held.keys() == {"w"} and image.held["w"].chunks == range(6, 10)
        assert len(decoded) <= 4
        assert torch.equal(image.rows("w", 100, 150), now["w"][100:150])
        assert image.tensors() == {}
        now = moved(now, version)
    with pytest.raises(EtudeError, match="rows 0 to 9 of w were not fetched"):
        image.rows("w", 0, 10)
    image.held["w"].data[3] ^= 1
    assert wrong_tensors(part) == ["w"]
    publisher.close()


def test_shards_without_anything_that_is_wanted_are_not_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.weights.shards.SHARD_BYTES", 1)
    objects = Objects.open("memory:")
    publisher = Publisher(Chain(objects))
    now = {f"model.experts.{n}.weight": torch.randn(30, 4).bfloat16() for n in range(8)}
    publisher.publish(1, now, stage="rl", step=1)
    publisher.close()
    fetched: list[str] = []

    class Counting(Chain):
        def shard(self, target: VersionRef, hash: str) -> bytes:
            fetched.append(hash)
            return super().shard(target, hash)

    def mine(entry: TensorEntry) -> range | None:
        return entry.chunks if int(entry.name.split(".")[2]) % 4 == 1 else None

    found = Follower(Counting(objects), only=mine).fetch(1)
    assert all_bits(found) == all_bits(
        {name: now[name] for name in ("model.experts.1.weight", "model.experts.5.weight")}
    )
    assert len(fetched) == 1 + 2 * 2  # the state, and two chunks of two tensors


def test_a_snapshot_does_not_change_with_the_tensors_and_uses_memory_again() -> None:
    live = {
        "w": torch.randn(40, 3),
        "t": torch.randn(3, 40).T,
        "codes": torch.zeros(4, dtype=torch.float4_e2m1fn_x2),
    }
    snapshots = Snapshots()
    taken = []
    for version in range(4):
        before = {name: tensor.clone() for name, tensor in live.items()}
        arrays = snapshots.take(
            {
                name: Part(t, dtype=None if name == "codes" else torch.bfloat16)
                for name, t in live.items()
            }
        )()
        live["w"] += 1
        assert torch.equal(arrays["w"].view(torch.bfloat16).view(40, 3), before["w"].bfloat16())
        assert torch.equal(arrays["t"].view(torch.bfloat16).view(40, 3), before["t"].bfloat16())
        taken.append(arrays)
        if version:
            snapshots.release(taken[-2])
    assert taken[2]["w"].data_ptr() == taken[0]["w"].data_ptr() != taken[1]["w"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_changed_is_all_that_crosses(dtype: torch.dtype) -> None:
    """The functions that run on a device, here on the CPU: indices and bits, with NaN and -0.0
    distinguished."""
    old = torch.randn(5000).to(dtype)
    new = old.clone()
    new[::50] = torch.randn(100).to(dtype)
    new[7], old[7] = float("nan"), float("nan")
    new[9], old[9] = -0.0, 0.0
    shadow, was = bits(old).clone(), bits(old).clone()
    places, values = changed(shadow, bits(new))
    assert (
        90 < len(places) <= 101 and 9 in places and 7 not in places and places.dtype == torch.int32
    )
    was[places.long()] = values
    assert torch.equal(was, bits(new)) and torch.equal(shadow, bits(new))


def test_what_is_given_away_is_not_copied() -> None:
    tensor, snapshots = torch.randn(6, 4).bfloat16(), Snapshots()
    taken = snapshots.take({"w": Part(tensor)}, given=True)()["w"]
    assert taken.data_ptr() == tensor.data_ptr() and torch.equal(taken, bits(tensor))
    other = snapshots.take({"w": Part(tensor, dtype=torch.float32)}, given=True)()["w"]
    assert torch.equal(other.view(torch.float32), tensor.float().reshape(-1)), (
        "in another type it is made anew"
    )


def test_a_root_is_of_names_types_shapes_and_bytes_in_whatever_order() -> None:
    ones, twos = torch.ones(2, 3), torch.full((2, 3), 2.0)
    root = root_of({"a": ones, "b": twos})
    assert root == root_of({"b": twos.clone(), "a": ones.clone()})
    assert root == root_of({"a": ones.T.contiguous().T, "b": twos}), "wherever its bytes lie"
    others = [
        {"a": twos, "b": ones},
        {"a": ones, "c": twos},
        {"a": ones},
        {"a": ones.reshape(3, 2), "b": twos},
        {"a": ones.view(torch.int32), "b": twos},
    ]
    assert len({root, *map(root_of, others)}) == 1 + len(others)
