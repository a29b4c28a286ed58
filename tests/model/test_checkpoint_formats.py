"""Checkpoints as they are published: in FP8 and MXFP4, in shards, read tensor by tensor."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from etude.model import checkpoint
from etude.model.checkpoint import Checkpoint, from_fp8, from_mxfp4
from etude.model.config import ModelConfig
from etude.model.files import build_model, hf_state_dict, read_directory, write_directory
from etude.model.to_fp8 import rounded, to_fp8
from etude.model.transformer import Transformer, init_from_scratch
from etude.trainer.prepare import pretrained_files
from tests.model.test_families import MODELS, SHAPE, SMALL

E4M3 = torch.float8_e4m3fn
BLOCKWISE = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
ROWWISE = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def model(name: str) -> Transformer:
    said = SHAPE | MODELS[name] | {"model_type": name.split()[0]}
    return init_from_scratch(ModelConfig.from_json(json.dumps(said)), 0)


def blockwise(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-n // size) for n in weight.shape)
    scale = torch.empty(rows, columns)
    stored = torch.empty(weight.shape, dtype=E4M3)
    for r in range(rows):
        for c in range(columns):
            part = slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size)
            scale[r, c] = weight[part].float().abs().max() / 448
            stored[part] = (weight[part].float() / scale[r, c]).to(E4M3)
    return stored, scale


def rowwise(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scale).to(E4M3), scale.to(torch.bfloat16)


def published(
    path: Path, given: Transformer, quantization: dict[str, object], suffix: str
) -> dict[str, Tensor]:
    """Write matrices of layers in FP8, the rest in bf16, in two shards. Returns the dequantised
    tensors."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in hf_state_dict(given).items():
        if ".layers." not in name or tensor.ndim < 2 or "gate.weight" in name:
            stored[name] = meant[name] = tensor
            continue
        weight, scale = blockwise(tensor, 32) if suffix == "_scale_inv" else rowwise(tensor)
        stored |= {name: weight, name + suffix: scale}
        whole = scale.float()
        if suffix == "_scale_inv":
            whole = whole.repeat_interleave(32, 0)[: tensor.shape[0]]
            whole = whole.repeat_interleave(32, 1)[:, : tensor.shape[1]]
        meant[name] = (weight.float() * whole).to(torch.bfloat16)
    said = json.loads(given.config.to_json()) | {"quantization_config": quantization}
    small = SMALL | {"config.json": json.dumps(said).encode()}
    write_directory(path, small, stored, shard_bytes=60_000)
    return meant


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("suffix", "how"), [("_scale_inv", BLOCKWISE), ("_scale", ROWWISE)], ids=["blocks", "rows"]
)
def test_fp8_is_read_as_the_numbers_that_it_stands_for(
    name: str, suffix: str, how: dict[str, object], tmp_path: Path
) -> None:
    given = model(name)
    meant = published(tmp_path, given, how, suffix)
    small, tensors = read_directory(tmp_path)
    assert tensors.keys() == meant.keys()
    assert "none.weight" not in tensors
    assert all(torch.equal(tensors[key], tensor) for key, tensor in meant.items())
    again = hf_state_dict(build_model(small, tensors))
    assert all(torch.equal(again[key], tensor) for key, tensor in meant.items())
    assert not any(tensor.requires_grad for tensor in again.values())
    # The result is a model in bf16, and its config.json agrees.
    assert "quantization_config" not in json.loads(small["config.json"])
    assert b"quantization_config" not in pretrained_files(str(tmp_path))["config.json"]


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    given, generator = model("gpt_oss"), torch.Generator().manual_seed(0)
    stored, meant = {}, {}
    for name, tensor in hf_state_dict(given).items():
        if "experts" not in name or name.endswith("bias"):
            stored[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, -(-inputs // 32), 16)
        blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 130, shape[:-1], generator=generator, dtype=torch.uint8)
        stored |= {name + "_blocks": blocks, name + "_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, tmp_path / "model.safetensors")
    found = Checkpoint(tmp_path)
    assert found.keys() == meant.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in meant.items())
    assert all(found.in_bfloat16(name) for name in meant)


@pytest.mark.parametrize(
    ("shape", "scales"), [((7, 5), ()), ((7, 5), (1,)), ((7, 5), (7,)), ((7, 5), (7, 1))]
)
def test_one_factor_for_all_or_for_each_row(
    shape: tuple[int, int], scales: tuple[int, ...]
) -> None:
    weight, scale = torch.randn(shape).to(E4M3), torch.rand(scales) + 0.5
    each = scale.reshape(-1, 1)
    assert torch.equal(from_fp8(weight, scale), (weight.float() * each).bfloat16())


@pytest.mark.parametrize("scales", [(3, 1), (1, 3), (0, 1), (33, 1)])
def test_factors_that_no_blocks_have_are_refused(scales: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=r"\d+ scales do not divide 32 rows or columns into blocks"
    ):
        from_fp8(torch.randn(32, 32).to(E4M3), torch.ones(scales))


def test_a_model_is_never_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is read once, and freed before the next is requested."""
    given = model("qwen3_moe")
    write_directory(
        tmp_path, SMALL | {"config.json": given.config.to_json().encode()}, hf_state_dict(given)
    )
    alive, read = [], Checkpoint._read

    def watched(self: Checkpoint, name: str) -> Tensor:
        assert all(each() is None for each in alive[:-1])
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(checkpoint.Checkpoint, "_read", watched)
    build_model(*read_directory(tmp_path))
    assert len(alive) == len(hf_state_dict(given))


@pytest.mark.parametrize(
    "how",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "fp8", "fmt": "e5m2"},
    ],
)
def test_other_quantised_weights_are_refused_by_name(how: dict[str, object]) -> None:
    said = SHAPE | {"model_type": "llama", "quantization_config": how}
    with pytest.raises(ValueError, match=rf"quantization_config of '{how['quant_method']}'"):
        ModelConfig.from_json(json.dumps(said))


def test_fp8_without_its_scale_is_refused(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(2, 2).to(E4M3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"x\.weight is in F8_E4M3 with the scale None"):
        Checkpoint(tmp_path)["x.weight"]


def test_numbers_of_four_bits() -> None:
    blocks = torch.tensor([[[[0x21, 0xF9] + [0] * 14]]], dtype=torch.uint8)
    exponents = torch.tensor([[[128]]], dtype=torch.uint8)
    assert from_mxfp4(blocks, exponents)[0, :5, 0].tolist() == [1.0, 2.0, -1.0, -12.0, 0.0]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen2_moe", "phi3", "qwen3_next"])
def test_a_model_written_in_fp8_is_read_back_but_for_rounding(name: str, tmp_path: Path) -> None:
    given = model(name)
    tensors = hf_state_dict(given)
    small, stored = to_fp8(SMALL | {"config.json": given.config.to_json().encode()}, tensors)
    write_directory(tmp_path, small, stored)
    said = json.loads((tmp_path / "config.json").read_bytes())
    assert said["quantization_config"]["weight_block_size"] == [128, 128]
    back = Checkpoint(tmp_path)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        if key + "_scale_inv" not in stored:
            assert torch.equal(back[key], tensor), key
            continue
        # Half of the last of the three mantissa bits; and a tolerance near zero.
        off = (back[key].float() - tensor.float()).abs()
        assert (off <= tensor.float().abs() / 15 + tensor.float().abs().max() / 100_000).all(), key
    assert all(".layers." in key and "gate.weight" not in key for key in stored if "scale" in key)
    assert build_model(*read_directory(tmp_path)).config == given.config


def test_experts_in_one_tensor_have_no_fp8() -> None:
    given = model("gpt_oss")
    small = {"config.json": given.config.to_json().encode()}
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj is a stack of matrices"):
        to_fp8(small, hf_state_dict(given))


def test_large_matrices_and_edges_in_blocks() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    weight[:128, 128:] *= 100
    weight[256:] = 0
    stored, scale = rounded(weight)
    assert scale.shape == (3, 2) and stored.shape == weight.shape
    off = (from_fp8(stored, scale).float() - weight).abs()
    assert (off <= weight.abs() / 15 + scale.max() / 100).all()
    assert (off[256:] == 0).all()


def test_a_block_of_zeros_is_one_of_zeros() -> None:
    weight = torch.zeros(130, 300)
    weight[0, 0] = 448.0
    stored, scale = rounded(weight)
    assert scale.shape == (2, 3) and (scale == 1.0).all()
    assert stored.shape == weight.shape and torch.equal(stored.float(), weight)
