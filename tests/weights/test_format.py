"""The format on the wire and in the store: data once written stays readable.

All digests here are of bytes that this package wrote when the test was written. A different digest
means that older stores cannot be read any more, or that the two coders disagree: give a new format
a new magic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.core.types import VersionRef
from etude.store.objects import Objects
from etude.weights import codec, fast, reference
from etude.weights.delta_format import (
    BYTES,
    CHUNK,
    KINDS,
    Array,
    ContextHeader,
    Damaged,
    Kind,
    Reader,
    kind_of,
    top_exponent,
    varint,
)
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from etude.weights.records import (
    hash_of,
    lease_key,
    manifest_key,
    owner_of,
    route_key,
    shard_key,
)
from etude.weights.shards import Chunk, read
from etude.weights.tensors import TensorEntry

DELTAS = {
    "bfloat16": (657, "60565a1cf858970d"),
    "float16": (675, "18c1d042ca6dc326"),
    "float32": (759, "a030107a73a01f91"),
    "float8_e4m3fn": (625, "e0617ec05af422fc"),
    "float8_e4m3fnuz": (625, "e0617ec05af422fc"),
    "float8_e5m2": (623, "56a954bd12a80ff5"),
    "float8_e5m2fnuz": (623, "56a954bd12a80ff5"),
    "float4_e2m1fn_x2": (567, "7aaa222c729f8c55"),
    "int16": (616, "442db46b9fedadb9"),
    "int32": (715, "63f81efa358cc70c"),
    "int64": (559, "d3974b2d102b2822"),
}
"""Length and digest."""
ROOT = "a19fd60af1996551"
SHARDS = ["b0245bc59bb4b038"]


def numbers(count: int, seed: int) -> Array:
    """Random numbers that are the same on every machine, and in every version of numpy."""
    made = np.empty(count, np.uint64)
    state = seed
    for place in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        made[place] = state >> 33
    return made


def codes(kind: Kind, count: int) -> tuple[Array, Array]:
    """Two versions: some elements differ by one step, some by many."""
    top = 15 if kind.nibbles else (1 << 8 * kind.width) - 1
    dtype = f"<u{kind.width}"
    first, where, far = (numbers(count, seed) for seed in (1, 2, 3))
    old = (first & top).astype(dtype)
    step = np.where(where % 10 == 0, 1, np.where(where % 97 == 0, far, 0)).astype(np.uint64)
    return old, ((old.astype(np.uint64) + step) & top).astype(dtype)


@pytest.mark.parametrize("name", [*KINDS, "int64"])
def test_the_bytes_of_a_difference_stay_the_same(name: str) -> None:
    kind = kind_of(name)
    old, new = codes(kind, 6000)
    body = reference.encode_delta(kind, old, new)
    assert body is not None
    assert (len(body), hash_of(body)[:16]) == DELTAS[name]
    if fast.LIBRARY:
        assert fast.encode_delta(kind, old, new) == body


def test_the_bytes_of_a_version_stay_the_same() -> None:
    objects = Objects.open("memory:")
    publisher = Publisher(Chain(objects), now=lambda: 7.0)
    for version in (1, 2):
        made = {
            name: torch.from_numpy(codes(KINDS[name], 6000)[version - 1].view(np.int16))
            .view(torch.bfloat16)
            .reshape(60, 100)
            for name in ("bfloat16",)
        }
        made["layers.0.up_proj.weight"] = torch.full((3, 4), version, dtype=torch.float32)
        made["unchanged"] = torch.ones(5)
        publisher.publish(version, made, stage="rl", step=version)
    publisher.close()
    manifest = Chain(objects).find(2)[1]
    assert manifest.root[:16] == ROOT
    assert [shard.hash[:16] for shard in manifest.route.shards] == SHARDS
    (shard,) = manifest.route.shards
    assert (shard.first, shard.last) == ("bfloat16", "layers.0.up_proj.weight")
    assert manifest.bytes == 6000 * 2 + 12 * 4 + 5 * 4 and manifest.time == 7.0
    assert manifest.changed["unchanged"] == 0 and manifest.changed["up_proj"] == 1


FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("name", FLOATS)
def test_contexts_are_the_exponents_of_the_type(name: str) -> None:
    kind, dtype = KINDS[name], getattr(torch, name)
    powers = torch.tensor([2.0**n for n in range(-5, 6)])
    both = torch.stack((powers, 1.25 * powers, -1.5 * powers)).to(dtype)
    assert both.element_size() == kind.width
    found = both.reshape(-1).view(torch.uint8).numpy().view(f"<u{kind.width}")
    exponents = ((found >> kind.shift) & kind.exponent).reshape(3, -1).astype(np.int64)
    assert (np.diff(exponents, axis=1) == 1).all() and (exponents == exponents[0]).all()
    assert kind.exponent >> (8 * kind.width - 1 - kind.shift) == 0, "without the sign"


def test_types_like_each_other_are_coded_alike() -> None:
    assert KINDS["float8_e4m3fnuz"] == KINDS["float8_e4m3fn"]
    assert KINDS["float8_e5m2fnuz"] == KINDS["float8_e5m2"]
    assert kind_of("complex128") is BYTES and BYTES.contexts == 1
    assert [kind.contexts for kind in (KINDS["bfloat16"], KINDS["float8_e4m3fn"])] == [16, 16]


def test_sizes_and_counts_of_elements() -> None:
    for kind in (*KINDS.values(), BYTES):
        assert kind.count(kind.size(6)) == 6
        assert kind.chunk == (4 * CHUNK if kind.width == 1 else CHUNK)
    assert [KINDS[name].size(6) for name in ("float4_e2m1fn_x2", "int16", "float32")] == [3, 12, 24]
    assert codec.chunks(KINDS["int32"], 2 * CHUNK + 1) == [
        slice(0, CHUNK),
        slice(CHUNK, 2 * CHUNK),
        slice(2 * CHUNK, 2 * CHUNK + 1),
    ]


def test_outliers_do_not_choose_the_top() -> None:
    kind = KINDS["bfloat16"]

    def of(exponents: list[int]) -> int:
        return top_exponent(kind, (np.array(exponents, "<u2") << 7).astype("<u2"))

    assert of([5]) == 5 and of([3, 9, 4]) == 9
    assert of([3] * 126 + [99]) == 99 and of([3] * 127 + [99]) == 3
    assert top_exponent(KINDS["int32"], np.array([7], "<u4")) == 0


@pytest.mark.parametrize(
    ("value", "data"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (1 << 35, "808080808001")],
)
def test_varints(value: int, data: str) -> None:
    assert varint(value).hex() == data
    reader = Reader(bytes.fromhex(data) + b"x")
    assert reader.varint(value) == value and reader.left == 1
    if value:
        with pytest.raises(Damaged, match="count in the payload is out of range"):
            Reader(bytes.fromhex(data)).varint(value - 1)


def test_a_varint_ends() -> None:
    assert Reader(b"\xff" * 8 + b"\x7f").varint(1 << 63) == (1 << 63) - 1
    with pytest.raises(Damaged, match="out of range"):
        Reader(b"\x80" * 9 + b"\x01").varint(1 << 80)
    with pytest.raises(Damaged, match="ends too early"):
        Reader(b"\x80").varint(9)
    with pytest.raises(Damaged, match="ends too early"):
        Reader(b"abc").take(4)
    assert Reader(b"abc").take(3) == b"abc"


def test_a_header_names_widths_that_numbers_have() -> None:
    assert ContextHeader.read(Reader(b"\x00"), 9) == ContextHeader(0, 0, 0, 0, 0)
    assert ContextHeader.read(Reader(b"\x02\x1f\x00"), 9) == ContextHeader(2, 31, 0, 0, 0)
    whole = ContextHeader.read(Reader(b"\x02\x1e\x02\x1f\x1f"), 9)
    assert whole == ContextHeader(2, 30, 2, 31, 31)
    for wrong in (b"\x02\x20\x00", b"\x02\x00\x01\x20\x00", b"\x02\x00\x01\x00\x20"):
        with pytest.raises(Damaged, match="impossible bit width"):
            ContextHeader.read(Reader(wrong), 9)
    for wrong in (b"\x0a\x00\x00", b"\x02\x00\x03\x00\x00"):
        with pytest.raises(Damaged, match="out of range"):
            ContextHeader.read(Reader(wrong), 9)


def test_a_shard_is_read_to_its_last_byte() -> None:
    state = (TensorEntry("a", "uint8", (3,), ("",)), TensorEntry("b", "uint8", (9,), ("",)))
    whole = b"etude w1" + bytes((2, 0, 0, 3, 1, 0, 1)) + b"abcd"
    chunks = [Chunk(each.tensor, each.chunk, bytes(each.payload)) for each in read(whole, state)]
    assert chunks == [Chunk(0, 0, b"abc"), Chunk(1, 0, b"d")]
    assert read(b"etude w1\x00", state) == []
    for wrong, why in (
        (whole[:-1], "does not match its chunks"),
        (whole + b"e", "does not match its chunks"),
        (b"etude w2" + whole[8:], "no valid header"),
        (b"etude w1" + bytes((2, 1, 0, 3, 0, 0, 1)) + b"abcd", "out of order"),
        (b"etude w1" + bytes((2, 0, 0, 3, 0, 0, 1)) + b"abcd", "out of order"),
        (b"etude w1" + bytes((1, 2, 0, 1)) + b"a", "out of range"),
        (b"etude w1" + bytes((1, 0, 1, 1)) + b"a", "out of range"),
    ):
        with pytest.raises(Damaged, match=why):
            read(wrong, state)


def test_a_library_that_is_built_is_used() -> None:
    built = list(Path(fast.__file__).parent.glob("_delta*.so"))
    assert (fast.LIBRARY is not None) == bool(built)


def test_elements_are_counted_from_the_head_of_a_payload() -> None:
    for name in ("bfloat16", "float4_e2m1fn_x2", "int32"):
        kind = KINDS[name]
        old, new = codes(kind, 6000)
        payload, size = codec.encode(kind, old, new), kind.size(6000)
        assert payload[0] == codec.DELTA
        assert codec.num_changed(kind, payload, size) == int((old != new).sum())
        assert codec.num_changed(kind, codec.encode(kind, None, new), size) == 6000
        assert codec.num_changed(kind, codec.encode(kind, old, old), size) == 0


HASH = "0123456789abcdef" * 4
LINK, BASE = VersionRef(3, 12, HASH), VersionRef(2, 7, HASH)


def test_keys_stand_where_they_stood() -> None:
    keys = {
        manifest_key(3, 12): "weights/versions/000003/000012.json",
        route_key(LINK, None): "weights/routes/000003/000012/whole.json",
        route_key(LINK, BASE): "weights/routes/000003/000012/000002-000007.json",
        shard_key(3, 12, HASH): f"weights/shards/000003/000012/{HASH}",
    }
    assert all(made == stands and owner_of(made) == (3, 12) for made, stands in keys.items())
    assert lease_key("a b") == "weights/leases/a b.json" and owner_of(lease_key("a")) is None
    assert owner_of(manifest_key(10**6, 10**7)) == (10**6, 10**7)


@pytest.mark.parametrize(
    "key",
    [
        "weights/versions/000003/12.json",
        "weights/versions/000003/0000012.json",
        "weights/versions/000003/000012.json.part",
        "weights/versions/000003/000012",
        "x/weights/versions/000003/000012.json",
        "weights/routes/000003/000012/part.json",
        "weights/routes/000003/000012/000002.json",
        f"weights/shards/000003/000012/{HASH[:-1]}",
        f"weights/shards/000003/000012/{HASH}0",
        f"weights/shards/000003/000012/{HASH.upper()}",
    ],
)
def test_whatever_else_lies_there_belongs_to_no_version(key: str) -> None:
    assert owner_of(key) is None


def test_entries_and_their_chunks() -> None:
    entry = TensorEntry("a", "int32", (3, CHUNK))
    assert entry.bytes == 12 * CHUNK and entry.chunk_bytes == 4 * CHUNK
    assert entry.chunks == range(3) and entry.holding(1, 3) == range(1, 3)
    ragged = TensorEntry("a", "int32", (7, CHUNK // 2 + 1))
    size = 4 * (CHUNK // 2 + 1)
    assert ragged.chunks == range(4)
    assert ragged.place(3) == slice(12 * CHUNK, 7 * size)
    assert ragged.holding(0, 1) == range(1) and ragged.holding(1, 2) == range(2)
    assert ragged.holding(6, 7) == range(3, 4) and ragged.holding(2, 2) == range(1, 2)
    empty = TensorEntry("a", "int32", (0, 4))
    assert empty.chunks == range(0) and empty.holding(0, 0) == range(0)
    assert entry.is_like(TensorEntry("b", "int32", (3, CHUNK), ("x",)))
    others = [None, TensorEntry("a", "int16", (3, CHUNK)), TensorEntry("a", "int32", (CHUNK, 3))]
    assert not any(entry.is_like(other) for other in others)


def test_how_the_shards_of_a_large_version_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.weights.delta_format.CHUNK", 64)
    monkeypatch.setattr("etude.weights.shards.SHARD_BYTES", 1000)
    objects = Objects.open("memory:")
    publisher = Publisher(Chain(objects))
    tensors = {name: torch.arange(200, dtype=torch.float32) for name in "abc"}
    publisher.publish(1, tensors, stage="rl", step=1)
    publisher.close()
    shards = Chain(objects).find(1)[1].route.shards
    # 64 floats and a byte each: the fourth chunk fills a shard
    assert [(shard.first, shard.last) for shard in shards] == [
        ("a", "b"), ("b", "c"), ("c", "c"),
    ]  # fmt: skip


class Answering:
    """A library that always returns this code."""

    def __init__(self, code: int) -> None:
        self._code = code

    def encode(self, *_: object) -> int:
        return self._code

    apply = encode


def test_what_the_library_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS["int32"]
    data = np.zeros(100, "<u4")
    for code, size in ((-1, None), (400, None), (399, 399), (0, 0)):
        monkeypatch.setattr(fast, "LIBRARY", Answering(code))
        made = fast.encode_delta(kind, data, data)
        assert (made if made is None else len(made)) == size, "never larger than the elements"
    fast.apply_delta(kind, data, b"x", data.copy())
    for code, error in ((-2, MemoryError), (-1, Damaged), (1, Damaged)):
        monkeypatch.setattr(fast, "LIBRARY", Answering(code))
        with pytest.raises(error):
            fast.apply_delta(kind, data, b"x", data.copy())
    monkeypatch.setattr(fast, "LIBRARY", Answering(-2))
    with pytest.raises(MemoryError):
        fast.encode_delta(kind, data, data)
