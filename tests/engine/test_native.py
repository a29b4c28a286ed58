"""A pass in C computes the same as the model definition, with the same bits whatever else is in the
pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from etude.core.isa import Isa
from etude.core.sampling import Sample
from etude.engine import native
from etude.engine.engine import Engine
from etude.engine.native import LIBRARY, CpuRunner, unsupported
from etude.engine.runner import TorchRunner
from etude.engine.select import select_runner
from etude.model.config import ExpertsConfig
from etude.model.files import hf_state_dict
from etude.model.transformer import ModelConfig, Transformer
from tests.small_model import Asked, add, drain, plain_logprobs, request, sharp

pytestmark = pytest.mark.skipif(
    LIBRARY is None, reason="native.c is not built: there was no compiler"
)

# Six query heads on two key heads are one group of three each; the vocabulary does not fill its
# last unit.
SMALL = ModelConfig(
    model_type="qwen3",
    vocab_size=150,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=128,
)
MODELS = {
    "llama": replace(SMALL, model_type="llama"),
    "qwen2": replace(SMALL, model_type="qwen2", tie_word_embeddings=False),
    "qwen3": SMALL,
    "nine heads on one": replace(SMALL, num_attention_heads=9, num_key_value_heads=1, head_dim=64),
}
EXPERTS = ExpertsConfig(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, layers=(1,), norm_topk_prob=True
)


@pytest.fixture(params=range(native.ISA + 1), ids=lambda isa: Isa(isa).name.lower())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every instruction set that the processor has and ETUDE_CPU_ISA allows."""
    monkeypatch.setattr(native, "ISA", Isa(request.param))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model(name: str, seed: int = 3, dtype: torch.dtype = torch.float32) -> Transformer:
    made = sharp(MODELS[name], seed, factor=2.0)
    for key, parameter in made.named_parameters():
        if key.endswith("bias"):
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
        parameter.copy_(parameter.bfloat16())
    return made.to(dtype)


def requests() -> list[Asked]:
    """Requests from 6 to 75 tokens, some with the same prefix, some greedy."""
    return [
        request(str(i), [5 + i // 2, 9, 20] * (2 + 3 * i), max_tokens=4 + 3 * i, temperature=i % 3)
        for i in range(8)
    ]


def answers(engine: Engine, asked: list[Asked]) -> dict[str, Sample]:
    for each in asked:
        add(engine, each)
    return drain(engine)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", MODELS)
def test_what_the_operators_compute(name: str) -> None:
    made = model(name)
    ours, reference = (
        answers(
            Engine(made, max_num_seqs=5, max_batched_tokens=40, runner=kind(made, 40)), requests()
        )
        for kind in (CpuRunner, TorchRunner)
    )
    for id, sample in ours.items():
        assert sample.tokens == reference[id].tokens
        assert sample.logprobs == pytest.approx(reference[id].logprobs, abs=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bf16_is_as_near_to_fp32_as_with_the_operators(name: str) -> None:
    exact, made = model(name), model(name, dtype=torch.bfloat16)
    found = answers(Engine(made, max_num_seqs=5, max_batched_tokens=40), requests())
    ours, theirs = [], []
    for asked in requests()[2:5]:
        sample, temperature = found[asked.id], asked.temperature or 1.0
        expected = plain_logprobs(exact, asked.prompt, sample.tokens, temperature)
        ours.append(torch.tensor(sample.logprobs) - expected)
        theirs.append(plain_logprobs(made, asked.prompt, sample.tokens, temperature) - expected)
    assert 0 < torch.cat(ours).abs().mean() < 1.5 * torch.cat(theirs).abs().mean()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    made = model("qwen3", dtype=dtype)
    torch.set_num_threads(2)
    together = answers(Engine(made, max_num_seqs=8, max_batched_tokens=30), requests())
    torch.set_num_threads(1)
    alone = {
        r.id: answers(Engine(made, max_num_seqs=2, prefix_cache=False), [r])[r.id]
        for r in requests()
    }
    assert together == alone


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_change_no_bit(dtype: torch.dtype) -> None:
    """Right and wrong drafts give the tokens and log-probs of plain decoding, to the bit."""
    made = model("qwen3", dtype=dtype)
    plain = answers(Engine(made, max_num_seqs=8), requests())
    guesses = {id: (*sample.tokens[:3], 7, *sample.tokens[4:]) for id, sample in plain.items()}
    drafted = answers(
        Engine(made, max_num_seqs=8, max_batched_tokens=60),
        [replace(each, prediction=guesses[each.id]) for each in requests()],
    )
    assert (
        min(
            sum(s.accepted_draft_tokens for s in drafted.values()),
            sum(s.rejected_draft_tokens for s in drafted.values()),
        )
        > 30
    )
    assert {
        id: replace(sample, accepted_draft_tokens=0, rejected_draft_tokens=0)
        for id, sample in drafted.items()
    } == plain


def test_new_weights_take_the_place_of_the_old() -> None:
    old, new = model("qwen2"), model("qwen2", seed=4)
    engine = Engine(old, max_num_seqs=4)
    before = answers(engine, requests())
    engine.load_weights(1, hf_state_dict(new))
    after, expected = answers(engine, requests()), answers(Engine(new, max_num_seqs=4), requests())
    assert {id: sample.tokens for id, sample in after.items()} == {
        id: s.tokens for id, s in expected.items()
    }
    assert after.keys() == before.keys() and after["7"].tokens != before["7"].tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_it_gives_back_the_weights_that_it_was_given(name: str, dtype: torch.dtype) -> None:
    """A worker proves with these which weights it serves."""
    engine = Engine(model(name, dtype=dtype), max_num_seqs=2)
    for version in range(3):  # the third takes the memory of the first
        expected = hf_state_dict(model(name, seed=version, dtype=dtype))
        engine.load_weights(version, expected)
        found = engine.weights()
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key


def test_who_computes_what() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(
            select_runner(model("llama", dtype=dtype), max_num_seqs=2, kv_cache_bytes=1 << 20),
            CpuRunner,
        )
    assert isinstance(
        select_runner(model("llama"), max_num_seqs=1, kv_cache_bytes=1 << 20), TorchRunner
    )
    sparse = replace(SMALL, model_type="qwen3_moe", experts=EXPERTS)
    assert unsupported(sparse, torch.float32) == ["router softmax"]
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        assert unsupported(replace(SMALL, **{name: 16}), torch.float32) == [f"{name} 16"]
    assert unsupported(replace(SMALL, head_dim=256), torch.float32) == []  # head size of Gemma
    assert unsupported(replace(SMALL, head_dim=288), torch.float32) == ["head_dim 288"]
    assert unsupported(SMALL, torch.float16) == ["torch.float16"]
