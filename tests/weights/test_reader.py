"""One reader and one trainer, edge cases: adapters, routes by name, rows, given memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from etude.core.errors import EtudeError
from etude.core.types import Manifest, Route, VersionRef
from etude.store.objects import Missing, Objects
from etude.weights.collect import find_garbage
from etude.weights.follow import CorruptWeights, Follower
from etude.weights.layout import Extent, build_layout
from etude.weights.manifest import Chain, VersionGone, find_newest, read_manifest
from etude.weights.publish import Publisher, SnapshotPolicy, publish
from etude.weights.records import Epoch, follows, is_sound, leads_on, manifest_key, shard_key
from etude.weights.shards import ChangeStats, sort_of
from etude.weights.signing import Corrupt
from etude.weights.snapshot import Part, Snapshots, bits
from etude.weights.tensors import TensorEntry
from tests.weights.test_weights import bits as all_bits
from tests.weights.test_weights import larger, moved, run

HASH = "0123456789abcdef" * 4


@pytest.fixture
def chain() -> Chain:
    return Chain(Objects.open("memory:"), sleep=lambda seconds: None)


def with_adapters(
    chain: Chain, policy: SnapshotPolicy | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """1 and 2 are whole models, 3 and 4 adapters to 2, 5 a model again."""
    model = larger(1)
    made = {1: model, 2: moved(model, 1), 5: moved(model, 2)}
    made |= {v: {"lora": torch.full((4,), float(v))} for v in (3, 4)}
    publisher = Publisher(chain, policy=policy)
    for version in range(1, 6):
        publisher.publish(
            version,
            made[version],
            stage="rl",
            step=version,
            adapter_of=2 if version in (3, 4) else None,
        )
    publisher.close()
    return made


def test_an_adapter_comes_with_the_version_that_it_is_to(chain: Chain) -> None:
    made = with_adapters(chain)
    follower = Follower(chain)
    third = follower.fetch(3)
    assert all_bits(third) == all_bits(made[2] | made[3])
    fourth = follower.fetch(4)
    assert all_bits(fourth) == all_bits(made[2] | made[4])
    assert third["w"].data_ptr() == fourth["w"].data_ptr(), "the base stays where it is"
    assert all_bits(follower.fetch(5)) == all_bits(made[5])
    assert all_bits(follower.fetch(4)) == all_bits(made[2] | made[4])
    assert all_bits(follower.image(4).tensors()) == all_bits(made[4]), "its own bits alone"
    assert read_manifest(chain.objects, 4).adapter_of == chain.find(2)[0]
    assert read_manifest(chain.objects, 5).adapter_of is None


def test_the_base_of_an_adapter_is_kept(chain: Chain) -> None:
    with_adapters(chain, SnapshotPolicy(max_chain=1))  # each is available whole

    def kept(keep: int) -> set[int]:
        doomed = find_garbage(chain, keep=keep, now=0.0)
        return {v for v in range(1, 6) if f"weights/versions/000001/{v:06d}.json" not in doomed}

    assert [kept(keep) for keep in (1, 2, 3)] == [{5}, {2, 3, 4, 5}, {2, 3, 4, 5}]
    assert kept(5) == kept(9) == {1, 2, 3, 4, 5}


def test_the_newest_version_by_its_number(chain: Chain) -> None:
    assert find_newest(chain.objects) is None
    run(Publisher(chain), larger(1), range(3, 6))
    newest = find_newest(chain.objects, after=4)
    assert newest is not None and newest.version == 5
    assert find_newest(chain.objects, after=5) is None
    assert read_manifest(chain.objects, 4).version == 4
    for version in (6, -1):
        with pytest.raises(Missing, match=f"version {version} is not published; versions 3 to 5"):
            read_manifest(chain.objects, version)
    with pytest.raises(VersionGone, match="version 2 was deleted by .*; versions 3 to 5 exist"):
        read_manifest(chain.objects, 2)


def test_a_damaged_manifest_hides_no_older_version(chain: Chain) -> None:
    made = run(Publisher(chain), larger(1), range(3, 6))
    key = manifest_key(1, 5)
    chain.objects.put(key, chain.objects.get(key)[:-3])
    late = Chain(chain.objects, sleep=lambda seconds: None)
    for version in (3, 4):
        assert late.find(version)[1].version == version
        assert all_bits(Follower(late).fetch(version)) == all_bits(made[version])
    assert list(late.lineage()) == [3, 4, 5]
    with pytest.raises(Corrupt, match="000005.json"):
        late.find(5)
    with pytest.raises(Corrupt, match="000005.json"):
        late.head()


def test_exactly_one_route_is_applied_or_refused_by_its_ends(chain: Chain) -> None:
    made = run(Publisher(chain, policy=SnapshotPolicy(max_chain=2)), larger(1), range(1, 4))
    follower = Follower(chain)
    third, manifest = chain.find(3)
    (whole,) = chain.extra_routes(third)
    follower.apply_route(third, whole)
    assert follower.held is not None and all_bits(follower.held.tensors()) == all_bits(made[3])
    before = follower.image(2)
    (shard,) = manifest.route.shards
    chain.objects.put(shard_key(third.epoch, 3, shard.hash), b"other bytes")
    with pytest.raises(
        CorruptWeights, match=r"version 3 cannot be restored .* route: 2 to 3; damaged: "
    ):
        follower.apply_route(third, manifest.route)
    assert follower.held is before
    # a sound object, but of another version
    wrong = chain.find(2)[1].route
    with pytest.raises(CorruptWeights, match=r"route: 2 to 3"):
        follower.apply_route(third, Route(before.link, wrong.shards))
    assert follower.held is before
    with pytest.raises(CorruptWeights, match=r"route: nothing to 3"):
        follower.apply_route(third, Route(None, wrong.shards))


def test_rows_that_are_not_held_are_not_made_up(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.weights.delta_format.CHUNK", 64)
    whole = torch.arange(600, dtype=torch.float32).reshape(60, 10)
    publish(chain.objects, 1, {"w": whole}, stage="rl", step=1)
    follower = Follower(chain, only=lambda entry: entry.holding(20, 40))
    image = follower.image(1)
    assert image.held["w"].chunks == range(3, 7) and image.tensors() == {}
    assert torch.equal(image.rows("w", 20, 40), whole[20:40])
    assert torch.equal(image.rows("w", 21, 22), whole[21:22])
    assert image.rows("w", 30, 30).shape == (0, 10)
    for first, last in ((18, 20), (19, 21), (44, 46), (0, 60)):
        with pytest.raises(EtudeError, match=f"rows {first} to {last - 1} of w were not fetched"):
            image.rows("w", first, last)


def test_a_snapshot_comes_with_the_64th_difference_or_half_of_a_version() -> None:
    policy = SnapshotPolicy()
    assert not policy.wants_snapshot(63, 0, 100) and policy.wants_snapshot(64, 0, 100)
    assert not policy.wants_snapshot(1, 50, 100) and policy.wants_snapshot(1, 51, 100)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_parameters_are_taken_as_they_are(dtype: torch.dtype | None, given: bool) -> None:
    """Parameters require a gradient, but published tensors must not."""
    weight = torch.nn.Parameter(torch.randn(3, 4))
    taken = Snapshots().take({"w": Part(weight, dtype=dtype)}, given=given)()["w"]
    assert not taken.requires_grad
    assert torch.equal(taken, bits(weight.detach().to(dtype or torch.float32)))
    taken.view(torch.uint8).numpy()


def test_memory_that_was_given_is_not_written_to() -> None:
    snapshots, given = Snapshots(), torch.ones(6)
    first = snapshots.take({"w": Part(given)}, given=True)()
    snapshots.release(first)
    second = snapshots.take({"w": Part(torch.zeros(6))})()
    assert torch.equal(given, torch.ones(6))
    snapshots.release(second)
    third = snapshots.take({"w": Part(torch.full((6,), 3.0))})()
    assert third["w"].data_ptr() == second["w"].data_ptr(), "ours is used again"
    snapshots.release(third)
    fourth = snapshots.take({"w": Part(torch.zeros(7))})()
    assert len(fourth["w"]) == 7, "if it has the size"


def test_parts_say_where_they_lie() -> None:
    part = Part(torch.zeros(2, 5), first=3, rows=7)
    extent = part.extent("w")
    assert extent == Extent(TensorEntry("w", "float32", (7, 5)), 60, 100)
    half = Part(torch.zeros(2, 5), first=3, rows=7, dtype=torch.bfloat16).extent("w")
    assert half == Extent(TensorEntry("w", "bfloat16", (7, 5)), 30, 50)
    scalar = Part(torch.zeros(())).extent("s")
    assert scalar == Extent(TensorEntry("s", "float32", ()), 0, 4)


def test_what_several_ranks_hold_is_the_lowest_ones() -> None:
    entry = TensorEntry("w", "float32", (4, 5))
    whole, upper = Extent(entry, 0, 80), Extent(entry, 40, 80)
    layout = build_layout([[], [upper], [whole], [whole]])
    assert layout.owners["w"] == ((2, range(1)),) and layout.owned(2) == {"w": range(1)}
    assert layout.owned(1) == {} and layout.transfers == ()
    with pytest.raises(EtudeError, match="no rank has byte 0 of w"):
        build_layout([[upper]])
    with pytest.raises(EtudeError, match="ranks disagree on w: rank 0 has .*, rank 2 has"):
        build_layout([[whole], [], [Extent(TensorEntry("w", "float32", (2, 10)), 0, 80)]])


def test_sorts_of_tensors_and_the_share_that_changed() -> None:
    names = {
        "model.layers.3.mlp.up_proj.weight": "up_proj",
        "model.layers.3.mlp.experts.12.up_proj.weight": "up_proj",
        "model.layers.3.self_attn.q_proj.bias": "bias",
        "model.norm.weight": "norm",
        "w": "w",
    }
    assert {name: sort_of(name) for name in names} == names
    stats, other = ChangeStats(), ChangeStats()
    stats.count(TensorEntry("b.weight", "bfloat16", (8,)), 2, 16)
    stats.count(TensorEntry("a", "bfloat16", (0,)), 0, 0)
    other.count(TensorEntry("1.b.weight", "float32", (8,)), 6, 32)
    stats.join(other)
    assert stats.shares() == {"a": 0.0, "b": 0.5} and list(stats.shares()) == ["a", "b"]


def link(epoch: int, version: int) -> VersionRef:
    return VersionRef(epoch, version, HASH)


def test_a_link_leads_from_older_to_newer() -> None:
    assert leads_on(None, 1, 0) and leads_on(link(1, 4), 1, 5) and leads_on(link(1, 4), 2, 5)
    assert not leads_on(link(1, 5), 1, 5) and not leads_on(link(2, 4), 1, 5)
    good = Manifest(
        version=5, stage="rl", step=5, epoch=2, parent=link(1, 4), root=HASH, adapter_of=None,
        bytes=1, route=Route(link(1, 4), ()), changed={}, publisher="", time=0.0,
    )  # fmt: skip
    assert follows(good, 2, 5) and not follows(good, 2, 4)
    assert not follows(replace(good, route=Route(None, ())), 2, 5)
    assert not follows(replace(good, adapter_of=link(2, 5)), 2, 5)
    assert follows(replace(good, adapter_of=link(2, 3)), 2, 5)


@pytest.mark.parametrize(
    ("first", "parent", "at", "good"),
    [
        (5, link(1, 4), 5, True),
        (9, link(1, 4), 5, True),
        (4, link(1, 4), 5, False),
        (5, link(1, 3), 5, False),
        (5, link(0, 4), 5, False),
        (5, None, 5, False),
        (5, None, 2, True),
        (0, None, 2, True),
        (5, link(1, 1), 2, False),
    ],
)
def test_an_epoch_goes_on_where_the_one_before_ended(
    first: int, parent: VersionRef | None, at: int, good: bool
) -> None:
    before = Epoch(epoch=1, first=2, parent=None, publisher="a")
    after = Epoch(epoch=2, first=first, parent=parent, publisher="b")
    assert after.succeeds(before, at) == good
    skipping = Epoch(epoch=3, first=first, parent=parent, publisher="b")
    assert not skipping.succeeds(before, at)


def test_records_hold_hashes_and_numbers_where_these_belong() -> None:
    def epoch(number: int = 1, first: int = 0, hash: str = HASH, seal: str = HASH) -> Epoch:
        parent = VersionRef(0, 0, hash)
        return Epoch(epoch=number, first=first, parent=parent, publisher="../x", seal=seal)

    assert is_sound(epoch()) and is_sound(epoch(number=(1 << 63) - 1))
    assert is_sound(epoch(seal=f"{HASH} {HASH * 2}"))
    wrong = [
        epoch(number=-1), epoch(first=-1), epoch(number=1 << 63), epoch(hash=HASH[1:]),
        epoch(hash=HASH.upper()), epoch(seal=""), epoch(seal=f"{HASH} {HASH}"),
        epoch(seal=f"{HASH}\n"),
    ]  # fmt: skip
    assert not any(map(is_sound, wrong))
