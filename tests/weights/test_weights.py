"""Versions in a store, published and fetched: always the same bits, or a refusal."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.core.errors import EtudeError
from etude.core.protocols import WeightStore
from etude.core.types import Route, Shard, VersionRef
from etude.store.objects import Missing, Objects
from etude.weights.cache import HostCache
from etude.weights.compact import compact, wanted_routes
from etude.weights.follow import CorruptWeights, Follower, fetch
from etude.weights.manifest import Chain, PublishedVersions
from etude.weights.publish import Fenced, Publisher, SnapshotPolicy, publish
from etude.weights.records import manifest_key
from etude.weights.routes import RouteStep, cheapest
from etude.weights.signing import Corrupt, Signer, Trust, Untrusted, signer_from_environment
from etude.weights.tensors import wrong_in

Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "transposed": torch.randn(2, 4, generator=generator).to(torch.bfloat16).T,
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "odd": torch.tensor([float("nan"), -0.0, 0.0, float("inf"), 1e-40], dtype=torch.bfloat16),
        "codes": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8).view(
            torch.float8_e4m3fn
        ),
        "nibbles": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8).view(
            torch.float4_e2m1fn_x2
        ),
        "count": torch.tensor([seed]),
    }


def moved(old: Tensors, seed: int, share: float = 0.02) -> Tensors:
    """Tensors after one step of training: a few elements are one step up or down."""
    random = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        codes = data.view(f"u{tensor.element_size()}")
        with np.errstate(over="ignore"):
            codes += (random.random(len(codes)) < share).astype(codes.dtype)
        new[name] = (
            torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape) if data.size else tensor
        )
    return new


def larger(seed: int) -> Tensors:
    return {
        "w": torch.randn(300, 200, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    }


def bits(weights: Tensors) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Bits, for equality that distinguishes -0.0 from 0.0 and holds for NaN."""
    return {
        name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in weights.items()
    }


@pytest.fixture
def objects() -> Objects:
    return Objects.open("memory:")


@pytest.fixture
def chain(objects: Objects) -> Chain:
    return Chain(objects, sleep=lambda seconds: None)


def put(objects: Objects, version: int, seed: int) -> None:
    publish(objects, version, tensors(seed), stage="rl", step=version)


def run(publisher: Publisher, start: Tensors, versions: range) -> dict[int, Tensors]:
    """Publish a chain of small steps; return the tensors of each version."""
    made = {versions[0] - 1: start}
    for version in versions:
        made[version] = moved(made[version - 1], version) if version > versions[0] else start
        publisher.publish(version, made[version], stage="rl", step=version)
    publisher.close()
    return {version: made[version] for version in versions}


def test_a_b_a_gives_back_a_bit_for_bit(objects: Objects) -> None:
    for version, seed in enumerate((7, 8, 7), 1):
        put(objects, version, seed)
    assert bits(fetch(objects, 1)) == bits(tensors(7)) == bits(fetch(objects, 3))
    assert bits(fetch(objects, 2)) == bits(tensors(8)) != bits(tensors(7))


def test_a_root_sees_name_dtype_shape_and_every_bit(objects: Objects) -> None:
    zeros = torch.zeros(2, 3)
    others = [
        zeros.reshape(3, 2),
        zeros.to(torch.int32),
        torch.zeros(6),
        -zeros,
        torch.zeros(2, 3, 1),
    ]
    roots = [
        publish(objects, n, {"w": t}, stage="rl", step=n).root
        for n, t in enumerate([zeros, *others])
    ]
    roots.append(publish(objects, len(roots), {"v": zeros}, stage="rl", step=0).root)
    assert len(set(roots)) == len(roots) == 7
    assert publish(objects, 7, {"w": torch.zeros(3, 2).T}, stage="rl", step=0).root == roots[0]


def test_publishing_again(objects: Objects) -> None:
    first = publish(objects, 1, tensors(7), stage="rl", step=1)
    assert publish(objects, 1, tensors(7), stage="rl", step=1) == first
    with pytest.raises(
        EtudeError, match="weight version 1 is already published with other weights"
    ):
        put(objects, 1, 8)
    assert bits(fetch(objects, 1)) == bits(tensors(7))


