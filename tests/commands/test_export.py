"""Exported models as other programs read them: with stop tokens, and with the context length that
they were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.cli import main
from etude.core.config import parse
from etude.model.directory import with_stop_tokens
from etude.model.files import hf_state_dict, write_directory
from etude.model.tokenizer import ChatTokenizer
from etude.model.transformer import ModelConfig, init_from_scratch
from etude.serve.worker_protocol import read_model_files
from etude.store.runs import Run
from etude.trainer.prepare import pretrained_files, scratch_files, store_files
from etude.weights.manifest import Chain
from etude.weights.publish import Publisher
from tests.small_model import small_files

TOML = """
name = "a"
[model]
max_context = 64
[[stage]]
kind = "midtrain"
steps = 1
"""


def exported(directory: Path, files: dict[str, bytes], *overrides: str) -> dict[str, Any]:
    """The JSON of an export from a run that was prepared with these files and published once."""
    run = Run.open(f"file:{directory / 'run'}")
    run.put_config(parse(TOML, overrides))
    store_files(run, files)
    model = init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)
    publisher = Publisher(Chain(run.objects))
    publisher.publish(1, hf_state_dict(model), stage="midtrain", step=1)
    publisher.close()
    assert main(["weights", "export", str(directory / "run"), str(directory / "out")]) == 0
    return {path.stem: json.loads(path.read_bytes()) for path in (directory / "out").glob("*.json")}


def model_directory(path: Path, **generation: object) -> Path:
    files = small_files(context=256) | {"generation_config.json": json.dumps(generation).encode()}
    model = init_from_scratch(ModelConfig.from_json(files["config.json"]), 0)
    write_directory(path, files, hf_state_dict(model))
    return path


def test_the_context_of_a_run_is_not_the_context_of_its_model(tmp_path: Path) -> None:
    given = model_directory(tmp_path / "given")
    said = exported(tmp_path, pretrained_files(str(given)), f'model.path="{given}"')
    assert said["config"]["max_position_embeddings"] == 256
    run = Run.open(f"file:{tmp_path / 'run'}", create=False)
    used = json.loads(read_model_files(run)["config.json"])
    assert used["max_position_embeddings"] == 64


def test_what_ends_an_answer_is_kept_and_completed(tmp_path: Path) -> None:
    given = model_directory(tmp_path / "given", eos_token_id=7, temperature=0.6)
    said = exported(tmp_path, pretrained_files(str(given)), f'model.path="{given}"')
    eos = ChatTokenizer(small_files()).eos_token_id
    assert said["generation_config"] == {"eos_token_id": [eos, 7], "temperature": 0.6}
    assert said["config"]["eos_token_id"] == [eos, 7]
    assert ChatTokenizer(read_model_files(Run.open(f"file:{tmp_path / 'run'}"))).stop_token_ids == (
        eos,
        7,
    )


def test_a_model_made_from_nothing_stops_in_transformers(tmp_path: Path) -> None:
    files = scratch_files(parse(TOML, ["model.vocab_size=300"]))
    said = exported(tmp_path, files)
    eos = ChatTokenizer(files).eos_token_id
    assert said["generation_config"]["eos_token_id"] == said["config"]["eos_token_id"] == eos

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "read area.py"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    begin = prompt["input_ids"].shape[1]

    def end_with_the_third(ids: Tensor, scores: Tensor) -> Tensor:
        forced = eos if ids.shape[1] == begin + 2 else eos + 1
        return torch.zeros_like(scores).index_fill(1, torch.tensor(forced), 1.0)

    answer = model.generate(
        **prompt, max_new_tokens=8, do_sample=False, logits_processor=[end_with_the_third]
    )
    assert answer[0, begin:].tolist() == [eos + 1, eos + 1, eos]


def test_the_end_of_a_turn_ends_an_answer_though_no_file_says_so() -> None:
    files = small_files()
    config = json.loads(files["tokenizer_config.json"]) | {"eos_token": "<|tools|>"}
    template = files["chat_template.jinja"].decode().replace("{{ eos_token }}", "<|end|>")
    files |= {
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": template.encode(),
    }
    tokenizer = ChatTokenizer(files)
    ids = [tokenizer.encode(token)[0] for token in ("<|tools|>", "<|end|>")]
    assert list(tokenizer.stop_token_ids) == ids
    assert json.loads(with_stop_tokens(files)["generation_config.json"]) == {"eos_token_id": ids}


@pytest.mark.parametrize("template", [b"", b"{% for m in messages %}{{ m.content }}\n{% endfor %}"])
def test_a_template_without_an_end_adds_none(template: bytes) -> None:
    tokenizer = ChatTokenizer(small_files() | {"chat_template.jinja": template})
    assert tokenizer.stop_token_ids == (tokenizer.eos_token_id,)
