"""The small files of a model directory: missing files, the place of the template, tokens that end
an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from etude.model.checkpoint import Checkpoint
from etude.model.directory import (
    GENERATION,
    INDEX,
    MODEL_FILES,
    SINGLE_FILE,
    TEMPLATE,
    check_weights,
    cut_context,
    missing_files,
    read_model_files,
    with_stop_tokens,
)
from tests.small_model import small_files

FILES = small_files()


def put(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def test_what_a_directory_lacks_is_named(tmp_path: Path) -> None:
    assert missing_files(tmp_path) == ["config.json", "tokenizer.json", SINGLE_FILE]
    (tmp_path / "config.json").mkdir()
    assert missing_files(tmp_path) == ["config.json", "tokenizer.json", SINGLE_FILE]
    put(tmp_path, {"tokenizer.json": b"", INDEX: b"{}"})
    assert missing_files(tmp_path) == ["config.json"]


def test_every_file_of_weights_that_an_index_names_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{SINGLE_FILE} cannot be read .*: download it again"):
        check_weights(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, tmp_path / name)
    weight_map = {"x": "a", "y": "b", "z": "a"}
    put(tmp_path, {INDEX: json.dumps({"weight_map": weight_map}).encode()})
    check_weights(tmp_path)
    (tmp_path / "b").write_bytes((tmp_path / "b").read_bytes()[:-1])
    with pytest.raises(ValueError, match="^b cannot be read"):
        check_weights(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "\xff",
        "{}",
        '["a"]',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"x": 3}}',
        '{"weight_map": {"x": ["a"]}}',
        '{"weight_map": {"x": "../a"}}',
        '{"weight_map": {"x": "/ABSOLUTE/a"}}',
    ],
)
def test_an_index_names_files_of_its_directory(tmp_path: Path, index: str) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "a")
    own = tmp_path / "own"
    own.mkdir()
    put(own, {INDEX: index.replace("/ABSOLUTE", str(tmp_path)).encode("latin-1")})
    for read in (check_weights, Checkpoint):
        with pytest.raises(ValueError, match=f"^{INDEX} does not list .*: download it again"):
            read(own)


def test_the_template_has_a_file_of_its_own_wherever_it_stood(tmp_path: Path) -> None:
    config = json.loads(FILES["tokenizer_config.json"])
    put(tmp_path, {"notes.txt": b"x", **FILES, TEMPLATE: b"file"})
    config["chat_template"] = "config"
    put(tmp_path, {"tokenizer_config.json": json.dumps(config).encode()})
    found = read_model_files(tmp_path)
    assert found[TEMPLATE] == b"file" and found.keys() == set(MODEL_FILES)
    (tmp_path / TEMPLATE).unlink()
    assert read_model_files(tmp_path)[TEMPLATE] == b"config"
    config["chat_template"] = [
        {"name": "tool_use", "template": "other"},
        {"name": "default", "template": "named"},
    ]
    put(tmp_path, {"tokenizer_config.json": json.dumps(config).encode(), GENERATION: b"{}"})
    found = read_model_files(tmp_path)
    assert found[TEMPLATE] == b"named" and found[GENERATION] == b"{}"
    del config["chat_template"]
    put(tmp_path, {"tokenizer_config.json": json.dumps(config).encode()})
    assert TEMPLATE not in read_model_files(tmp_path)


@pytest.mark.parametrize("context", [64, 10**9])
def test_a_context_is_cut_and_never_made_longer(context: int) -> None:
    own = json.loads(FILES["config.json"])["max_position_embeddings"]
    cut = cut_context(FILES, context)
    assert json.loads(cut["config.json"]) == json.loads(FILES["config.json"]) | {
        "max_position_embeddings": min(own, context)
    }
    assert {name: data for name, data in cut.items() if name != "config.json"} == {
        name: data for name, data in FILES.items() if name != "config.json"
    }


def test_other_programs_find_the_tokens_that_end_an_answer() -> None:
    def said(files: dict[str, bytes]) -> list[dict[str, object]]:
        return [json.loads(files[name]) for name in ("config.json", GENERATION)]

    one = with_stop_tokens(FILES)
    eos = 0
    assert [each["eos_token_id"] for each in said(one)] == [eos, eos]
    more = {GENERATION: b'{"eos_token_id": [7, 9], "top_p": 0.5}'}
    config, generation = said(with_stop_tokens(FILES | more))
    assert generation == {"eos_token_id": [eos, 7, 9], "top_p": 0.5}
    assert config == json.loads(FILES["config.json"]) | {"eos_token_id": [eos, 7, 9]}
