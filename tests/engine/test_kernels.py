"""The kernels compute what plain torch computes: on the CPU, through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":  # conftest sets it if there is no device
    pytest.skip("a device runs them: tests.engine.kernel_checks", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime import interpreter

from etude.core.sampling import Sample
from etude.engine import cuda
from etude.engine.adapters import AdapterLimits
from etude.engine.engine import Engine
from etude.engine.kernels import attention, fp8, norm
from etude.engine.kernels.trainable import BatchInvariantTransformer
from etude.model.config import ExpertsConfig, LinearConfig
from etude.model.experts import Routing
from etude.model.files import hf_state_dict
from etude.model.fp8 import Quantised, quantise_rows
from etude.model.numerics import Arithmetic
from etude.model.transformer import ModelConfig, Transformer
from etude.train.loss import token_logprobs
from etude.train.packing import TokenSequence, pack_batch
from tests.adapters_of import random_adapter
from tests.engine import kernel_checks
from tests.engine.kernel_inputs import Inputs
from tests.engine.test_sampling_params import check_on_kernels
from tests.slow import slow
from tests.small_model import ROUNDING, Asked, add, drain, request, sharp

SMALL = ModelConfig(
    model_type="qwen3",
    vocab_size=150,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64,
)
EXPERTS = ExpertsConfig(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1,), norm_topk_prob=True
)
MODELS = {
    "qwen3": replace(SMALL, num_hidden_layers=2, sliding_window=5, sliding_layers=(0,)),
    "qwen2": replace(SMALL, model_type="qwen2", tie_word_embeddings=False),
    "qwen3_moe": replace(SMALL, model_type="qwen3_moe", num_hidden_layers=2, experts=EXPERTS),
    # and the changes of other families to scores and logits
    "gpt_oss": replace(
        SMALL,
        model_type="gpt_oss",
        attention_bias=True,
        attention_out_bias=True,
        sliding_window=5,
        sliding_layers=(0,),
        experts=replace(EXPERTS, layers=(0,), router_bias=True, swiglu_limit=2.0),
        query_pre_attn_scalar=20.0,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=9.0,
        residual_multiplier=0.7,
    ),
    "qwen3_next": replace(
        SMALL,
        model_type="qwen3_next",
        num_hidden_layers=2,
        linear=LinearConfig(
            num_key_heads=1,
            num_value_heads=2,
            key_head_dim=4,
            value_head_dim=5,
            conv_kernel_dim=3,
            layers=(0,),
        ),
    ),
}


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that reading it is never right by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


WRAPPED: set[str] = set()
"""Modules of Triton's language that its interpreter has wrapped permanently."""


