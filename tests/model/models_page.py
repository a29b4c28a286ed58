"""Writer of docs/models.md, from the families, the models that are compared with transformers and
the known config.json files: `python -m tests.model.models_page`, or `make models-page`."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch

from etude.engine.kernels.fused import SUPPORTED as KERNELS_SUPPORTED
from etude.engine.kernels.unfused import SUPPORTED as UNFUSED_SUPPORTED
from etude.engine.native import SUPPORTED as NATIVE_SUPPORTED
from etude.model.config import LayerFeatures, ModelConfig
from etude.model.families import FAMILIES
from tests.model.known_configs import KNOWN, REFUSED
from tests.model.test_families import MODELS, SHAPE

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
NAMES = {
    "llama": "Llama, SmolLM2",
    "mistral": "Mistral, Devstral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE, Qwen3-Coder",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-4",
    "granite": "Granite 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "seed_oss": "Seed-OSS",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1",
    "kimi_k2": "Kimi K2",
}
OFF = """# Models

Which models Etude reads, from Hugging Face directories with safetensors. Trainer and engine run
one definition of all of them ([decision 0051](decisions/0051-families.md)). This page is made
from the code and its tests by `make models-page`.

A model is read if every key of its config.json is read or known to change nothing; otherwise the
error names the key. Every family is compared with `transformers` in fp32 on small random models:
logits to 1e-4 in all its variants and with any one key changed, files there and back, gradients;
and the engine's log-probs with the definition's, in batches, in pieces, from the cache, after
preemption and after a swap of weights.

**Fast paths** state what they can compute. `native.c` (CPU) and the CUDA kernels compute layers
like Llama's, and beyond those what the columns say. On a CUDA device in bf16 other layers with
keys and values have attention on our kernels (windows, sinks and capped scores too), recurrent
layers the delta rule, and the rest is on torch's operators, in captured graphs (prompts of models
with recurrent layers without): "attention". What is left runs on torch's operators one by one, with
a warning that names the features: latent layers, heads whose size is no power of two, and anything
batch-invariant that is not like Llama's.

**Windows.** Layers with a window have blocks of the KV cache of their own, beside layers that see
everything. A sequence gives up those that its window does not reach any more, and within the same
memory there is room for more tokens.

**Recurrent layers** (Gated DeltaNet) keep a state of one size instead of keys and values. It is
kept at the end of each block of the KV cache, so that it is found by whoever begins behind a cached
block, and goes with the block when that is freed. Blocks of such models are larger, up to 1,024
tokens. Drafts are not used for them, and batch-invariant arithmetic is refused.

**Weights** in bf16, fp16 or fp32; in FP8 (e4m3, with a scale for each block, each row or each
tensor: `fp8`, `fbgemm_fp8`, `compressed-tensors` of `float-quantized`) and MXFP4 (gpt-oss).
Quantised weights are turned into bf16 tensor by tensor while they are read; what a run publishes
is bf16, and `etude weights export --dtype fp8` writes blocks of FP8. Other methods are refused by
name. Whatever the weights are stored in, `quantization = "fp8"` multiplies in FP8
([training.md](training.md#fp8)).

**Rope**: default, linear, dynamic, llama3 and yarn, and longrope within the original context of a
model: beyond it the angles of all tokens change with the length of a sequence, which no cache can
follow. A run with `model.max_context` within it reads such a model.
"""


def config(name: str) -> ModelConfig:
    kind = name.split()[0]
    return ModelConfig.from_json(json.dumps(SHAPE | MODELS[name] | {"model_type": kind}))


def features(model_type: str) -> str:
    """The differences of its layers from Llama's, in any variant."""
    found: dict[str, set[str]] = {}
    plain = LayerFeatures()
    for name in MODELS:
        if name.split()[0] != model_type:
            continue
        c = config(name)
        for layer in range(c.num_hidden_layers):
            for f in fields(LayerFeatures):
                value = getattr(c.layer_features(layer), f.name)
                if value != getattr(plain, f.name):
                    said = value if isinstance(value, str) else ""
                    found.setdefault(f.name, set()).add(str(said))
    words = [
        f"{name.replace('_', ' ')}{': ' + ', '.join(sorted(v)) if any(v) else ''}"
        for name, v in found.items()
    ]
    return "; ".join(words) or "plain"


def path_of(model_type: str) -> tuple[str, str]:
    """Support on the CPU and on CUDA, over the variants of the family."""
    variants = [config(name) for name in MODELS if name.split()[0] == model_type]
    said = []
    for supported in (NATIVE_SUPPORTED, KERNELS_SUPPORTED, UNFUSED_SUPPORTED):
        count = sum(not c.unsupported_features(supported) for c in variants)
        said.append("no" if not count else "yes" if count == len(variants) else "in part")
    native, fused, modules = said
    return native, fused if fused == "yes" else f"{fused}, attention" if modules != "no" else fused


def page() -> str:
    heads = ("`model_type`", "models", "beyond Llama, if config.json says so")
    lines = [OFF, "## Families", "", f"| {' | '.join(heads)} | native.c | CUDA kernels |"]
    lines.append("|---|---|---|---|---|")
    for model_type in FAMILIES:
        tested = "deepseek_v3" if model_type == "kimi_k2" else model_type
        native, kernels = path_of(tested)
        row = (f"`{model_type}`", NAMES[model_type], features(tested), native, kernels)
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", IN_PART, "", "## Known models", "", BY_HAND, "", "| model | |", "|---|---|"]
    for name, said in KNOWN.items():
        why = "read" if name not in REFUSED else "refused: " + REASONS[name]
        if name not in REFUSED and (how := said.get("quantization_config")):
            why += f", {how['quant_method'].upper()}"
        lines.append(f"| {name} | {why} |")
    return "\n".join(lines) + "\n"


IN_PART = '"In part": whole layers, of models without the features that the path does not compute.'
BY_HAND = (
    "Their config.json was written down by hand (`tests/model/known_configs.py`); no weights were "
    "fetched."
)
REASONS = {
    "google/gemma-3-27b-it": "sees images; the text-only 1B and 270M are read",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "chunked attention, scores scaled by position, "
    "norms after the rotation and weighted expert inputs: features of no other family; and images",
    "microsoft/Phi-4-mini-instruct": "longrope beyond 4096 tokens; read with "
    "`model.max_context = 4096`",
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
