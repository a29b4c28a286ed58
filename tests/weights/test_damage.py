"""Stores that are damaged, or prepared with malicious intent: intact objects stay reachable, and
the rest is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.core.errors import EtudeError
from etude.core.types import Route, Shard, VersionRef
from etude.store.codec import to_json
from etude.store.objects import Missing, Objects
from etude.weights.cache import HostCache
from etude.weights.collect import collect, find_garbage
from etude.weights.compact import compact
from etude.weights.delta_format import Damaged
from etude.weights.follow import LEASE_S, CorruptWeights, Follower
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher, SnapshotPolicy, publish
from etude.weights.records import Epoch, ExtraRoute, Lease, manifest_key, route_key, shard_key
from etude.weights.shards import MAGIC, read
from etude.weights.signing import Corrupt, Signer, Trust, Untrusted
from etude.weights.tensors import TensorEntry, read_state, state_json
from tests.weights.test_weights import Tensors, bits, larger, run


@pytest.fixture
def objects() -> Objects:
    return Objects.open("memory:")


@pytest.fixture
def made(objects: Objects) -> dict[int, Tensors]:
    """Versions 1 to 9: each a step from the previous one, 1 and 5 and 9 whole, and 6 from 3."""
    made = run(
        Publisher(Chain(objects), policy=SnapshotPolicy(max_chain=4)), larger(1), range(1, 10)
    )
    assert len(compact(Chain(objects), skip=3)) == 2
    return made


def reading(objects: Objects) -> Chain:
    return Chain(objects, sleep=lambda seconds: None)


def flip(objects: Objects, key: str) -> None:
    data = objects.get(key)
    objects.put(key, data[:-1] + bytes([data[-1] ^ 1]))


def flip_way(objects: Objects, version: int, base: int | None) -> None:
    """Damage the objects of one route to a version."""
    chain = reading(objects)
    link, manifest = chain.find(version)
    starts = {
        route.base.version if route.base else None: route
        for route in (manifest.route, *chain.extra_routes(link))
    }
    for shard in starts[base].shards:
        flip(objects, shard_key(link.epoch, version, shard.hash))


@pytest.mark.parametrize("start", [None, 2, 7])
def test_a_damaged_whole_version_is_gone_around(
    objects: Objects, made: dict[int, Tensors], start: int | None
) -> None:
    follower = Follower(reading(objects))
    if start is not None:
        follower.fetch(start)
    for version in (5, 9):
        flip_way(objects, version, None)
    assert bits(follower.fetch(9)) == bits(made[9])


def test_a_whole_version_that_leads_nowhere_is_gone_around(
    objects: Objects, made: dict[int, Tensors]
) -> None:
    flip_way(objects, 9, None)
    flip_way(objects, 6, 5)  # 5 is whole, but only the route from 3 leads on
    assert bits(Follower(reading(objects)).fetch(9)) == bits(made[9])


def test_whole_objects_that_make_something_else_are_gone_around(
    objects: Objects, made: dict[int, Tensors]
) -> None:
    """The snapshot of 9 names the shards of 5, and its route from 6 those of 7: each matches its
    hash, but the result is another version."""
    chain = reading(objects)
    (five, _), (seven, step), (nine, _) = (chain.find(version) for version in (5, 7, 9))
    (snapshot,) = (route for route in chain.extra_routes(five) if route.base is None)
    for source, route in ((five, snapshot), (seven, step.route)):
        for shard in route.shards:
            data = objects.get(shard_key(1, source.version, shard.hash))
            objects.put(shard_key(1, 9, shard.hash), data)
        forge(objects, route_key(nine, route.base), ExtraRoute(target=nine, route=route))
    follower = Follower(reading(objects))
    assert bits(follower.fetch(9)) == bits(made[9]) and follower.rebuilt == 0


def test_a_manifest_that_took_the_place_of_another_is_not_followed(objects: Objects) -> None:
    run(Publisher(Chain(objects)), larger(1), range(1, 4))
    _, second = reading(objects).find(2)
    forge(objects, manifest_key(1, 2), replace(second, stage="other"))
    chain = reading(objects)
    _, third = chain.find(3)
    assert third.route.base is not None
    with pytest.raises(
        Corrupt,
        match="version 2 does not match the hash in its successor; restore "
        f"{manifest_key(1, 2)} from a backup",
    ):
        chain.follow(third.route.base)
    assert chain.find(2)[1].stage == "other"


@pytest.mark.parametrize(("damaged", "next_whole"), [(None, 10), (7, 11)])
def test_the_way_to_a_whole_version_is_counted_as_far_as_it_can_be_read(
    objects: Objects, made: dict[int, Tensors], damaged: int | None, next_whole: int
) -> None:
    objects.delete(route_key(reading(objects).find(9)[0], None))
    if damaged is not None:
        flip(objects, manifest_key(1, damaged))
    again = Publisher(reading(objects), policy=SnapshotPolicy(max_chain=4))
    run(again, made[9], range(10, 14))
    chain = reading(objects)
    whole = [
        version
        for version in range(10, 14)
        if any(route.base is None for route in chain.extra_routes(chain.find(version)[0]))
    ]
    assert whole == [next_whole]


def test_a_store_that_lists_less_than_there_is_is_not_written_to(objects: Objects) -> None:
    """Version 1 was deleted, so there is a newer one, which the listing does not show yet."""
    for version in (1, 2):
        publish(objects, version, larger(version), stage="rl", step=version)
    objects.delete(manifest_key(1, 1))
    hidden = objects.get(manifest_key(2, 2))
    objects.delete(manifest_key(2, 2))
    before = objects.list("weights")
    with pytest.raises(EtudeError, match="weight version 1 was deleted, so newer versions exist"):
        publish(objects, 3, larger(3), stage="rl", step=3)
    assert [key for key in objects.list("weights") if key.endswith(".json")] == [
        key for key in before if key.endswith(".json")
    ]
    objects.put(manifest_key(2, 2), hidden)
    publish(objects, 3, larger(3), stage="rl", step=3)
    assert bits(Follower(reading(objects)).fetch(3)) == bits(larger(3))


def test_a_damaged_manifest_is_gone_around(objects: Objects, made: dict[int, Tensors]) -> None:
    for version in (5, 4):
        flip(objects, manifest_key(1, version))
    objects.delete(route_key(reading(objects).find(9)[0], None))
    assert bits(Follower(reading(objects)).fetch(9)) == bits(made[9])


def test_a_damaged_further_way_is_left_out(objects: Objects, made: dict[int, Tensors]) -> None:
    targets = {v: reading(objects).find(v)[0] for v in (5, 6, 9)}
    key = route_key(targets[9], None)
    flip(objects, key)
    objects.put(
        route_key(targets[6], reading(objects).find(3)[0]), objects.get(route_key(targets[5], None))
    )
    chain = reading(objects)
    assert bits(Follower(chain).fetch(9)) == bits(made[9])
    assert (
        isinstance(chain.check_extra_routes(targets[9])[key], Corrupt)
        and len(chain.extra_routes(targets[9])) == 1
    )
    assert [type(way) for way in chain.check_extra_routes(targets[6]).values()] == [Corrupt]
    again = Publisher(chain, policy=SnapshotPolicy(max_chain=4))
    again.publish(10, larger(2), stage="rl", step=10)
    again.close()
    assert bits(Follower(chain).fetch(10)) == bits(larger(2))


def test_an_unsigned_further_way_is_left_out(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    key, other = (ed25519.Ed25519PrivateKey.generate() for _ in range(2))
    chain = Chain(
        objects, trust=Trust(key.public_key().public_bytes_raw()), sleep=lambda seconds: None
    )
    made = run(Publisher(chain, signer=Signer(key.sign)), larger(1), range(1, 9))
    for signer in (Signer(), Signer(other.sign)):
        monkeypatch.setattr(
            "etude.weights.compact.signer_from_environment", lambda signer=signer: signer
        )
        (way,) = compact(reading(objects), skip=4)
        (why,) = chain.check_extra_routes(way.target).values()
        assert isinstance(why, Untrusted)
        assert bits(Follower(chain).fetch(8)) == bits(made[8])
        objects.delete(route_key(way.target, way.route.base))


def test_what_a_damaged_further_way_names_is_not_deleted(
    objects: Objects, made: dict[int, Tensors]
) -> None:
    assert find_garbage(reading(objects), keep=100, now=0.0) == []
    key = route_key(reading(objects).find(9)[0], None)
    data = objects.get(key)
    flip(objects, key)
    assert find_garbage(reading(objects), keep=100, now=0.0) == []
    objects.put(key, data)
    flip_way(objects, 9, 8)
    assert bits(Follower(reading(objects)).fetch(9)) == bits(made[9])


def forge(objects: Objects, key: str, record: object) -> None:
    """Write a record as an attacker with write access, but without a key, would."""
    objects.put(key, to_json(Signer()(record)))  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["../../pwned", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
@pytest.mark.parametrize("field", ["shard", "root", "parent", "target"])
def test_a_hash_that_is_none_is_refused(
    objects: Objects, tmp_path: Path, name: str, field: str
) -> None:
    publish(objects, 1, larger(1), stage="rl", step=1)
    publish(objects, 2, larger(1), stage="rl", step=2)
    link, manifest = reading(objects).find(2)
    assert manifest.parent is not None
    shard, parent = Shard(name, 1, "w", "w"), replace(manifest.parent, hash=name)
    if field == "target":
        key = route_key(link, None)
        forge(
            objects, key, ExtraRoute(target=replace(link, hash=name), route=Route(None, (shard,)))
        )
        assert [
            str(why)[: len("memory:: " + key)]
            for why in reading(objects).check_extra_routes(link).values()
        ] == [f"memory:: {key}"]
        return
    changes = {
        "shard": replace(manifest, route=replace(manifest.route, shards=(shard,))),
        "root": replace(manifest, root=name),
        "parent": replace(manifest, parent=parent, route=replace(manifest.route, base=parent)),
    }
    forge(objects, manifest_key(link.epoch, 2), changes[field])
    with pytest.raises(Corrupt, match="is not a valid Manifest"):
        Follower(reading(objects), cache=HostCache(tmp_path / "a" / "b" / "cache")).fetch(2)
    assert [p.name for p in tmp_path.rglob("*")] == ["a", "b", "cache"]


def test_a_key_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    for act in (objects.get, objects.exists, objects.list, lambda key: objects.put(key, b"")):
        with pytest.raises(EtudeError, match="cannot .* in "):
            act("weights/../../pwned")


def test_a_cache_that_cannot_be_used_is_one_sentence(objects: Objects, tmp_path: Path) -> None:
    publish(objects, 1, larger(1), stage="rl", step=1)
    (tmp_path / reading(objects).find(1)[1].root).mkdir()
    with pytest.raises(EtudeError, match="cannot cache weights in .*: choose another directory"):
        Follower(reading(objects), cache=HostCache(tmp_path)).fetch(1)


def test_a_record_that_is_written_otherwise_is_refused(objects: Objects) -> None:
    """Its seal is right, because it covers the content of the record; but references cover the
    bytes."""
    publish(objects, 1, larger(1), stage="rl", step=1)
    data = objects.get(manifest_key(1, 1))
    for other in (
        data.replace(b'"stage"', b'"more": 1,\n "stage"'),
        data + b"\n",
        data.replace(b"\n ", b"\n  "),
        data.replace(b'"\n}', b' 00"\n}'),
    ):
        objects.put(manifest_key(1, 1), other)
        with pytest.raises(Corrupt, match="is not a valid Manifest"):
            reading(objects).find(1)


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"stage": "\xff"}', b"\xff", b""])
def test_what_is_no_json_is_refused(objects: Objects, data: bytes) -> None:
    publish(objects, 1, larger(1), stage="rl", step=1)
    objects.put(manifest_key(1, 1), data)
    with pytest.raises(Corrupt, match="is not a valid Manifest"):
        reading(objects).find(1)


def test_a_link_that_leads_forward_is_refused(objects: Objects) -> None:
    for version in (1, 2):
        publish(objects, version, larger(1), stage="rl", step=version)
    link, manifest = reading(objects).find(2)
    for base in (
        replace(link, version=2),
        replace(link, version=7),
        replace(link, epoch=9, version=1),
    ):
        forge(
            objects,
            manifest_key(link.epoch, 2),
            replace(manifest, parent=base, route=replace(manifest.route, base=base)),
        )
        with pytest.raises(Corrupt, match="does not follow an older version"):
            reading(objects).find(2)
    forge(objects, manifest_key(link.epoch, 2), replace(manifest, parent=None))
    with pytest.raises(Corrupt, match="does not follow an older version"):
        reading(objects).find(2)
    forge(objects, manifest_key(link.epoch, 2), manifest)
    later = replace(link, version=7)
    forge(objects, route_key(link, later), ExtraRoute(target=link, route=Route(later, ())))
    assert [type(way) for way in reading(objects).check_extra_routes(link).values()] == [Corrupt]


def test_an_epoch_that_is_another_is_refused(objects: Objects) -> None:
    """Otherwise a signed record, copied to a later number, would make readers go back, or trap them
    in a cycle."""
    for version in (1, 2):
        publish(objects, version, larger(version), stage="rl", step=version)
    head = reading(objects).head()
    assert head is not None and head.epoch == 2
    objects.put(manifest_key(2, 3), objects.get(manifest_key(1, 2)))
    with pytest.raises(Corrupt, match="the record of another epoch"):
        reading(objects).newest()
    for epoch in (
        Epoch(epoch=2, first=3, parent=head, publisher=""),
        Epoch(epoch=4, first=3, parent=head, publisher=""),
        Epoch(epoch=3, first=2, parent=head, publisher=""),
        Epoch(epoch=3, first=3, parent=None, publisher=""),
        Epoch(epoch=3, first=3, parent=VersionRef(1, 1, "0" * 64), publisher=""),
    ):
        forge(objects, manifest_key(2, 3), epoch)
        with pytest.raises(Corrupt, match="the record of another epoch"):
            reading(objects).newest()
    forge(objects, manifest_key(2, 3), Epoch(epoch=3, first=3, parent=head, publisher=""))
    assert reading(objects).head() == head


GOOD = TensorEntry("w", "bfloat16", (2, 3), ("0" * 64,))


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, shape=(-2, 3), digests=()),
        replace(GOOD, shape=(-2, -3)),
        replace(GOOD, shape=(1 << 50,), digests=()),
        replace(GOOD, shape=(1 << 62, 1 << 62), digests=()),
        replace(GOOD, shape=(0, 1 << 70), digests=()),
        replace(GOOD, shape=(0, 1 << 62, 1 << 62), digests=()),
        replace(GOOD, shape=(1,) * 65),
        replace(GOOD, digests=()),
        replace(GOOD, digests=("0" * 64,) * 2),
        replace(GOOD, dtype="half"),
    ],
)
def test_a_state_that_cannot_be_is_refused(wrong: TensorEntry) -> None:
    with pytest.raises(Corrupt, match="w has an impossible dtype, shape or digest"):
        read_state(state_json((wrong,))[0], wrong.bytes, "it")


def test_a_state_is_sorted_and_as_large_as_the_manifest_says() -> None:
    other = replace(GOOD, name="v")
    assert read_state(state_json((other, GOOD))[0], 24, "it") == (other, GOOD)
    for state in ((GOOD, other), (GOOD, GOOD)):
        with pytest.raises(Corrupt, match="not sorted by name"):
            read_state(state_json(state)[0], 24, "it")
    with pytest.raises(Corrupt, match="do not have the size that the manifest states"):
        read_state(state_json((GOOD,))[0], 13, "it")
    with pytest.raises(Corrupt, match="it is not a valid"):
        read_state(b"[1]", 0, "it")
    with pytest.raises(EtudeError, match="install a newer one"):
        read_state(state_json((replace(GOOD, dtype="float3"),))[0], 12, "it")


def test_empty_tensors_and_scalars_have_possible_states(objects: Objects) -> None:
    given = {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(3, 0, dtype=torch.int64),
    }
    publish(objects, 1, given, stage="rl", step=1)
    assert bits(Follower(reading(objects)).fetch(1)) == bits(given)


def test_a_shard_holds_no_chunk_that_its_tensor_does_not_have() -> None:
    state = (replace(GOOD, shape=(0, 3), digests=()), replace(GOOD, name="x"))
    for tensor, chunk in ((0, 0), (1, 1), (2, 0)):
        with pytest.raises(Damaged, match="out of range"):
            read(MAGIC + bytes([1, tensor, chunk, 0]), state)
    for heads in (bytes([2, 1, 0, 0, 1, 0, 0]), bytes([1, 1, 0, 1])):
        with pytest.raises(Damaged, match="out of order|does not match its chunks"):
            read(MAGIC + heads, state)
    with pytest.raises(Damaged, match="has no valid header"):
        read(b"X" + MAGIC[1:] + bytes([0]), state)
    assert read(MAGIC + bytes([0]), state) == []


def test_a_forged_state_is_not_served(objects: Objects) -> None:
    publish(objects, 1, larger(1), stage="rl", step=1)
    link, manifest = reading(objects).find(1)
    for entry in (TensorEntry("w", "bfloat16", (-1,)), TensorEntry("w", "bfloat16", (1 << 50,))):
        data, root = state_json((entry,))
        objects.put(shard_key(1, 1, root), data)
        forge(objects, manifest_key(1, 1), replace(manifest, root=root, bytes=max(0, entry.bytes)))
        with pytest.raises(CorruptWeights):
            Follower(reading(objects)).fetch(1)


def test_stray_files_are_left_alone(objects: Objects, made: dict[int, Tensors]) -> None:
    stray = [
        "weights/epochs/x.json",
        "weights/epochs/000009.json.part",
        "weights/versions/README",
        "weights/versions/000001/foo.json",
        "weights/versions/000001/sub/000099.json",
        "weights/versions/000001/0000010.json",
        "weights/routes/000001/000009/foo.json",
        "weights/shards/000001/000001/notes.txt",
        "weights/shards/x",
        "weights/leases/.DS_Store",
        "weights/gc/.DS_Store",
    ]
    for key in stray:
        objects.put(key, b"?")
    chain = reading(objects)
    assert list(chain.lineage()) == list(made) and bits(Follower(chain).fetch(9)) == bits(made[9])
    now = [1000.0]
    for _ in range(2):
        collect(chain, keep=1, grace_s=0, now=lambda: now[0])
    assert list(chain.lineage()) == [9] and all(objects.exists(key) for key in stray)


@pytest.mark.parametrize(
    "damage", [lambda data: b"{", lambda data: b"", lambda data: data.replace(b"until", b"units")]
)
def test_a_damaged_lease_stops_the_collector_until_it_is_deleted(
    objects: Objects, made: dict[int, Tensors], damage: Callable[[bytes], bytes]
) -> None:
    Follower(reading(objects), name="r").fetch(9)
    key = "weights/leases/r.json"
    objects.put(key, damage(objects.get(key)))
    with pytest.raises(
        Corrupt, match=r"weights/leases/r.json .*; delete it if that reader no longer exists"
    ):
        collect(reading(objects), keep=1)
    objects.delete(key)
    assert collect(reading(objects), keep=1).pending


def test_a_lease_says_what_its_reader_needs_now_and_goes_with_it(
    objects: Objects, made: dict[int, Tensors]
) -> None:
    told: list[tuple[str, int, float]] = []
    now = 1000.0

    class Noting(Objects):
        def put_sealed(self, key: str, data: bytes) -> None:
            super().put_sealed(key, data)
            if key.startswith("weights/leases/"):
                (lease,) = reading(objects).leases().values()
                assert isinstance(lease, Lease)
                told.append((lease.reader, lease.version, lease.until))

    chain = Chain(Noting(objects._store, objects.url), sleep=lambda seconds: None)
    reader = Follower(chain, name="r", now=lambda: now)
    reader.fetch(2)
    assert told[-1] == ("r", 2, 1000.0 + LEASE_S) and {version for _, version, _ in told} <= {1, 2}
    told.clear()
    now = 2000.0
    reader.fetch(4)
    # first its current version, as long as the route starts there; then the version it moved to
    assert [version for _, version, _ in told] == [2, 4]
    assert {until for *_, until in told} == {2000.0 + LEASE_S}
    reader.close()
    assert objects.list("weights/leases") == []
    without = Follower(chain)
    without.fetch(4)
    without.close()
    assert objects.list("weights/leases") == []


def test_a_damaged_list_of_what_is_to_go_is_named(
    objects: Objects, made: dict[int, Tensors]
) -> None:
    collect(reading(objects), keep=1)
    (key,) = objects.list("weights/gc")
    flip(objects, key)
    with pytest.raises(Corrupt, match=rf"{key}.*; delete it: garbage collection will find"):
        collect(reading(objects), keep=1)
    objects.delete(key)
    assert collect(reading(objects), keep=1).pending


def test_there_is_no_version_below_zero(objects: Objects, made: dict[int, Tensors]) -> None:
    with pytest.raises(Missing, match="weight version -1 is not published; versions 1 to 9 exist"):
        reading(objects).find(-1)


def test_links_in_a_directory_lead_no_deletion_astray(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path / "run"))
    for version in (1, 2):
        publish(objects, version, larger(version), stage="rl", step=version)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear")
    (tmp_path / "run/weights/shards/000000").mkdir()
    (tmp_path / "run/weights/shards/000000/000000").symlink_to(tmp_path / "home")
    (tmp_path / "run/weights/shards/000001/000001/broken").symlink_to(tmp_path / "nowhere")
    for _ in range(2):
        collect(reading(objects), keep=1, grace_s=0)
    assert (tmp_path / "home" / "diary.txt").read_text() == "dear"
    assert bits(Follower(reading(objects)).fetch(2)) == bits(larger(2))
