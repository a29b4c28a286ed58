"""Every family trains: gradients equal those of transformers, packed rows do not see each other,
and a step of each optimizer moves every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from etude.model.attention import CausalAttention
from etude.model.files import build_model, hf_tensors, read_directory
from etude.train.distributed import SINGLE_PROCESS
from etude.train.optimizer import OPTIMIZER
from tests.engine.test_served_families import SERVED, random_model
from tests.model.test_families import MODELS, SHAPE, SMALL, mean, tokens

LENGTHS = [13, 1, 30, 21]


@pytest.mark.parametrize("name", SERVED)
def test_packed_rows_are_what_they_are_alone(name: str) -> None:
    model, row = random_model(name), tokens(1, sum(LENGTHS))[0]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    together = model(row, positions, CausalAttention(LENGTHS))
    alone = [
        model(part[None], torch.arange(len(part))[None], CausalAttention())[0]
        for part in row.split(LENGTHS)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", SERVED)
def test_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = theirs(name)
    reference.save_pretrained(tmp_path)
    for file, data in SMALL.items():
        (tmp_path / file).write_bytes(data)
    mine = build_model(*read_directory(tmp_path))
    row = tokens(1, 30)
    reference(row).logits.logsumexp(-1).sum().backward()
    hidden = mine(row, torch.arange(30)[None], CausalAttention())
    mine.logits(hidden).logsumexp(-1).sum().backward()
    found = hf_tensors(mine, {n: p.grad for n, p in mine.named_parameters() if p.grad is not None})
    # Saved again, gradients have the names and the layout of the files.
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    reference.save_pretrained(tmp_path / "gradients")
    (tmp_path / "gradients" / "tokenizer.json").write_bytes(SMALL["tokenizer.json"])
    expected = read_directory(tmp_path / "gradients")[1]
    largest = max(float(tensor.abs().max()) for tensor in found.values())
    for key, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[key].float(), atol=1e-4 * largest, rtol=1e-3, msg=key
        )


def theirs(name: str) -> Any:
    # A padding token would have no gradient.
    said = SHAPE | MODELS[name] | {"pad_token_id": None}
    config = transformers.AutoConfig.for_model(name.split()[0], **said)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.normal_(mean(name, key), 0.15, generator=generator)
    return model.eval()


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("kind", OPTIMIZER)
def test_a_step_moves_experts_with_biases_sinks_and_filters(kind: str, name: str) -> None:
    model = random_model(name).requires_grad_(True)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = {name: master.clone() for name, master in masters.items()}
    optimizer = OPTIMIZER[kind](masters, model, SINGLE_PROCESS)
    hidden = model(tokens(2, 20), torch.arange(20).expand(2, 20), CausalAttention())
    model.logits(hidden).logsumexp(-1).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step(gradients, lr=1e-3, weight_decay=0.0, divisor=torch.tensor(1.0))
    assert all(master.isfinite().all() for master in masters.values())
    assert not [name for name in masters if torch.equal(masters[name], before[name])]
