"""Adapters in the engine: several at once on one base, and bits that do not depend on other
requests."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from etude.core.sampling import Request, Sample
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine, FinishedRequest
from etude.engine.graph_inputs import adapter_inputs
from etude.model.files import hf_state_dict, load_weights
from etude.model.lora import Adapter, merged
from etude.model.numerics import INVARIANT
from etude.model.transformer import Transformer
from tests.adapters_of import random_adapter
from tests.small_model import ROUNDING, config, sharp

ADAPTERS = {
    "a": random_adapter(config(), 1),
    "b": random_adapter(config(), 2, rank=8, targets=("q_proj", "down_proj")),
}
LIMITS = AdapterLimits(num_named=2, max_rank=8)
FIT_FOR_C = replace(
    config(),
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=64,
)
"""A model with sizes that native.c supports."""
NAMES = ("a", "b", None, "b", "a")


def request(number: int, adapter: str | None) -> Request:
    prompt = tuple(range(1 + number, 12 + 2 * number))
    return Request(prompt=prompt, max_tokens=6, seed=number, adapter=adapter)


def answers(engine: Engine, requests: list[Request]) -> list[Sample]:
    for number, each in enumerate(requests):
        engine.add(each, str(number))
    found: dict[str, Sample] = {}
    while not engine.idle:
        found |= {e.id: e.sample for e in engine.step() if isinstance(e, FinishedRequest)}
    return [found[str(number)] for number in range(len(requests))]


def adapted_engine(*, invariant: bool = False, **more: int) -> Engine:
    model = sharp(config(), 0)
    if invariant:
        model.compute_with(INVARIANT)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine(model, max_num_seqs=8, adapters=LIMITS, **more)
    assert invariant or any("native.c does not support adapters" in str(w.message) for w in said)
    for name, adapter in ADAPTERS.items():
        engine.load_adapter(name, adapter)
    return engine


def merged_model(adapter: Adapter | None) -> Transformer:
    model = sharp(config(), 0)
    if adapter is not None:
        tensors = hf_state_dict(model, torch.float32) | dict(adapter.tensors)
        load_weights(model, merged(tensors, adapter.config))
    return model


def test_each_request_has_its_own_adapter() -> None:
    """Each request gives the same alone on merged weights, and together with others on one base."""
    requests = [request(number, name) for number, name in enumerate(NAMES)]
    together = answers(adapted_engine(), requests)
    for asked, sample in zip(requests, together, strict=True):
        model = merged_model(ADAPTERS[asked.adapter] if asked.adapter else None)
        (alone,) = answers(Engine(model, max_num_seqs=1), [replace(asked, adapter=None)])
        assert sample.tokens == alone.tokens
        assert sample.logprobs == pytest.approx(alone.logprobs, abs=ROUNDING)
    assert len({sample.tokens for sample in answers(adapted_engine(), [
        request(0, name) for name in ("a", "b", None)
    ])}) == 3  # fmt: skip


def test_bits_do_not_depend_on_the_company() -> None:
    requests = [request(number, name) for number, name in enumerate(NAMES)]
    together = answers(adapted_engine(invariant=True, max_batched_tokens=16), requests)
    for asked, sample in zip(requests, together, strict=True):
        (alone,) = answers(adapted_engine(invariant=True), [asked])
        assert (sample.tokens, sample.logprobs) == (alone.tokens, alone.logprobs)


def test_prefixes_are_shared_within_an_adapter_only() -> None:
    engine = adapted_engine()
    prompt = tuple(range(1, 41))

    def cached(adapter: str | None) -> int:
        before = engine.stats().cached_tokens
        answers(engine, [Request(prompt=prompt, max_tokens=2, seed=0, adapter=adapter)])
        return engine.stats().cached_tokens - before

    assert cached("a") == cached("b") == cached(None) == 0
    assert cached("a") > 0 and cached(None) > 0
    engine.load_adapter("a", random_adapter(config(), 9))
    assert cached("a") == 0
    assert cached("b") > 0


@pytest.mark.parametrize(("max_num_seqs", "invariant"), [(1, False), (4, False), (4, True)])
def test_weights_may_bring_an_adapter_along(max_num_seqs: int, invariant: bool) -> None:
    """The base is put in place once, and the adapter with each version: next to the base, or merged
    into it by a runner that needs that."""
    own = random_adapter(FIT_FOR_C, 1)
    published = {n: t.bfloat16() for n, t in own.tensors.items()}
    base = hf_state_dict(sharp(FIT_FOR_C, 0))
    limits = AdapterLimits(own=own.config)
    model = sharp(FIT_FOR_C, 5)
    if invariant:
        model.compute_with(INVARIANT)
    engine = Engine(model, max_num_seqs=max_num_seqs, adapters=limits)
    engine.load_weights(1, base)
    assert engine.weights().keys() == base.keys()
    for version, scale in ((2, 1.0), (3, -1.0)):
        adapter = {n: t * scale if "lora_B" in n else t for n, t in published.items()}
        engine.load_weights(version, base | adapter)
        found = engine.weights()
        assert found.keys() == adapter.keys()
        assert all(torch.equal(found[n], t) for n, t in adapter.items())
        for tensor in found.values():
            tensor.zero_()  # `weights` returns a copy
        assert all(torch.equal(t, adapter[n]) for n, t in engine.weights().items())
        (sample,) = answers(engine, [request(0, None)])
        alone = sharp(FIT_FOR_C, 0)
        load_weights(alone, merged({n: t.float() for n, t in (base | adapter).items()}, own.config))
        (expected,) = answers(Engine(alone, max_num_seqs=1), [request(0, None)])
        assert sample.tokens == expected.tokens
        assert sample.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)
        assert [span.version for span in sample.versions] == [version]
    engine.load_weights(4, base)
    assert engine.weights().keys() == base.keys()
    (sample,) = answers(engine, [request(0, None)])
    plain = sharp(FIT_FOR_C, 0)
    load_weights(plain, base)
    assert sample.tokens == answers(Engine(plain, max_num_seqs=1), [request(0, None)])[0].tokens


def test_what_has_no_room_or_does_not_fit_is_refused() -> None:
    engine = adapted_engine()
    with pytest.raises(ValueError, match="no adapter is named 'c'; the adapters here: a, b"):
        engine.add(request(0, "c"), "x")
    with pytest.raises(
        ValueError, match="no room for adapter c: this engine has room for 2 adapters"
    ):
        engine.load_adapter("c", ADAPTERS["a"])
    with pytest.raises(ValueError, match="rank 16, but this engine has room for rank 8 at most"):
        engine.load_adapter("a", random_adapter(config(), 1, rank=16))
    plain = Engine(sharp(config(), 0), max_num_seqs=1)
    with pytest.raises(ValueError, match="started without room for one"):
        plain.load_weights(1, hf_state_dict(sharp(config(), 0)) | dict(ADAPTERS["a"].tensors))


def test_tiles_are_rows_of_one_slot() -> None:
    """Tiles also join requests that are not neighbours in the batch."""
    slots = torch.tensor([2] * 10 + [0] + [2] * 10 + [1]).numpy()
    tiles = {name: values.tolist() for name, values in adapter_inputs(slots).items()}
    assert tiles == {
        "adapter_row": [10, 21, *range(10), *range(11, 21)],
        "adapter_first": [0, 1, 2, 18],
        "adapter_count": [1, 1, 16, 4],
        "adapter_slot": [0, 1, 2, 2],
    }


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_weights_that_were_prepared_and_never_put_in_place_are_not_taken_for_served(
    max_num_seqs: int,
) -> None:
    own = random_adapter(FIT_FOR_C, 1)
    weights = hf_state_dict(sharp(FIT_FOR_C, 0), torch.float32) | dict(own.tensors)

    def answer(num_dropped: int) -> tuple[int, ...]:
        limits = AdapterLimits(own=own.config)
        engine = Engine(sharp(FIT_FOR_C, 5), max_num_seqs=max_num_seqs, adapters=limits)
        for _ in range(num_dropped):
            engine.prepare_weights(weights)
        engine.load_weights(1, weights)
        return answers(engine, [request(0, None)])[0].tokens

    assert answer(1) == answer(0)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_an_adapter_is_added_to_its_own_base_after_another_was_prepared(max_num_seqs: int) -> None:
    """The other adapter may be one that did not fit."""
    first, second = (random_adapter(FIT_FOR_C, seed) for seed in (1, 2))
    base, other = (hf_state_dict(sharp(FIT_FOR_C, seed), torch.float32) for seed in (0, 3))
    unfit = {name: tensor[:1] for name, tensor in first.tensors.items()}

    def answer(is_refused: bool) -> tuple[int, ...]:
        limits = AdapterLimits(own=first.config)
        engine = Engine(sharp(FIT_FOR_C, 5), max_num_seqs=max_num_seqs, adapters=limits)
        engine.load_weights(1, base | dict(first.tensors))
        if is_refused:
            with pytest.raises((ValueError, RuntimeError)):
                engine.prepare_weights(other | unfit)
        engine.load_weights(2, base | dict(second.tensors))
        return answers(engine, [request(0, None)])[0].tokens

    assert answer(True) == answer(False)