@pytest.fixture(autouse=True)
def _quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter wraps its language when a kernel begins, and then once more at each call
    of a function, without end. Once is enough. The programs of a kernel run one after the other, so
    those of a single multiprocessor are enough, too."""

    def call(function: interpreter.InterpretedFunction, *given: Any, **named: Any) -> Any:
        module = function.fn.__module__
        if module.startswith("triton.language") and module not in WRAPPED:
            WRAPPED.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*given, **named)

    def convert(x: Any, kind: tl.dtype, to: tl.dtype, rounding: object) -> Any:
        """Round to e4m3 as a device does; the interpreter does not carry."""
        if to == tl.float8e4nv and kind == tl.float32:
            return torch.from_numpy(x.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return by_interpreter(x, kind, to, rounding)

    def dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        """Round each sum once. BLAS may add in another order at the end of a tile, so that a row's
        bits would depend on its place there, which they do not on a device."""
        wide = interpreter.TensorHandle(np.zeros(d.data.shape), tl.float64)
        product = dot_by_interpreter(builder, a, b, wide, *how).data.astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    dot_by_interpreter = interpreter.InterpreterBuilder.create_dot
    by_interpreter = interpreter._convert_float
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(attention, "num_splits", partial(attention.num_splits, processors=1))


@pytest.mark.parametrize("name", kernel_checks.SMALL)
def test_as_in_float64(name: str) -> None:
    found = kernel_checks.SMALL[name](Inputs("cpu", torch.float32))
    assert all(value < 1e-5 for value in found.values()), found


@pytest.mark.parametrize(
    ("name", "invariant", "fp8_kv"),
    [
        slow("qwen3", False, False),
        slow("qwen2", False, False),
        slow("qwen3_moe", False, False),
        ("gpt_oss", False, False),
        ("qwen3_next", False, False),
        slow("qwen3_moe", True, False),
        ("qwen3", False, True),
        slow("gpt_oss", False, True),
        ("qwen3_moe", True, True),
    ],
)
@pytest.mark.filterwarnings("ignore:native.c")
def test_an_engine_on_kernels_says_what_the_model_says(
    name: str, invariant: bool, fp8_kv: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, prompts in the prefix cache, one sequence and several, padded and not,
    some of them greedy."""
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (8,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", ())
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    prompts = [[7] * 3, [5, 9, 20] * 4, [5, 9, 20] * 4 + [1]]
    requests = [
        request(str(i), prompt, max_tokens=2 + i // 2, temperature=i / 2)
        for i, prompt in enumerate(prompts)
    ]
    model = sharp(MODELS[name], seed=3)
    model.compute_with(Arithmetic.of(invariant=False, fp8=False, fp8_kv=fp8_kv))
    windowed = 16 if model.config.windowed_layers else 0
    found = []
    for runner in (
        cuda.CudaRunner(
            model, 12, max_num_seqs=3, invariant=invariant, num_windowed_blocks=windowed
        ),
        None,
    ):
        engine = Engine(model, max_num_seqs=3, max_batched_tokens=9, runner=runner)
        for each in requests:
            add(engine, each)
        found.append(drain(engine))
    ours, reference = found
    assert ours.keys() == reference.keys()
    for id, sample in ours.items():
        assert sample.tokens == reference[id].tokens
        assert sample.logprobs == pytest.approx(reference[id].logprobs, abs=ROUNDING)
        assert sample.experts == reference[id].experts


@pytest.mark.filterwarnings("ignore:native.c")
def test_an_engine_in_fp8_on_kernels_says_what_the_model_in_fp8_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence and several, and a swap. Triton's interpreter rounds to e4m3 differently, so
    torch rounds the rows here."""

    def fill(x_NC: Tensor, out: Quantised, *, gated: bool = False, pdl: bool = False) -> None:
        for to, made in zip(out, quantise_rows(fp8.gated(x_NC) if gated else x_NC), strict=True):
            to.copy_(made)

    def add_norm(x: Tensor, parts: Tensor, gain: Tensor, normed: Tensor, *rest: Any) -> None:
        eps, pdl, *rounded = rest
        by_kernel(x, parts, gain, normed, eps, pdl)
        if rounded and rounded[0] is not None:
            fill(normed, rounded[0])

    by_kernel = norm.add_norm
    monkeypatch.setattr(norm, "add_norm", add_norm)
    monkeypatch.setattr(fp8, "quantise_into", fill)
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (8,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", ())
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    own, other = (
        sharp(MODELS["qwen2"], seed, 3.0).compute_with(Arithmetic.of(invariant=False, fp8=True))
        for seed in (3, 4)
    )
    found = []
    for runner in (cuda.CudaRunner(own, num_blocks=12, max_num_seqs=3), None):
        engine = Engine(own if runner else other, max_num_seqs=3, runner=runner)
        if runner:
            engine.load_weights(1, hf_state_dict(other, torch.float32))
        for number in range(2):
            add(engine, request(str(number), [7, 9 + number], max_tokens=1 + number))
        found.append(drain(engine))
    for id, sample in found[0].items():
        assert sample.tokens == found[1][id].tokens
        assert sample.logprobs == pytest.approx(found[1][id].logprobs, abs=ROUNDING)


def test_drafts_on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts run next to a prompt and a sequence without a draft; tokens and log-probs are those
    without drafts."""
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (8,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", (4, 16))
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    model = sharp(SMALL, seed=3, factor=4.0)
    plain = [
        request(str(i), [5 + i, 9, 20], max_tokens=8, temperature=i / 2, stop_token_ids=())
        for i in range(3)
    ]
    found: list[dict[str, Sample]] = []
    for runner in (None, cuda.CudaRunner(model, num_blocks=12, max_num_seqs=3)):
        engine = Engine(model, max_num_seqs=3, max_batched_tokens=20, runner=runner)
        for each in plain:
            if found and each.id != "1":
                answer = found[0][each.id].tokens
                params = replace(each.params, top_k=150 if each.id == "2" else 0)
                each = replace(each, prediction=(*answer[:4], 60, *answer[5:]), params=params)
            add(engine, each)
        found.append(drain(engine))
    expected, drafted = found
    for id, sample in drafted.items():
        assert sample.tokens == expected[id].tokens
        assert sample.logprobs == pytest.approx(expected[id].logprobs, abs=ROUNDING)
        assert bool(sample.accepted_draft_tokens and sample.rejected_draft_tokens) == (id != "1")


@pytest.mark.filterwarnings("ignore:native.c")
@pytest.mark.parametrize("invariant", [slow(False), True])
def test_adapters_on_kernels(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of rank 8, which is stored unpadded, and of lower rank; requests of one adapter are
    not neighbours. Answers are those of torch's operators, and with batch-invariant kernels they
    equal those of a request alone to the bit."""
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (16,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", ())
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    limits = AdapterLimits(num_named=2, max_rank=8)
    adapters = {
        "a": random_adapter(SMALL, 1, rank=8),
        "b": random_adapter(SMALL, 2, rank=3, targets=("q_proj", "v_proj", "down_proj")),
    }

    def answers(on_kernels: bool, numbers: range) -> dict[str, Sample]:
        model, runner = sharp(SMALL, seed=3), None
        if on_kernels:
            runner = cuda.CudaRunner(model, 12, 4, invariant=invariant, adapters=limits)
        engine = Engine(model, max_num_seqs=4, runner=runner, adapters=limits)
        for name, adapter in adapters.items():
            engine.load_adapter(name, adapter)
        for number in numbers:
            asked = request(str(number), [5 + number, 9, 20], max_tokens=2, temperature=0.5)
            add(engine, replace(asked, adapter=("a", "b", None)[number % 3]))
        return drain(engine)

    together, reference = (answers(on_kernels, range(4)) for on_kernels in (True, False))
    for id, sample in together.items():
        assert sample.tokens == reference[id].tokens
        assert sample.logprobs == pytest.approx(reference[id].logprobs, abs=ROUNDING)
        if invariant and id in "01":
            alone = answers(True, range(int(id), int(id) + 1))[id]
            assert (sample.tokens, sample.logprobs) == (alone.tokens, alone.logprobs)


@pytest.mark.parametrize("way", [{"top_k": 5}, {"top_logprobs": 2}])
def test_no_bit_depends_on_how_another_request_is_sampled(
    way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits do not depend on whether top log-probs are reported, either."""
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (8,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", ())
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    model = sharp(SMALL, seed=3, factor=2.0)
    plain, other = (
        request(id, [5, 9, 20], seed=0, max_tokens=4, temperature=0.7, stop_token_ids=(), **options)
        for id, options in (("0", {}), ("1", way))
    )

    def answers(*requests: Asked) -> dict[str, Sample]:
        runner = cuda.CudaRunner(model, 12, max_num_seqs=2, invariant=True)
        engine = Engine(model, max_num_seqs=2, runner=runner)
        for each in requests:
            add(engine, each)
        return drain(engine)

    alone, together = answers(plain), answers(plain, other)
    assert together["0"] == alone["0"]
    if "top_logprobs" in way:
        assert [len(top) for top in together["1"].top_logprobs] == [2] * 4
        assert replace(together["1"], top_logprobs=()) == alone["0"]


# For the six tokens that are read: the router's own choice at two of them, and elsewhere the
# experts it ranks lowest or highest.
REPLAYED = [[0, 1], [3, 2], [-1, -1], [2, 0], [-1, -1], [1, 3]]


@pytest.mark.parametrize(
    ("name", "replay", "fp8_kv"),
    [
        ("qwen2", None, False),
        ("qwen2", None, True),
        ("qwen3_moe", None, False),
        ("qwen3_moe", REPLAYED, False),
    ],
)
def test_a_trainable_model_on_kernels_has_the_values_and_gradients_of_the_plain_one(
    name: str, replay: list[list[int]] | None, fp8_kv: bool
) -> None:
    packed = pack_batch(
        [TokenSequence((5, 9, 20, 7, 3), (True,) * 5), TokenSequence((8, 11, 2), (True,) * 3)]
    )
    found, routings = [], []
    for kind in (Transformer, BatchInvariantTransformer):
        model = kind(MODELS[name])
        model.load_state_dict(sharp(MODELS[name], seed=3, factor=2.0).state_dict())
        model.compute_with(Arithmetic.of(invariant=False, fp8=False, fp8_kv=fp8_kv))
        warm = replace(packed, temperature_N=torch.full((packed.num_loss_tokens,), 0.7))
        routing = Routing(torch.tensor(replay)[:, None]) if replay else None
        routings.append(routing)
        logp_N, _ = token_logprobs(model, warm, routing)
        (logp_N * torch.arange(len(logp_N))).sum().backward()
        found.append((logp_N, {key: p.grad for key, p in model.named_parameters()}))
    (plain_N, plain), (ours_N, ours) = found
    assert ours_N.tolist() == pytest.approx(plain_N.tolist(), abs=1e-4)
    for key, grad in plain.items():
        assert torch.allclose(ours[key], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max())), key
    if replay:
        (plain_routing, routing) = routings
        assert routing.chosen().tolist() == plain_routing.chosen().tolist()
        assert routing.mismatches().tolist() == plain_routing.mismatches().tolist()
        told = torch.tensor(replay)
        assert torch.equal(routing.chosen()[:, 0][told[:, 0] >= 0], told[told[:, 0] >= 0])


def test_experts_that_are_given_have_the_shares_of_those_that_are_chosen() -> None:
    """Equal to the bit: a replay of the router's own choice changes nothing."""
    from etude.engine.kernels import experts

    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(5, dtype=torch.int32)

    def route(ids: torch.Tensor, given: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ids, shares = ids.clone(), torch.empty(5, 4)
        record = torch.empty(5, 4, dtype=torch.int32)
        experts.route(logits, ids, shares, record, slots, renormalise=True, given=given)
        return ids, shares

    own, shares = route(torch.empty(5, 4, dtype=torch.int32), given=False)
    for told in (own, own.where(slots[:, None] % 2 == 0, -1)):
        again, same = route(told, given=True)
        assert torch.equal(again, own) and torch.equal(same, shares)
    swapped, other = route(own.flip(1), given=True)
    assert torch.equal(swapped, own.flip(1)) and torch.allclose(other, shares.flip(1))


def test_few_tokens_are_routed_like_many() -> None:
    """The same holds if logits are equal, and if a router outputs NaN."""
    from etude.engine.kernels import experts

    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [-1.0, 2.0, 2.0, nan, -inf, -2.0],
            [-0.0, -5.0, 0.0, -5.0, nan, -5.0],
            [-3.0, -2.0, -1.0, -4.0, -4.0, -4.0],
        ]
    )
    slots = torch.arange(4, dtype=torch.int32)
    ids, shares = torch.empty(4, 4, dtype=torch.int32), torch.empty(4, 4)
    many, few = torch.empty(4, 4, dtype=torch.uint8), torch.empty(4, 4, dtype=torch.uint8)
    experts.route(logits, ids, shares, many, slots, renormalise=True)
    act, down, out = torch.ones(4, 4, 8), torch.randn(6, 3, 8), torch.full((4, 3), nan)
    experts.chosen_down(act, down, logits, slots, few, out, renormalise=True)
    assert torch.equal(few, many)
    expected = torch.einsum("bk,bke->be", shares, down.sum(-1)[ids.long()])
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("invariant", [slow(False), True])
def test_sampling_parameters_on_kernels(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "PREFILL_GRAPH_SIZES", (16,))
    monkeypatch.setattr(cuda, "DRAFT_GRAPH_SIZES", (16,))
    monkeypatch.setattr(cuda.CudaRunner, "block_size", 8)
    check_on_kernels(
        sharp(SMALL, seed=3, factor=4.0), monkeypatch, max_tokens=4, invariant=invariant
    )
