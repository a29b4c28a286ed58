"""Expected results of the engine, computed in the simplest way: one forward pass over the whole
row, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.core.sampling import Sample, SamplingParams
from etude.engine.batch import ForwardBatch, Ints, ModelRunner, SamplerOutput
from etude.engine.sampler import uniforms
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LatentConfig, ModelConfig
from etude.model.experts import Routing
from etude.model.lora import Adapter
from etude.model.transformer import Transformer
from tests.small_model import ROUNDING, Asked

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 160,
}
EXPERTS = ExpertsConfig(
    num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, layers=(1, 2)
)
GROUPED = replace(
    EXPERTS, sigmoid=True, n_group=3, topk_group=2, n_shared_experts=1, norm_topk_prob=True
)
LATENT = LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
FAMILIES = {
    "llama": ModelConfig(**SHAPE),
    "qwen3_moe": ModelConfig(**SHAPE, model_type="qwen3_moe", experts=EXPERTS),
    "deepseek_v3": ModelConfig(**SHAPE, model_type="deepseek_v3", experts=GROUPED, latent=LATENT),
}


def plain_logits(model: Transformer, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Logits after every token, and the experts that each was routed to."""
    routing = Routing() if model.config.experts else None
    hidden = model(
        torch.tensor([tokens]), torch.arange(len(tokens))[None], CausalAttention(), routing
    )
    return model.logits(hidden)[0], routing.chosen() if routing else None


def distribution(logits_V: Tensor, params: SamplingParams, history: Sequence[int]) -> Tensor:
    """The distribution that the next token is sampled from, in float64; without top-p and masks."""
    logits_V, penalty = logits_V.double().clone(), params.repetition_penalty
    for token in set(history):
        logits_V[token] = (
            logits_V[token] / penalty if logits_V[token] > 0 else logits_V[token] * penalty
        )
    p_V = torch.softmax(logits_V / (params.temperature or 1.0), -1)
    if not params.temperature:
        return p_V
    p_V = torch.where(p_V >= params.min_p * p_V.max(), p_V, 0.0)
    if params.top_k:
        p_V = torch.where(p_V >= p_V.sort().values[-params.top_k], p_V, 0.0)
    return p_V / p_V.sum()


def check(model: Transformer, asked: Asked, sample: Sample) -> None:
    """Check that every token is the one that the request's own random number selects, and that its
    log-prob is right."""
    begin = len(asked.prompt)
    logits, experts = plain_logits(model, (asked.prompt + sample.tokens)[:-1])
    numbers = uniforms(asked.seed, len(sample.tokens))
    for place, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs, strict=True)):
        history = asked.prompt + sample.tokens[:place]
        p = distribution(logits[begin - 1 + place], asked.params, history)
        if asked.temperature == 0:
            assert token == int(p.argmax())
        else:
            assert token == int(torch.searchsorted(p.cumsum(0), numbers[place], right=True))
        assert logprob == pytest.approx(float(p[token].log()), abs=ROUNDING)
    ends = sample.tokens[-1] in asked.stop_token_ids
    room = model.config.max_position_embeddings - begin
    assert sample.finish_reason == ("stop" if ends else "length")
    assert ends or len(sample.tokens) == min(asked.max_tokens, room)
    assert not set(asked.stop_token_ids) & set(sample.tokens[:-1])
    if experts is None:
        assert sample.experts is None
    else:
        assert sample.experts is not None
        assert (
            np.frombuffer(sample.experts, np.uint8).reshape(experts.shape) == experts.numpy()
        ).all()


class Overlapping:
    """A runner that behaves like a device: results are read back later, and a batch may refer to a
    token that has not been read yet."""

    overlaps = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._before = SamplerOutput(tokens=[], logprobs=[])
        self.num_blocks = runner.num_blocks
        self.num_windowed_blocks = runner.num_windowed_blocks
        self.block_size = runner.block_size

    def launch(self, plan: ForwardBatch) -> Callable[[], SamplerOutput]:
        for place, token in enumerate(plan.tokens_N):
            if token < 0:
                plan.tokens_N[place] = self._before.tokens[-1 - token]
        self._before = drawn = self._runner.launch(plan)()
        return lambda: drawn

    def routed_experts(self, blocks: Ints, length: int) -> bytes | None:
        return self._runner.routed_experts(blocks, length)

    def prepare_weights(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        return self._runner.prepare_weights(tensors)

    def prepare_adapter(self, slot: int, adapter: Adapter | None) -> Callable[[], None]:
        return self._runner.prepare_adapter(slot, adapter)

    def weights(self) -> dict[str, Tensor]:
        return self._runner.weights()


class OnlyEven:
    """A constraint that allows even tokens, and every third one must be 6."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def allowed(self) -> NDArray[np.bool_]:
        return np.arange(61) % 2 == 0 if len(self.seen) % 3 < 2 else np.arange(61) == 6

    def allowed_after(self, draft: Iterable[int]) -> list[NDArray[np.bool_]]:
        masks, begin = [], len(self.seen)
        for token in draft:
            if not self.allowed()[token]:
                break
            self.seen.append(token)
            masks.append(self.allowed())
        del self.seen[begin:]
        return masks

    def accept(self, token: int) -> None:
        assert self.allowed()[token]
        self.seen.append(token)
