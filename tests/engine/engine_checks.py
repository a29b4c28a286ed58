"""Whole engines on a CUDA device against the model definition in float64: `python -m
tests.engine.kernel_checks` runs them after the kernels."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from etude.engine.blocks import num_windowed_blocks
from etude.engine.cuda import CudaRunner
from etude.engine.engine import Engine, FinishedRequest
from etude.model.attention import CausalAttention
from etude.model.config import ExpertsConfig, LinearConfig, ModelConfig
from etude.model.experts import Routing
from etude.model.files import hf_state_dict
from etude.model.transformer import init_from_scratch
from tests.small_model import add, request

WHOLE = ModelConfig(
    model_type="qwen3", vocab_size=5000, hidden_size=256, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, intermediate_size=512,
    max_position_embeddings=2048,
)  # fmt: skip
EXPERTS = ExpertsConfig(
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=128,
    layers=(1, 2, 3),
    norm_topk_prob=True,
)
LINEAR = LinearConfig(
    num_key_heads=2,
    num_value_heads=4,
    key_head_dim=32,
    value_head_dim=64,
    conv_kernel_dim=4,
    layers=(0, 1, 3),
)
ENGINES = {
    "plain": WHOLE,
    "with experts": replace(WHOLE, model_type="qwen3_moe", experts=EXPERTS),
    "with windows": replace(WHOLE, sliding_window=100, sliding_layers=(0, 2)),
    "gpt-oss": replace(
        WHOLE,
        model_type="gpt_oss",
        attention_bias=True,
        attention_out_bias=True,
        sliding_window=100,
        sliding_layers=(0, 2),
        experts=replace(EXPERTS, layers=(0, 1, 2, 3), router_bias=True, swiglu_limit=7.0),
    ),
    "gemma2": replace(
        WHOLE,
        model_type="gemma2",
        hidden_act="gelu_pytorch_tanh",
        query_pre_attn_scalar=60.0,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=30.0,
        sliding_window=100,
        sliding_layers=(0, 2),
    ),
    "qwen3-next": replace(
        WHOLE, model_type="qwen3_next", experts=EXPERTS, linear=LINEAR, partial_rotary_factor=0.25
    ),
}


def check_engine(config: ModelConfig) -> dict[str, float]:
    """Run a whole engine on a GPU, with prompts in chunks, shared prefixes and all sampling
    methods, on weights that replaced others: its log-probs against those of the same weights in
    float64, experts replayed."""
    experts = config.experts
    model, before = (
        init_from_scratch(config, seed=torch.seed() % 1000)
        .to("cuda", torch.bfloat16)
        .requires_grad_(False)
        for _ in range(2)
    )
    windowed = 0
    if config.sliding_window is not None:
        windowed = num_windowed_blocks(
            config.sliding_window, 64, max_num_seqs=24, max_batched_tokens=200
        )
    engine = Engine(
        before,
        max_num_seqs=24,
        max_batched_tokens=200,
        runner=CudaRunner(before, 200, max_num_seqs=24, num_windowed_blocks=windowed),
    )
    engine.load_weights(1, {name: tensor.cpu() for name, tensor in hf_state_dict(model).items()})
    prefix = torch.randint(0, 5000, (130,)).tolist()
    requests = {}
    for i in range(40):
        own = torch.randint(0, 5000, (1 + 17 * i,)).tolist()
        asked = requests[str(i)] = request(
            str(i), (prefix if i % 3 == 0 else []) + own, max_tokens=5 + i,
            temperature=(i % 4) / 2, stop_token_ids=(), top_k=7 if i == 9 else 0,
            top_p=0.9 if i == 10 else 1.0,
        )  # fmt: skip
        add(engine, asked)
    exact = copy.deepcopy(model).double()
    differences = []
    while not engine.idle:
        for event in engine.step():
            if not isinstance(event, FinishedRequest) or event.id in ("9", "10"):
                continue
            asked, sample = requests[event.id], event.sample
            row = torch.tensor([asked.prompt + sample.tokens], device="cuda")
            routing = None
            if experts and sample.experts:
                used = torch.frombuffer(bytearray(sample.experts), dtype=torch.uint8)
                routing = Routing(used.view(1, row.shape[1] - 1, len(experts.layers), -1).cuda())
            positions = torch.arange(row.shape[1] - 1, device="cuda")[None]
            logits = exact.logits(exact(row[:, :-1], positions, CausalAttention(), routing))[
                0, len(asked.prompt) - 1 :
            ]
            expected = torch.log_softmax(logits / (asked.temperature or 1.0), -1)
            expected = expected.gather(1, row[0, len(asked.prompt) :, None])[:, 0].cpu()
            differences.append((torch.tensor(sample.logprobs) - expected).abs())
    assert len(differences) == 38
    return {
        "mean": float(torch.cat(differences).mean()) / 3,
        "largest": float(torch.cat(differences).max()) / 30,
    }
