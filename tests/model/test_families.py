"""Every family against `transformers`: the same numbers, and the same files in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from etude.model.attention import CausalAttention, KVCache, PagedAttention
from etude.model.files import (
    build_model,
    hf_state_dict,
    hf_tensors,
    read_directory,
    write_directory,
)
from etude.model.from_scratch import tokenizer_files
from etude.model.transformer import ModelConfig, Routing, Transformer, init_from_scratch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
SMALL = tokenizer_files(["a b c"], 270)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 6.0],
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
GLM = {
    **EXPERTS,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
NEXT = {
    **EXPERTS,
    "head_dim": 32,
    "num_experts": 6,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "rope_theta": 100_000.0},
    "llama llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}},
    "llama linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "head_dim": 10},
    "llama yarn to its context": {"rope_scaling": YARN | {"factor": None}},
    "qwen2": {"num_key_value_heads": 3},
    "qwen2 yarn": {"rope_scaling": YARN},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "num_experts": 6, "norm_topk_prob": True},
    "qwen3_moe sparse": {**EXPERTS, "head_dim": 8, "num_experts": 4, "decoder_sparse_step": 2},
    "qwen3_moe some": {**EXPERTS, "head_dim": 8, "num_experts": 4, "mlp_only_layers": [1]},
    "deepseek_v3": {**EXPERTS, **LATENT, "q_lora_rank": 20},
    "deepseek_v3 yarn": {
        **EXPERTS,
        **LATENT,
        "q_lora_rank": None,
        "rope_scaling": YARN
        | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1},
    },
    "deepseek_v3 one group": {
        **EXPERTS,
        **LATENT,
        "q_lora_rank": 20,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "norm_topk_prob": False,
    },
    "llama biases": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "llama dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama longrope": {"rope_scaling": LONGROPE},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3 window": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "attention_bias": True,
    },
    "qwen3_moe window": {
        **EXPERTS,
        "num_experts": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
    },
    "qwen3_next": {
        **NEXT,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_next dense": {
        **NEXT,
        "mlp_only_layers": [0, 1, 2],
        "full_attention_interval": 2,
        "attention_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "linear_conv_kernel_dim": 2,
        "linear_num_key_heads": 4,
        "norm_topk_prob": False,
    },
    "mistral": {"sliding_window": 11},
    "mistral whole": {"sliding_window": None, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral window": {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 12},
    "qwen2_moe": {**EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40},
    "qwen2_moe window": {
        **EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
        "use_sliding_window": True,
        "sliding_window": 10,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "qkv_bias": False,
    },
    "smollm3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
    "smollm3 window": {
        "pad_token_id": 0,
        "use_sliding_window": True,
        "sliding_window": 9,
        "no_rope_layers": [1, 0, 1],
        "tie_word_embeddings": False,
        "mlp_bias": True,
    },
    "phi3": {"pad_token_id": 0},
    "phi3 window": {
        "pad_token_id": 0,
        "sliding_window": 10,
        "partial_rotary_factor": 0.5,
        "rope_scaling": LONGROPE | {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]},
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "num_hidden_layers": 4},
    "olmo3 yarn": {
        "sliding_window": 6,
        "rope_scaling": YARN,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "seed_oss": {"head_dim": 8, "attention_out_bias": True},
    "gemma2": {"head_dim": 12, "sliding_window": 8, "query_pre_attn_scalar": 20},
    "gemma2 whole": {
        "head_dim": 8,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention"] * 3,
    },
    "gemma3_text": {"head_dim": 12, "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3_text linear": {
        "head_dim": 12,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 500.0,
        "query_pre_attn_scalar": 30,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": False,
    },
    "glm4_moe": GLM,
    "glm4_moe large": {
        **GLM,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.25,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.9,
    },
    "deepseek_v2": {**EXPERTS, **LATENT, "q_lora_rank": 20, "n_group": None, "topk_group": None},
    "deepseek_v2 groups": {
        **EXPERTS,
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 0,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}


def mean(family: str, name: str) -> float:
    """Mean of a tensor's weights; for norms it is the value that changes nothing."""
    centred = family.startswith(("gemma", "qwen3_next")) and "linear_attn" not in name
    return 1.0 if "norm" in name and not centred else 0.0


@pytest.fixture(params=MODELS, scope="module")
def theirs(request: pytest.FixtureRequest) -> Any:
    """A model of transformers with weights that matter: none has a value that would hide it."""
    family = request.param.split()[0]
    config = transformers.AutoConfig.for_model(family, **SHAPE | MODELS[request.param])
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.normal_(mean(family, name), 0.2 if tensor.ndim > 1 else 0.3, generator=generator)
    return model


