"""The model that a run starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from etude.core.errors import EtudeError
from etude.model.files import hf_state_dict, hf_tensors, write_directory
from etude.model.transformer import init_from_scratch
from etude.train.start import compile_layers, initial_model
from tests.small_model import config, small_files


def test_without_a_directory_it_is_fresh_and_the_same_for_a_seed() -> None:
    told = config().to_json().encode()
    first, again, other = (initial_model(None, told, seed) for seed in (1, 1, 2))
    tensors = [hf_tensors(model) for model in (first, again, other)]
    name = "model.embed_tokens.weight"
    assert torch.equal(tensors[0][name], tensors[1][name])
    assert not torch.equal(tensors[0][name], tensors[2][name])
    assert compile_layers(first) is first and not first.fused, "a CPU compiles nothing"


def test_a_directory_is_read_or_told_of(tmp_path: Path) -> None:
    model, files = init_from_scratch(config(300, 256), 3), small_files()
    write_directory(tmp_path, files, hf_state_dict(model, torch.float32))
    told = (tmp_path / "config.json").read_bytes()
    read = initial_model(tmp_path, told, 0)
    expected = hf_tensors(model)
    assert all(torch.equal(each, expected[name]) for name, each in hf_tensors(read).items())
    wider = json.dumps(json.loads(told) | {"hidden_size": 64, "head_dim": 8}).encode()
    for directory, shape in ((tmp_path / "gone", told), (tmp_path, wider)):
        with pytest.raises(EtudeError, match=f"the model in {directory} cannot be read"):
            initial_model(directory, shape, 0)
