"""config.json files of widely used models: their shapes and facts, written down by hand, without
token names and the like. `REFUSED` has a word of the reason for those that are not supported."""

from __future__ import annotations

from typing import Any


def shape(
    layers: int, hidden: int, inner: int, heads: tuple[int, int], vocabulary: int, context: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    said = {"factor": factor, "original_max_position_embeddings": original}
    return {"type": "yarn", "beta_fast": 32, "beta_slow": 1, **said, **more}


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
QWEN2 = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 70,
    "attention_dropout": 0.0,
}
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 36,
    "tie_word_embeddings": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10_000_000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
MISTRAL = {
    "model_type": "mistral",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
DEEPSEEK_V3 = LATENT | {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0),
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "quantization_config": FP8,
}
DEEPSEEK_V2 = LATENT | {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_scaling": yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707),
    "scoring_func": "softmax",
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GEMMA2 = {
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
}
GLM = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "sliding_window": 128,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "initial_context_length": 4096,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.9,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        + ["model.embed_tokens", "lm_head"],
    },
}
GRANITE = {
    "model_type": "granite",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
PHI3 = {
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
OLMO2 = {
    "model_type": "olmo2",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500_000,
    "tie_word_embeddings": False,
}


def types(layers: int, kinds: str) -> list[str]:
    """`kinds`: s or f for each layer of the pattern."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    return [names[kinds[n % len(kinds)]] for n in range(layers)]


PHI4_MINI_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + n for n in range(48)],
}

KNOWN: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": shape(30, 576, 1536, (9, 3), 49152, 8192)
    | LLAMA
    | {"rope_theta": 100_000, "is_llama_config": True, "rope_interleaved": False}
    | {"tie_word_embeddings": True, "rope_scaling": None},
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": shape(24, 2048, 8192, (32, 32), 49152, 8192)
    | LLAMA
    | {"rope_theta": 130_000, "tie_word_embeddings": True},
    "meta-llama/Llama-3.1-8B-Instruct": shape(32, 4096, 14336, (32, 8), 128256, 131072)
    | LLAMA
    | {"rope_scaling": llama3(8.0)},
    "meta-llama/Llama-3.1-70B-Instruct": shape(80, 8192, 28672, (64, 8), 128256, 131072)
    | LLAMA
    | {"rope_scaling": llama3(8.0)},
    "meta-llama/Llama-3.2-1B-Instruct": shape(16, 2048, 8192, (32, 8), 128256, 131072)
    | LLAMA
    | {"rope_scaling": llama3(32.0), "head_dim": 64, "tie_word_embeddings": True},
    "meta-llama/Llama-3.2-3B-Instruct": shape(28, 3072, 8192, (24, 8), 128256, 131072)
    | LLAMA
    | {"rope_scaling": llama3(32.0), "head_dim": 128, "tie_word_embeddings": True},
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": shape(32, 4096, 14336, (32, 8), 128256, 131072)
    | LLAMA
    | {"rope_scaling": llama3(8.0)},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": shape(28, 3584, 18944, (28, 4), 152064, 131072)
    | QWEN2
    | {"rope_theta": 10_000, "sliding_window": 4096, "tie_word_embeddings": False},
    "Qwen/Qwen2.5-0.5B-Instruct": shape(24, 896, 4864, (14, 2), 151936, 32768)
    | QWEN2
    | {"tie_word_embeddings": True, "max_window_layers": 21},
    "Qwen/Qwen2.5-7B-Instruct": shape(28, 3584, 18944, (28, 4), 152064, 32768)
    | QWEN2
    | {"tie_word_embeddings": False, "max_window_layers": 28},
    "Qwen/Qwen2.5-Coder-7B-Instruct": shape(28, 3584, 18944, (28, 4), 152064, 32768)
    | QWEN2
    | {"tie_word_embeddings": False, "max_window_layers": 28},
    "Qwen/Qwen2.5-Coder-32B-Instruct": shape(64, 5120, 27648, (40, 8), 152064, 32768)
    | QWEN2
    | {"tie_word_embeddings": False},
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": shape(24, 2048, 5632, (16, 16), 151936, 8192)
    | QWEN2
    | {"model_type": "qwen2_moe", "sliding_window": 32768, "max_window_layers": 21}
    | {"decoder_sparse_step": 1, "moe_intermediate_size": 1408, "norm_topk_prob": False}
    | {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False},
    "Qwen/Qwen3-0.6B": shape(28, 1024, 3072, (16, 8), 151936, 40960)
    | QWEN3
    | {"tie_word_embeddings": True, "max_window_layers": 28},
    "Qwen/Qwen3-8B": shape(36, 4096, 12288, (32, 8), 151936, 40960) | QWEN3,
    "Qwen/Qwen3-32B": shape(64, 5120, 25600, (64, 8), 151936, 40960) | QWEN3,
    "Qwen/Qwen3-4B-Instruct-2507": shape(36, 2560, 9728, (32, 8), 151936, 262144)
    | QWEN3
    | {"rope_theta": 5_000_000, "tie_word_embeddings": True},
    "Qwen/Qwen3-30B-A3B": shape(48, 2048, 6144, (32, 4), 151936, 40960)
    | QWEN3_MOE
    | {"moe_intermediate_size": 768, "max_window_layers": 48},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": shape(48, 2048, 5472, (32, 4), 151936, 262144)
    | QWEN3_MOE
    | {"moe_intermediate_size": 768, "rope_theta": 10_000_000, "max_window_layers": 28}
    | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": shape(62, 6144, 8192, (96, 8), 151936, 262144)
    | QWEN3_MOE
    | {"num_experts": 160, "moe_intermediate_size": 2560, "rope_theta": 10_000_000}
    | {"max_window_layers": 62, "quantization_config": FP8, "qkv_bias": False}
    | {"shared_expert_intermediate_size": 0, "use_qk_norm": True},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": shape(48, 2048, 5120, (16, 2), 151936, 262144) | QWEN3_NEXT,
    "Qwen/Qwen3-Coder-Next": shape(48, 2048, 5120, (16, 2), 151936, 262144)
    | QWEN3_NEXT
    | {"rope_theta": 5_000_000},
    "mistralai/Mistral-7B-Instruct-v0.1": shape(32, 4096, 14336, (32, 8), 32000, 32768)
    | MISTRAL
    | {"sliding_window": 4096, "rope_theta": 10_000.0},
    "mistralai/Mistral-7B-Instruct-v0.3": shape(32, 4096, 14336, (32, 8), 32768, 32768) | MISTRAL,
    "mistralai/Mistral-Nemo-Instruct-2407": shape(40, 5120, 14336, (32, 8), 131072, 131072)
    | MISTRAL
    | {"head_dim": 128},
    "mistralai/Devstral-Small-2505": shape(40, 5120, 32768, (32, 8), 131072, 131072)
    | MISTRAL
    | {"head_dim": 128, "rope_theta": 1_000_000_000.0},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": shape(32, 4096, 14336, (32, 8), 32000, 32768)
    | MISTRAL
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"output_router_logits": False, "router_aux_loss_coef": 0.02},
    "HuggingFaceTB/SmolLM3-3B": shape(36, 2048, 11008, (16, 4), 128256, 65536)
    | {"model_type": "smollm3", "attention_bias": False, "mlp_bias": False}
    | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "rms_norm_eps": 1e-6}
    | {"layer_types": types(36, "f"), "max_window_layers": 28, "sliding_window": None}
    | {"rope_scaling": None, "rope_theta": 5_000_000.0, "use_sliding_window": False}
    | {"pretraining_tp": 2},
    "microsoft/Phi-3-mini-4k-instruct": shape(32, 3072, 8192, (32, 32), 32064, 4096)
    | PHI3
    | {"original_max_position_embeddings": 4096, "rope_scaling": None, "sliding_window": 2047},
    "microsoft/phi-4": shape(40, 5120, 17920, (40, 10), 100352, 16384)
    | PHI3
    | {"original_max_position_embeddings": 16384, "rope_scaling": None, "sliding_window": None}
    | {"rope_theta": 250_000},
    "microsoft/Phi-4-mini-instruct": shape(32, 3072, 8192, (24, 8), 200064, 131072)
    | PHI3
    | {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
    | {"rope_scaling": PHI4_MINI_ROPE, "sliding_window": 262144, "tie_word_embeddings": True}
    | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
    "ibm-granite/granite-3.3-8b-instruct": shape(40, 4096, 12800, (32, 8), 49159, 131072)
    | GRANITE
    | {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
    | {"residual_multiplier": 0.22, "rope_theta": 10_000_000.0, "tie_word_embeddings": True},
    "allenai/OLMo-2-1124-7B-Instruct": shape(32, 4096, 11008, (32, 32), 100352, 4096) | OLMO2,
    "allenai/OLMo-2-0325-32B-Instruct": shape(64, 5120, 27648, (40, 8), 100352, 4096) | OLMO2,
    "allenai/Olmo-3-7B-Instruct": shape(32, 4096, 11008, (32, 32), 100278, 65536)
    | OLMO2
    | {"model_type": "olmo3", "sliding_window": 4096, "layer_types": types(32, "sssf")}
    | {"rope_scaling": yarn(8.0, 8192, attention_factor=1.2079441541679836)},
    "ByteDance-Seed/Seed-OSS-36B-Instruct": shape(64, 5120, 27648, (80, 8), 155136, 524288)
    | {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False}
    | {"head_dim": 128, "mlp_bias": False, "residual_dropout": 0.1, "rms_norm_eps": 1e-6}
    | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10_000_000.0}
    | {"tie_word_embeddings": False},
    "google/gemma-2-9b-it": shape(42, 3584, 14336, (16, 8), 256000, 8192) | GEMMA2,
    "google/gemma-3-1b-it": {
        key: value
        for key, value in (shape(26, 1152, 6912, (4, 1), 262144, 32768) | GEMMA3).items()
        if key != "hidden_act"
    },
    "google/gemma-3-27b-it": {"model_type": "gemma3", "text_config": {}, "vision_config": {}},
    "zai-org/GLM-4.5-Air": shape(46, 4096, 10944, (96, 8), 151552, 131072) | GLM,
    "zai-org/GLM-4.6": shape(92, 5120, 12288, (96, 8), 151552, 202752)
    | GLM
    | {"moe_intermediate_size": 1536, "n_routed_experts": 160, "routed_scaling_factor": 2.5}
    | {"first_k_dense_replace": 3, "use_qk_norm": True},
    "openai/gpt-oss-20b": shape(24, 2880, 2880, (64, 8), 201088, 131072)
    | GPT_OSS
    | {"num_local_experts": 32, "layer_types": types(24, "sf")}
    | {"rope_scaling": yarn(32.0, 4096, truncate=False)},
    "openai/gpt-oss-120b": shape(36, 2880, 2880, (64, 8), 201088, 131072)
    | GPT_OSS
    | {"num_local_experts": 128, "layer_types": types(36, "sf")}
    | {"rope_scaling": yarn(32.0, 4096, truncate=False)},
    "deepseek-ai/DeepSeek-V2-Lite-Chat": shape(27, 2048, 10944, (16, 16), 102400, 163840)
    | DEEPSEEK_V2
    | {"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1, "n_routed_experts": 64}
    | {"q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_method": "greedy"},
    "deepseek-ai/DeepSeek-Coder-V2-Instruct": shape(60, 5120, 12288, (128, 128), 102400, 163840)
    | DEEPSEEK_V2
    | {"moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3, "n_routed_experts": 160}
    | {"q_lora_rank": 1536, "routed_scaling_factor": 16.0}
    | {"topk_method": "group_limited_greedy"},
    "deepseek-ai/DeepSeek-V3-0324": shape(61, 7168, 18432, (128, 128), 129280, 163840)
    | DEEPSEEK_V3,
    "moonshotai/Kimi-K2-Instruct": shape(61, 7168, 18432, (64, 64), 163840, 131072)
    | DEEPSEEK_V3
    | {"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    | {"n_routed_experts": 384, "routed_scaling_factor": 2.827, "rope_theta": 50_000.0}
    | {"num_nextn_predict_layers": 0}
    | {"rope_scaling": yarn(32.0, 4096, mscale=1.0, mscale_all_dim=1.0) | {"beta_fast": 1.0}},
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {"model_type": "llama4", "text_config": {}},
}
REFUSED = {
    "google/gemma-3-27b-it": "model_type 'gemma3' is not supported .it sees images",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "model_type 'llama4' is not .* .chunked attention",
    "microsoft/Phi-4-mini-instruct": "longrope",
}