def save_in_bf16(model: Any, path: Path, **options: Any) -> None:
    """Save as models are published: parameters rounded, tables and router biases not. The model
    continues with the rounded parameters."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16)
    for name, buffer in buffers.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, buffer)
    model.save_pretrained(path, **options)
    model.float()


def ours_from(path: Path) -> Transformer:
    for name, data in SMALL.items():
        (path / name).write_bytes(data)
    return build_model(*read_directory(path)).requires_grad_(False)


def tokens(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.Generator().manual_seed(1))


def through_the_cache(model: Transformer, tokens_T: Tensor, steps: list[int]) -> Tensor:
    """Run one sequence in pieces, with its keys and values in arbitrary blocks."""
    cache, blocks = KVCache(model.config, 9, 8, like=model.rope), torch.tensor([5, 2, 8, 1, 7])
    positions, parts = torch.arange(len(tokens_T)), []
    for new, place in zip(tokens_T.split(steps), positions.split(steps), strict=True):
        attend = PagedAttention(
            cache, slot_mapping_GN=(blocks[place // 8] * 8 + place % 8)[None].numpy(), starts=[0],
            lengths=[int(place[-1]) + 1], block_table_GBM=blocks[None, None].numpy(), ids=[0],
            num_decode=int(len(new) == 1),
        )  # fmt: skip
        parts.append(model(new, place, attend))
    return model.logits(torch.cat(parts))


def test_logits_are_those_of_transformers(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    model, tokens_BT = ours_from(tmp_path), tokens()
    with torch.no_grad():
        expected = theirs(tokens_BT).logits
    assert expected.std() > 0.3
    positions = torch.arange(40).expand(2, 40)
    torch.testing.assert_close(
        model.logits(model(tokens_BT, positions, CausalAttention())), expected, atol=1e-4, rtol=1e-4
    )
    cached = through_the_cache(model, tokens_BT[0], [9, 1, 1, 20, 1, 8])
    torch.testing.assert_close(cached, expected[0], atol=1e-4, rtol=1e-4)


def test_weights_go_there_and_back_bit_for_bit(theirs: Any, tmp_path: Path) -> None:
    save_in_bf16(theirs, tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    model = ours_from(tmp_path / "theirs")
    small, given = read_directory(tmp_path / "theirs")
    write_directory(
        tmp_path / "ours",
        small | {"config.json": model.config.to_json().encode()},
        hf_state_dict(model),
        40_000,
    )
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    mine = {
        n: t
        for file in (tmp_path / "ours").glob("*.safetensors")
        for n, t in load_file(file).items()
    }
    assert mine.keys() == given.keys()
    assert all(
        torch.equal(mine[name], tensor) and mine[name].dtype == tensor.dtype
        for name, tensor in given.items()
    )

    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.float32,
        pad_token_id=0,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)


def test_the_config_comes_back(theirs: Any) -> None:
    config = ModelConfig.from_json(json.dumps(theirs.config.to_dict()))
    assert ModelConfig.from_json(config.to_json()) == config
    assert config.max_position_embeddings == 128
    assert config.rope_scaling is None or config.rope_scaling.factor > 1


def moe(model_type: str = "deepseek_v3") -> Transformer:
    shape = json.dumps(SHAPE | MODELS[model_type] | {"model_type": model_type})
    return init_from_scratch(ModelConfig.from_json(shape), seed=0)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_replayed_experts_are_used(model_type: str) -> None:
    model, tokens_BT, positions = moe(model_type), tokens(), torch.arange(40).expand(2, 40)

    def run(routing: Routing | None) -> Tensor:
        return model(tokens_BT, positions, CausalAttention(), routing).detach()

    own = Routing()
    plain = run(own)
    layers = len(model.config.experts.layers)  # type: ignore[union-attr]
    ids = own.chosen().unflatten(0, (2, 40))
    assert ids.shape == (2, 40, layers, 2)
    assert torch.equal(run(None), plain)
    assert torch.equal(run(Routing(ids.to(torch.uint8))), plain)
    assert torch.equal(run(Routing(torch.full_like(ids, -1))), plain)

    other = ids.clone()
    other[:, 20] = (other[:, 20] + 1) % 6
    replay = Routing(other.short())
    changed = run(replay)
    assert torch.equal(replay.chosen().view(ids.shape), other)
    # Other experts have other numbers of rows, and products may round them differently.
    torch.testing.assert_close(changed[:, :20], plain[:, :20])
    assert not torch.isclose(changed[:, 20], plain[:, 20], rtol=1e-2).all()


def test_only_the_experts_that_were_used_learn_and_the_router_always_does() -> None:
    model = moe()
    ids = torch.tensor([1, 4]).expand(1, 5, 2, 2)
    model(
        tokens(1, 5), torch.arange(5)[None], CausalAttention(), Routing(ids)
    ).square().sum().backward()
    gradients = hf_tensors(
        model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    )
    assert gradients["model.layers.1.mlp.gate.weight"].any()
    assert gradients["model.layers.1.mlp.shared_experts.up_proj.weight"].any()
    for expert in range(8):
        for part in ("gate", "up", "down"):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            assert gradients[name].any() == (expert in (1, 4)), name


def test_tokens_do_not_depend_on_whom_they_share_experts_with() -> None:
    model = moe("qwen3_moe").requires_grad_(False)
    rows, positions = tokens(4, 16), torch.arange(16)[None]
    together = model(rows, positions.expand(4, 16), CausalAttention())
    alone = torch.cat([model(row[None], positions, CausalAttention()) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_a_model_in_bf16_keeps_the_bias_of_its_router_whole() -> None:
    model = moe()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    hf_tensors(model)[name].normal_()
    before = hf_tensors(model)[name].clone()
    model.to(torch.bfloat16)
    assert torch.equal(hf_tensors(model)[name], before)
    assert torch.equal(hf_state_dict(model)[name], before)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_bf16_stays_near_fp32(theirs: Any, tmp_path: Path) -> None:
    save_in_bf16(theirs, tmp_path)
    exact = ours_from(tmp_path)
    rough = build_model(*read_directory(tmp_path), dtype=torch.bfloat16).requires_grad_(False)
    routing, positions = Routing(), torch.arange(40).expand(2, 40)
    expected = exact.logits(exact(tokens(), positions, CausalAttention(), routing))
    replay = Routing(routing.chosen().unflatten(0, (2, 40))) if exact.config.experts else None
    logits = rough.logits(rough(tokens(), positions, CausalAttention(), replay))
    assert logits.dtype == torch.float32
    wrong = (logits - expected).square().mean((0, 2)).sqrt()
    # The norm after a recurrent state makes a nearly empty read as large as any other, and its
    # rounding error too; there the median token is checked.
    typical = wrong.median() if exact.config.linear else wrong.square().mean().sqrt()
    assert typical < 0.03 * expected.std()


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("deepseek_v3", "attention_bias", True),
        ("mistral", "mlp_bias", True),
        ("llama", "use_sliding_window", True),
        ("llama", "sliding_window", 4096),
        ("llama", "layer_types", ["sliding_attention"] * 3),
        ("qwen2", "layer_types", ["sliding_attention"] * 3),
        ("qwen3", "layer_types", ["chunked_attention"] * 3),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "logit_scale", 2.0),
        ("llama", "quantization_config", {"quant_method": "awq"}),
        ("llama", "rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("llama", "rope_scaling", LONGROPE | {"original_max_position_embeddings": 64}),
        ("llama", "rope_scaling", YARN | {"finetuned": True}),
        ("phi3", "rope_scaling", YARN | {"rope_type": "llama3"}),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("glm4_moe", "num_experts_per_tok", 9),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("gpt2", "n_ctx", 5),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(model_type: str, key: str, value: Any) -> None:
    said = SHAPE | MODELS.get(model_type, {}) | {"model_type": model_type, key: value}
    named = {"gpt2": "model_type", "rope_scaling": "rope|factor"}
    expected = named.get(model_type) or named.get(key) or key
    with pytest.raises(ValueError, match=rf"config\.json: .*({expected})"):
        ModelConfig.from_json(json.dumps(said))


def test_tensors_that_files_carry_in_vain_are_left_out() -> None:
    model = init_from_scratch(ModelConfig(**SHAPE), 0)  # type: ignore[arg-type]
    small, tensors = {"config.json": model.config.to_json().encode()}, hf_state_dict(model)
    extra = (
        "lm_head.weight",
        "model.layers.3.eh_proj.weight",
        "mtp.fc.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    again = build_model(small, tensors | {name: torch.ones(1) for name in extra})
    assert hf_state_dict(again).keys() == tensors.keys()
