"""A key that config.json leaves out means the same as in `transformers`, or is required by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from etude.commands.serve import load
from etude.core.errors import EtudeError
from etude.model.attention import CausalAttention
from etude.model.config import ModelConfig
from etude.model.directory import cut_context
from etude.model.files import build_model, hf_state_dict, read_directory, write_directory
from etude.model.transformer import init_from_scratch
from etude.train.start import initial_model
from etude.trainer.prepare import pretrained_files
from tests.model.test_families import EXPERTS, LATENT, LLAMA3, MODELS, SHAPE, SMALL, YARN
from tests.small_model import small_files

LINEAR = {"rope_type": "linear", "factor": 3.0}
ROPE = ("rope_scaling", "rope_parameters")
WHOLE: dict[str, dict[str, Any]] = {
    **MODELS,
    "llama all of yarn": {
        "rope_scaling": YARN
        | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "truncate": False}
    },
    "llama some of yarn": {"rope_scaling": YARN | {"mscale": 0.5, "mscale_all_dim": 0.7}},
    "qwen2 others of llama3": {
        "rope_scaling": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0}
    },
    "qwen3 linear": {"rope_scaling": LINEAR, "head_dim": 16},
    "kimi_k2": MODELS["deepseek_v3"],
    "kimi_k2 otherwise": {
        **EXPERTS,
        **LATENT,
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 3,
        "norm_topk_prob": False,
        "rope_interleave": False,
    },
}
MUST_BE_SAID = {
    *(
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("intermediate_size", "max_position_embeddings", "num_experts_per_tok"),
    *("num_experts", "num_local_experts", "n_routed_experts", "shared_expert_intermediate_size"),
    *(
        "moe_intermediate_size",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ),
    *("factor", "low_freq_factor", "high_freq_factor"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
}
"""Sizes, and the keys that a stretched rope needs. No other key may be required."""


class Noting(dict[str, Any]):
    """Records the keys that are looked up, in this table or another."""

    seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def theirs(said: dict[str, Any]) -> dict[str, Any]:
    """The config with every key that transformers fills in."""
    model_type = said["model_type"]
    known = "deepseek_v3" if model_type == "kimi_k2" else model_type
    rest = {
        key: value for key, value in json.loads(json.dumps(said)).items() if key != "model_type"
    }
    completed: dict[str, Any] = transformers.AutoConfig.for_model(known, **rest).to_dict()
    return completed | {"model_type": model_type}


def ours(said: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_json(json.dumps(said))


def keys_read(said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(Noting, "seen", set())
    read = json.loads
    with monkeypatch.context() as patched:
        patched.setattr(
            "etude.model.config.json.loads", lambda text: read(text, object_hook=Noting)
        )
        ModelConfig.from_json(json.dumps(said))
    return Noting.seen - {"model_type"}


def without(said: dict[str, Any], key: str) -> dict[str, Any]:
    """The config without the key, at the top and in the rope table."""
    left = {name: value for name, value in said.items() if name != key}
    for table in ROPE:
        if left.get(table):
            left[table] = {name: value for name, value in left[table].items() if name != key}
    return left


@pytest.mark.parametrize("model", WHOLE)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = theirs(SHAPE | WHOLE[model] | {"model_type": model.split()[0]})
    rope = whole["rope_parameters"]
    dropped = [key for key in keys_read(whole, monkeypatch) if key in whole or key in rope]
    assert len(dropped) > 10
    for key in dropped:
        left = without(whole, key)
        try:
            mine = ours(left)
        except ValueError as e:
            assert key in str(e), (key, e)
            if key not in MUST_BE_SAID:
                # The completed config of transformers is refused as well, by it or by us.
                with pytest.raises((ValueError, StrictDataclassError)):
                    ours(theirs(left))
        else:
            assert mine == ours(theirs(left)), key


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("deepseek_v3", "norm_topk_prob"),
        ("deepseek_v3", "n_group"),
        ("llama", "rms_norm_eps"),
        ("llama", "rope_theta"),
    ],
)
def test_null_is_no_value(model_type: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {key} is null"):
        ours(SHAPE | MODELS[model_type] | {"model_type": model_type, key: None})


def test_linear_rope_needs_its_factor() -> None:
    with pytest.raises(ValueError, match="the factor of rope scaling 'linear' is null"):
        ours(SHAPE | {"model_type": "llama", "rope_scaling": LINEAR | {"factor": None}})


def test_experts_come_in_whole_groups() -> None:
    with pytest.raises(ValueError, match="10 experts cannot be divided into n_group = 4 groups"):
        ours(SHAPE | MODELS["deepseek_v3"] | {"model_type": "deepseek_v3", "n_routed_experts": 10})


@pytest.mark.parametrize(
    "dropped",
    [
        ["norm_topk_prob"],
        ["routed_scaling_factor"],
        ["n_group", "topk_group"],
        ["n_shared_experts"],
        ["rope_interleave"],
    ],
)
def test_deepseek_without_a_key_gives_the_logits_of_transformers(
    dropped: list[str], tmp_path: Path
) -> None:
    """16 experts, so that each of the 8 groups has as many as a router looks at."""
    said = {**SHAPE, **EXPERTS, **LATENT, "q_lora_rank": 20, "n_routed_experts": 16}
    config = transformers.DeepseekV3Config(
        **{key: value for key, value in said.items() if key not in dropped}
    )
    reference = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in reference.state_dict().values():
        tensor.normal_(0.0, 0.3, generator=generator)
    reference.save_pretrained(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in shape.items() if k not in dropped})
    )
    for name, data in SMALL.items():
        (tmp_path / name).write_bytes(data)
    model = build_model(*read_directory(tmp_path)).requires_grad_(False)
    tokens_BT = torch.randint(97, (2, 20), generator=generator)
    with torch.no_grad():
        expected = reference(tokens_BT).logits
    logits = model.logits(model(tokens_BT, torch.arange(20).expand(2, 20), CausalAttention()))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_dense_layers_only_comes_back() -> None:
    for model_type, dense in (
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
    ):
        config = ours(SHAPE | MODELS[model_type] | dense | {"model_type": model_type})
        assert config.experts is None
        assert ModelConfig.from_json(config.to_json()) == config


def test_yarn_without_a_factor_is_stretched_by_the_context_that_the_model_was_made_for(
    tmp_path: Path,
) -> None:
    """A run that cuts the context changes no angle."""
    yarn = YARN | {"factor": None}
    said = SHAPE | {"model_type": "llama", "rope_scaling": yarn}
    write_directory(
        tmp_path,
        SMALL | {"config.json": json.dumps(said).encode()},
        hf_state_dict(init_from_scratch(ours(said), 0)),
    )
    cut = ModelConfig.from_json(cut_context(pretrained_files(str(tmp_path)), 64)["config.json"])
    assert cut.max_position_embeddings == 64
    assert cut.rope_scaling == ours(said).rope_scaling
    assert cut.rope_scaling is not None and cut.rope_scaling.factor == 128 / 32


@pytest.mark.parametrize("key", ["max_position_embeddings", "hidden_size"])
def test_whoever_loads_a_model_is_told_which_key_is_missing(key: str, tmp_path: Path) -> None:
    files = small_files()
    tensors = hf_state_dict(init_from_scratch(ModelConfig.from_json(files["config.json"]), 0))
    said = json.loads(files["config.json"])
    del said[key]
    incomplete = json.dumps(said).encode()
    write_directory(tmp_path, files | {"config.json": incomplete}, tensors)
    with pytest.raises(EtudeError, match=f"{key} is missing"):
        load(str(tmp_path), None, torch.device("cpu"))
    with pytest.raises(EtudeError, match=f"{key} is missing"):
        initial_model(tmp_path, incomplete, 0)
