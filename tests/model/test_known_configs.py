"""config.json of widely used models: read, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from etude.engine.runner import block_size
from etude.model.config import ModelConfig
from etude.model.config_json import pin_context
from etude.model.rope import attention_factor
from tests.model.known_configs import KNOWN, REFUSED


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in REFUSED])
def test_known_models_are_read(name: str) -> None:
    said = KNOWN[name]
    config = ModelConfig.from_json(json.dumps(said))
    assert config.num_hidden_layers == said["num_hidden_layers"]
    assert config.max_position_embeddings == said["max_position_embeddings"]
    assert bool(config.experts) == any("experts" in key for key in said)
    windowed = said.get("layer_types", []).count("sliding_attention")
    assert not windowed or len(config.sliding_layers) == windowed
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        ModelConfig.from_json(json.dumps(KNOWN[name]))


def test_a_longrope_model_is_read_within_its_original_context() -> None:
    """The factor is that of the context that the model was made for, as a run cuts it."""
    said = json.loads(json.dumps(KNOWN["microsoft/Phi-4-mini-instruct"]))
    pin_context(said)
    config = ModelConfig.from_json(json.dumps(said | {"max_position_embeddings": 4096}))
    assert config.rope_scaling is not None and config.rope_scaling.factor == 32
    assert config.rotary_dim == 96
    assert attention_factor(config.rope_scaling) == pytest.approx(1.1902380714238083)
    # any stretch sharpens attention, even a small one
    factors = {1.5: 1.0240834, 1.0: 1.0, 0.5: 1.0}
    for factor, expected in factors.items():
        scaling = replace(config.rope_scaling, factor=factor)
        assert attention_factor(scaling) == pytest.approx(expected)


def test_what_some_facts_come_to() -> None:
    def read(name: str) -> ModelConfig:
        return ModelConfig.from_json(json.dumps(KNOWN[name]))

    gemma = read("google/gemma-3-1b-it")
    assert gemma.layer_features(5).rope == "global" and gemma.layer_features(5).window is None
    assert gemma.layer_features(4).rope == "local" and gemma.layer_features(4).window == 512
    assert gemma.layer_features(0).scale == 1 / 16
    smol = read("HuggingFaceTB/SmolLM3-3B")
    assert [n for n in range(36) if smol.layer_features(n).rope is None] == list(range(3, 36, 4))
    oss = read("openai/gpt-oss-20b")
    assert (
        oss.layer_features(0).sinks
        and oss.layer_features(0).window == 128
        and oss.layer_features(1).window is None
    )
    following = read("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert following.cached_layers == tuple(range(3, 48, 4)) and block_size(following) == 1024
    assert following.layer_features(0).linear and not following.layer_features(3).linear
    assert read("zai-org/GLM-4.6").rotary_dim == 64
    assert read("mistralai/Devstral-Small-2505").layer_features(0).window is None


def test_the_page_of_models_is_current() -> None:
    pytest.importorskip("triton", reason="the kernels' list is beside them")
    from tests.model import models_page

    assert models_page.PAGE.read_text() == models_page.page(), "run `make models-page`"
