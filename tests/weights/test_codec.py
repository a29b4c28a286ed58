"""The delta codec: bit-equal for every dtype and every kind of change, in numpy and in C alike, and
safe for any input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.weights import codec, delta_format, fast, reference
from etude.weights.codec import RAW
from etude.weights.delta_format import BYTES, CHUNK, KINDS, Array, Damaged, Kind
from tests.weights.fuzz import fuzz

BF16 = KINDS["bfloat16"]
ISAS = range(fast.ISA + 1) if fast.LIBRARY else []
kinds = pytest.mark.parametrize("kind", [*KINDS.values(), BYTES], ids=[*KINDS, "bytes"])


def some(kind: Kind, count: int, seed: int) -> Array:
    random = np.random.default_rng(seed)
    if kind.nibbles:
        return random.integers(0, 16, count, np.uint8)
    if kind is BF16:  # as weights are, including all special floats
        weights = (random.normal(0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(
            np.uint16
        )
        weights[random.random(count) < 0.01] = random.choice(
            np.array([0, 0x8000, 0x7FC0, 0xFFC0, 0x7F80, 1, 0x8001], "<u2")
        )
        return weights
    return random.integers(0, 1 << (8 * kind.width), count, f"<u{kind.width}", endpoint=False)


def changed(kind: Kind, old: Array, share: float, seed: int) -> Array:
    random = np.random.default_rng(seed)
    steps = (
        random.choice(np.array([1, -1, 1, -1, 2, -3, 90]), len(old))
        .astype(f"<i{kind.width}")
        .view(old.dtype)
    )
    with np.errstate(over="ignore"):
        new = np.where(random.random(len(old)) < share, old + steps, old)
    return new & 15 if kind.nibbles else new


def check(kind: Kind, old: Array, new: Array) -> bytes:
    """Check that all codecs agree and restore the new version, also in place of the old one."""
    payload = codec.encode(kind, old, new, by=reference.encode_delta)
    for apply in (reference.apply_delta, *([fast.apply_delta] if fast.LIBRARY else [])):
        out = np.full_like(old, 7)
        codec.apply(kind, old, payload, out, by=apply)
        assert np.array_equal(out, new)
        codec.apply(kind, place := old.copy(), payload, place, by=apply)
        assert np.array_equal(place, new)
    for isa in ISAS:
        assert fast.encode_delta(kind, old, new, isa) == reference.encode_delta(kind, old, new)
        if payload and payload[0] != RAW:
            out = np.full_like(old, 7)
            fast.apply_delta(kind, old, payload[1:], out, isa)
            assert np.array_equal(out, new)
    return payload


@kinds
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 1.0])
def test_round_trip(kind: Kind, share: float) -> None:
    for count in (1, 2, 63, 64, 65, 1000, 20_001):
        old = some(kind, count + (kind.nibbles and count % 2), count)
        payload = check(kind, old, new := changed(kind, old, share, 1))
        assert (payload == b"") == np.array_equal(old, new)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_codes_to_any_codes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*KINDS.values()]))
    top = 15 if kind.nibbles else (1 << 8 * kind.width) - 1
    dtype = f"<u{kind.width}"
    old = 2 * data.draw(st.lists(st.integers(0, top), min_size=1, max_size=150))
    new = [data.draw(st.integers(0, top)) if data.draw(st.booleans()) else code for code in old]
    check(kind, np.array(old, dtype), np.array(new, dtype))


def test_the_ends_of_the_number_line() -> None:
    odd = np.array([0x0000, 0x8000, 0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x7FFF], "<u2")
    check(BF16, np.repeat(odd, len(odd)), np.tile(odd, len(odd)))
    for width in (1, 2, 4):
        kind = Kind(width, ordered=True)
        ends = np.array(
            [0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1), (1 << (8 * width - 1)) - 1],
            f"<u{width}",
        )
        check(kind, np.repeat(np.tile(ends, 5), 9), np.repeat(np.repeat(ends, 5), 9))


def test_minus_zero_is_one_step_from_zero() -> None:
    zeros = np.zeros(1000, "<u2")
    one, far = zeros.copy(), zeros.copy()
    one[500], far[500] = 0x8000, 0xFF00
    assert len(check(BF16, zeros, one)) < len(check(BF16, zeros, far))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ranks_of_floats_go_up_as_the_floats_do(dtype: str) -> None:
    kind = KINDS[dtype]
    values = torch.tensor([-torch.inf, -2.0, -1.0, -1e-3, -0.0, 0.0, 1e-3, 1.0, 2.0, torch.inf])
    code = values.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(f"<u{kind.width}")
    ranks = reference.ranks(kind, code)
    assert (np.diff(ranks.astype(object)) > 0).all()
    assert int(ranks[5]) - int(ranks[4]) == 1


def test_a_delta_that_does_not_pay_is_not_made() -> None:
    random = np.random.default_rng(0)
    old, new = (random.integers(0, 1 << 16, 100_000).astype("<u2") for _ in range(2))
    payload = codec.encode(BF16, old, new)
    assert payload[0] == RAW and len(payload) == 1 + new.nbytes
    codec.apply(BF16, None, payload, out := np.empty_like(new))
    assert np.array_equal(out, new)
    assert codec.encode(BF16, None, new) == payload
    assert not codec.is_worth_coding(BF16, old, new)
    assert codec.is_worth_coding(BF16, new, changed(BF16, new, 0.4, 1))


def test_it_is_near_what_is_possible() -> None:
    from etude.bench.delta import bounds, make

    old, new = make()
    payload = codec.encode(BF16, old[:CHUNK], new[:CHUNK])
    _, bound = bounds(old[:CHUNK], new[:CHUNK])
    assert bound / 1.1 < 2 * CHUNK / len(payload) < bound


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool],
)
def test_every_dtype_of_torch_has_a_kind(dtype: torch.dtype) -> None:
    kind = delta_format.kind_of(str(dtype).removeprefix("torch."))
    data = torch.arange(96).reshape(4, 24).to(dtype).reshape(-1).view(torch.uint8).numpy()
    assert np.array_equal(codec.stored(kind, codec.codes(kind, data)), data)
    assert (kind is BYTES) == (dtype in (torch.int64, torch.bool))


def test_wrong_sizes_are_refused() -> None:
    old = some(BF16, 1000, 0)
    payload = codec.encode(BF16, old, changed(BF16, old, 0.1, 1))
    whole = codec.encode(BF16, None, old)
    for damaged, base in (
        (payload, None),
        (whole[:-1], None),
        (whole + b"x", None),
        (b"", None),
        (b"\x09abc", old),
    ):
        with pytest.raises(Damaged):
            codec.apply(BF16, base, damaged, np.empty_like(old))


@pytest.mark.parametrize("decoder", [reference, *([fast] if fast.LIBRARY else [])])
def test_a_change_behind_the_end_of_its_context_is_refused(decoder: Any) -> None:
    def old(ones: int) -> Array:
        """Numbers of two contexts: this many ones, and halves."""
        return np.repeat(np.array([0x3F80, 0x3F00], "<u2"), [ones, 100 - ones])

    new = old(60)
    new[59] += 1
    body = reference.encode_delta(BF16, old(60), new)
    assert body
    decoder.apply_delta(BF16, old(60), body, out := np.empty_like(new))
    assert np.array_equal(out, new)
    for ones in (59, 58):
        with pytest.raises(Damaged):
            decoder.apply_delta(BF16, old(ones), body, out)


def test_damaged_payloads_are_refused_or_harmless() -> None:
    report = fuzz(4_000, seed=3)
    assert report.inputs == 4_000 and report.refused > 2_000 and report.applied > 20