def test_a_version_cannot_be_slipped_in_before_the_newest(objects: Objects) -> None:
    put(objects, 5, 1)
    with pytest.raises(EtudeError, match="cannot publish weight version 3: version 5 is"):
        put(objects, 3, 2)


def test_a_step_is_small_and_followers_stay_bit_equal(chain: Chain) -> None:
    follower, late = Follower(chain), Follower(chain)
    publisher = Publisher(chain, policy=SnapshotPolicy())
    now = larger(0)
    for version in range(1, 14):
        publisher.publish(version, now, stage="rl", step=version)
        manifest = publisher.wait()
        assert manifest is not None
        if version > 1:
            assert (
                manifest.route.bytes < manifest.bytes / 20 and 0.005 < manifest.changed["w"] < 0.04
            )
        assert bits(follower.fetch(version)) == bits(now)
        if version % 5 == 0:
            assert bits(late.fetch(version)) == bits(now) == bits(fetch(chain.objects, version))
        now = moved(now, version)
    assert publisher.stalled_s >= 0
    publisher.close()


def test_a_host_without_the_c_codec_reads_and_writes_the_same(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(Publisher(chain), larger(5), range(1, 3))
    monkeypatch.setattr("etude.weights.fast.LIBRARY", None)
    assert bits(Follower(chain).fetch(2)) == bits(made[2])
    other = Chain(Objects.open("memory:"))
    run(Publisher(other), larger(5), range(1, 3))
    assert [chain.find(v)[1].route.shards for v in (1, 2)] == [
        other.find(v)[1].route.shards for v in (1, 2)
    ]


def test_tensors_may_come_go_and_change_shape(objects: Objects) -> None:
    versions: list[Tensors] = [
        {"a": torch.ones(4), "b": torch.zeros(3)},
        {"a": torch.ones(2, 2), "c": torch.zeros(3)},
        {"a": torch.ones(2, 2).bfloat16(), "c": torch.zeros(3), "b": torch.ones(1)},
    ]
    for version, given in enumerate(versions):
        publish(objects, version, given, stage="rl", step=version)
    follower = Follower(Chain(objects))
    for version, given in enumerate(versions):
        assert bits(follower.fetch(version)) == bits(given) == bits(fetch(objects, version))


def test_whole_versions_come_when_the_chain_has_grown(chain: Chain) -> None:
    made = run(Publisher(chain, policy=SnapshotPolicy(max_chain=5)), larger(1), range(1, 14))
    whole = [
        v
        for v, e in chain.lineage().items()
        if any(r.base is None for r in chain.extra_routes(chain.at(e, v)[0]))
    ]
    assert whole == [6, 11]
    # a restarted publisher knows how long the chain is
    again = Publisher(chain, policy=SnapshotPolicy(max_chain=5))
    again.publish(13, made[13], stage="rl", step=13)
    for version in (14, 15, 16):
        again.publish(version, moved(made[13], version), stage="rl", step=version)
    again.close()
    assert any(route.base is None for route in chain.extra_routes(chain.find(16)[0]))


def test_policy() -> None:
    policy = SnapshotPolicy(max_chain=64, max_share=0.5)
    assert not policy.wants_snapshot(63, 50, 100)
    assert policy.wants_snapshot(64, 1, 100) and policy.wants_snapshot(2, 51, 100)


def test_a_skip_is_shorter_than_its_steps_and_is_taken(chain: Chain) -> None:
    made = run(Publisher(chain), larger(2), range(4, 10))
    (way,) = compact(chain, skip=4)
    (skip,) = chain.extra_routes(chain.find(8)[0])
    steps = sum(chain.find(v)[1].route.bytes for v in range(5, 9))
    assert skip == way.route and skip.base == chain.find(4)[0] and skip.bytes < steps
    assert compact(chain, skip=4) == []
    loads: list[int] = []
    follower = Follower(chain, progress=lambda done, total: loads.append(total))
    follower.fetch(4)
    assert bits(follower.fetch(9)) == bits(made[9])
    assert loads[-1] == skip.bytes + chain.find(9)[1].route.bytes


def test_which_ways_the_compactor_wants() -> None:
    assert wanted_routes(range(1, 26), 8) == [(8, 16), (16, 24)]
    assert wanted_routes([8, 9, 16, 17], 8) == [(8, 16)] and wanted_routes([9, 16], 8) == []
    # further back, readers start from a whole version
    assert wanted_routes(range(1000), 8)[0] == (936, 944)


def hop(start: int | None, end: int, cost: int) -> RouteStep:
    base = None if start is None else VersionRef(1, start, "")
    return RouteStep(VersionRef(1, end, ""), Route(base, (Shard("", cost, "", ""),)))


def test_the_cheapest_way() -> None:
    hops = [
        hop(None, 0, 100),
        hop(0, 1, 5),
        hop(1, 2, 5),
        hop(0, 2, 8),
        hop(2, 3, 5),
        hop(None, 3, 100),
    ]
    way = cheapest(hops, VersionRef(1, 0, ""), VersionRef(1, 3, ""))
    assert way == [hops[3], hops[4]]
    assert cheapest(hops, None, VersionRef(1, 3, "")) == [hops[5]]
    assert cheapest(hops, VersionRef(1, 3, ""), VersionRef(1, 3, "")) == []
    assert cheapest(hops[1:5], None, VersionRef(1, 3, "")) is None


def shards_of(objects: Objects, version: int) -> list[str]:
    return [key for key in objects.list("weights/shards") if key.split("/")[3] == f"{version:06d}"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_damage_is_refused_and_the_old_version_stays(objects: Objects, damage: str) -> None:
    put(objects, 1, 7)
    follower = Follower(Chain(objects, sleep=lambda s: None))
    before = bits(follower.fetch(1))
    put(objects, 2, 8)
    for key in shards_of(objects, 2):
        data = objects.get(key)
        changed = {
            "flip": data[:-1] + bytes([data[-1] ^ 1]),
            "cut": data[: len(data) // 2],
            "empty": b"",
        }
        if damage == "missing":
            objects.delete(key)
        else:
            objects.put(key, changed[damage])
    with pytest.raises(
        CorruptWeights, match="weight version 2 cannot be restored exactly as published"
    ):
        follower.fetch(2)
    assert follower.held is not None and bits(follower.held.tensors()) == before


def test_a_damaged_manifest_is_refused(objects: Objects) -> None:
    put(objects, 1, 7)
    put(objects, 2, 8)
    key = manifest_key(2, 2)
    data = objects.get(key)
    for wrong in (
        data.replace(b'"stage": "rl"', b'"stage": "xl"'),
        data[:-9],
        data.replace(b'"version": 2', b'"version": 3'),
    ):
        objects.put(key, wrong)
        with pytest.raises(EtudeError, match="damaged"):
            Follower(Chain(objects, sleep=lambda s: None)).fetch(2)
    objects.put(key, objects.get(manifest_key(1, 1)))
    with pytest.raises(Corrupt, match="manifest of another version"):
        Follower(Chain(objects, sleep=lambda s: None)).fetch(2)


def wrong_tensors(follower: Follower) -> list[str]:
    """The tensors that differ from their checked values."""
    assert follower.held is not None
    with ThreadPoolExecutor(1) as pool:
        return wrong_in(follower.held.state, follower.held.held, pool)


def test_a_bit_that_flips_in_memory_is_found_and_the_follower_rebuilds(chain: Chain) -> None:
    made = run(Publisher(chain), larger(3), range(1, 4))
    follower = Follower(chain)
    follower.fetch(2)
    assert follower.held is not None and wrong_tensors(follower) == []
    follower.held.held["w"].data[7] ^= 16
    assert wrong_tensors(follower) == ["w"]
    assert bits(follower.fetch(3)) == bits(made[3]) and follower.rebuilt == 1
    assert wrong_tensors(follower) == []


def test_a_difference_is_not_applied_twice_or_to_another_base(chain: Chain) -> None:
    made = run(Publisher(chain), larger(4), range(1, 5))
    follower = Follower(chain)
    for version in (2, 2, 4, 3, 4, 1, 4):
        assert bits(follower.fetch(version)) == bits(made[version])
    assert follower.rebuilt == 0


def test_of_two_trainers_one_is_fenced(objects: Objects) -> None:
    old = [Publisher(Chain(objects)) for _ in range(3)]
    for version, publisher in enumerate(old, 1):
        publisher.publish(version, tensors(version), stage="rl", step=version)
        publisher.wait()
    new = Publisher(Chain(objects))
    new.publish(4, tensors(4), stage="rl", step=4)
    new.close()
    old[0].publish(4, tensors(9), stage="rl", step=4)
    old[1].publish(5, tensors(9), stage="rl", step=5)
    for fenced in old[:2]:
        with pytest.raises(Fenced, match="another trainer has taken over"):
            fenced.wait()
    old[2].publish(4, tensors(4), stage="rl", step=4)
    same = old[2].wait()
    assert same == Chain(objects).find(4)[1]  # its manifest is the published one
    old[2].publish(5, tensors(5), stage="rl", step=5)
    with pytest.raises(Fenced):
        old[2].wait()
    assert list(Chain(objects).lineage()) == [1, 2, 3, 4] and bits(fetch(objects, 4)) == bits(
        tensors(4)
    )


def test_a_trainer_that_is_succeeded_while_it_publishes_is_told(
    chain: Chain, objects: Objects
) -> None:
    """It looked, found itself alone, and began to upload; its successor comes before it commits."""
    zombie = Publisher(chain)
    zombie.publish(1, larger(1), stage="rl", step=1)
    zombie.wait()
    follower, heir, put_shard = Follower(chain), Publisher(Chain(objects)), chain.put_shard
    follower.fetch(1)

    def slowly(epoch: int, version: int, data: bytes) -> str:
        if not objects.exists(manifest_key(2, 2)):
            heir.publish(2, larger(2), stage="rl", step=2)
            heir.wait()
        return put_shard(epoch, version, data)

    chain.put_shard = slowly  # type: ignore[method-assign]
    zombie.publish(2, larger(8), stage="rl", step=2)
    with pytest.raises(Fenced, match="another trainer has taken over"):
        zombie.close()
    newest = Chain(objects).newest()
    assert newest is not None and newest.version == 2 and newest.epoch == 2
    assert bits(follower.fetch(2)) == bits(larger(2))
    with pytest.raises(Missing, match="weight version 3 is not published"):
        follower.fetch(3)
    heir.publish(3, larger(3), stage="rl", step=3)
    heir.close()
    assert bits(follower.fetch(3)) == bits(larger(3))


def test_numbers_may_be_left_out(chain: Chain, objects: Objects) -> None:
    """The numbers of one epoch count up by one, so that its end can be found; a trainer that skips
    a number claims another epoch."""
    publisher = Publisher(chain)
    for version in (3, 4, 7, 8):
        publisher.publish(version, larger(version), stage="rl", step=version)
    publisher.close()
    assert Chain(objects).lineage() == {3: 1, 4: 1, 7: 2, 8: 2}
    with pytest.raises(Missing, match="weight version 5 is not published; versions 3 to 8 exist"):
        chain.find(5)
    assert bits(fetch(objects, 7)) == bits(larger(7))


def test_a_host_downloads_each_object_once(objects: Objects, tmp_path: Path) -> None:
    put(objects, 1, 7)
    counted: list[str] = []

    class Counting(Chain):
        def shard(self, target: VersionRef, hash: str) -> bytes:
            counted.append(hash)
            return super().shard(target, hash)

    caches = [HostCache(tmp_path / "cache") for _ in range(3)]
    for cache in caches:
        assert bits(Follower(Counting(objects), cache=cache).fetch(1)) == bits(tensors(7))
    assert len(counted) == len(set(counted))
    for path in (tmp_path / "cache").iterdir():
        if not path.suffix:
            path.write_bytes(b"damaged")
    assert bits(Follower(Counting(objects), cache=caches[0]).fetch(1)) == bits(tensors(7))
    HostCache(tmp_path / "cache", max_bytes=1).get(counted[0], lambda: b"")
    small = HostCache(tmp_path / "small", max_bytes=10)
    from etude.weights.records import hash_of

    for data in (b"12345678", b"abcdefgh"):
        assert small.get(hash_of(data), lambda data=data: data) == data
    assert [p.read_bytes() for p in (tmp_path / "small").iterdir() if not p.suffix] == [b"abcdefgh"]


def test_only_what_is_far_away_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert HostCache.beside("file:/run") is None and HostCache.beside("/run", tmp_path) is None
    assert (
        HostCache.beside("s3://bucket/run") is not None
        and (tmp_path / "user/etude/weights").is_dir()
    )
    (tmp_path / "file").touch()
    with pytest.raises(EtudeError, match="cannot cache weights in"):
        HostCache.beside("gs://bucket/run", tmp_path / "file" / "cache")


def test_of_many_processes_one_downloads(tmp_path: Path) -> None:
    """Single flight: a process that requests an object during its download waits for it."""
    script = (
        "import sys, time, pathlib\n"
        "from etude.weights.cache import HostCache\n"
        "from etude.weights.records import hash_of\n"
        "def download():\n"
        "    (pathlib.Path(sys.argv[1]) / f'{time.time_ns()}.download').touch()\n"
        "    time.sleep(0.5)\n"
        "    return b'weights'\n"
        "assert HostCache(pathlib.Path(sys.argv[1])).get(hash_of(b'weights'), download) == "
        "b'weights'\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert len(list(tmp_path.glob("*.download"))) == 1


def test_signed_manifests(objects: Objects) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    mine, other = (ed25519.Ed25519PrivateKey.generate() for _ in range(2))
    trust = Trust(mine.public_key().public_bytes_raw())
    publisher = Publisher(Chain(objects, trust=trust), signer=Signer(mine.sign))
    publisher.publish(1, tensors(1), stage="rl", step=1)
    publisher.close()
    assert (
        bits(Follower(Chain(objects, trust=trust)).fetch(1))
        == bits(tensors(1))
        == bits(fetch(objects, 1))
    )
    for trusted in (Trust(other.public_key().public_bytes_raw()),):
        with pytest.raises(Untrusted, match="is not signed with the key"):
            Follower(Chain(objects, trust=trusted, sleep=lambda s: None)).fetch(1)
    put(objects, 2, 2)  # by a writer without the key
    with pytest.raises(Untrusted):
        Follower(Chain(objects, trust=trust, sleep=lambda s: None)).fetch(2)


def test_keys_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.setenv("ETUDE_SIGNING_KEY", "key.pem")
    with pytest.raises(EtudeError, match=r"pip install 'etude\[signing\]'"):
        signer_from_environment()


def test_keys_from_the_environment(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as s

    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    monkeypatch.setenv("ETUDE_SIGNING_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("ETUDE_TRUSTED_KEY", key.public_key().public_bytes_raw().hex())
    put(objects, 1, 1)
    assert bits(fetch(objects, 1)) == bits(tensors(1))
    monkeypatch.setenv("ETUDE_TRUSTED_KEY", "abc")
    with pytest.raises(EtudeError, match="must be the 64 hex digits"):
        fetch(objects, 1)


def test_a_private_key_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
    from cryptography.hazmat.primitives import serialization as s

    path = tmp_path / "key.pem"
    monkeypatch.setenv("ETUDE_SIGNING_KEY", str(path))
    with pytest.raises(EtudeError, match=f"cannot read a private key from {path}"):
        signer_from_environment()
    path.write_bytes(b"no key")
    with pytest.raises(EtudeError, match=f"cannot read a private key from {path}"):
        signer_from_environment()
    other = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    with pytest.raises(EtudeError, match=f"{path} is not an ed25519 key"):
        signer_from_environment()


def test_a_compactor_signs_what_it_makes(
    tmp_path: Path, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as s

    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    monkeypatch.setenv("ETUDE_SIGNING_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("ETUDE_TRUSTED_KEY", key.public_key().public_bytes_raw().hex())
    run(Publisher(Chain(objects)), larger(1), range(1, 5))
    (made,) = compact(Chain(objects), skip=2)
    assert Chain(objects).extra_routes(made.target) == [made.route]


class Listing(Objects):
    """The contents of another store, with listings that hide some objects and invent others."""

    def __init__(self, inner: Objects, hidden: set[str], invented: set[str]) -> None:
        super().__init__(inner._store, inner.url)
        self.hidden = hidden
        self.invented = invented

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        invented = {key for key in self.invented if key.startswith(prefix) and key > (after or "")}
        return sorted({*super().list(prefix, after=after), *invented} - self.hidden)


def test_a_listing_is_not_the_last_word(objects: Objects) -> None:
    """It may be older or newer than the readable objects."""
    run(Publisher(Chain(objects)), larger(1), range(1, 6))
    hidden = {manifest_key(1, version) for version in (1, 2, 3)}
    assert list(Chain(Listing(objects, hidden, set())).lineage()) == [1, 2, 3, 4, 5]
    hidden = {manifest_key(1, version) for version in (3, 4, 5)}
    invented = {manifest_key(1, 8)}
    head = Chain(Listing(objects, hidden, invented)).head()
    assert head is not None and head.version == 5


def test_a_trainer_that_went_back_builds_on_the_newest_version(objects: Objects) -> None:
    made = run(Publisher(Chain(objects)), larger(1), range(1, 4))
    again = Publisher(Chain(objects))
    again.publish(1, made[1], stage="rl", step=1)
    again.publish(4, moved(made[3], 9), stage="rl", step=4)
    again.close()
    assert bits(fetch(objects, 4)) == bits(moved(made[3], 9))


def test_a_manifest_says_how_much_of_each_sort_changed(objects: Objects) -> None:
    old = {f"model.layers.{layer}.mlp.up_proj.weight": torch.zeros(8, 8) for layer in range(2)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["model.layers.1.mlp.up_proj.weight"][0] = 1.0
    publisher = Publisher(Chain(objects))
    for version, weights in enumerate((old, new), 1):
        publisher.publish(version, weights, stage="rl", step=version)
    publisher.close()
    manifest = Chain(objects).find(2)[1]
    assert manifest.changed == {"up_proj": 8 / 128}


def test_progress_ends_with_all_that_there_was_to_load(objects: Objects) -> None:
    run(Publisher(Chain(objects)), larger(1), range(1, 4))
    told: list[tuple[int, int]] = []
    Follower(Chain(objects), progress=lambda done, total: told.append((done, total))).fetch(3)
    steps = [done for done, _ in told]
    assert steps == sorted(set(steps)) and told[-1][0] == told[-1][1] > 0


def test_the_time_that_a_trainer_is_held_up_is_counted(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    publisher = Publisher(Chain(objects))
    monkeypatch.setattr("etude.weights.publish.time.monotonic", lambda: next(clock))
    start = publisher.prepare(1, tensors(1), stage="rl", step=1)
    assert publisher.stalled_s == 1.0  # the copy
    monkeypatch.setattr(publisher, "wait", lambda: next(clock))
    start()
    assert publisher.stalled_s == 3.0  # and the previous version
    monkeypatch.undo()
    publisher.close()


async def test_the_store_is_asked_for_news_again_and_again_but_not_always(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 4:
            put(objects, 1, 1)

    monkeypatch.setattr("etude.weights.manifest.asyncio.sleep", sleep)
    assert (await PublishedVersions(objects).wait(after=0)).version == 1
    assert waited == [0.05, 0.1, 0.2, 0.2]


async def test_a_version_is_waited_for(objects: Objects) -> None:
    versions: WeightStore = PublishedVersions(objects)
    waiting = asyncio.create_task(versions.wait(after=-1))
    put(objects, 0, 1)
    assert (await waiting).version == 0
    put(objects, 2, 3)
    assert (await versions.wait(after=0)).version == 2
    objects.put("weights/shards/000009/000003/abc", b"a manifest will follow")
    newest = await versions.wait(after=-1)
    assert newest.version == 2 and newest.stage == "rl"


def test_manifests_are_read_without_torch() -> None:
    code = "import sys, etude.weights.manifest, etude.store.runs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PUBLISHER = """
import sys, torch
from etude.store.objects import Objects
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
publisher = Publisher(Chain(Objects.open(sys.argv[1])))
for version in range(int(sys.argv[2]), 10**6):
    publisher.publish(version, {"w": torch.full((2000, 50), version, dtype=torch.bfloat16)}, stage="rl", step=version)
    publisher.wait()
    print(version, flush=True)
"""  # noqa: E501


async def test_a_killed_publisher_leaves_only_whole_versions(tmp_path: Path) -> None:
    objects = Objects.open(str(tmp_path))
    first = 1
    for _ in range(2):
        command = [sys.executable, "-c", PUBLISHER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as publisher:
            assert publisher.stdout is not None
            confirmed = int([publisher.stdout.readline() for _ in range(3)][-1])
            publisher.kill()
        newest = await PublishedVersions(objects).wait(after=-1)
        assert newest.version >= confirmed
        follower = Follower(Chain(objects))
        for version in range(1, newest.version + 1):
            assert torch.equal(
                follower.fetch(version)["w"][0, :1].float(), torch.tensor([float(version)])
            )
        first = newest.version + 1
